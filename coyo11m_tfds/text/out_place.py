"""Where a sidecar goes: a folder of parts, local or on gs://, or one local file.

out_place.check('gs://bucket/gemma', share=(0, 4))
with out_place.scratch_folder('gemma', '') as folder:
    ...
out_place.finished_parts('gemma', 700)      # {0: SourceFile(...), 4: ...}
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from coyo11m_tfds import schema
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.storage import held_folder, source_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import user_temp
from coyo11m_tfds.storage.source_files import SourceFile

_FILE = '.parquet'


def is_file(out: str) -> bool:
    """True if `out` names one file."""
    return out.endswith(_FILE)


def check(out: str, share: tuple[int, int]) -> None:
    """Refuses what cannot be written, before anything is read.

    Args:
        out: what the user names.
        share: which of how many hosts this is.

    Raises:
        ValueError: it cannot be written, or not by several hosts.
    """
    if not 0 <= share[0] < share[1]:
        raise ValueError(f'part {share[0]} of {share[1]}: expected one of 0 to n - 1, of n.')
    if not is_file(out):
        if os.path.isfile(out):
            raise ValueError(f'{out} is a file; expected a folder, or a name ending in {_FILE}.')
        Destination(out)
        return
    if source_files.is_remote(out):
        raise ValueError(
            f'{out} is remote; expected a local path, which can be copied there, or a folder.'
        )
    if os.path.isdir(out):
        raise ValueError(f'{out} is a folder; expected the path of a file to write.')
    if share[1] > 1:
        raise ValueError(
            f'{out}: one process makes a file, and this is one of {share[1]}. Name a folder.'
        )


@contextlib.contextmanager
def scratch_folder(out: str, chosen: str | os.PathLike[str]) -> Iterator[str]:
    """A folder of this run alone; in or beside a local `out`, so that parts are only renamed."""
    if is_file(out):
        parent, prefix = Path(out).parent, f'.{Path(out).name}.'
    elif source_files.is_remote(out):
        parent, prefix = Path(chosen or user_temp(schema.NAME)), 'embed-'
    else:
        # What another host of a shared disk has must stay, even if locks do not reach so far.
        parent, prefix = Path(chosen or out), f'.{platform.node()}-'
        Path(out).mkdir(parents=True, exist_ok=True)
    parent.mkdir(parents=True, exist_ok=True)
    with held_folder.make(parent, prefix) as folder:
        yield folder


def finished_parts(out: str, count: int) -> dict[int, SourceFile]:
    """Returns the parts that are in a folder, by number.

    Raises:
        ValueError: they are of another number than `count`.
        OSError: the storage cannot be reached.
    """
    found_count, parts = sidecar.find_parts(out)
    if parts and found_count != count:
        raise ValueError(
            f'{next(iter(parts.values())).path}: is one of {found_count} parts, but these captions '
            f'make {count} parts here. Remove it, choose another folder, or give part_captions '
            'as it was.'
        )
    return parts
