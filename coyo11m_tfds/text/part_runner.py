"""Makes the parts that are missing, in this process or in several, into a folder or one file.

    choice = EncoderChoice('hf:google/gemma-3-270m')
    job = Job(choice, folder, 'caption_llava', 32768, 'gs://bucket/gemma', '/tmp/staging')
    made = part_runner.run(job, [0, 3, 6], {9: file}, 2, None, on_batch)

A part appears in the folder only when it is complete, and its metadata hold everything that decides
its contents. So there is nothing to lock and nothing to clean up: any process makes a part that is
missing, and two processes that make the same part write the same bytes.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.process import machine, workers
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage import file_state, locks, source_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import user_temp
from coyo11m_tfds.storage.source_files import SourceFile
from coyo11m_tfds.text import parts, text_encoders, words
from coyo11m_tfds.text.encoder import DEFAULT_MAX_TOKENS, Encoder, OnBatch, Tokenizer
from coyo11m_tfds.text.parts import Captions

_FILE = '.parquet'

# What a process that hashes words takes: of 2 million captions 1.13 GB with the store of captions
# that the first of them makes, 0.66 GB for tokens.
_WORKER_BYTES = 1_200_000_000
# A process takes 1 to 2 s to start, a part of hashed words 0.3 s.
_PARTS_WORTH_A_WORKER = 8

_SECONDS_BETWEEN_LOOKS = 0.5
_CPUS_VARIABLES = 'OMP_NUM_THREADS', 'RAYON_NUM_THREADS'
_GPUS_VARIABLE = 'CUDA_VISIBLE_DEVICES'


@dataclasses.dataclass(frozen=True)
class EncoderChoice:
    """Which encoder, for a process to load it.

    Attributes:
        spec: See `text_encoders.make_encoder`; of tokens `make_tokenizer`.
        max_tokens: Captions are cut to so many tokens.
        batch_tokens: See `text_encoders.make_encoder`.
        tokens_only: Whether to make token ids in place of embeddings.
    """

    spec: str
    max_tokens: int = DEFAULT_MAX_TOKENS
    batch_tokens: int | None = None
    tokens_only: bool = False

    def load(self) -> Encoder | Tokenizer:
        """Loads the encoder, or the tokenizer alone; raises as `text_encoders.make_encoder`."""
        if self.tokens_only:
            return text_encoders.make_tokenizer(self.spec, self.max_tokens)
        return text_encoders.make_encoder(self.spec, self.max_tokens, self.batch_tokens)

    def check(self) -> None:
        """Checks in seconds whether the encoder exists; raises as `load`."""
        if self.hashes:
            self.load()
        else:
            text_encoders.check(self.spec)

    @property
    def hashes(self) -> bool:
        """True if the encoder hashes words in Python: its process uses one core and no weights."""
        return self.spec in (words.HashEncoder.name, words.WordsTokenizer.name)


@dataclasses.dataclass(frozen=True)
class Job:
    """The embedding of a source; the same for all processes.

    Attributes:
        encoder: The encoder.
        captions: Folder of a `Joined` of all captions, by key.
        caption_column: Name of their column.
        part_captions: Captions of a part at most.
        out: Folder of the parts, local or on gs://; or path of the one file, local.
        staging: Existing local folder to write files in, on the disk of a local `out`.
    """

    encoder: EncoderChoice
    captions: str
    caption_column: str
    part_captions: int
    out: str
    staging: str


class Made(NamedTuple):
    """Encoder, numbers a caption, how many captions were cut, and most token ids of one."""

    encoder: str
    width: int
    num_truncated: int
    longest: int


class Counter:
    """An `on_batch` that adds to a progress what it is told.

    Attributes:
        tokens: Tokens so far.
        slots: Tokens and padding so far.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self.tokens = self.slots = 0

    def __call__(self, captions: int, tokens: int, slots: int) -> None:
        self.tokens += tokens
        self.slots += slots
        if self.slots > self.tokens:
            self._progress.note = f'{self.padding:.1%} padding'
        self._progress.add(captions, tokens=tokens)

    @property
    def padding(self) -> float:
        """The share of what was computed that is padding."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


# --- Where they go --------------------------------------------------------------------------


def is_file(out: str) -> bool:
    """True if `out` names one file."""
    return out.endswith(_FILE)


def check_out(out: str, share: tuple[int, int]) -> None:
    """Refuses what cannot be written, before anything is read.

    Args:
        out: Folder or file of the sidecar, as the user names it.
        share: Number of this host, and number of hosts.

    Raises:
        ValueError: It cannot be written, or not by several hosts.
    """
    what = ''
    if not 0 <= share[0] < share[1]:
        raise ValueError(f'part {share[0]} of {share[1]}: expected one of 0 to n - 1, of n.')
    if not is_file(out):
        if os.path.isfile(out):
            what = f'is a file; expected a folder, or a name ending in {_FILE}.'
        else:
            Destination(out)
    elif source_files.is_remote(out):
        what = 'is remote; expected a local path, which can be copied there, or a folder.'
    elif os.path.isdir(out):
        what = 'is a folder; expected the path of a file to write.'
    elif share[1] > 1:
        what = (
            f'is one file, which one process makes, and this is one of {share[1]}. Name a folder.'
        )
    if what:
        raise ValueError(f'{out} {what}')


@contextlib.contextmanager
def scratch_folder(out: str, chosen: str | os.PathLike[str]) -> Iterator[str]:
    """A folder of this run alone; in or beside a local `out`, so that parts are only renamed."""
    if is_file(out):
        parent, prefix = Path(out).parent, f'.{Path(out).name}.'
    elif source_files.is_remote(out):
        parent, prefix = Path(chosen or user_temp(schema.NAME)), 'embed-'
    else:
        # What another host of a shared disk has must stay, even if locks do not reach so far.
        parent, prefix = Path(chosen or out), f'.{platform.node()}-'
        Path(out).mkdir(parents=True, exist_ok=True)
    parent.mkdir(parents=True, exist_ok=True)
    with locks.temporary_folder(parent, prefix) as folder:
        yield folder


def finished_parts(out: str, count: int) -> dict[int, SourceFile]:
    """Returns the parts that are in a folder, by number; {} for one file, which is replaced.

    Raises:
        ValueError: They are of another number than `count`.
        OSError: The storage cannot be reached.
    """
    if is_file(out):
        return {}
    found_count, found = sidecar.find_parts(out)
    if found and found_count != count:
        raise ValueError(
            f'{next(iter(found.values())).path}: is one of {found_count} parts, but these captions '
            f'make {count} parts here. Remove it, choose another folder, or give part_captions '
            'as it was.'
        )
    return found


# --- Making them ----------------------------------------------------------------------------


def run(
    job: Job,
    numbers: Sequence[int],
    found: Mapping[int, SourceFile],
    num_workers: int,
    encoder: Encoder | Tokenizer | None,
    on_batch: OnBatch,
) -> Made:
    """Makes parts, after a check of those that an earlier run has finished.

    Args:
        job: Description of the parts to make.
        numbers: Numbers of the parts to make.
        found: All parts that are there. Every process checks them before it adds one.
        num_workers: Processes; one makes a file.
        encoder: If it is loaded already; for one process.
        on_batch: See `parts.make`.

    Raises:
        ValueError: A part that was found is another one, the encoder cannot be had, or it makes
            numbers that are not finite in float16.
        OSError: A part cannot be stored.
        RuntimeError: A process died.
    """
    logging.info(
        'parts to make: %d; processes: %d (--num_workers or %s changes that)',
        len(numbers),
        num_workers,
        workers.VARIABLE,
    )
    if num_workers == 1:
        return _make(job, numbers, found, encoder or job.encoder.load(), on_batch)
    told, stop = workers.CONTEXT.SimpleQueue(), workers.CONTEXT.RawValue('b', 0)
    gpus: Any = workers.CONTEXT.SimpleQueue()
    names = _gpus(job.encoder) or ['']
    for index in range(num_workers):
        gpus.put(names[index % len(names)])
    cpus = max(1, machine.usable_cpus() // num_workers)
    with workers.pool(num_workers, functools.partial(_begin, told, stop, gpus, cpus)) as pool:
        pending = {
            pool.submit(_work, job, numbers[index::num_workers], found)
            for index in range(num_workers)
        }
        made = []
        try:
            while pending:
                done, pending = concurrent.futures.wait(
                    pending, _SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
                )
                while not told.empty():
                    on_batch(*told.get())
                made += [future.result() for future in done]
        finally:
            stop.value = 1
    longest = max(each.longest for each in made)
    num_truncated = sum(each.num_truncated for each in made)
    return made[0]._replace(num_truncated=num_truncated, longest=longest)


def _make(
    job: Job,
    numbers: Sequence[int],
    found: Mapping[int, SourceFile],
    encoder: Encoder | Tokenizer,
    on_batch: OnBatch,
) -> Made:
    captions = Captions(Joined(job.captions), job.part_captions)
    tokens_only, longest = job.encoder.tokens_only, 0
    width = encoder.max_tokens if tokens_only else cast(Encoder, encoder).dim
    entries = parts.entries(encoder, job.caption_column, captions.digest, tokens_only)
    parts.check(found, entries, captions.count)
    path, one_file = os.path.join(job.staging, uuid.uuid4().hex), is_file(job.out)
    column = schema.TEXT_EMBEDDING if one_file else schema.PART_EMBEDDING
    column = schema.TOKENS if tokens_only else column
    with contextlib.ExitStack() as stack:
        write = None
        if one_file:
            write = stack.enter_context(parts.open_file(path, entries, column, width))
        for number, keys, values in parts.make(captions, numbers, encoder, on_batch, tokens_only):
            if tokens_only:
                longest = max(longest, int((values != schema.TOKEN_PADDING).sum(axis=1).max()))
            if write:
                write(keys, values)
                continue
            metadata = entries | parts.part_entry(number, captions.count)
            with parts.open_file(path, metadata, column, width) as write_part:
                write_part(keys, values)
            name = sidecar.part_name(number, captions.count)
            Destination(job.out).put(path, name, file_state.of_file(path).crc32c)
    if one_file:
        folder, name = os.path.split(os.path.abspath(job.out))
        Destination(folder).put(path, name, file_state.of_file(path).crc32c)
    return Made(encoder.name, width, encoder.truncated, longest)


# --- Several processes ----------------------------------------------------------------------


def choose_workers(num_workers: int, encoder: EncoderChoice, num_parts: int) -> int:
    """Returns how many processes make so many parts.

    Args:
        num_workers: What is asked for; 0 takes `COYO11M_NUM_PROC`, else what suits: one a core for
            hashed words, as far as memory allows and the work is worth it, one a GPU for a model of
            `hf:`, and one for all others. Those use all cores or devices by themselves, the fast
            tokenizers among them.
        encoder: Encoder of the processes.
        num_parts: Parts to make.

    Raises:
        ValueError: The variable is not a number.
    """
    chosen = workers.chosen(num_workers)
    if not chosen and encoder.hashes:
        cpus, memory = machine.usable_cpus(), machine.usable_memory()
        chosen = min(cpus, memory // _WORKER_BYTES, 1 + num_parts // _PARTS_WORTH_A_WORKER)
    return max(1, min(chosen or len(_gpus(encoder)), num_parts))


def _gpus(encoder: EncoderChoice) -> list[str]:
    """Returns the GPUs for torch, as `CUDA_VISIBLE_DEVICES` names them; [] if torch is not used."""
    if encoder.tokens_only or not encoder.spec.startswith('hf:'):
        return []
    if os.environ.get(_GPUS_VARIABLE):
        return os.environ[_GPUS_VARIABLE].split(',')
    try:
        import torch
    except ModuleNotFoundError:  # the encoder says what is to be installed
        return []
    return [str(number) for number in range(torch.cuda.device_count())]


class _Stopped(Exception):
    """Nobody waits for this process any more."""


_parent: Any = None  # of a worker: where it tells what it has done, and a value that stops it


def _begin(told: Any, stop: Any, gpus: Any, cpus: int) -> None:
    """Runs first in each process, before torch and tokenizers are imported, which read these."""
    global _parent
    _parent = told, stop
    os.environ.update(dict.fromkeys(_CPUS_VARIABLES, str(cpus)))
    if gpu := gpus.get():
        os.environ[_GPUS_VARIABLE] = gpu


def _work(job: Job, numbers: Sequence[int], found: Mapping[int, SourceFile]) -> Made:
    told, stop = _parent

    def on_batch(*counts: int) -> None:
        if stop.value:
            raise _Stopped
        told.put(counts)

    return _make(job, numbers, found, job.encoder.load(), on_batch)
