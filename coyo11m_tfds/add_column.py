"""Adds text vectors to a built data set, in files beside its shards, which stay as they are.

    python -m coyo11m_tfds.embed_captions --source=SOURCE --encoder=hf:NAME --out=other.parquet
    python -m coyo11m_tfds.add_column --data_dir=OUT/coyo11m_tfds/latents/1.0.0 --name=other \\
        --embeddings=other.parquet

    batches = input_pipeline.train_batches(data_dir, text='other', ...)

Every record needs a vector. A row of the file is that of a record, in the order of the shards. The
files, what they are, and the new checksums come into their place when all is written.
"""

import argparse
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

import numpy as np
from absl import logging

from coyo11m_tfds import columns, schema
from coyo11m_tfds.build import manifest
from coyo11m_tfds.columns import TextColumn
from coyo11m_tfds.process import ending
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.reading import rows, stored_dataset, verified
from coyo11m_tfds.reading.names import MASK
from coyo11m_tfds.reading.row_reader import RowChoices, RowReader
from coyo11m_tfds.reading.stored_dataset import StoredDataset
from coyo11m_tfds.report.moments import Moments
from coyo11m_tfds.source import embedding_store, part_files
from coyo11m_tfds.storage import source_files
from coyo11m_tfds.storage.file_state import naming, of_file

_NAME = re.compile(r'[a-z][a-z0-9_]*')
_ROWS_AT_ONCE = 4096


def add(
    data_dir: str | os.PathLike[str],
    name: str,
    embeddings: str | os.PathLike[str],
    scratch_dir: str = '',
) -> TextColumn:
    """Adds a column of text vectors to a local data set.

    Args:
        data_dir: folder of the data set.
        name: that the column is asked for by: small letters, digits and '_'.
        embeddings: local file or folder that `embed_captions` made, of any column of captions.
        scratch_dir: local folder for the vectors as a matrix; '' for `.coyo11m_tfds` beside the
            folder of the data set, where a build has it.

    Raises:
        ValueError: there is no data set, or a column of this name; the file is none of vectors, or
            lacks that of a record; or a record is damaged.
        OSError: a file cannot be read or written.
    """
    folder = os.fspath(data_dir).rstrip('/')
    stored = None if source_files.is_remote(folder) else stored_dataset.read(folder)
    if stored is None:
        raise ValueError(f'{folder}: is no local data set, .../coyo11m_tfds/CONFIG/1.0.0.')
    if not _NAME.fullmatch(name) or name in {*stored.features, *stored.columns}:
        raise ValueError(
            f'{folder}: a new column cannot be called {name!r}; there are '
            f"{sorted({*stored.features, *stored.columns})}. Use small letters, digits and '_'."
        )
    header, store = embedding_store.prepare_store(
        part_files.find(embeddings),
        cache_dir=scratch_dir or str(pathlib.Path(folder).parents[2] / f'.{schema.NAME}'),
    )
    if header.vocabulary:
        raise ValueError(
            f'{embeddings}: holds tokens, which records alone can hold; expected embeddings.'
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix='.add_column-') as made:
        files, moments = {}, Moments(header.dim)
        for split in stored.splits:
            files[split] = columns.file_name(name, split)
            of_split = moments if split == schema.TRAIN else Moments(header.dim)
            path = os.path.join(made, files[split])
            _write(path, stored, split, store, header.dim, of_split, embeddings)
        encoder = header.to_json()
        column = TextColumn(name, header.dim, files, *moments.mean_and_std(), encoder)
        columns.write(made, {**stored.columns, name: column})
        _commit(folder, made, [*files.values(), schema.COLUMNS_FILE])
    return column


def _write(
    path: str,
    stored: StoredDataset,
    split: str,
    store: embedding_store.VectorStore,
    dim: int,
    moments: Moments,
    name: str,
) -> None:
    """Writes the vectors of a split, float16 `(n, dim)`, as a `.npy` file, and sums them up."""
    num_records = sum(stored.splits[split].shard_lengths)
    with (
        naming(path),
        open(path, 'wb') as file,
        Progress(split, num_records, 'records') as progress,
    ):
        header = {'descr': '<f2', 'fortran_order': False, 'shape': (num_records, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for keys in _keys(stored, split):
            found = store.find(keys)
            if (found < 0).any():
                raise ValueError(
                    f'{name}: has no vector for {(found < 0).sum()} of {len(keys)} records of '
                    f'{stored.folder}, such as key {keys[(found < 0).argmax()]}. Embed the '
                    'captions of all of them.'
                )
            values = store.read(found)
            file.write(values.astype('<f2', copy=False).data)
            exact = values.astype(np.float64)
            moments.add(len(exact), exact.sum(axis=0), (exact**2).sum(axis=0))
            progress.add(len(keys))


def _keys(stored: StoredDataset, split: str) -> Iterator[np.ndarray]:
    """The keys of a split in the order of its records, some at a time."""
    opened = stored.open_split(split)
    if opened is None:
        raise ValueError(f'{stored.folder}: split {split!r} has no chunk index.')
    reader = RowReader(
        opened,
        RowChoices((schema.KEY,), stored.latent_dtype, stored.text_dim, with_mask=True),
        stored.record_layout,
        verify=verified.ALWAYS,
    )
    lengths = opened.index.shard_lengths
    size = int(lengths.sum())
    count = -(-size // _ROWS_AT_ONCE)
    for batch in rows.eval_batches(reader, lengths, range(size), _ROWS_AT_ONCE, count, 1):
        yield batch[schema.KEY][batch[MASK]]


def _commit(folder: str, made: str, names: list[str]) -> None:
    """Moves files into the folder of a data set, and then the checksums that know them."""
    recorded = os.path.join(folder, schema.CHECKSUMS_FILE)
    if os.path.exists(recorded):
        files = manifest.parse(pathlib.Path(recorded).read_bytes())
        files |= {name: of_file(os.path.join(made, name)) for name in names}
        manifest.write(made, files)
        names = [*names, schema.CHECKSUMS_FILE]
    for name in names:
        os.replace(os.path.join(made, name), os.path.join(folder, name))


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m coyo11m_tfds.add_column',
        description='Adds text vectors to a built data set, beside its shards.',
    )
    add_argument = parser.add_argument
    add_argument('--data_dir', required=True, help='folder of a data set, .../CONFIG/1.0.0')
    add_argument('--name', required=True, help='of the column, for data.text of the trainer')
    add_argument('--embeddings', required=True, help='what coyo11m_tfds.embed_captions made')
    add_argument('--scratch_dir', default='', help='local folder for the vectors on their way')
    return parser.parse_args()


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    flags = parse_flags()
    logging.set_verbosity(logging.INFO)
    with ending.in_one_line('nothing was added, the same command starts anew'):
        column = add(flags.data_dir, flags.name, flags.embeddings, flags.scratch_dir)
    print(f'{flags.data_dir}: text={column.name!r} has {column.width} numbers a record.')


if __name__ == '__main__':
    main()
