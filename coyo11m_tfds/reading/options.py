"""What is read and how: the opened sources, and the options of readers with their checks."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import Data, DatasetStats, StoredDataset, open_data
from coyo11m_tfds.memory.read_counts import ReadCounter
from coyo11m_tfds.process import arguments
from coyo11m_tfds.process.errors import UNIT_INTERVAL, FieldError, at_least, one_of
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.reading import damage
from coyo11m_tfds.reading.batches import CROP
from coyo11m_tfds.sampling import filters
from coyo11m_tfds.sampling.order import OrderSettings, check_chunk

if TYPE_CHECKING:
    import jax

SYNTAX = (
    "dicts with 'dir', the folder of a data set, and perhaps 'weight' (1), 'where', 'text', "
    "'name', 'seed' and 'same_vae'"
)
# 'dir' and 'weight' are checked where they are used.
_TYPES = {'where': str, 'text': texts.TextSpec, 'name': str, 'seed': int, 'same_vae': bool}

# Statistics of one VAE's latents differ by less from one set of pictures to another.
_MAX_MEAN_DISTANCE = 0.5  # in standard deviations
_MAX_STD_RATIO = 1.5


@dataclasses.dataclass(frozen=True, eq=False)
class MixSource:
    """One data set of a mixture."""

    name: str  # for logs and metrics
    stored: StoredDataset
    weight: float = 1.0
    where: filters.Condition | None = None  # that its records meet
    text: texts.TextSpec | None = None  # None for the texts of the mixture
    seed: int | None = None  # of its order and choices; None for that of the mixture
    same_vae: bool = False  # whether to trust that the VAE of the other sources made its latents
    # The records that the condition keeps, by split; filled when they are needed first.
    kept: dict[str, filters.KeptRecords] = dataclasses.field(default_factory=dict, repr=False)

    def choose_text(self, text: texts.TextSpec) -> texts.TextSpec:
        """Returns the text of this source: its own, or else that of the mixture."""
        return text if self.text is None else self.text

    def identity(self, split: str) -> dict[str, str]:
        """Returns the identity of the data set and of its condition, with columns' checksums."""
        identity = {'data_set': self.stored.identity(split)}
        if self.where:
            identity['where'] = self.where.identity(self.stored, split)
        return identity


Mix: TypeAlias = Sequence[Mapping[str, Any] | MixSource]


def open_mix(data: Data | Mix) -> tuple[MixSource, ...]:
    """Opens the data sets of a mixture, or a single data set, which is a mixture of one."""
    # What has a `data_dir` is a builder of TFDS, which is not imported to find that out.
    if isinstance(data, str | os.PathLike | StoredDataset) or hasattr(data, 'data_dir'):
        stored = open_data(data)
        return (MixSource(_short_name(stored), stored),)
    members: tuple[Any, ...] = ()
    # A dict is one member, and not a sequence of its keys.
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        members = tuple(data)
    if not members:
        raise ValueError(
            f'data={data!r}: expected the folder of a data set, or for a mixture a sequence of '
            f'{SYNTAX}'
        )
    sources = []
    for member in members:
        if not isinstance(member, MixSource):
            member = _open_mix_source(member)
        sources.append(member)
    return _name_sources(sources)


def _open_mix_source(description: Any) -> MixSource:
    """Opens the data set that a dict of a mixture names; a ValueError for anything else."""
    fields: dict[str, Any] = {}
    if isinstance(description, Mapping):
        fields |= description
    names = {'dir', 'weight'} | _TYPES.keys()
    if 'dir' not in fields or not fields.keys() <= names:
        raise ValueError(f'mix has {description!r}: expected {SYNTAX}')
    for name, kind in _TYPES.items():
        if name in fields:
            fields[name] = arguments.convert(f'mix: {name}', fields[name], kind)
    # After the cheap checks: opening reads files, perhaps of a bucket.
    stored = open_data(fields.pop('dir'))
    # A condition on a column that is not there is refused now, not in the middle of a run.
    if 'where' in fields:
        fields['where'] = filters.Condition.parse(fields['where'])
        fields['where'].check_columns(stored)
    return MixSource(fields.pop('name', ''), stored, **fields)


