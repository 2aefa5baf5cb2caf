"""The settings of a build, which go from the config to the workers and into the metadata."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import coyo11m_tfds
from coyo11m_tfds import schema
from coyo11m_tfds.dataset.columns import IN_PLACE, IN_RECORDS, LATENT_STORAGE
from coyo11m_tfds.storage import source_files

EMBEDDINGS_IN_PT = 'pt'  # the `text_embeddings` for `embeddings` inside the `.pt` files

# What to do about a data set of other settings, or of another source.
WAYS_ON = (
    'Give the config another name, or replace the data set with --overwrite (in Python '
    'download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS).'
)

_LIMIT = 'max_examples_per_split'
_LATENTS = 'latents'
# A finished data set does not depend on these.
_NOT_COMPARED = ('max_bad_fraction', 'check_crc', 'package_version')


def check_names(names: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raises a ValueError that begins with `where` if a name is not a known field."""
    for name in names:
        if name not in known:
            raise ValueError(
                f"{where} has an unknown field '{name}'; the fields are {', '.join(known)}."
            )


@dataclasses.dataclass(eq=False, kw_only=True)
class BuildSettings:
    """The settings of a build; coyo11m_tfds/README.md describes the fields ("Building")."""

    source: str = ''
    caption_column: str = schema.DEFAULT_CAPTION_COLUMN
    validation_fraction: float = 0.01
    shard_bytes: int = 128 * 1024 * 1024
    text_embeddings: str = ''
    latents_from: str = ''
    vae: str = ''
    latents: str = IN_RECORDS
    bad_data: str = 'drop'
    max_bad_fraction: float = 0.01
    check_crc: bool = True
    num_workers: int = 0
    scratch_dir: str = ''

    def __post_init__(self):
        names = 'source', 'caption_column', 'text_embeddings', 'scratch_dir', 'latents_from', 'vae'
        for name in names:
            self._check(name, isinstance(getattr(self, name), str), 'a string')
        for name in ('shard_bytes', 'num_workers'):
            self._check(name, isinstance(getattr(self, name), int), 'an integer')
        self._check('shard_bytes', self.shard_bytes > 0, 'at least 1')
        self._check('num_workers', self.num_workers >= 0, 'at least 0')
        for name in ('validation_fraction', 'max_bad_fraction'):
            self._check(name, isinstance(getattr(self, name), (int, float)), 'a number')
        self._check('validation_fraction', 0 <= self.validation_fraction < 1, 'one in [0, 1)')
        self._check('max_bad_fraction', 0 <= self.max_bad_fraction <= 1, 'one in [0, 1]')
        self._check('check_crc', isinstance(self.check_crc, bool), 'true or false')
        self._check('latents', self.latents in LATENT_STORAGE, "'records' or 'in_place'")
        schema.parse_latents_from(self.latents_from)
        self._check('bad_data', self.bad_data in ('drop', 'stop'), "'drop' or 'stop'")

    @property
    def drop_bad(self) -> bool:
        return self.bad_data == 'drop'

    @property
    def in_place(self) -> bool:
        return self.latents == IN_PLACE

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f'config: {name} is {getattr(self, name)!r}, expected {expected}.')

    def record(self, limit: int | None, text_embeddings: str | Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that decide the records, as JSON for the metadata.

        `limit` is the `max_examples_per_split` of the build, and `text_embeddings` '', 'pt' or the
        header of a sidecar, but no path.
        """
        # Only in these data sets, so that the metadata of others does not change.
        chosen = {_LATENTS: self.latents} if self.in_place else {}
        for name in ('latents_from', schema.META_VAE):
            if value := getattr(self, name):
                chosen[name] = value
        return chosen | {
            'caption_column': self.caption_column,
            schema.SETTINGS_TEXT: text_embeddings,
            'validation_fraction': float(self.validation_fraction),
            'shard_bytes': self.shard_bytes,
            'bad_data': self.bad_data,
            'max_bad_fraction': float(self.max_bad_fraction),
            'check_crc': self.check_crc,
            _LIMIT: limit,
            'record_format': schema.RECORD_FORMAT,
            'package_version': coyo11m_tfds.__version__,
        }

    def check_recorded(
        self, folder: str | os.PathLike[str], metadata: Mapping[str, Any], limit: int | None
    ) -> None:
        """Raises a ValueError if a data set has other settings; accepts one that records none."""
        there = metadata.get(schema.META_SETTINGS)
        if there is None:
            return
        text_embeddings = self._text_embeddings(there.get(schema.SETTINGS_TEXT))
        lie = {_LATENTS: IN_RECORDS, schema.META_VAE: ''}
        differing = list(_differences(lie | there, lie | self.record(limit, text_embeddings)))
        if differing:
            raise ValueError(
                f'{os.fspath(folder)} was built with other settings: {"; ".join(differing)}. '
                f'{WAYS_ON}'
            )

    def _text_embeddings(self, recorded: Any) -> str | Mapping[str, Any]:
        """Returns what a build would record now; `recorded` if the sidecar is remote or absent."""
        chosen = self.text_embeddings
        if chosen in ('', schema.LABELS) and isinstance(recorded, dict):
            return recorded if recorded.get('encoder') == schema.LABELS else chosen
        if chosen in ('', schema.LABELS, EMBEDDINGS_IN_PT):
            return chosen
        if source_files.is_remote(chosen) or not os.path.exists(chosen):
            return recorded if isinstance(recorded, dict) else chosen
        from coyo11m_tfds.source import sidecar

        first, *_ = sidecar.find_sidecar(chosen)
        return sidecar.describe_values(first.path)['header']


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    # A setting that only one of the two has belongs to another version of this package.
    for name in sorted(here.keys() & there.keys() - set(_NOT_COMPARED)):
        old, new = there[name], here[name]
        field = 'text_embeddings' if name == schema.SETTINGS_TEXT else name
        if isinstance(old, dict) and isinstance(new, dict):
            yield from (f'{field}: {part}' for part in _differences(old, new))
        elif old != new:
            yield f'{field} is {old!r} there, {new!r} is asked for'
