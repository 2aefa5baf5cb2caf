"""Examines the machine, the credentials, the source and the encoder before a long build.

    python -m coyo11m_tfds.doctor
    python -m coyo11m_tfds.doctor --source=hf://datasets/owner/name \\
        --data_dir=gs://BUCKET/tfds --encoder=hf:google/gemma-3-270m

    pass  machine: 8 cores, 64.0 GB of memory
    fail  disk of data_dir: OUT has 20.0 GB free, expected 310.0 GB -> ...

Each finding is one line: pass, warn or fail, and advice after the arrow. The exit status is 1 if a
check fails, and 2 for a wrong command line. The program plans a build of the source but builds
nothing. It writes only temporary files and, into a bucket, one file of one byte, which it removes.
"""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import (
    BuildSettings,
    build_memory,
    check_build_memory,
    check_names,
)
from coyo11m_tfds.process import command_line, ending, machine
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.storage import scratch
from coyo11m_tfds.storage.stored_file import StoredFile

PASS, WARN, FAIL = 'pass', 'warn', 'fail'
_TIMEOUT = 240.0  # seconds for JAX and for the encoder; a large model takes a minute to load

# A storage that answers does so in a moment; one that does not should be told soon.
_IMPATIENCE = {'COYO11M_RETRY_SECONDS': '0.2', 'COYO11M_STALL_SECONDS': '5'}

# Of a build of a small source, and of 12 million rows by two processes.
_LEAST_MEMORY, _AMPLE_MEMORY = build_memory(0, 1), build_memory(12_000_000, 2)
_LEAST_ROOM = 1_000_000_000  # bytes on a disk, for logs and unfinished files besides the data

# A source of more files, or with more captions, is not planned: the heads of some files stand for
# all. Captions of this size are read in seconds.
_HEADS = 8
_EXACT_BYTES = {False: 500_000_000, True: 30_000_000}  # by whether they are remote
_USUAL_CAPTIONS = 11_000_000  # to rate an encoder by where no source is named
_FETCHED_AT_ONCE = 4  # large files that a build holds at a time
_MUCH = 0.1  # share of the rows; hardly anybody means to leave out one in ten

_LOG_IN = {'gs://': 'gcloud auth application-default login', 'hf://': 'hf auth login'}

_LIST_DEVICES = """
import json, jax
print(json.dumps([jax.__version__, [[d.platform, d.device_kind] for d in jax.local_devices()]]))
"""
# The last keeps JAX from taking three quarters of a GPU's memory.
_QUIETLY = {
    'COYO11M_TRACEBACK': '',
    'TF_CPP_MIN_LOG_LEVEL': '3',
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
}

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
    mend: str = ''  # command or change that repairs the fault, if `text` does not say it

    def __str__(self) -> str:
        mend = f' -> {self.mend}' if self.mend else ''
        return f'{self.status}  {self.name}: {self.text}{mend}'


def findings(
    source: str, data_dir: str, encoder: str, settings: BuildSettings
) -> Iterator[Finding]:
    """Runs all checks; '' for an argument leaves out its checks."""
    yield check_machine()
    yield check_devices()
    dry, room = DryRun(), {}
    if source:
        yield check_place('source', source)
    if data_dir:
        yield check_place('data_dir', data_dir, writes=bool(source))
    if source:
        try:
            dry = dry_run(source, settings)
            yield describe(source, dry)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            yield Finding('source', FAIL, ending.describe(error))
    if data_dir and storage.local_path(data_dir):
        room['data_dir'] = data_dir, dry.num_bytes
    if source:
        folder = scratch.choose_folder(schema.NAME, data_dir, settings.scratch_dir)
        room['scratch'] = folder, dry.scratch_bytes
    yield from check_disks(room)
    if encoder:
        yield check_encoder(encoder, dry.num_records or _USUAL_CAPTIONS)


