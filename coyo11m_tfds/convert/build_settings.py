"""The settings of a build, the memory that it takes, and what a data set records of both.

A data set records its settings and its source, so that a later build with other settings, or from
another source, is refused and not mistaken for the same.
"""

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from absl import logging

import coyo11m_tfds
from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.dataset.columns import IN_PLACE, IN_RECORDS, LATENT_STORAGE
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.process import machine, workers
from coyo11m_tfds.process.errors import UNIT_INTERVAL, FieldError, FieldRule, at_least, one_of
from coyo11m_tfds.process.sizes import format_bytes, format_count
from coyo11m_tfds.source import source_folder

# How much of the latents a build reads: values of the config's field `read_latents`.
READ_ALL = 'all'
READ_HEADS = 'heads'  # of each file; statistics come from some rows

EMBEDDINGS_IN_PT = 'pt'  # the `text_embeddings` for `embeddings` inside the `.pt` files

# How to go on where a data set of other settings, or of another source, exists.
_WAYS_ON = (
    'Give the config another name, or replace the data set with --overwrite (in Python '
    'download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS).'
)

_MAX_SOURCE_DIFFERENCES = 3  # in a message

_LEAST_VALIDATION = 10  # records
_USUAL_FRACTION = 0.01

_LIMIT = 'max_examples_per_split'
_LATENTS = 'latents'
_READ_LATENTS = 'read_latents'
_KEY_COLUMN = 'key_column'
_OPTIONAL = 'latents_from', _KEY_COLUMN, schema.META_VAE, schema.META_MOMENTS
# A finished data set does not depend on these.
_NOT_COMPARED = {'max_bad_fraction', 'check_crc', 'package_version'}.union(schema.META_RIGHTS)

# Configs come from JSON that people type, so a value may also be of another type.
_TYPES = {
    str: FieldRule('a string', lambda x: isinstance(x, str)),
    # True and false are whole numbers in Python.
    int: FieldRule('an integer', lambda x: isinstance(x, int) and not isinstance(x, bool)),
    float: FieldRule('a number', lambda x: isinstance(x, int | float) and not isinstance(x, bool)),
    bool: FieldRule('true or false', lambda x: isinstance(x, bool)),
}
# Of texts for the metadata, which a build writes at its end; names of files may be of any bytes.
_READABLE = FieldRule('a text in UTF-8', foreign_text.is_readable)
_RULES = {
    schema.META_VAE: _READABLE,
    schema.META_LICENSE: _READABLE,
    schema.META_CITATION: _READABLE,
    'validation_fraction': FieldRule('one in [0, 1)', lambda x: 0 <= x < 1),
    'shard_bytes': at_least(1),
    'latents': one_of(*LATENT_STORAGE),
    'read_latents': one_of(READ_ALL, READ_HEADS),
    'moments': one_of('', *schema.MOMENTS),
    'bad_data': one_of('drop', 'stop'),
    'max_bad_fraction': UNIT_INTERVAL,
    'num_workers': at_least(0),
    'scratch_dir': FieldRule('a local folder', lambda place: storage.local_path(place) is not None),
}


# Fields that are also flags of programs.
CAPTION_FLAGS = {
    'captions': 'Parquet file of captions, or folder of such files, within the source or elsewhere',
    _KEY_COLUMN: 'column of keys in these files, or name of the keys in the files of latents',
    'caption_column': 'column of captions',
}