def _name_sources(members: Iterable[MixSource]) -> tuple[MixSource, ...]:
    """Returns sources that all have a name; raises a ValueError for a name that occurs twice.

    One without a name gets that of its config, with a number if there are several of it.
    """
    sources = list(members)
    # All names that were given come first, so that no number makes one of them a second time.
    names = [x.name for x in sources if x.name]
    for number, source in enumerate(sources):
        if source.name:
            continue
        stem = name = _short_name(source.stored)
        suffixes = itertools.count(2)
        while name in names:
            name = f'{stem}_{next(suffixes)}'
        sources[number] = dataclasses.replace(source, name=name)
        names.append(name)
    names.sort()
    for name, next_name in itertools.pairwise(names):
        if name == next_name:
            raise ValueError(f'mix has the name {name!r} twice: give every source its own')
    return tuple(sources)


def _short_name(stored: StoredDataset) -> str:
    """Returns the config of a data set, or the name of one that this project did not build."""
    # TFDS writes `name/config/version`, and `name/version` where there is no config.
    parts = stored.full_name.split('/')
    return parts[1] if len(parts) > 2 else parts[0]


def choose_texts(
    sources: Sequence[MixSource],
    text: texts.TextSpec,
    features: Sequence[str] = tuple(schema.TEXT_DTYPES),
) -> list[texts.TextMixture]:
    """Returns the texts of each source, padded to the longest of all sources.

    Raises a ValueError for texts of several encoders or vocabularies, if a feature is text.
    """
    mixtures = [source.stored.choose_texts(source.choose_text(text)) for source in sources]
    if not schema.TEXT_DTYPES.keys() & set(features):
        return mixtures
    # One model reads all of them, so all must come from one encoder.
    first = mixtures[0].texts[0]
    for source, mixture in zip(sources, mixtures, strict=True):
        owner = f'{source.stored.folder}: its text'
        texts.check_same_kind(mixture.texts[0], owner, first, sources[0].stored.folder)
    size = max(x.size for x in mixtures)
    return [dataclasses.replace(x, size=size) for x in mixtures]


def mix_stats(sources: Sequence[MixSource], text: texts.TextSpec) -> DatasetStats:
    """Returns the statistics of latents and texts by the weights of a mixture, not its stages."""
    stats = [source.stored.stats(source.choose_text(text)) for source in sources]
    # One data set needs no checks against others, and keeps its numbers to the last bit.
    if len(stats) == 1:
        return stats[0]
    check_latents(sources)
    mixtures = choose_texts(sources, text)
    moments: dict[str, Any] = {}
    weights = [source.weight for source in sources]
    # Mixed in float64, so that only the last rounding is that of float32.
    for kind in ('latent', 'text'):
        means = []
        stds = []
        for source_stats in stats:
            means.append(getattr(source_stats, f'{kind}_mean').astype(np.float64))
            stds.append(getattr(source_stats, f'{kind}_std').astype(np.float64))
        mean, std = texts.mix_moments(means, stds, weights)
        moments[f'{kind}_mean'] = mean.astype(np.float32)
        moments[f'{kind}_std'] = std.astype(np.float32)
    # 0 means no limit, which is more than any.
    text_max_tokens = 0
    if all(x.text_max_tokens for x in stats):
        text_max_tokens = max(x.text_max_tokens for x in stats)
    num_tokens = 0
    if stats[0].num_tokens:
        num_tokens = mixtures[0].size
    named = max(stats, key=lambda x: x.vae)  # all names are equal, see `check_latents`
    # Each once, in the order of the sources.
    licenses = dict.fromkeys(x.license or 'unknown' for x in stats)
    # Where no data set names a license, the mixture names none.
    if not any(x.license for x in stats):
        licenses.clear()
    citations = dict.fromkeys(x.citation for x in stats)
    # Numbers of crops may differ, because a sample has one of them.
    num_crops = max(x.latents_shape[0] for x in stats)
    return dataclasses.replace(
        stats[0],
        **moments,
        latents_shape=(num_crops, *stats[0].latents_shape[1:]),
        text_max_tokens=text_max_tokens,
        num_tokens=num_tokens,
        vae=named.vae,
        latent_scale=named.latent_scale,
        license=' and '.join(licenses),
        citation='\n'.join(filter(None, citations)),
    )


