"""The sources of a mixture: opened, with their names, conditions and texts."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import Data, DatasetStats, StoredDataset, open_data
from coyo11m_tfds.reading import arguments, filters

SYNTAX = (
    "dicts with 'dir', the folder of a data set, and perhaps 'weight' (1), 'where', 'text', "
    "'name', 'seed' and 'same_vae'"
)
# 'dir' and 'weight' are checked where they are used.
_TYPES = {'where': str, 'text': texts.TextSpec, 'name': str, 'seed': int, 'same_vae': bool}

# Statistics of one VAE's latents differ by less from one set of pictures to another. The distance
# of means is in standard deviations.
_MAX_MEAN_DISTANCE, _MAX_STD_RATIO = 0.5, 1.5


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

    def identity(self, split: str) -> dict[str, str]:
        """Returns the identity of the data set and of its condition, with columns' checksums."""
        identity = {'data_set': self.stored.identity(split)}
        if self.where:
            identity['where'] = self.where.identity(self.stored, split)
        return identity


Mix: TypeAlias = Sequence[Mapping[str, Any] | MixSource]


def open_mix(data: Data | Mix) -> tuple[MixSource, ...]:
    """Opens the data sets of a mixture, or a single data set, which is a mixture of one."""
    if isinstance(data, str | os.PathLike | StoredDataset) or hasattr(data, 'data_dir'):
        stored = open_data(data)
        return (MixSource(_short_name(stored), stored),)
    members = () if isinstance(data, Mapping) or not isinstance(data, Iterable) else tuple(data)
    if not members:
        raise ValueError(
            f'data={data!r}: expected the folder of a data set, or for a mixture a sequence of '
            f'{SYNTAX}'
        )
    return _name_sources(x if isinstance(x, MixSource) else _open_mix_source(x) for x in members)


def _open_mix_source(description: Any) -> MixSource:
    fields = dict(description) if isinstance(description, Mapping) else {}
    if 'dir' not in fields or not fields.keys() <= {'dir', 'weight', *_TYPES}:
        raise ValueError(f'mix has {description!r}: expected {SYNTAX}')
    for name in fields.keys() & _TYPES.keys():
        fields[name] = arguments.convert(f'mix: {name}', fields[name], _TYPES[name])
    # After the cheap checks: opening reads files, perhaps of a bucket.
    stored = open_data(fields.pop('dir'))
    if 'where' in fields:
        fields['where'] = filters.Condition.parse(fields['where'])
        fields['where'].check_columns(stored)
    return MixSource(fields.pop('name', ''), stored, **fields)


def _name_sources(members: Iterable[MixSource]) -> tuple[MixSource, ...]:
    """Names the sources without a name; raises a ValueError for a name that occurs twice."""
    sources = list(members)
    names = [x.name for x in sources if x.name]
    for number, source in enumerate(sources):
        if not source.name:
            stem = _short_name(source.stored)
            candidates = itertools.chain([stem], (f'{stem}_{n}' for n in itertools.count(2)))
            name = next(x for x in candidates if x not in names)
            sources[number] = dataclasses.replace(source, name=name)
            names.append(name)
    if duplicates := {x for x in names if names.count(x) > 1}:
        raise ValueError(f'mix has the name {min(duplicates)!r} twice: give every source its own')
    return tuple(sources)


def _short_name(stored: StoredDataset) -> str:
    """The config of a data set, or the name of a data set that this project did not build."""
    parts = stored.full_name.split('/')
    return parts[1] if len(parts) > 2 else parts[0]


def choose_texts(
    sources: Sequence[MixSource],
    text: texts.TextSpec,
    features: Sequence[str] = tuple(schema.TEXT_DTYPES),
) -> list[texts.TextMixture]:
    """Chooses the texts of each source, padded to the longest of all sources."""
    mixtures = [x.stored.choose_texts(text if x.text is None else x.text) for x in sources]
    if not schema.TEXT_DTYPES.keys() & set(features):
        return mixtures
    # One model reads all of them, so all must come from one encoder.
    first = mixtures[0].texts[0]
    for source, mixture in zip(sources, mixtures, strict=True):
        if mixture.texts[0].kind != first.kind:
            raise ValueError(
                f'{source.stored.folder}: its text has {mixture.texts[0]}, expected {first} as '
                f'{sources[0].stored.folder} has'
            )
    size = max(x.size for x in mixtures)
    return [dataclasses.replace(x, size=size) for x in mixtures]


