"""The sources of a mixture: opened, with their names, conditions and texts.

A data set alone is a mixture of one source without a condition.
"""

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
# The types of these values; 'dir' and 'weight' are checked where they are used.
_KINDS = {'where': str, 'text': texts.TextSpec, 'name': str, 'seed': int, 'same_vae': bool}

# Statistics of one VAE's latents differ by less from one set of pictures to another: means in
# standard deviations, and standard deviations as a ratio.
_MEANS_APART, _STDS_APART = 0.5, 1.5


@dataclasses.dataclass(frozen=True, eq=False)
class MixSource:
    """One data set of a mixture."""

    name: str  # for logs and metrics
    stored: StoredDataset
    weight: float = 1.0
    where: filters.Where | None = None  # condition that its records meet
    text: texts.TextSpec | None = None  # None for the texts of the mixture
    seed: int | None = None  # of its order and choices; None for that of the mixture
    same_vae: bool = False  # whether to trust that the VAE of the other sources made its latents
    # The records that the condition keeps, by split, when they have been found.
    kept: dict[str, filters.Kept] = dataclasses.field(default_factory=dict, repr=False)

    def identity(self, split: str) -> dict[str, str]:
        """Returns the identity of the data set and of its condition, with columns' checksums."""
        found = {'data_set': self.stored.identity(split)}
        if self.where:
            found['where'] = filters.identity(self.where, self.stored, split)
        return found


Mix: TypeAlias = Sequence[Mapping[str, Any] | MixSource]


def open_mix(data: Data | Mix) -> tuple[MixSource, ...]:
    """Opens the data sets of a mixture, or a single data set.

    Raises the errors of `open_data`, and a ValueError if `data` is not a mixture, a name occurs
    twice, or a condition has a wrong syntax or compares a missing column.
    """
    if isinstance(data, str | os.PathLike | StoredDataset) or hasattr(data, 'data_dir'):
        stored = open_data(data)
        return (MixSource(_short_name(stored), stored),)
    members = () if isinstance(data, Mapping) or not isinstance(data, Iterable) else tuple(data)
    if not members:
        raise ValueError(
            f'data={data!r}: expected the folder of a data set, or for a mixture a sequence of '
            f'{SYNTAX}'
        )
    return _named(tuple(x if isinstance(x, MixSource) else _open(x) for x in members))


def _open(described: Any) -> MixSource:
    fields = dict(described) if isinstance(described, Mapping) else {}
    if 'dir' not in fields or not fields.keys() <= {'dir', 'weight', *_KINDS}:
        raise ValueError(f'mix has {described!r}: expected {SYNTAX}')
    for name in fields.keys() & _KINDS.keys():
        fields[name] = arguments.convert(f'mix: {name}', fields[name], _KINDS[name])
    stored = open_data(fields.pop('dir'))
    if 'where' in fields:
        fields['where'] = filters.parse(fields['where'])
        filters.check(fields['where'], stored)
    return MixSource(fields.pop('name', ''), stored, **fields)


def _named(sources: tuple[MixSource, ...]) -> tuple[MixSource, ...]:
    """Gives a name to each that has none; raises a ValueError for a name that is there twice."""
    taken, named = [x.name for x in sources if x.name], []
    for source in sources:
        if not source.name:
            short = _short_name(source.stored)
            names = itertools.chain([short], (f'{short}_{n}' for n in itertools.count(2)))
            source = dataclasses.replace(source, name=next(x for x in names if x not in taken))
            taken.append(source.name)
        named.append(source)
    if twice := {x for x in taken if taken.count(x) > 1}:
        raise ValueError(f'mix has the name {min(twice)!r} twice: give every source its own')
    return tuple(named)


def _short_name(stored: StoredDataset) -> str:
    """The config of a data set, or the name of a data set that this project did not build."""
    parts = stored.full_name.split('/')
    return parts[1] if len(parts) > 2 else parts[0]