def check_latents(sources: Sequence[MixSource]) -> None:
    """Checks that all latents can come from one VAE, by its recorded name and by statistics.

    Raises a ValueError, which names two data sets, where they cannot.
    """
    # Moments have twice the channels of latents that were drawn from them.
    first_stored = sources[0].stored
    for source in sources[1:]:
        if source.stored.moments != first_stored.moments:
            first = first_stored.moments or 'none'
            other = source.stored.moments or 'none'
            raise ValueError(
                f'{source.stored.folder}: its moments are {other!r}, those of '
                f'{first_stored.folder} {first!r}; build them with one setting of moments'
            )
    # Names first, which leave no doubt. Not every data set has one: then its numbers must do.
    _check_vae_names([x for x in sources if schema.META_VAE in x.stored.metadata])
    stats_names = {schema.META_LATENT_MEAN, schema.META_LATENT_STD}
    _check_latent_stats([x for x in sources if x.stored.metadata.keys() >= stats_names])


def _check_vae_names(with_vae: Sequence[MixSource]) -> None:
    """Raises a ValueError if the metadata of sources name several VAEs."""
    for source in with_vae[1:]:
        vae = source.stored.metadata[schema.META_VAE]
        first_vae = with_vae[0].stored.metadata[schema.META_VAE]
        if vae != first_vae:
            raise ValueError(
                f'{source.stored.folder}: its latents come from VAE {vae!r}, those of '
                f'{with_vae[0].stored.folder} from {first_vae!r}; mix only data sets of one VAE'
            )


def _check_latent_stats(with_stats: Sequence[MixSource]) -> None:
    """Raises a ValueError if the statistics of sources can hardly be those of one VAE."""
    for source in with_stats[1:]:
        mean, std = _latent_stats(source)
        first_mean, first_std = _latent_stats(with_stats[0])
        problem = (
            f'{source.stored.folder}: its latents have mean {_format(mean)} and std '
            f'{_format(std)} in each channel, those of {with_stats[0].stored.folder} '
            f'{_format(first_mean)} and {_format(first_std)}'
        )
        # Another number of channels is another VAE, whatever `same_vae` says.
        if len(mean) != len(first_mean):
            raise ValueError(f'{problem}: expected latents of one VAE')
        # Symmetric, so that the order of the sources does not decide. A channel may be constant.
        smaller_std = np.minimum(std, first_std)
        larger_std = np.maximum(std, first_std)
        std_ratio = larger_std / np.maximum(smaller_std, 1e-12)
        # Multiplied, because a deviation of 0 divides nothing.
        is_far = np.abs(mean - first_mean) > _MAX_MEAN_DISTANCE * larger_std
        is_other = is_far | (std_ratio > _MAX_STD_RATIO)
        if is_other.any() and not source.same_vae:
            raise ValueError(
                f"{problem}: if one VAE made both, say so with 'same_vae': True in its entry of mix"
            )


def _latent_stats(source: MixSource) -> tuple[np.ndarray, np.ndarray]:
    """Returns the recorded means and standard deviations of channels, float64 `(C,)` each."""
    metadata = source.stored.metadata
    mean = np.asarray(metadata[schema.META_LATENT_MEAN], np.float64)
    std = np.asarray(metadata[schema.META_LATENT_STD], np.float64)
    return mean, std


def _format(values: np.ndarray) -> str:
    return ' '.join(f'{x:.3g}' for x in values)