def mix_stats(sources: Sequence[MixSource], text: texts.TextSpec) -> DatasetStats:
    """Returns the statistics of latents and texts by the weights of a mixture, not its stages."""
    stats = [x.stored.stats(text if x.text is None else x.text) for x in sources]
    if len(stats) == 1:
        return stats[0]
    check_latents(sources)
    mixtures = choose_texts(sources, text)
    moments: dict[str, Any] = {}
    for names in (('latent_mean', 'latent_std'), ('text_mean', 'text_std')):
        means, stds = ([getattr(x, name).astype(np.float64) for x in stats] for name in names)
        mean_and_std = texts.mix_moments(means, stds, [x.weight for x in sources])
        moments |= {n: x.astype(np.float32) for n, x in zip(names, mean_and_std, strict=True)}
    # 0 means no limit, which is more than any.
    limits = [x.text_max_tokens for x in stats]
    named = max(stats, key=lambda x: x.vae)  # all names are equal, see `check_latents`
    has_license = any(x.license for x in stats)
    licenses = dict.fromkeys(x.license or 'unknown' for x in stats if has_license)
    return dataclasses.replace(
        stats[0],
        **moments,
        latents_shape=(max(x.latents_shape[0] for x in stats), *stats[0].latents_shape[1:]),
        text_max_tokens=max(limits) if all(limits) else 0,
        num_tokens=mixtures[0].size if stats[0].num_tokens else 0,
        vae=named.vae,
        latent_scale=named.latent_scale,
        license=' and '.join(licenses),
        citation='\n'.join(dict.fromkeys(x.citation for x in stats if x.citation)),
    )


def check_latents(sources: Sequence[MixSource]) -> None:
    """Checks that all latents can come from one VAE, by its recorded name and by statistics."""
    for source in sources[1:]:
        if source.stored.moments != sources[0].stored.moments:
            first, other = (x.stored.moments or 'none' for x in (sources[0], source))
            raise ValueError(
                f'{source.stored.folder}: its moments are {other!r}, those of '
                f'{sources[0].stored.folder} {first!r}; build them with one setting of moments'
            )
    with_vae = [x for x in sources if schema.META_VAE in x.stored.metadata]
    for source in with_vae[1:]:
        vae, first_vae = (x.stored.metadata[schema.META_VAE] for x in (source, with_vae[0]))
        if vae != first_vae:
            raise ValueError(
                f'{source.stored.folder}: its latents come from VAE {vae!r}, those of '
                f'{with_vae[0].stored.folder} from {first_vae!r}; mix only data sets of one VAE'
            )
    names = schema.META_LATENT_MEAN, schema.META_LATENT_STD
    with_stats = [x for x in sources if x.stored.metadata.keys() >= set(names)]
    for source in with_stats[1:]:
        (mean, std), (first_mean, first_std) = (
            [np.asarray(x.stored.metadata[name], np.float64) for name in names]
            for x in (source, with_stats[0])
        )
        problem = (
            f'{source.stored.folder}: its latents have mean {_format(mean)} and std '
            f'{_format(std)} in each channel, those of {with_stats[0].stored.folder} '
            f'{_format(first_mean)} and {_format(first_std)}'
        )
        # Another number of channels is another VAE, whatever `same_vae` says.
        if len(mean) != len(first_mean):
            raise ValueError(f'{problem}: expected latents of one VAE')
        std_ratio = np.maximum(std, first_std) / np.maximum(np.minimum(std, first_std), 1e-12)
        mean_distance = np.abs(mean - first_mean) / np.maximum(std, first_std)
        is_other = (std_ratio > _MAX_STD_RATIO).any() or (mean_distance > _MAX_MEAN_DISTANCE).any()
        if is_other and not source.same_vae:
            raise ValueError(
                f"{problem}: if one VAE made both, say so with 'same_vae': True in its entry of mix"
            )


def _format(values: np.ndarray) -> str:
    return ' '.join(f'{x:.3g}' for x in values)
