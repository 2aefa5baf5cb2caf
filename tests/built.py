"""Small data sets built from the sources of `conftest`."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.storage import file_state

ID = '3f9a1c20'


def build(
    source: pathlib.Path, sidecar: pathlib.Path | str, out: pathlib.Path, **fields: Any
) -> pathlib.Path:
    """The folder of a data set with a tenth in `validation` and, unless '', with text of `sidecar`.

    Its shards have unequal lengths, none a multiple of 32, except by chance.
    """
    # Imported here, because TFDS takes seconds and many test files do without.
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    defaults = {
        'name': 'hash',
        'source': str(source),
        'text_embeddings': str(sidecar),
        'validation_fraction': 0.1,
        'shard_bytes': 2_500_000,
        'num_workers': 1,
    }
    builder = Builder(data_dir=out, config=Coyo11mConfig(**(defaults | fields)))
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """The content of the files in a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def files_of_any_source(folder: pathlib.Path) -> dict[str, bytes]:
    """The same without those that name the place of the source."""
    stem = schema.CHECKSUMS_FILE.partition('.')[0]
    files = {}
    for name, data in files_of(folder).items():
        if not name.startswith((schema.METADATA_FILE, stem)):
            files[name] = data
    return files


def split_records(data: bytes) -> Iterator[bytes]:
    """The records in the content of a TFRecord file."""
    at = 0
    while at < len(data):
        # Its length and the checksum of it, the record, and the checksum of that.
        size = int.from_bytes(data[at : at + 8], 'little')
        begin = at + 12
        yield data[begin : begin + size]
        at = begin + size + 4


def with_known_id(folder: pathlib.Path) -> pathlib.Path:
    """Names the files of a data set as if its build had `ID`, whatever its plan's digest is."""
    metadata = json.loads((folder / schema.METADATA_FILE).read_text())
    build = metadata[schema.META_BUILD]
    for path in sorted(folder.iterdir()):
        if path.suffix in ('.json', '.html'):
            content = path.read_bytes().replace(build.encode(), ID.encode())
            path.write_bytes(content)
        path.rename(folder / path.name.replace(f'-{build}.', f'-{ID}.'))
    # The record is of the files as they were before.
    checksums = schema.of_build(schema.CHECKSUMS_FILE, ID)
    (folder / checksums).unlink()
    files = {path.name: file_state.compute_state(path) for path in folder.iterdir()}
    manifest.write_checksums(folder, files, ID)
    return folder
