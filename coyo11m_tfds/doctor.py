"""Checks machine, credentials, source and encoder before a build.

    python -m coyo11m_tfds.doctor
    python -m coyo11m_tfds.doctor --source=hf://datasets/owner/name \\
        --data_dir=gs://BUCKET/tfds --encoder=jax:Qwen/Qwen3-0.6B
    python -m coyo11m_tfds.doctor --data=hf://datasets/owner/name --processes=8

    pass  machine: 8 cores, 64.0 GB of memory
    fail  disk of data_dir: OUT has 20.0 GB free, expected 310.0 GB -> ...

Each finding is one line: pass, warn or fail, and advice after the arrow. The exit status is 1 if a
check fails, and 2 for a wrong command line. The program plans a build of the source but builds
nothing. It writes only temporary files and, into a bucket, one file of one byte, which it removes.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import (
    CAPTION_FLAGS,
    BuildSettings,
    add_caption_flags,
    build_memory,
    check_names,
)
from coyo11m_tfds.dataset import hub_use, stored_dataset
from coyo11m_tfds.dry_run import DryRun, plan_or_estimate
from coyo11m_tfds.process import command_line, errors, machine, python_child
from coyo11m_tfds.process.sizes import format_bytes, format_count
from coyo11m_tfds.storage import scratch

PASS, WARN, FAIL = 'pass', 'warn', 'fail'

# A storage that works answers in a moment; waiting longer would only delay the report.
_IMPATIENCE = {'COYO11M_RETRY_SECONDS': '0.2', 'COYO11M_STALL_SECONDS': '5'}

# Of a build of a small source, and of 12 million rows by two processes.
_LEAST_MEMORY, _AMPLE_MEMORY = build_memory(0, 1), build_memory(12_000_000, 2)
_LEAST_ROOM = 1_000_000_000  # bytes on a disk, for logs and unfinished files besides the data

_USUAL_CAPTIONS = 11_000_000  # to rate an encoder by where no source is named
_MUCH = 0.1  # share of the rows; hardly anybody means to leave out one in ten

_LOG_IN = {'gs://': 'gcloud auth application-default login', 'hf://': 'hf auth login'}

_LIST_DEVICES = """
import json, jax
print(json.dumps([jax.__version__, [[d.platform, d.device_kind] for d in jax.local_devices()]]))
"""

# 10 to 90 words, as long captions have.
_SENTENCE = 'A small wooden boat with a red sail lies on the calm water of a lake in the evening. '
_CAPTIONS = [f'{number}. {_SENTENCE * (1 + number % 5)}' for number in range(32)]
_MOST_CAPTIONS = 4096
_SLOW_HOURS = 24


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    name: str
    status: str  # PASS, WARN or FAIL
    text: str
    fix: str = ''  # command or change, if `text` does not say it

    def __str__(self) -> str:
        fix = f' -> {self.fix}' if self.fix else ''
        return f'{self.status}  {self.name}: {self.text}{fix}'


def run_checks(
    source: str, data_dir: str, encoder: str, settings: BuildSettings
) -> Iterator[Finding]:
    """Yields the findings of all checks; '' for an argument leaves out its checks."""
    # From what costs nothing to what takes minutes, each line shown at once.
    yield check_machine()
    yield check_devices()
    dry_run = DryRun()  # of nothing, where no source is named or it cannot be built
    if source:
        yield check_credentials('source', source)
    if data_dir:
        yield check_credentials('data_dir', data_dir, is_output=True, writes=bool(source))
    if source:
        try:
            dry_run = plan_or_estimate(source, settings)
            yield describe_build(source, dry_run)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            yield Finding('source', FAIL, errors.describe_error(error))
    # After the dry run, which tells how much a build writes.
    places = {}
    if data_dir and storage.local_path(data_dir):
        places['data_dir'] = data_dir, dry_run.num_bytes
    if source:
        folder = scratch.choose_folder(schema.NAME, data_dir, settings.scratch_dir)
        places['scratch'] = folder, dry_run.scratch_bytes
    yield from check_disks(places)
    if encoder:
        yield check_encoder_speed(encoder, dry_run.num_records or _USUAL_CAPTIONS)


def check_machine() -> Finding:
    """Checks cores and memory, within the limits of a container."""
    memory = machine.usable_memory()
    cores = machine.usable_cpus()
    text = f'{format_count(cores, "core")}, {format_bytes(memory)} of memory'
    if memory >= _AMPLE_MEMORY and cores > 1:
        return Finding('machine', PASS, text)
    text += f', expected 2 cores and {format_bytes(_AMPLE_MEMORY)} for a large source'
    fix = 'raise the limits, e.g. docker run --cpus=4 --memory=16g'
    # A small source can be built with less.
    status = FAIL if memory < _LEAST_MEMORY else WARN
    return Finding('machine', status, text, fix)


def check_disks(
    places: Mapping[str, tuple[str, int]], usage: Callable[[str], Any] = shutil.disk_usage
) -> Iterator[Finding]:
    """Checks that local folders, which need not exist yet, can be written to and have room.

    `places` are, by name, folders and the bytes that a build writes there.
    """
    device_bytes: collections.Counter[int] = collections.Counter()
    for name, (folder, num_bytes) in places.items():
        title = f'disk of {name}'
        option = '--data_dir' if name == 'data_dir' else 'scratch_dir in the config of the build'
        try:
            parent = _find_existing(folder)
        # A name that is too long, or a folder above that this user may not enter.
        except OSError as error:
            yield Finding(title, FAIL, errors.describe_error(error), f'choose another {option}')
            continue
        # Folders on one disk share its room.
        device = parent.stat().st_dev
        device_bytes[device] += num_bytes
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            text = f'{folder}: {parent} is a file, or this user cannot write to it'
            yield Finding(title, FAIL, text, f'choose another {option}')
            continue
        _, _, free = usage(str(parent))
        text = f'{folder} has {format_bytes(free)} free'
        # With what the places before it will take of the same disk.
        required = max(device_bytes[device], _LEAST_ROOM)
        if free < required:
            text += f', expected {format_bytes(required)} for what will be on this disk'
            fix = f'free some space, or choose another {option}'
            yield Finding(title, FAIL, text, fix)
        else:
            yield Finding(title, PASS, text)


def _find_existing(folder: str) -> pathlib.Path:
    """Returns a folder or, if it does not exist, the closest one above it."""
    path = pathlib.Path(storage.make_absolute(folder))
    while not path.exists():
        path = path.parent
    return path


def check_credentials(
    name: str, url: str, *, is_output: bool = False, writes: bool = False
) -> Finding:
    """Lists a folder of a storage and, with `writes`, stores a byte; a local folder passes.

    That of an output fails on a storage that is only read.
    """
    label = f'credentials of {name}'
    # The checks of disks look into local folders, when it is known how much a build writes.
    if storage.local_path(url):
        return Finding(label, PASS, f'{url} is local and needs none')
    try:
        storage.check_single_slashes(url)
        if is_output:
            storage.open_writable_folder(url)
        folder = storage.open_folder(url)
        if reason := folder.why_unreadable():
            return Finding(label, FAIL, reason)
        if writes:
            storage.open_writable_folder(url).check_writable()
        # Of the hub, `pin` lists the data set; elsewhere, `exists` sends a request.
        folder.pin().exists()
    except FileNotFoundError:
        text = f'{url}: the hub has no such data set, or does not show it to this user.'
        return Finding(label, FAIL, text, _LOG_IN['hf://'])
    except PermissionError as error:
        return Finding(label, FAIL, errors.describe_error(error), _LOG_IN.get(url[:5], ''))
    except (OSError, ValueError) as error:
        return Finding(label, FAIL, errors.describe_error(error))
    rights = 'can be listed, written to and deleted from' if writes else 'can be listed'
    return Finding(label, PASS, f'{url} {rights}')


def describe_build(place: str, dry_run: DryRun) -> Finding:
    """Returns what a build of a source makes; a warning if it drops many rows."""
    records = format_count(dry_run.num_records, 'record')
    size = format_bytes(dry_run.num_bytes)
    # Only a plan knows the shards, and so the numbers exactly.
    if dry_run.num_shards:
        build = f'{records} in {format_count(dry_run.num_shards, "shard")} of {size}'
    else:
        build = f'about {records} in about {size}'
    text = f'{place}: {dry_run.source}, become {build}'
    reasons = []
    for reason, count in dry_run.dropped.items():
        if count:
            reasons.append(f'{count:,} {reason}')
    if reasons:
        text += f'; left out: {", ".join(reasons)}'
    num_dropped = sum(dry_run.dropped.values())
    share = num_dropped / max(1, dry_run.num_records + num_dropped)
    if share <= _MUCH:
        return Finding('source', PASS, text)
    fix = 'check that the captions belong to these latents, and that caption_column is right'
    return Finding('source', WARN, f'{text} ({share:.1%} of the rows)', fix)


def check_devices(root: str = '/') -> Finding:
    """Lists the devices that JAX sees on this host; `root` holds dev."""
    try:
        version, devices = python_child.run_python(_LIST_DEVICES)
    except (ValueError, OSError) as error:
        fix = 'end what else uses the devices, or set JAX_PLATFORMS=cpu to do without them'
        return Finding('accelerators', FAIL, str(error), fix)
    counts = collections.Counter(kind for _, kind in devices)
    device_list = ', '.join(f'{count} x {kind}' for kind, count in counts.items())
    text = f'jax {version}: {device_list}'
    # JAX calls some of its GPUs by the name of their platform.
    platforms = {platform.replace('cuda', 'gpu') for platform, _ in devices}
    # A machine whose accelerator is there but not in JAX lacks the right wheel of it.
    unseen_kinds = sorted(machine.accelerators(root) - platforms)
    if unseen_kinds:
        # The first one is enough: one installation of JAX has one kind.
        kind = unseen_kinds[0]
        text += f', although there is a {kind.upper()} in this machine'
        install = f"pip install -c constraints.txt -e '.[{kind}]'"
        return Finding('accelerators', WARN, text, install)
    return Finding('accelerators', PASS, text)


def check_encoder_speed(spec: str, num_captions: int) -> Finding:
    """Loads an encoder in its own process, and rates its speed by the captions of a source."""
    try:
        program = f'from coyo11m_tfds import doctor\ndoctor.time_encoder({spec!r})'
        dim, rate = python_child.run_python(program)
    except (ValueError, OSError) as error:
        return Finding('encoder', FAIL, f'{spec}: {error}')
    hours = num_captions / rate / 3600
    text = (
        f'{spec} loads, embeddings of {dim} numbers, {rate:,.1f} captions/s here: {hours:,.1f} '
        f'hours for {format_count(num_captions, "caption")}'
    )
    if hours <= _SLOW_HOURS:
        return Finding('encoder', PASS, text)
    fix = (
        'use a machine with a GPU (and a CUDA build of torch) or a TPU (jax: in place of hf: runs '
        'Qwen3 and Gemma 3 there), spread the work over more machines, or take a smaller encoder'
    )
    return Finding('encoder', WARN, text, fix)


def time_encoder(spec: str) -> None:
    """Prints the width of an embedding and the captions a second."""
    from coyo11m_tfds.text import text_encoders

    with command_line.ends_in_one_line('nothing was changed', (ValueError, OSError, ImportError)):
        encoder = text_encoders.make_encoder(spec)
        # The first call compiles, and makes threads: its time says nothing.
        encoder.encode(_CAPTIONS)
        captions = _CAPTIONS
        seconds = 0.0  # of the last call
        # More of them until they take a second, because a GPU is only fast at many.
        while seconds < 1 and len(captions) < _MOST_CAPTIONS:
            captions = captions * 4
            start = time.perf_counter()
            encoder.encode(captions)
            seconds = time.perf_counter() - start
    command_line.print_lines(json.dumps([encoder.dim, len(captions) / seconds]))


def check_quota(data: str, *, samples_per_second: float, chunk: int, num_processes: int) -> Finding:
    """Compares the requests of a run that reads a data set on the hub with the account's quota."""
    try:
        stored = stored_dataset.open_data(data)
        # The hub alone, which keeps versions, counts requests against a quota.
        if not storage.class_of(stored.folder).keeps_versions:
            return Finding('quota', PASS, f'{data} is not on the hub and needs none')
        use = hub_use.estimate_use(
            stored,
            samples_per_second=samples_per_second,
            chunk=chunk,
            num_processes=num_processes,
        )
    except (OSError, ValueError) as error:
        return Finding('quota', FAIL, errors.describe_error(error))
    text = (
        f'{stored.folder}: {samples_per_second:,g} samples/s in chunks of {chunk} take '
        f'{use.requests_per_second:,.1f} requests/s of {format_bytes(round(use.request_nbytes))}; '
        f'the addresses of {format_count(use.num_files, "file")} in '
        f'{format_count(num_processes, "process", "processes")} take up to '
        f'{use.num_resolves:,} resolves at the start'
    )
    if use.quota is None:
        return Finding('quota', WARN, f'{text}; the hub does not say how many this account has')
    text += f', this account has {use.quota.limit:,} in {use.quota.seconds:g} s'
    if use.is_within:
        return Finding('quota', PASS, text)
    fix = (
        'the run waits for the next window; hf auth login, an account with more, fewer processes '
        'or a copy on gs:// or a disk avoid it'
    )
    return Finding('quota', WARN, text, fix)


