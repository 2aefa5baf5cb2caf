"""The options of readers, and all checks of them that need no data set."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import Data, StoredDataset
from coyo11m_tfds.process.errors import UNIT_INTERVAL, FieldError, at_least, one_of
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.reading import arguments, damage
from coyo11m_tfds.reading.batches import CROP
from coyo11m_tfds.reading.files import ReadCounter
from coyo11m_tfds.reading.order import OrderSettings, check_chunk
from coyo11m_tfds.reading.sources import Mix, MixSource, choose_texts, open_mix

if TYPE_CHECKING:
    import jax

AUTO, ROWS, CHUNKS, TF_DATA = ENGINES = ('auto', 'rows', 'chunks', 'tf_data')


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How to read a split once; `input_pipeline.train_batches` describes the fields.

    Its fields are the arguments of `input_pipeline.eval_batches`.
    """

    data: Data | Mix
    _: dataclasses.KW_ONLY
    batch_size: int
    features: Sequence[str] | None = None
    split: str = schema.VALIDATION
    chunk: int = 64
    parallel_reads: int = 16
    process_index: int = 0
    process_count: int = 1
    on_bad_records: str = damage.STOP
    max_bad_fraction: float = damage.DEFAULT_MAX_FRACTION
    counter: ReadCounter | None = None
    prefetch: int = -1
    engine: str = AUTO
    verify: str = damage.ONCE
    text: texts.TextSpec = ''

    def __post_init__(self):
        # Before the checks, which compare numbers.
        arguments.convert_fields(self)
        if self.features is not None and not self.features:
            raise ValueError("features=() names no feature; features=('key',) works")
        one_of(*ENGINES).check('engine', self.engine)
        one_of(*damage.MODES).check('verify', self.verify)
        one_of(damage.STOP, damage.SKIP).check('on_bad_records', self.on_bad_records)
        UNIT_INTERVAL.check('max_bad_fraction', self.max_bad_fraction)
        at_least(1).check('parallel_reads', self.parallel_reads)
        check_chunk(self.chunk)

    @functools.cached_property
    def sources(self) -> tuple[MixSource, ...]:
        return open_mix(self.data)

    @property
    def source(self) -> MixSource:
        """The only source; raises a ValueError if there are several."""
        if len(self.sources) > 1:
            names = ', '.join(x.name for x in self.sources)
            raise ValueError(
                f'this reads a single data set, not the mixture of {names}: give one of them'
            )
        return self.sources[0]

    @property
    def stored(self) -> StoredDataset:
        return self.source.stored

    @functools.cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The features to read; by default with the text that all sources have, if any."""
        if self.features is not None:
            return tuple(self.features)
        names = schema.KEY, schema.LATENTS, CROP
        kinds = {mixture.feature for mixture in choose_texts(self.sources, self.text, names)}
        text = kinds.pop() if len(kinds) == 1 else ''
        return (*names, text) if text else names

    def describe(self, engine: str) -> str:
        """Describes for people what an engine reads."""
        folders = ', '.join(x.stored.folder for x in self.sources)
        return f'{folders}, split {self.split!r}, read by {engine!r}'

    def for_source(self, source: MixSource) -> Self:
        text = self.text if source.text is None else source.text
        return dataclasses.replace(self, data=(source,), text=text, features=self.feature_names)

    @property
    def process(self) -> tuple[int, int]:
        return self.process_index, self.process_count

    @property
    def local_batch_size(self) -> int:
        """Number of rows in this process's share of a batch."""
        return self.batch_size // self.process_count

    @property
    def batches_ahead(self) -> int:
        return 2 if self.prefetch < 0 else max(1, self.prefetch)

    def check_shares(self, lanes: int | None = None) -> None:
        """Checks that all processes get equal shares of a batch, and equal numbers of lanes."""
        batch_size, count = self.batch_size, self.process_count
        if not 0 <= self.process_index < count:
            raise ValueError(f'process_index={self.process_index} is not in [0, {count})')
        # Each process has the same number of lanes, and each lane gives equally many samples.
        divisor = count if lanes is None else lanes
        if batch_size > 0 and divisor > 0 and not (batch_size % divisor or divisor % count):
            return
        # The nearest batch size that works, and then the nearest number of lanes that divides it.
        fitting_size = max(1, round(batch_size / count)) * count
        problem, advice = 'cannot be shared', f'batch_size={fitting_size}'
        if lanes is not None:
            divisors = [n for n in range(count, fitting_size + 1, count) if fitting_size % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - lanes))
            problem, advice = f'{problem} with lanes={lanes}', f'{advice} with lanes={nearest}'
        processes = format_count(count, 'process', 'processes')
        problem = f'{problem} by {processes} equally; {advice} works'
        raise FieldError('batch_size', batch_size, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(ReadOptions):
    """How to read a split for training, in the planned order.

    Its fields are the arguments of `input_pipeline.train_batches`.
    """

    split: str = schema.TRAIN
    parallel_reads: int = 4
    seed: int
    lanes: int = 16
    window: int = 1024
    caption_dropout: float = 0.0
    start_step: int = 0
    start: Mapping[str, Any] | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    stride: int = 1

    def __post_init__(self):
        super().__post_init__()
        UNIT_INTERVAL.check('caption_dropout', self.caption_dropout)
        at_least(1).check('stride', self.stride)
        at_least(0).check('start_step', self.start_step)

    @property
    def order(self) -> OrderSettings:
        return OrderSettings(self.seed, self.chunk, self.lanes, self.window)

    @property
    def own_lanes(self) -> range:
        per_process = self.lanes // self.process_count
        first = self.process_index * per_process
        return range(first, first + per_process)

    def for_source(self, source: MixSource) -> Self:
        """Returns the options of one of several sources, with its own seed if it has one."""
        options = super().for_source(source)
        return options if source.seed is None else dataclasses.replace(options, seed=source.seed)


@dataclasses.dataclass(frozen=True)
class ArrayOptions(TrainOptions):
    """How to read batches for training onto devices.

    Its fields are the arguments of `input_pipeline.train_arrays`.
    """

    sharding: 'jax.sharding.Sharding'
    _: dataclasses.KW_ONLY
    ahead: int = 2
    process_index: int = -1
    process_count: int = -1