def choose_texts(
    sources: Sequence[MixSource],
    text: texts.TextSpec,
    features: Sequence[str] = tuple(schema.TEXT_DTYPES),
) -> list[texts.TextMixture]:
    """Chooses the texts of each source, padded to the longest of all sources.

    Raises the errors of `texts.resolve_texts`, and a ValueError if `features` asks for texts, and
    no single model can read those of all sources.
    """
    found = [x.stored.choose_texts(text if x.text is None else x.text) for x in sources]
    if not schema.TEXT_DTYPES.keys() & set(features):
        return found
    first = found[0].texts[0]
    for source, chosen in zip(sources, found, strict=True):
        if chosen.texts[0].kind != first.kind:
            raise ValueError(
                f'{source.stored.folder}: its text has {chosen.texts[0]}, expected {first} as '
                f'{sources[0].stored.folder} has'
            )
    size = max(x.size for x in found)
    return [dataclasses.replace(x, size=size) for x in found]


def stats(sources: Sequence[MixSource], text: texts.TextSpec) -> DatasetStats:
    """Returns the statistics of latents and texts over a mixture, by its weights, not its stages.

    Raises the ValueError of `choose_texts`.
    """
    found = [x.stored.stats(text if x.text is None else x.text) for x in sources]
    if len(found) == 1:
        return found[0]
    chosen = choose_texts(sources, text)
    mixed: dict[str, Any] = {}
    for names in (('latent_mean', 'latent_std'), ('text_mean', 'text_std')):
        means, stds = ([getattr(x, name).astype(np.float64) for x in found] for name in names)
        of_both = texts.mix_moments(means, stds, [x.weight for x in sources])
        mixed |= {name: x.astype(np.float32) for name, x in zip(names, of_both, strict=True)}
    limits = [x.text_max_tokens for x in found]
    return dataclasses.replace(
        found[0],
        **mixed,
        latents_shape=(max(x.latents_shape[0] for x in found), *found[0].latents_shape[1:]),
        text_max_tokens=max(limits) if all(limits) else 0,
        num_tokens=chosen[0].size if found[0].num_tokens else 0,
        known_tokens='',
        vae=max(x.vae for x in found),  # all names are equal, see `check_latents`
    )


def check_latents(sources: Sequence[MixSource]) -> None:
    """Checks that all latents can come from one VAE, by its recorded name and by statistics.

    Raises a ValueError if numbers of channels or recorded names differ, or the statistics of a
    source without `same_vae` are too far from those of the first source.
    """
    named = [x for x in sources if schema.META_VAE in x.stored.metadata]
    for source in named[1:]:
        vae, first = (x.stored.metadata[schema.META_VAE] for x in (source, named[0]))
        if vae != first:
            raise ValueError(
                f'{source.stored.folder}: its latents are of VAE {vae!r}, expected {first!r} as '
                f'those of {named[0].stored.folder}; mix only data sets of one VAE'
            )
    names = schema.META_LATENT_MEAN, schema.META_LATENT_STD
    known = [x for x in sources if x.stored.metadata.keys() >= set(names)]
    for source in known[1:]:
        (mean, std), (mean_0, std_0) = (
            [np.asarray(x.stored.metadata[name], np.float64) for name in names]
            for x in (source, known[0])
        )
        told = (
            f'{source.stored.folder}: its latents have mean {_numbers(mean)} and std '
            f'{_numbers(std)} in each channel, those of {known[0].stored.folder} '
            f'{_numbers(mean_0)} and {_numbers(std_0)}'
        )
        if len(mean) != len(mean_0):
            raise ValueError(f'{told}: expected latents of one VAE')
        ratio = np.maximum(std, std_0) / np.maximum(np.minimum(std, std_0), 1e-12)
        apart = np.abs(mean - mean_0) / np.maximum(std, std_0)
        is_other = bool((ratio > _STDS_APART).any() or (apart > _MEANS_APART).any())
        if is_other and not source.same_vae:
            raise ValueError(
                f"{told}: if one VAE made both, say so with 'same_vae': True in its entry of mix"
            )


def _numbers(values: np.ndarray) -> str:
    return ' '.join(f'{x:.3g}' for x in values)
