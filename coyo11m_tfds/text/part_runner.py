"""Makes the parts that are missing, in this process or in several.

    choice = EncoderChoice('hf:google/gemma-3-270m')
    job = Job(choice, folder, 'caption_llava', 32768, 'gs://bucket/gemma', '/tmp/staging')
    made = part_runner.run(job, [0, 3, 6], {9: file}, 2, None, on_batch)

A part appears in the folder when it is complete, or not at all, and what decides it stands in it.
So there is nothing to lock and nothing to clean up: whoever finds a part missing makes it, and two
who make the same one make the same.
"""

import concurrent.futures
import dataclasses
import functools
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.process import machine, workers
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.source_files import SourceFile
from coyo11m_tfds.text import part_maker, part_writer, text_encoders, tokenizers
from coyo11m_tfds.text.part_maker import Captions
from coyo11m_tfds.text.text_encoders import Encoder, OnBatch, Tokenizer

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
        spec: see `text_encoders.make_encoder`; of tokens `tokenizers.make_tokenizer`.
        max_tokens: captions are cut to it.
        batch_tokens: see `text_encoders.make_encoder`.
        tokens_only: whether to make token ids in place of embeddings.
    """

    spec: str
    max_tokens: int = text_encoders.DEFAULT_MAX_TOKENS
    batch_tokens: int | None = None
    tokens_only: bool = False

    def load(self) -> Encoder | Tokenizer:
        """Loads the encoder, or the tokenizer alone; raises as `text_encoders.make_encoder`."""
        if self.tokens_only:
            return tokenizers.make_tokenizer(self.spec, self.max_tokens)
        return text_encoders.make_encoder(self.spec, self.max_tokens, self.batch_tokens)

    def check(self) -> None:
        """Looks in seconds whether there is such an encoder; raises as `load`."""
        if self.hashes:
            self.load()
        else:
            text_encoders.check(self.spec)

    @property
    def hashes(self) -> bool:
        """True if it hashes words, in Python: a process of it takes one core and no weights."""
        return self.spec in (text_encoders.HashEncoder.name, tokenizers.WordsTokenizer.name)

    @property
    def column(self) -> str:
        """Of the parts."""
        return schema.TOKENS if self.tokens_only else schema.PART_EMBEDDING

    def width(self, encoder: Encoder | Tokenizer) -> int:
        """Returns how many numbers the encoder makes of a caption."""
        return encoder.max_tokens if self.tokens_only else cast(Encoder, encoder).dim

    def longest(self, values: np.ndarray) -> int:
        """Returns the most token ids of a caption in a part; 0 of embeddings."""
        return int((values != tokenizers.PADDING).sum(axis=1).max()) if self.tokens_only else 0


@dataclasses.dataclass(frozen=True)
class Job:
    """The embedding of a source; the same for all processes.

    Attributes:
        encoder: that makes it.
        captions: folder of a `Joined` of all captions, by key.
        caption_column: that they are from.
        part_captions: captions of a part at most.
        out: folder of the parts, local or on gs://.
        staging: existing local folder to write files in, on the disk of a local `out`.
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
        tokens: all so far.
        slots: these and padding.
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


def run(
    job: Job,
    missing: Sequence[int],
    found: Mapping[int, SourceFile],
    num_workers: int,
    encoder: Encoder | Tokenizer | None,
    on_batch: OnBatch,
) -> Made:
    """Makes parts, after a check of those that an earlier run has finished.

    Args:
        job: what is to be made.
        missing: numbers of the parts to make.
        found: all parts that are there. Every process checks them before it adds one.
        num_workers: processes.
        encoder: if it is loaded already; for one process.
        on_batch: see `part_maker.make`.

    Raises:
        ValueError: a part that was found is another one, the encoder cannot be had, or it makes
            numbers that are not finite in float16.
        OSError: a part cannot be stored.
        RuntimeError: a process died.
    """
    logging.info(
        'parts to make: %d; processes: %d (--num_workers or %s changes that)',
        len(missing),
        num_workers,
        workers.VARIABLE,
    )
    if num_workers == 1:
        return _make(job, missing, found, encoder or job.encoder.load(), on_batch)
    # What the processes have done: of each a row, captions, tokens and slots; and whether to stop.
    shared = workers.CONTEXT.RawArray('q', 3 * num_workers + 1)
    board = np.frombuffer(shared, np.int64)
    told = np.zeros(3, np.int64)
    gpus = _gpus(job.encoder) or ['']
    with workers.pool(num_workers, functools.partial(_keep, shared)) as pool:
        futures = set()
        for index in range(num_workers):
            mine = slice(index, None, num_workers)
            process = _Process(index, num_workers, gpus[index % len(gpus)])
            futures.add(pool.submit(_work, job, process, missing[mine], found))
        try:
            pending = futures
            while pending:
                _, pending = concurrent.futures.wait(
                    pending, _SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
                )
                done = board[:-1].reshape(-1, 3).sum(axis=0)
                on_batch(*(done - told).tolist())
                told = done
                made = [future.result() for future in futures - pending]
        finally:
            board[-1] = 1
    return Made(
        made[0].encoder,
        made[0].width,
        sum(each.num_truncated for each in made),
        max(each.longest for each in made),
    )