def check_machine() -> Finding:
    """Checks cores and memory, within the limits of a container."""
    usable, cores = machine.usable_memory(), machine.usable_cpus()
    text = f'{cores} cores, {readable(usable)} of memory'
    if usable >= _AMPLE_MEMORY and cores > 1:
        return Finding('machine', PASS, text)
    text += f', expected 2 cores and {readable(_AMPLE_MEMORY)} for a large source'
    mend = 'raise the limits, e.g. docker run --cpus=4 --memory=16g'
    return Finding('machine', FAIL if usable < _LEAST_MEMORY else WARN, text, mend)


def check_disks(
    places: Mapping[str, tuple[str, int]], usage: Callable[[str], Any] = shutil.disk_usage
) -> Iterator[Finding]:
    """Checks that local folders, which need not exist yet, can be written to and have room.

    Args:
        places: Folder, and bytes that the build will write to it, by name.
        usage: Function that returns `(total, used, free)` bytes of the disk of a folder.
    """
    taken: collections.Counter[int] = collections.Counter()
    for name, (folder, num_bytes) in places.items():
        option = '--data_dir' if name == 'data_dir' else 'scratch_dir in the config of the build'
        path = pathlib.Path(folder).expanduser().absolute()
        there = next(place for place in (path, *path.parents) if place.exists())
        device = there.stat().st_dev
        taken[device] += num_bytes  # places on one disk share its room
        needed, free = max(taken[device], _LEAST_ROOM), usage(str(there))[2]
        text, mend = f'{folder} has {readable(free)} free', ''
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            text = f'{folder}: {there} is a file, or this user cannot write to it'
            mend = f'choose another {option}'
        elif free < needed:
            text += f', expected {readable(needed)} for what will be on this disk'
            mend = f'free some space, or choose another {option}'
        yield Finding(f'disk of {name}', FAIL if mend else PASS, text, mend)


