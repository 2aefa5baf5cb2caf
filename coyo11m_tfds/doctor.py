"""Looks at a machine, a source, an encoder, a configuration and data sets before hours are spent.

    python -m coyo11m_tfds.doctor
    python -m coyo11m_tfds.doctor --source=hf://datasets/owner/name \\
        --data_dir=gs://BUCKET/tfds --encoder=hf:google/gemma-3-270m

    pass  cores: 8, without a quota
    fail  disk of data_dir: OUT has 20 GB free on SSD, expected 310 GB -> ...

Each finding is one line: pass, warn or fail, and after the arrow what mends it; `--json` prints all
in one document. The exit status is 1 if anything fails, and 2 for a wrong command line. A build is
planned, but not written: this makes only temporary files, and in a bucket a file of one byte, which
it removes again. A check that takes more than a second says so; one that gives no answer in time
fails.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from coyo11m_tfds import schema
from coyo11m_tfds.checks import (
    child,
    devices,
    encoders,
    finding,
    hardware,
    places,
    training,
    versions,
)
from coyo11m_tfds.checks.finding import FAIL, WARN, Finding
from coyo11m_tfds.convert.settings import BuildSettings, check_names
from coyo11m_tfds.process import command_line, ending
from coyo11m_tfds.storage import source_files

DEFAULT_TIMEOUT = 60.0
_LONGEST_TIMEOUT = 24 * 3600.0  # longer ones overflow in the libraries that wait
_LOADING = 4  # times as long for checks that load a model: a large one takes a minute

_USUAL_CAPTIONS = 11_000_000  # of the model case, to rate an encoder by where no source is named

# A storage that answers does so in a moment; one that does not should be told soon.
_IMPATIENCE = {'COYO11M_RETRY_SECONDS': '0.2', 'COYO11M_STALL_SECONDS': '10'}

# Bytes a second that a kind of disk or a bucket takes, for the time of a build.
_WRITE_RATES = {
    hardware.SSD: 500e6,
    hardware.ROTATING: 150e6,
    hardware.MEMORY: 2e9,
    hardware.NETWORK: 100e6,
    hardware.DISK: 200e6,
}
_BUCKET_RATE = 200e6

_OF_TFDS = ('name', 'description')  # fields of a config that no build looks at


class Doctor:
    """One examination."""

    def __init__(self, flags: argparse.Namespace):
        """Looks at nothing yet.

        Args:
            flags: those of `parse_flags`.

        Raises:
            ValueError: see `read_build_config`.
        """
        self._flags = flags
        self._fields, self._settings = read_build_config(flags.build_config)
        self._environment, self._temporary = dict(os.environ), tempfile.gettempdir()
        self._num_bytes = self._scratch_bytes = 0
        self._num_captions = _USUAL_CAPTIONS
        self._data_sets: list[str] = []

    def findings(self) -> Iterator[Finding]:
        """Runs all checks that are asked for, one after the other."""
        for name, check, patience in self._checks():
            yield from finding.bounded(name, patience * self._flags.timeout, check)

    def _checks(self) -> Iterator[tuple[str, finding.Check, float]]:
        """Yields names, checks, and how many times as long as usual each may take.

        A check may use what those before it have found.
        """
        flags, seconds = self._flags, self._flags.timeout
        yield 'cores', hardware.check_cores, 1
        yield 'memory', hardware.check_memory, 1
        yield 'versions', functools.partial(versions.check_versions, self._extras()), 1
        yield 'environment', self._check_environment, 1
        check = functools.partial(devices.check_devices, ['jax', 'torch'], seconds)
        yield 'accelerators', check, 2
        if flags.source:
            check = functools.partial(places.check_place, 'source', flags.source)
            yield 'credentials of source', check, 1
        if flags.data_dir:
            check = functools.partial(
                places.check_place, 'data_dir', flags.data_dir, writes=bool(flags.source)
            )
            yield 'credentials of data_dir', check, 1
        if flags.source:
            yield 'source', self._source, 2
        yield 'disks', self._disks, 1
        if flags.encoder:
            yield 'encoder', self._encoder, 2 * _LOADING
        if flags.data_dir:
            yield 'data sets', self._find_data_sets, 1
            for data_set in self._data_sets:
                yield f'data set {data_set}', functools.partial(self._health, data_set), 1
        if flags.config:
            yield 'config', self._config, 2 * _LOADING
        yield 'settings', self._choose, 1

    def _extras(self) -> list[str]:
        """Extras of this package that are needed for what is asked."""
        kind = self._flags.encoder.partition(':')[0]
        of_encoder = {'hf': ['text'], 'jax': ['text-jax']}.get(kind, [])
        return ['convert', *of_encoder] if self._flags.source else of_encoder

    # Modules that need an extra are imported where they are used, so that a missing one is a
    # finding.

    def _check_environment(self) -> Sequence[Finding]:
        from coyo11m_tfds.checks import choices

        return choices.check_environment(self._environment)

    def _source(self) -> Iterator[Finding]:
        from coyo11m_tfds.checks import source_checks
        from coyo11m_tfds.source import location

        source = location.find(self._flags.source)
        yield from source_checks.check_files(source)
        found = source_checks.estimate(source, self._settings, self._write_rate())
        self._num_captions = found.num_records
        self._num_bytes = found.num_bytes
        fetched = min(found.fetched_bytes, self._settings.scratch_bytes)
        self._scratch_bytes = found.store_bytes + fetched
        yield from source_checks.check_build(found)

    def _write_rate(self) -> float:
        data_dir = self._flags.data_dir or os.curdir
        if source_files.is_remote(data_dir):
            return _BUCKET_RATE
        return _WRITE_RATES[hardware.look_at_disk(data_dir).kind]

    def _disks(self) -> Sequence[Finding]:
        from coyo11m_tfds.storage import scratch

        data_dir, builds, local = self._flags.data_dir, bool(self._flags.source), {}
        if data_dir and not source_files.is_remote(data_dir):
            local['data_dir'] = data_dir, self._num_bytes if builds else None
        if builds or not data_dir:
            folder = scratch.choose_folder(schema.NAME, data_dir, self._settings.scratch_dir)
            local['scratch'] = folder, self._scratch_bytes
        return hardware.check_disks(local)

    def _encoder(self) -> Sequence[Finding]:
        seconds = _LOADING * self._flags.timeout
        return encoders.check_encoder(self._flags.encoder, self._num_captions, seconds)

    def _find_data_sets(self) -> Sequence[Finding]:
        from coyo11m_tfds.checks import data_sets

        self._data_sets = data_sets.find(self._flags.data_dir)
        if self._data_sets:
            return []
        text = f'none in {self._flags.data_dir} yet'
        return [finding.passed('data sets', text)]

    def _health(self, data_set: str) -> Sequence[Finding]:
        from coyo11m_tfds.checks import data_sets

        return data_sets.check_health(data_set)

    def _config(self) -> Sequence[Finding]:
        # Of several data sets the configuration chooses.
        chosen = self._data_sets[0] if len(self._data_sets) == 1 else ''
        seconds = _LOADING * self._flags.timeout
        return training.check_config(self._flags.config, chosen, seconds)

    def _choose(self) -> Sequence[Finding]:
        from coyo11m_tfds.checks import choices
        from coyo11m_tfds.storage import scratch

        candidates = [scratch.user_cache(schema.NAME), self._temporary, os.getcwd()]
        return [
            choices.choose(
                self._settings,
                self._fields,
                self._flags.data_dir,
                self._num_bytes,
                self._scratch_bytes,
                candidates,
            )
        ]


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line.Parser('coyo11m_tfds.doctor', __doc__)
    add = parser.add_argument
    add('--source', default='', help='folder of the source, local, gs:// or hf://')
    add(
        '--data_dir', default='', help='--data_dir of `tfds build`, or a built data set; also gs://'
    )
    add('--encoder', default='', help='text encoder: hash, hf:NAME or jax:NAME')
    add('--config', default='', help='configuration of the trainer: a file or a name')
    add('--build_config', default='{}', help='--config of `tfds build`, as JSON')
    add(
        '--timeout',
        type=command_line.positive,
        default=DEFAULT_TIMEOUT,
        help='seconds a check (%(default)g)',
    )
    add('--json', action='store_true', help='print one JSON document')
    flags = parser.parse_args()
    flags.timeout = min(flags.timeout, _LONGEST_TIMEOUT)
    return flags


def read_build_config(text: str) -> tuple[dict[str, Any], BuildSettings]:
    """The fields of `tfds build --config=TEXT`, and the settings that it would have.

    Raises:
        ValueError: it is no JSON object, or has a field that is unknown or bad.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f'--build_config={text}: is no JSON ({error}).') from error
    if not isinstance(fields, dict):
        raise ValueError(f'--build_config={text}: expected a JSON object.')
    known = [field.name for field in dataclasses.fields(BuildSettings)]
    of_build = {name: fields[name] for name in fields if name not in _OF_TFDS}
    check_names(of_build, ['name', *known], '--build_config')
    return fields, BuildSettings(**of_build)


