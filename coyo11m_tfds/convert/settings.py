"""The settings of a build: one object, handed down from the config to the workers."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.columns import IN_PLACE, LATENTS_LIE

EMBEDDINGS_IN_PT = 'pt'  # the `text_embeddings` for `embeddings` inside the `.pt` files

_RENAMED = {'text_vectors': 'text_embeddings'}  # fields, of earlier versions


def check_names(names: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raises a ValueError for a name that is none of the known fields; it begins with `where`."""
    for name in names:
        if name in _RENAMED:
            raise ValueError(f"{where}: the field '{name}' is now '{_RENAMED[name]}'.")
        if name not in known:
            raise ValueError(
                f"{where} has an unknown field '{name}'; the fields are {', '.join(known)}."
            )


@dataclasses.dataclass(eq=False, kw_only=True)
class BuildSettings:
    """The settings of a build.

    Attributes:
        source: folder of the source, local, `gs://` or `hf://`; '' for TFDS' `manual_dir`.
        caption_column: column of the Parquet file that becomes `caption`.
        validation_fraction: share of the keys in the validation split, in [0, 1).
        shard_bytes: the records of a larger `.pt` file are cut into the fewest shards of at most
            about this size, nearly equal; smaller files share one of half to twice this size.
        text_embeddings: '' for none; 'pt' for `embeddings` in the `.pt` files; else the place of a
            sidecar that `coyo11m_tfds.embed_captions` made, of embeddings or of tokens; a file or
            a folder.
        latents: 'records', or 'in_place': records hold all but the latents, which are read out of
            the source's files. These must stay as they are, on gs:// if the data set is there. The
            shards have the same records as otherwise, so that the order of training is the same.
        bad_data: what to do about duplicate keys, files whose tensors disagree, and numbers that
            are not finite: 'drop' and count them, or 'stop' at the first.
        max_bad_fraction: share of the source's rows that may be dropped as bad, in [0, 1].
        check_crc: whether contents of `.pt` files must have the CRC-32 that torch records with
            them; False for files saved without valid checksums.
        num_workers: processes that write; 0 for the environment variable COYO11M_NUM_PROC, else
            all cores.
        scratch_dir: local folder for what is kept between builds (captions as plain text, text
            embeddings) and for remote files on their way; '' for `.coyo11m_tfds` in a local
            data_dir, else `~/.cache/coyo11m_tfds`. Beam's workers take `coyo11m_tfds-<user id>` in
            their directory of temporary files.
        scratch_gb: most GB of remote files that lie there at a time; at least the largest
            file, and the small files of one shard.
        wait_hours: how long to wait for another process that builds the same data set.
    """

    source: str = ''
    caption_column: str = schema.DEFAULT_CAPTION_COLUMN
    validation_fraction: float = 0.01
    shard_bytes: int = 128 * 1024 * 1024
    text_embeddings: str = ''
    latents: str = 'records'
    bad_data: str = 'drop'
    max_bad_fraction: float = 0.01
    check_crc: bool = True
    num_workers: int = 0
    scratch_dir: str = ''
    scratch_gb: float = 32
    wait_hours: float = 24

    def __post_init__(self):
        for name in ('source', 'caption_column', 'text_embeddings', 'scratch_dir'):
            self._check(name, isinstance(getattr(self, name), str), 'a string')
        for name in ('shard_bytes', 'num_workers'):
            self._check(name, isinstance(getattr(self, name), int), 'an integer')
        self._check('shard_bytes', self.shard_bytes > 0, 'at least 1')
        self._check('num_workers', self.num_workers >= 0, 'at least 0')
        for name in ('validation_fraction', 'max_bad_fraction', 'scratch_gb', 'wait_hours'):
            self._check(name, isinstance(getattr(self, name), (int, float)), 'a number')
        self._check('validation_fraction', 0 <= self.validation_fraction < 1, 'one in [0, 1)')
        self._check('max_bad_fraction', 0 <= self.max_bad_fraction <= 1, 'one in [0, 1]')
        self._check('scratch_gb', 0 < self.scratch_gb < math.inf, 'more than 0, and finite')
        self._check('wait_hours', self.wait_hours >= 0, 'at least 0')
        self._check('check_crc', isinstance(self.check_crc, bool), 'true or false')
        self._check('latents', self.latents in LATENTS_LIE, "'records' or 'in_place'")
        self._check('bad_data', self.bad_data in ('drop', 'stop'), "'drop' or 'stop'")

    @property
    def drop_bad(self) -> bool:
        return self.bad_data == 'drop'

    @property
    def in_place(self) -> bool:
        return self.latents == IN_PLACE

    @property
    def scratch_bytes(self) -> int:
        return int(self.scratch_gb * 10**9)

    @property
    def wait_seconds(self) -> float:
        return self.wait_hours * 3600

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f'config: {name} is {getattr(self, name)!r}, expected {expected}.')