def _make(
    job: Job,
    missing: Sequence[int],
    found: Mapping[int, SourceFile],
    encoder: Encoder | Tokenizer,
    on_batch: OnBatch,
) -> Made:
    captions = Captions(Joined(job.captions), job.part_captions)
    destination = Destination(job.out)
    choice, width = job.encoder, job.encoder.width(encoder)
    entries = part_writer.entries(encoder, job.caption_column, captions.digest, choice.tokens_only)
    part_writer.check(found, entries, captions.count)
    made = part_maker.make(captions, missing, encoder, on_batch, choice.tokens_only)
    longest = 0
    for number, keys, values in made:
        longest = max(longest, choice.longest(values))
        path = os.path.join(job.staging, uuid.uuid4().hex)
        metadata = entries | part_writer.part_entry(number, captions.count)
        with part_writer.open_file(path, metadata, choice.column, width) as write:
            write(keys, values)
        name = sidecar.part_name(number, captions.count)
        destination.put(path, name, file_state.of_file(path).crc32c)
    return Made(encoder.name, width, encoder.truncated, longest)


def make_file(
    job: Job, captions: Captions, path: str, encoder: Encoder | Tokenizer, on_batch: OnBatch
) -> Made:
    """Makes all parts, as row groups of one file; see `run`."""
    choice, width = job.encoder, job.encoder.width(encoder)
    entries = part_writer.entries(encoder, job.caption_column, captions.digest, choice.tokens_only)
    column = schema.TOKENS if choice.tokens_only else schema.TEXT_EMBEDDING
    numbers = range(captions.count)
    made = part_maker.make(captions, numbers, encoder, on_batch, choice.tokens_only)
    longest = 0
    with part_writer.open_file(path, entries, column, width) as write:
        for _, keys, values in made:
            longest = max(longest, choice.longest(values))
            write(keys, values)
    return Made(encoder.name, width, encoder.truncated, longest)


# --- Several processes ----------------------------------------------------------------------


def choose_workers(num_workers: int, encoder: EncoderChoice, num_parts: int) -> int:
    """Returns how many processes make so many parts.

    Args:
        num_workers: what is asked for; 0 takes `COYO11M_NUM_PROC`, else what suits: one a core for
            hashed words, as far as memory allows and the work is worth it, one a GPU for a model of
            `hf:`, and one for all others. Those use all cores or devices by themselves, the fast
            tokenizers among them.
        encoder: what they run.
        num_parts: to make.

    Raises:
        ValueError: the variable is not a number.
    """
    chosen = workers.chosen(num_workers)
    if not chosen and encoder.hashes:
        cpus, memory = machine.usable_cpus(), machine.usable_memory()
        chosen = min(cpus, memory // _WORKER_BYTES, 1 + num_parts // _PARTS_WORTH_A_WORKER)
    return max(1, min(chosen or len(_gpus(encoder)), num_parts))


def _gpus(encoder: EncoderChoice) -> list[str]:
    """The GPUs that torch may use, as `CUDA_VISIBLE_DEVICES` names them; [] if it is not asked."""
    if encoder.tokens_only or not encoder.spec.startswith('hf:'):
        return []
    if os.environ.get(_GPUS_VARIABLE):
        return os.environ[_GPUS_VARIABLE].split(',')
    try:
        import torch
    except ModuleNotFoundError:  # the encoder says what is to be installed
        return []
    return [str(number) for number in range(torch.cuda.device_count())]


@dataclasses.dataclass(frozen=True)
class _Process:
    """Which of `count` processes this is, and the GPU that is its own, or ''."""

    index: int
    count: int
    gpu: str


class _Stopped(Exception):
    """Nobody waits for this process any more."""


_board: np.ndarray | None = None


def _keep(shared) -> None:
    global _board
    _board = np.frombuffer(shared, np.int64)


def _work(
    job: Job, process: _Process, missing: Sequence[int], found: Mapping[int, SourceFile]
) -> Made:
    """Runs in a process of its own: makes its parts and notes on the board how far it is."""
    assert _board is not None
    # Before torch and tokenizers are imported, which read them.
    cpus = max(1, machine.usable_cpus() // process.count)
    os.environ.update(dict.fromkeys(_CPUS_VARIABLES, str(cpus)))
    if process.gpu:
        os.environ[_GPUS_VARIABLE] = process.gpu
    row = _board[3 * process.index : 3 * process.index + 3]

    def on_batch(captions: int, tokens: int, slots: int) -> None:
        if _board[-1]:
            raise _Stopped
        row[:] += captions, tokens, slots

    return _make(job, missing, found, job.encoder.load(), on_batch)