def check_cache(cache_dir: str, cache_gb: float) -> None:
    """Raises a FieldError unless both are given or none, and the folder is local."""
    if not cache_dir:
        if cache_gb:
            raise FieldError('cache_gb', cache_gb, 'expected 0 without cache_dir')
        return
    if storage.local_path(cache_dir) is None:
        raise FieldError('cache_dir', cache_dir, 'expected a folder on a local disk')
    if not 0 < cache_gb < math.inf:
        problem = 'expected the GB that cache_dir may take, such as 100'
        raise FieldError('cache_gb', cache_gb, problem)


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
    cache_dir: str = ''
    cache_gb: float = 0.0

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
        check_cache(self.cache_dir, self.cache_gb)

    @functools.cached_property
    def sources(self) -> tuple[MixSource, ...]:
        """The sources, which are opened at the first use."""
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
        """The data set of the only source."""
        return self.source.stored

    @functools.cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The features to read; by default with the text that all sources have, if any."""
        if self.features is not None:
            return tuple(self.features)
        names = (schema.KEY, schema.LATENTS, CROP)
        # `names` has no text, so texts of several encoders are no error here.
        kinds = {mixture.feature for mixture in choose_texts(self.sources, self.text, names)}
        # A source without text has the kind ''.
        if len(kinds) == 1 and '' not in kinds:
            return (*names, kinds.pop())
        return names

    def describe(self, engine: str) -> str:
        """Returns what an engine reads, for people."""
        folders = ', '.join(x.stored.folder for x in self.sources)
        return f'{folders}, split {self.split!r}, read by {engine!r}'

    def for_source(self, source: MixSource) -> Self:
        """Returns the options of one of several sources, with its own text if it has one."""
        return dataclasses.replace(
            self,
            data=(source,),
            text=source.choose_text(self.text),
            # Those of the mixture: the default of this source alone may have a text.
            features=self.feature_names,
        )

    @property
    def cache_fields(self) -> dict[str, Any]:
        """The fields of the cache, for other options that read the same files."""
        return {'cache_dir': self.cache_dir, 'cache_gb': self.cache_gb}

    @property
    def process(self) -> tuple[int, int]:
        """Number of this process, and number of processes."""
        return self.process_index, self.process_count

    @property
    def local_batch_size(self) -> int:
        """Number of rows in this process's share of a batch."""
        return self.batch_size // self.process_count

    @property
    def batches_ahead(self) -> int:
        """Number of batches to keep ready."""
        if self.prefetch < 0:
            return 2
        # Even with 0, a thread reads the batch that `next` waits for.
        return max(1, self.prefetch)

    def check_shares(self, lanes: int | None = None) -> None:
        """Checks that all processes get equal shares of a batch, and equal numbers of lanes.

        Raises a ValueError, which names a batch size and a number of lanes that fit.
        """
        batch_size = self.batch_size
        count = self.process_count
        if not 0 <= self.process_index < count:
            raise ValueError(f'process_index={self.process_index} is not in [0, {count})')
        # Each process has the same number of lanes, and each lane gives equally many samples.
        divisor = count if lanes is None else lanes
        is_positive = batch_size > 0 and divisor > 0
        if is_positive and batch_size % divisor == 0 and divisor % count == 0:
            return
        # The nearest batch size that works, and then the nearest number of lanes that divides it.
        fitting_size = max(1, round(batch_size / count)) * count
        problem = 'cannot be shared'
        advice = f'batch_size={fitting_size}'
        if lanes is not None:
            # Multiples of the number of processes that divide the batch.
            multiples = range(count, fitting_size + 1, count)
            divisors = [n for n in multiples if fitting_size % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - lanes))
            problem += f' with lanes={lanes}'
            advice += f' with lanes={nearest}'
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
        """The settings of the order of a source."""
        return OrderSettings(self.seed, self.chunk, self.lanes, self.window)

    @property
    def own_lanes(self) -> range:
        """The lanes, streams with equal shares of each batch, that this process reads."""
        per_process = self.lanes // self.process_count
        first = self.process_index * per_process
        return range(first, first + per_process)

    def for_source(self, source: MixSource) -> Self:
        """Returns the options of one of several sources, with its own seed if it has one."""
        options = super().for_source(source)
        # Sources of equal lengths would come in lockstep with one seed.
        if source.seed is not None:
            options = dataclasses.replace(options, seed=source.seed)
        return options


@dataclasses.dataclass(frozen=True)
class ArrayOptions(TrainOptions):
    """How to read batches for training onto devices.

    Its fields are the arguments of `input_pipeline.train_arrays`.
    """

    sharding: 'jax.sharding.Sharding'
    _: dataclasses.KW_ONLY
    ahead: int = 2
    # -1 for those of the sharding, which `train_arrays` puts here before it plans.
    process_index: int = -1
    process_count: int = -1
