"""Settings from the environment, and those of a build that suit this machine.

choices.check_environment(os.environ)     # [Finding('environment', 'pass', 'COYO11M_NUM_PROC=8')]
choices.choose(BuildSettings(), {}, 'OUT', num_bytes, scratch_bytes, ['/scratch']).facts['config']
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from coyo11m_tfds import schema
from coyo11m_tfds.checks import finding, hardware
from coyo11m_tfds.checks.finding import Finding
from coyo11m_tfds.convert.settings import BuildSettings
from coyo11m_tfds.process import job, machine
from coyo11m_tfds.storage import lock_holder, retry, scratch

_OURS = 'COYO11M_'

# All that have a meaning; the README's table explains them.
VARIABLES = {
    'COYO11M_LEASE_SECONDS',
    'COYO11M_NUM_PROC',
    'COYO11M_RETRY_SECONDS',
    'COYO11M_STALL_SECONDS',
    'COYO11M_TRACEBACK',
    # Of the tests.
    'COYO11M_DRILL_SEED',
    'COYO11M_DRILL_SHARE',
    'COYO11M_ENCODERS',
}

_WORKER_BYTES = 500_000_000  # memory that a process of a build takes


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Checks the names and values of the variables of this project and of the job.

    Args:
        environment: of this process, as the user has set it.
    """
    findings = []
    for read in (
        lambda: choose_workers(0, 0),
        lambda: retry.seconds('COYO11M_RETRY_SECONDS', 1),
        retry.stall_seconds,
        lock_holder.lease_seconds,
        job.share,
    ):
        try:
            read()
        except ValueError as error:
            findings.append(finding.of_error('environment', error))
    ours = sorted(name for name in environment if name.startswith(_OURS))
    for name in ours:
        if name not in VARIABLES:
            text = f'{name} is set, but no variable of this project has this name'
            findings.append(finding.warned('environment', text, f'unset {name}'))
    values = ', '.join(f'{name}={environment[name]}' for name in ours)
    return findings or [finding.passed('environment', values or 'nothing is set')]


def choose_workers(num_workers: int, num_bytes: int) -> int:
    """`local_runner.choose_workers`; 1 where torch is missing, so that no build can run."""
    try:
        from coyo11m_tfds.convert import local_runner
    except ModuleNotFoundError:
        return 1
    return local_runner.choose_workers(num_workers, num_bytes)


def choose(
    settings: BuildSettings,
    fields: Mapping[str, Any],
    data_dir: str,
    num_bytes: int,
    scratch_bytes: int,
    candidates: Sequence[str],
    root: str | os.PathLike[str] = '/',
) -> Finding:
    """Chooses what a build should be told on this machine.

    Args:
        settings: what the user has decided; what is not the default stays.
        fields: of the config, as the user gives them to `tfds build`.
        data_dir: of the build; '' if it is not known.
        num_bytes: of the shards.
        scratch_bytes: that the scratch folder should have room for.
        candidates: other folders that may serve as one.
        root: folder that holds `proc` and `sys`.
    """
    by_memory = max(1, machine.free_memory(root) // _WORKER_BYTES)
    workers = min(choose_workers(settings.num_workers, num_bytes), by_memory)
    usual = scratch.choose_folder(schema.NAME, data_dir, settings.scratch_dir)
    folder = next((f for f in (usual, *candidates) if _suits(f, scratch_bytes, root)), usual)
    chosen: dict[str, int | float | str] = {'num_workers': int(workers)}
    if folder != scratch.choose_folder(schema.NAME, data_dir):
        chosen['scratch_dir'] = folder
    room = hardware.look_at_disk(folder, root).free
    if room < scratch_bytes:  # half of it, as others write there too
        chosen['scratch_gb'] = max(1.0, round(min(settings.scratch_bytes, room / 2) / 1e9, 1))
    config = json.dumps({'name': 'NAME', **fields, **chosen})
    text = f'tfds build ... --config={shlex.quote(config)}, scratch in {folder}'
    return finding.passed('settings', text, config=chosen, scratch_dir=folder)


def _suits(folder: str, needed: int, root: str | os.PathLike[str]) -> bool:
    try:
        disk = hardware.look_at_disk(folder, root)
    except OSError:
        return False
    return disk.free >= needed and disk.kind not in (hardware.MEMORY, hardware.NETWORK)