class _WarningPrinter(logging.Handler):
    """Prints warnings of a log as findings, and counts them."""

    num_warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record as one line, and counts it."""
        self.num_warnings += 1
        text = ' '.join(record.getMessage().split())
        command_line.print_lines(Finding('warning', WARN, text), file=sys.stderr)


@contextlib.contextmanager
def _showing_warnings() -> Iterator[_WarningPrinter]:
    """Shows what this project and libraries warn of as lines like those of the findings."""
    printer = _WarningPrinter(logging.WARNING)
    logger = logging.getLogger()
    logger.addHandler(printer)
    logging.captureWarnings(True)
    try:
        yield printer
    finally:
        logging.captureWarnings(False)
        logger.removeHandler(printer)


def read_build_config(text: str, **flags: str) -> BuildSettings:
    """Returns the settings of `coyo11m_tfds.build --config=TEXT` with flags for other fields.

    Raises a ValueError for a text that is no JSON object of such fields.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f'--build_config={text}: is not JSON ({error}).') from error
    if not isinstance(fields, dict):
        raise ValueError(f'--build_config={text}: expected a JSON object.')
    names = [field.name for field in dataclasses.fields(BuildSettings)]
    # These two are fields of a config of TFDS; nothing here depends on them.
    check_names(fields, ['name', 'description', *names], '--build_config')
    settings = {name: fields[name] for name in names if name in fields}
    # Flags take the place of fields, as in a build.
    return BuildSettings(**settings | flags)


