"""Arguments of `input_pipeline`, and all checks of them that need no data set."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import Data, StoredDataset
from coyo11m_tfds.reading import arguments, damage
from coyo11m_tfds.reading.files import ReadCounter
from coyo11m_tfds.reading.order import OrderSettings, check_chunk
from coyo11m_tfds.reading.sources import Mix, MixSource, open_mix

AUTO, ROWS, CHUNKS, TF_DATA = ENGINES = ('auto', 'rows', 'chunks', 'tf_data')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The settings for reading a split; `input_pipeline.train_batches` describes the fields.

    Raises a ValueError, which names values that work, for a value out of its range or of another
    type, and for an unknown name.
    """

    data: Data | Mix
    batch_size: int
    features: Sequence[str] = (schema.KEY,)
    split: str
    chunk: int = schema.CHUNK_STRIDE
    parallel_reads: int = 1
    process_index: int = 0
    process_count: int = 1
    on_bad_records: str = damage.STOP
    max_bad_fraction: float = damage.DEFAULT_MAX_FRACTION
    counter: ReadCounter | None = None
    prefetch: int = 1
    engine: str = AUTO
    verify: str = damage.ALWAYS
    text: texts.TextSpec = ''

    def __post_init__(self):
        arguments.convert_fields(self)
        if not self.features:
            raise ValueError("features=() names no feature; features=('key',) works")
        for name, known in {
            'engine': ENGINES,
            'verify': damage.MODES,
            'on_bad_records': (damage.STOP, damage.SKIP),
        }.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f'{name}={value!r} is none of {", ".join(map(repr, known))}')
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f'max_bad_fraction={self.max_bad_fraction} is not in [0, 1]')
        if self.parallel_reads < 1:
            raise ValueError(f'parallel_reads={self.parallel_reads}: expected at least 1')
        check_chunk(self.chunk)

    @functools.cached_property
    def sources(self) -> tuple[MixSource, ...]:
        """The data sets, opened."""
        return open_mix(self.data)

    @property
    def source(self) -> MixSource:
        """The only source; raises a ValueError if there are several."""
        if len(self.sources) > 1:
            names = ', '.join(x.name for x in self.sources)
            raise ValueError(
                f'this reads one data set, not the mixture of {names}: give one of them'
            )
        return self.sources[0]

    @property
    def stored(self) -> StoredDataset:
        """The only data set."""
        return self.source.stored

    def alone(self, source: MixSource) -> Self:
        """Returns the settings for one of several sources."""
        text = self.text if source.text is None else source.text
        return dataclasses.replace(self, data=(source,), text=text)

    @property
    def process(self) -> tuple[int, int]:
        """The number of this process, and the number of processes."""
        return self.process_index, self.process_count

    @property
    def local_size(self) -> int:
        """Number of rows in this process's part of a batch."""
        return self.batch_size // self.process_count

    @property
    def batches_ahead(self) -> int:
        """Number of batches to keep ready."""
        return 2 if self.prefetch < 0 else max(1, self.prefetch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(ReadOptions):
    """The settings for reading a split for training."""

    seed: int
    lanes: int
    window: int
    caption_dropout: float = 0.0
    start_step: int = 0
    start: Mapping[str, Any] | None = None
    stages: Sequence[Mapping[str, Any]]
    stride: int = 1

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f'caption_dropout={self.caption_dropout} is not in [0, 1]')
        if self.stride < 1:
            raise ValueError(f'stride={self.stride}: expected at least 1')
        if self.start_step < 0:
            raise ValueError(f'start_step={self.start_step}: expected at least 0')

    @property
    def order(self) -> OrderSettings:
        """The settings of the order; raises a ValueError if one is out of its range."""
        return OrderSettings(self.seed, self.chunk, self.lanes, self.window)

    def alone(self, source: MixSource) -> Self:
        """Returns the settings for one of several sources, with its own seed if it has one."""
        own = super().alone(source)
        return own if source.seed is None else dataclasses.replace(own, seed=source.seed)
