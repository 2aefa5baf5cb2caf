"""The settings that decide the records: kept with a data set, and compared with those of a build.

    metadata[schema.META_SETTINGS] = recorded_settings.record(settings, limit, text_embeddings)
    recorded_settings.check(folder, metadata, settings, limit)

The source is not compared: its fingerprint is in the metadata too, but computing that of a folder
takes reading its files.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import coyo11m_tfds
from coyo11m_tfds import schema
from coyo11m_tfds.convert.settings import EMBEDDINGS_IN_PT, BuildSettings
from coyo11m_tfds.dataset.columns import IN_PLACE, RECORDS
from coyo11m_tfds.storage import source_files

_LIMIT = 'max_examples_per_split'
_LATENTS = 'latents'
# A finished data set does not depend on these.
_NOT_COMPARED = ('max_bad_fraction', 'check_crc', 'package_version')


def record(
    settings: BuildSettings, limit: int | None, text_embeddings: str | Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what is kept with a data set, as JSON can carry it.

    Args:
        settings: of the build.
        limit: `max_examples_per_split`.
        text_embeddings: '', 'pt' or what a sidecar says about itself; never a path.
    """
    # Only in these data sets, so that the metadata of others does not change.
    in_place = {_LATENTS: settings.latents} if settings.latents == IN_PLACE else {}
    return in_place | {
        'caption_column': settings.caption_column,
        schema.SETTINGS_TEXT: text_embeddings,
        'validation_fraction': float(settings.validation_fraction),
        'shard_bytes': settings.shard_bytes,
        'bad_data': settings.bad_data,
        'max_bad_fraction': float(settings.max_bad_fraction),
        'check_crc': settings.check_crc,
        _LIMIT: limit,
        'record_format': schema.RECORD_FORMAT,
        'package_version': coyo11m_tfds.__version__,
    }


def check(
    folder: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    settings: BuildSettings,
    limit: int | None,
) -> None:
    """Refuses a data set that was built with other settings than are asked for.

    One without recorded settings, of an earlier version, is accepted. Of a sidecar the header is
    read, if it is local and exists.

    Args:
        folder: of the data set, for messages.
        metadata: of its `dataset_info`.
        settings: what is asked for.
        limit: `max_examples_per_split`.

    Raises:
        ValueError: they differ, or the sidecar is none.
    """
    recorded = metadata.get(schema.META_SETTINGS)
    if recorded is None:
        return
    wanted = record(
        settings,
        limit,
        _text_embeddings(settings.text_embeddings, recorded.get(schema.SETTINGS_TEXT)),
    )
    lie = {_LATENTS: RECORDS}
    differing = list(_differences(lie | recorded, lie | wanted))
    if differing:
        raise ValueError(
            f'{os.fspath(folder)} was built with other settings: {"; ".join(differing)}. Give the '
            'config another name, or replace the data set with --overwrite (in Python '
            'download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS).'
        )


def _text_embeddings(chosen: str, recorded: Any) -> str | Mapping[str, Any]:
    """`text_embeddings` as a build would record it now; as recorded if the sidecar is not here."""
    if chosen in ('', EMBEDDINGS_IN_PT):
        return chosen
    if source_files.is_remote(chosen) or not os.path.exists(chosen):
        return recorded if isinstance(recorded, dict) else chosen
    from coyo11m_tfds.source import sidecar

    first, *_ = sidecar.find(chosen)
    return sidecar.describe(first.path)['header']


def _differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    # A setting that only one of the two has belongs to another version of this package.
    for name in sorted(wanted.keys() & recorded.keys() - set(_NOT_COMPARED)):
        there, here = recorded[name], wanted[name]
        field = 'text_embeddings' if name == schema.SETTINGS_TEXT else name
        if isinstance(there, dict) and isinstance(here, dict):
            yield from (f'{field}: {part}' for part in _differences(there, here))
        elif there != here:
            yield f'{field} is {there!r} there, {here!r} is asked for'
