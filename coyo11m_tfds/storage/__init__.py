"""Files on a disk, in a bucket (`gs://`) and on the hub (`hf://`), with one set of verbs.

    folder = storage.open_folder('hf://datasets/owner/name')   # a `Hub`, which is only read
    files = folder.list()                                      # {'x.pt': StoredFile(...)}
    head = files['x.pt'].read_range(0, 100)
    storage.open_writable_folder('gs://bucket/set').write('x', head)    # a `Bucket`, or a `Disk`
    file = storage.describe_file('/data/y.pt')

No module here depends on the contents of files.
"""

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coyo11m_tfds.storage.base import ReadableFolder, WritableFolder
    from coyo11m_tfds.storage.stored_file import StoredFile


def class_of(path: str | os.PathLike[str]) -> 'type[ReadableFolder]':
    """Returns the class of folders of the storage of a path or URL; chosen here and nowhere else.

    Raises:
        ValueError: It is a URL of no storage.
    """
    text = os.fspath(path)
    # What `pathlib` makes of a URL; the text ./gs: names a local folder.
    if text.startswith(('gs:/', 'hf:/')) and '://' not in text:
        raise ValueError(f'{text}: expected two slashes, as in {text.replace(":/", "://", 1)}.')
    # Each is imported only where it is needed: the clients take 0.2 s and more.
    if local_path(text) is not None:
        from coyo11m_tfds.storage.disk import Disk

        return Disk
    if text.startswith('gs://'):
        from coyo11m_tfds.storage.bucket import Bucket

        return Bucket
    if text.startswith('hf://'):
        from coyo11m_tfds.storage.hub import Hub

        return Hub
    raise ValueError(
        f'{text}: expected a local path, gs://bucket/... or hf://datasets/owner/name/...'
    )


def expand_home(path: str | os.PathLike[str]) -> str:
    """Returns a path whose first part `~` is the user's home folder; others are unchanged.

    Shells leave that of `--out=~/new` to the program. A folder of this name is `./~`, of which the
    absolute path is returned.
    """
    text = os.fspath(path)
    # `pathlib` and TFDS drop the `./`, and what they return may come here again.
    if text.startswith('./~'):
        return os.path.abspath(text)
    return os.path.expanduser(text)


def open_folder(folder: str | os.PathLike[str]) -> 'ReadableFolder':
    """Returns a folder to read, which need not exist; ValueError for a place of no storage."""
    # An empty text, as of a variable of the shell that is not set, is not the current folder.
    if not os.fspath(folder):
        raise ValueError('no folder given, expected one to read.')
    return class_of(folder)(expand_home(folder))


def open_writable_folder(folder: str | os.PathLike[str]) -> 'WritableFolder':
    """Returns a folder to read and write, which need not exist; ValueError for one of the hub."""
    if not os.fspath(folder):
        raise ValueError('no folder given, expected one to write to.')
    return _writable_class_of(folder)(expand_home(folder))


def _writable_class_of(path: str | os.PathLike[str]) -> 'type[WritableFolder]':
    """Returns the class of folders of a path or URL; ValueError for one of the hub."""
    # Here, because `base` imports modules that import this one.
    from coyo11m_tfds.storage.base import WritableFolder

    kind = class_of(path)
    if not issubclass(kind, WritableFolder):
        raise ValueError(f'{path}: expected a local path or gs://bucket/folder.')
    return kind


def check_single_slashes(path: str | os.PathLike[str]) -> None:
    """Raises a ValueError for a URL with several slashes in a row, of which TFDS makes one."""
    # A slash at the end is none of these: folders are named with and without it.
    scheme, separator, name = os.fspath(path).partition('://')
    if separator and '//' in name.rstrip('/'):
        other = f'{scheme}{separator}{re.sub("/+", "/", name)}'
        raise ValueError(
            f'{path}: has several slashes in a row, which TFDS takes for one. Name {other}, or '
            'move the files to a folder whose name has none.'
        )


def describe_file(path: str | os.PathLike[str]) -> 'StoredFile':
    """Returns one file without reading it; raises a ValueError if it is missing or a folder."""
    try:
        return class_of(path).describe(expand_home(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f'{path} is missing or a folder; expected a file.') from None


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a small file at a path or URL; a reader may see a part of it.

    Raises:
        ValueError: It is a URL that cannot be written to.
        OSError: The storage refuses it.
    """
    path = expand_home(path)
    folder, name = os.path.split(path)
    if local_path(path) is None:
        open_writable_folder(folder).write(name, data)
        return
    os.makedirs(folder or os.curdir, exist_ok=True)
    from coyo11m_tfds.storage import file_state

    # Not beside it first: it may be a device, such as /dev/stdout.
    with file_state.naming(path), open(path, 'wb') as file:
        file.write(data)


def check_writable_file(path: str | os.PathLike[str]) -> None:
    """Checks that `write_file` can write at a path; raises a ValueError or an OSError."""
    path = expand_home(path)
    # Of the path itself, because the folder above it may look like another place.
    _writable_class_of(path)
    # The name first: an absolute path has lost the slash at its end, by which it names a folder.
    parent, name = os.path.split(path)
    # What is left of the URL of a bucket is its scheme, which would be a local folder.
    is_bucket = local_path(path) is None and local_path(parent) is not None
    if not name or is_bucket or os.path.isdir(path):
        raise ValueError(f'{path}: is a folder; expected the path of a file.')
    folder = os.path.dirname(make_absolute(path))
    open_writable_folder(folder).check_writable()


def list_folder(
    folder: str | os.PathLike[str], missing_ok: bool = False
) -> 'dict[str, StoredFile]':
    """Returns the visible files of a folder by name.

    Raises:
        ValueError: There is no such folder, unless `missing_ok`.
    """
    opened = open_folder(folder)
    files = {}
    for name, file in opened.list().items():
        if not name.startswith('.'):
            files[name] = file
    # Asked only if nothing was listed: in a bucket it is one more request.
    if not files and not missing_ok and not opened.exists():
        raise ValueError(f'{folder}: there is no such folder.')
    return files


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Returns the path, if files are opened and memory-mapped where they are; None for a URL."""
    text = os.fspath(path)
    return None if '://' in text else text


def make_absolute(path: str | os.PathLike[str]) -> str:
    """Returns a path that is valid in every working directory; a URL stays unchanged."""
    return os.fspath(path) if local_path(path) is None else os.path.abspath(expand_home(path))