def add_caption_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `CAPTION_FLAGS`, without defaults: what is not typed is not in the result."""
    for name, text in CAPTION_FLAGS.items():
        parser.add_argument(f'--{name}', default=argparse.SUPPRESS, help=text)


def check_names(names: Iterable[str], fields: Sequence[str], where: str) -> None:
    """Raises a ValueError that begins with `where` if a name is none of the fields."""
    for name in names:
        if name not in fields:
            known_fields = ', '.join(fields)
            raise ValueError(
                f"{where} has an unknown field '{name}'; the fields are {known_fields}."
            )


def choose_validation_fraction(num_records: int) -> float:
    """Returns a hundredth, or of few records the fraction that leaves about ten for validation."""
    # Of fewer than ten a loss says little, and none might be left.
    fraction = round(_LEAST_VALIDATION / max(1, num_records), 3)
    # Of a handful of records, half of them are left for training.
    return max(_USUAL_FRACTION, min(0.5, fraction))


@dataclasses.dataclass(eq=False, kw_only=True)
class BuildSettings:
    """The settings of a build; coyo11m_tfds/README.md describes the fields ("Building")."""

    source: str = ''
    captions: str = ''
    key_column: str = ''
    caption_column: str = schema.DEFAULT_CAPTION_COLUMN
    validation_fraction: float = _USUAL_FRACTION
    shard_bytes: int = 128 * 1024 * 1024
    text_embeddings: str = ''
    latents_from: str = ''
    vae: str = ''
    moments: str = ''
    license: str = ''
    citation: str = ''
    latents: str = IN_RECORDS
    read_latents: str = READ_ALL
    bad_data: str = 'drop'
    max_bad_fraction: float = 0.01
    check_crc: bool = True
    num_workers: int = 0
    scratch_dir: str = ''

    def __post_init__(self):
        for field in dataclasses.fields(BuildSettings):
            value = getattr(self, field.name)
            _TYPES[cast(type, field.type)].check(field.name, value)
            if rule := _RULES.get(field.name):
                rule.check(field.name, value)
        schema.parse_latents_from(self.latents_from)
        if self.reads_heads and not self.in_place:
            problem = f'records hold the latents, so all are read; set latents to {IN_PLACE!r} too.'
            raise FieldError(_READ_LATENTS, self.read_latents, problem)
        if self.reads_heads and self.text_embeddings == EMBEDDINGS_IN_PT:
            problem = 'embeddings lie with the latents; name those of embed_captions, or none.'
            raise FieldError('text_embeddings', self.text_embeddings, problem)

    @property
    def drop_bad(self) -> bool:
        """Whether bad rows are left out; otherwise the first one ends the build."""
        return self.bad_data == 'drop'

    @property
    def in_place(self) -> bool:
        """Whether the latents stay in the files of the source."""
        return self.latents == IN_PLACE

    @property
    def reads_heads(self) -> bool:
        """Whether only the heads of the files are read, and some rows for statistics."""
        return self.read_latents == READ_HEADS

    def record(self, limit: int | None, text_embeddings: str | Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that decide the records, with no path, as JSON for the metadata."""
        # Only in these data sets, so that the metadata, and with it the ID, of others stays.
        optional = {}
        if self.in_place:
            optional[_LATENTS] = self.latents
        if self.reads_heads:
            optional[_READ_LATENTS] = self.read_latents
        for name in itertools.chain(_OPTIONAL, schema.META_RIGHTS):
            if value := getattr(self, name):
                optional[name] = value
        return optional | {
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
        recorded = metadata.get(schema.META_SETTINGS)
        if recorded is None:
            return
        # What `record` leaves out where a setting has its default.
        defaults = {_LATENTS: IN_RECORDS, _READ_LATENTS: READ_ALL} | dict.fromkeys(_OPTIONAL, '')
        text_embeddings = self._describe_text_embeddings(recorded.get(schema.SETTINGS_TEXT))
        current = defaults | self.record(limit, text_embeddings)
        if differences := list(_setting_differences(defaults | recorded, current)):
            lines = '; '.join(differences)
            raise ValueError(
                f'{os.fspath(folder)} was built with other settings: {lines}. {_WAYS_ON}'
            )
        # The records do not depend on these, so that other ones refuse no data set.
        for name in schema.META_RIGHTS:
            old = recorded.get(name, '')
            new = getattr(self, name)
            if new not in ('', old):
                logging.warning(
                    '%s: %s stays %r, not %r, until --overwrite.', os.fspath(folder), name, old, new
                )

    def _describe_text_embeddings(self, recorded: Any) -> str | Mapping[str, Any]:
        """Returns what a build would record now; `recorded` if the sidecar is remote or absent."""
        place = storage.expand_home(self.text_embeddings)
        is_header_recorded = isinstance(recorded, dict)
        is_of_labels = is_header_recorded and recorded.get('encoder') == schema.LABELS
        # Labels may come from the files without being named.
        if place in ('', schema.LABELS) and is_of_labels:
            return recorded
        if place in ('', schema.LABELS, EMBEDDINGS_IN_PT):
            return place
        # A data set can be used after its sidecar is gone, and without access to a bucket.
        if not os.path.exists(place):
            return recorded if is_header_recorded else place
        # Here, because it needs pyarrow: the settings of a build are read without, too.
        from coyo11m_tfds.source import sidecar

        # All files of a sidecar have the same header.
        first_file = sidecar.find_sidecar_files(place)[0]
        return sidecar.describe_values(first_file.path)['header']


def _setting_differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each setting that differs; nested ones have the field before them."""
    # A setting that only one of the two has belongs to another version of this package.
    names = (current.keys() & recorded.keys()) - _NOT_COMPARED
    for name in sorted(names):
        old = recorded[name]
        new = current[name]
        field = 'text_embeddings' if name == schema.SETTINGS_TEXT else name
        if isinstance(old, dict) and isinstance(new, dict):
            for line in _setting_differences(old, new):
                yield f'{field}: {line}'
        elif old != new:
            yield f'{field} is {old!r} there, {new!r} is requested'


# --- The record of the source -------------------------------------------------------------------


def record_source(source: source_folder.SourceFolder) -> dict[str, Any]:
    """Returns the place of a source and, by name, size and digest of its files, as JSON."""
    files = {}
    for name, file in source.by_name.items():
        digest = file.checksum
        # The storage keeps no checksum of a local file, and to read all of it would take too long.
        if file.local_path:
            digest = columns.outline_digest(file.path)
        files[name] = (file.size, digest)
    # The place is for people: the same files elsewhere are the same source.
    return {'place': storage.make_absolute(source.root), 'files': files}


def check_source(
    folder: str | os.PathLike[str], recorded: Mapping[str, Any] | None, root: str, captions: str
) -> None:
    """Raises a ValueError if a data set records another source than that in the folder `root`."""
    if not recorded:
        return
    try:
        source = source_folder.find_source(root).with_captions(captions)
        files = record_source(source)['files']
        differences = list(_source_differences(recorded['files'], files))
    except ValueError as error:
        # A folder that is no source at all is another source, too.
        differences = [str(error).rstrip('.')]
    if differences:
        # Of two sources, every file may differ.
        examples = '; '.join(differences[:_MAX_SOURCE_DIFFERENCES])
        raise ValueError(
            f'{os.fspath(folder)} was built from {recorded["place"]}, not from '
            f'{storage.make_absolute(root)}: {examples}. {_WAYS_ON}'
        )


def _source_differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each file that is new, missing or has other contents."""
    for name in sorted(recorded.keys() | current.keys()):
        if name not in current:
            yield f'{name} is missing'
        elif name not in recorded:
            yield f'{name} is new'
        else:
            old_size, old_digest = recorded[name]
            new_size, new_digest = current[name]
            if new_size != old_size or _are_other_contents(old_digest, new_digest):
                yield f'{name} has other contents ({new_size:,} bytes, had {old_size:,})'


def _are_other_contents(digest: str, other_digest: str) -> bool:
    """Whether two digests tell contents apart: those of one kind, such as `crc32c:...`, can."""
    kind, _, value = digest.rpartition(':')
    other_kind, _, other_value = other_digest.rpartition(':')
    if not value or not other_value or kind != other_kind:
        return False
    return value != other_value


# --- The memory of a build ----------------------------------------------------------------------

# Measured without pages of files, such as TensorFlow's code, which the system can give up.
_PROGRAM = 550_000_000  # of `build` with TensorFlow, Beam and torch; it also writes, if it is alone
_WORKER = 250_000_000  # of each process if several write; threads take less
_JOINED_ROW = 130  # of each row while captions are joined
_PLANNED_ROW = 70  # of each row in the plan, which stays


def build_memory(num_rows: int, num_workers: int) -> int:
    """Returns the bytes that a build of a source with so many rows takes."""
    joining = _JOINED_ROW * num_rows
    writing = _PLANNED_ROW * num_rows
    if num_workers > 1:
        writing += _WORKER * num_workers
    # Workers start when the captions are joined.
    return _PROGRAM + max(joining, writing)


def fitting_workers(num_rows: int) -> int:
    """Returns how many workers can write in the usable memory, at least 1."""
    room = machine.usable_memory() - _PROGRAM - _PLANNED_ROW * num_rows
    return max(1, room // _WORKER)


def check_build_memory(num_rows: int, num_workers: int) -> None:
    """Raises a ValueError if a build with so many workers, or 0 for any number, cannot fit."""
    # A process that runs out of memory is killed without a message, after hours of work.
    count = workers.requested_workers(num_workers) or 1
    usable = machine.usable_memory()
    need = build_memory(num_rows, count)
    if need <= usable:
        return
    remedy = 'Use a machine with more, or'
    if build_memory(num_rows, 1) <= usable:
        remedy = f'Set num_workers to {fitting_workers(num_rows)}, or'
    raise ValueError(
        f'the build of {format_count(num_rows, "row")} with num_workers={count} takes '
        f'{format_bytes(need)} of memory, but this process can use '
        f'{format_bytes(usable)}. {remedy} raise its limit.'
    )