def main() -> None:
    """Runs the command line; the exit status is that of the module's docstring."""
    parser = command_line.Parser('coyo11m_tfds.doctor', __doc__)
    add = parser.add_argument
    add('--source', default='', help='folder of the source, local, gs:// or hf://')
    add_caption_flags(parser)
    add('--data_dir', default='', help='--data_dir of the build, local or gs://')
    add('--encoder', default='', help='text encoder: hash, hf:NAME or jax:NAME')
    add('--build_config', default='{}', help='--config of the build, as JSON')
    add('--data', default='', help='folder of a built data set on hf://, to train from there')
    add('--samples_per_second', default=1000.0, type=float, help='of the run, with --data')
    add('--chunk', default=64, type=int, help='data.chunk of the run, with --data')
    add('--processes', default=1, type=int, help='number of processes of the run, with --data')
    flags = parser.parse_args()
    # What the user has set stays.
    os.environ.update(_IMPATIENCE | os.environ)
    counts: collections.Counter[str] = collections.Counter()
    with command_line.ends_in_one_line('nothing was changed', status=2):
        # Only those that were given: the others have no value here.
        fields = {name: value for name, value in vars(flags).items() if name in CAPTION_FLAGS}
        settings = read_build_config(flags.build_config, **fields)
        for name in ('samples_per_second', 'chunk', 'processes'):
            errors.at_least(1).check(name, getattr(flags, name))
        with _showing_warnings() as printer:
            findings = run_checks(flags.source, flags.data_dir, flags.encoder, settings)
            if flags.data:
                quota = check_quota(
                    flags.data,
                    samples_per_second=flags.samples_per_second,
                    chunk=flags.chunk,
                    num_processes=flags.processes,
                )
                findings = itertools.chain(findings, [quota])
            for finding in findings:
                command_line.print_lines(finding)
                counts[finding.status] += 1
    summary = 'all pass'
    if counts[FAIL]:
        summary = f'{counts[FAIL]} fail'
    if num_warnings := counts[WARN] + printer.num_warnings:
        summary += f', {format_count(num_warnings, "warning")}'
    command_line.print_lines(f'{format_count(counts.total(), "check")}: {summary}')
    sys.exit(bool(counts[FAIL]))


if __name__ == '__main__':
    main()