def summarize(found: Sequence[Finding]) -> str:
    """One line about all findings."""
    counts = [(sum(one.status == status for one in found), status) for status in (FAIL, WARN)]
    said = ', '.join(f'{count} {status}' for count, status in counts if count)
    return f'{len(found)} checks: {said or "all pass"}'


def examine(flags: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if anything fails, else 0."""
    found, doctor = [], Doctor(flags)
    for name, value in _IMPATIENCE.items():
        os.environ.setdefault(name, value)
    # So that a check that hangs leaves no files behind.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tempfile.tempdir:
        for one in doctor.findings():
            found.append(one)
            if not flags.json:
                print(one, flush=True)
    has_failed = any(one.status == FAIL for one in found)
    if flags.json:
        listed = [vars(one) | {'facts': dict(one.facts)} for one in found]
        print(json.dumps({'ok': not has_failed, 'findings': listed}, indent=1))
    else:
        print(summarize(found))
    return int(has_failed)


def main() -> None:
    """Runs the command line; the exit status is that of the module's docstring."""
    flags = parse_flags()
    try:
        with ending.in_one_line('nothing was changed', status=2):
            status = examine(flags)
    except SystemExit as end:
        status = int(end.code or 0)
    child.end_all()
    sys.stdout.flush()
    os._exit(status)  # threads of a check that hangs would keep this process waiting


if __name__ == '__main__':
    main()