def check_place(name: str, url: str, writes: bool = False) -> Finding:
    """Asks a storage for a listing and, with `writes`, to store a byte; a local folder passes."""
    label = f'credentials of {name}'
    if storage.local_path(url):
        return Finding(label, PASS, f'{url} is local and needs none')
    try:
        folder = storage.open_folder(url)
        if writes:
            folder.check_writable()
        folder.pin().exists()
    except FileNotFoundError:
        text = f'{url}: the hub has no such data set, or does not show it to this user.'
        return Finding(label, FAIL, text, _LOG_IN['hf://'])
    except (OSError, ValueError) as error:
        mend = _LOG_IN.get(url[:5], '') if isinstance(error, PermissionError) else ''
        return Finding(label, FAIL, ending.describe(error), mend)
    what = 'can be listed, written to and deleted from' if writes else 'can be listed'
    return Finding(label, PASS, f'{url} {what}')


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The plan, or an estimate, of a build."""

    source: str = ''  # number and size of its files
    num_records: int = 0
    num_bytes: int = 0  # of all shards
    num_shards: int = 0  # of all splits; 0 for an estimate
    scratch_bytes: int = 0  # of the captions, and of remote files that are held at a time
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)  # rows by reason


def dry_run(place: str, settings: BuildSettings) -> DryRun:
    """Plans the build of a source.

    If the captions can be read in seconds, the plan is exactly that of the build. Otherwise this
    checks heads and the Parquet file's footer, and the sizes of the files stand for those of the
    shards.
    """
    from coyo11m_tfds.convert.plan import make_plan, read_latents  # these need an extra
    from coyo11m_tfds.source import source_folder

    source = source_folder.find_source(place)
    files, captions = source.latent_files, source.captions_file
    file_bytes, is_remote = sum(file.size for file in files), not files[0].local_path
    sizes = sorted(file.size for file in source.by_name.values())
    store_bytes = captions.size if captions else 0
    if captions:
        _check_column(captions, settings.caption_column)
    kind, beside = os.path.splitext(files[0].path)[1], ' and captions' if captions else ''
    found = functools.partial(
        DryRun,
        source=f'{len(files)} {kind} files{beside}, {readable(sum(sizes))}',
        scratch_bytes=store_bytes + (sum(sizes[-_FETCHED_AT_ONCE:]) if is_remote else 0),
    )
    # What is read to the end: captions, or whole files where captions lie beside the latents.
    read_bytes = store_bytes if captions else file_bytes
    with tempfile.TemporaryDirectory() as folder:
        if read_bytes <= _EXACT_BYTES[is_remote] and (not is_remote or len(files) <= _HEADS):
            plan = make_plan(source, settings, scratch.Scratch(f'{folder}/source'), folder)
            return found(
                num_records=sum(task.parts[-1].records.stop for task in plan.tasks),
                num_bytes=plan.num_bytes,
                num_shards=len(plan.tasks),
                dropped=plan.dropped.counts,
            )
        heads = files[:: -(-len(files) // _HEADS)]
        latents = read_latents(source, settings, folder, heads)
        num_rows = latents.num_rows * file_bytes // sum(file.size for file in heads)
        check_build_memory(num_rows, settings.num_workers)
        return found(
            num_records=num_rows,
            num_bytes=store_bytes + (0 if settings.in_place else file_bytes),
        )


def describe(place: str, dry: DryRun) -> Finding:
    """Describes the build in a finding."""
    about, shards = 'about ', ''
    if dry.num_shards:
        about, shards = '', f'{dry.num_shards:,} shards of '
    size = f'{about}{dry.num_records:,} records in {shards}{about}{readable(dry.num_bytes)}'
    text = f'{place}: {dry.source}, become {size}'
    if left_out := [f'{count:,} {reason}' for reason, count in dry.dropped.items() if count]:
        text += f'; left out: {", ".join(left_out)}'
    num_left_out = sum(dry.dropped.values())
    share = num_left_out / max(1, dry.num_records + num_left_out)
    if share > _MUCH:
        mend = 'check that the captions belong to these latents, and that caption_column is right'
        return Finding('source', WARN, f'{text} ({share:.1%} of the rows)', mend)
    return Finding('source', PASS, text)


def _check_column(captions: StoredFile, column: str) -> None:
    """Raises a ValueError if the footer of a Parquet file lacks a column."""
    from coyo11m_tfds.source import keyed_parquet

    names = keyed_parquet.read_schema(captions).names
    if column not in names:
        raise ValueError(
            f"{captions.path}: lacks the column '{column}'; its columns are {', '.join(names)}. "
            'Set caption_column.'
        )


def check_devices(root: str = '/') -> Finding:
    """Asks JAX for the devices of this host; `root` holds dev."""
    try:
        version, devices = ask(_LIST_DEVICES)
    except (ValueError, OSError) as error:
        mend = 'end what else uses the devices, or set JAX_PLATFORMS=cpu to do without them'
        return Finding('accelerators', FAIL, str(error), mend)
    counts = collections.Counter(kind for _, kind in devices)
    text = f'jax {version}: ' + ', '.join(f'{n} x {kind}' for kind, n in counts.items())
    seen = {platform.replace('cuda', 'gpu') for platform, _ in devices}
    for kind in sorted(machine.accelerators(root) - seen):
        text += f', although there is a {kind.upper()} in this machine'
        install = f"pip install -c constraints.txt -e '.[{kind}]'"
        return Finding('accelerators', WARN, text, install)
    return Finding('accelerators', PASS, text)


def check_encoder(spec: str, num_captions: int) -> Finding:
    """Loads an encoder in its own process, and rates its speed by the captions of a source."""
    try:
        dim, rate = ask(f'from coyo11m_tfds import doctor\ndoctor.time_encoder({spec!r})')
    except (ValueError, OSError) as error:
        return Finding('encoder', FAIL, f'{spec}: {error}')
    hours = num_captions / rate / 3600
    text = (
        f'{spec} loads, embeddings of {dim} numbers, {rate:,.1f} captions/s here: {hours:,.1f} '
        f'hours for {num_captions:,} captions'
    )
    if hours <= _SLOW_HOURS:
        return Finding('encoder', PASS, text)
    mend = (
        'use a machine with a GPU (and a CUDA build of torch) or a TPU (jax: in place of hf: '
        'runs Gemma 3 there), spread the work over more machines, or take a smaller encoder'
    )
    return Finding('encoder', WARN, text, mend)


def time_encoder(spec: str) -> None:
    """Prints the width of an embedding and the captions a second."""
    from coyo11m_tfds.text import text_encoders

    with ending.in_one_line('nothing was changed', (ValueError, OSError, ImportError)):
        encoder = text_encoders.make_encoder(spec)
        encoder.encode(_CAPTIONS)  # the first call compiles, and makes threads
        captions, seconds = _CAPTIONS, 0.0
        while seconds < 1 and len(captions) < _MOST_CAPTIONS:  # a GPU is only fast at many
            captions = captions * 4
            start = time.perf_counter()
            encoder.encode(captions)
            seconds = time.perf_counter() - start
    print(json.dumps([encoder.dim, len(captions) / seconds]))


def ask(program: str, seconds: float = _TIMEOUT) -> Any:
    """Runs Python code in its own process, because it may claim devices, hang or crash.

    Returns:
        The last line of its output, parsed as JSON.
    """
    command, quietly = [sys.executable, '-c', program], os.environ | _QUIETLY
    pipes: dict[str, Any] = {'stdin': subprocess.DEVNULL, 'capture_output': True, 'text': True}
    try:
        ended = subprocess.run(command, env=quietly, timeout=seconds, check=False, **pipes)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f'no answer within {seconds:g} s') from None
    if ended.returncode == -9:
        raise ValueError('the process was killed, most likely because memory ran out')
    if ended.returncode:
        said = ended.stderr.strip() or f'exit status {ended.returncode} without a word'
        raise ValueError(said.splitlines()[-1].removeprefix('error: '))
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise ValueError(f'no answer, but: {ended.stdout.strip()[-200:]}') from None


def read_build_config(text: str) -> BuildSettings:
    """Returns the settings of `tfds build --config=TEXT`."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f'--build_config={text}: is not JSON ({error}).') from error
    if not isinstance(fields, dict):
        raise ValueError(f'--build_config={text}: expected a JSON object.')
    names = [field.name for field in dataclasses.fields(BuildSettings)]
    check_names(fields, ['name', 'description', *names], '--build_config')
    return BuildSettings(**{name: fields[name] for name in names if name in fields})


def main() -> None:
    """Runs the command line; the exit status is that of the module's docstring."""
    parser = command_line.Parser('coyo11m_tfds.doctor', __doc__)
    add = parser.add_argument
    add('--source', default='', help='folder of the source, local, gs:// or hf://')
    add('--data_dir', default='', help='--data_dir of the build, local or gs://')
    add('--encoder', default='', help='text encoder: hash, hf:NAME or jax:NAME')
    add('--build_config', default='{}', help='--config of the build, as JSON')
    flags = parser.parse_args()
    for name, value in _IMPATIENCE.items():
        os.environ.setdefault(name, value)
    counts: collections.Counter[str] = collections.Counter()
    with ending.in_one_line('nothing was changed', status=2):
        settings = read_build_config(flags.build_config)
        for found in findings(flags.source, flags.data_dir, flags.encoder, settings):
            print(found, flush=True)
            counts[found.status] += 1
    said = ', '.join(f'{counts[status]} {status}' for status in (FAIL, WARN) if counts[status])
    print(f'{counts.total()} checks: {said or "all pass"}')
    sys.exit(bool(counts[FAIL]))


if __name__ == '__main__':
    main()
