"""Small files of latents as other projects write them.

`tests/test_formats.py` compares them with what the formats' own libraries write.
"""

import io
import json
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

MDS_COLUMNS = {'caption': 'str', 'latents_256': 'bytes', 'width': 'int32'}


def write_safetensors(path: pathlib.Path, latents: np.ndarray, labels: Sequence[int]) -> None:
    """As LightningDiT: `latents` `(n, 2, C, H, W)` are the pictures and the mirrored ones."""
    tensors = {
        'latents': np.ascontiguousarray(latents[:, 0]),
        'latents_flip': np.ascontiguousarray(latents[:, 1]),
        'labels': np.array(labels, np.int64),
    }
    save_file(tensors, path)


def write_mds(
    folder: pathlib.Path,
    shards: Sequence[Sequence[Mapping[str, Any]]],
    columns: Mapping[str, str] = MDS_COLUMNS,
) -> None:
    """The shards of MosaicML Streaming 0.13, each of some samples, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    sizes = []
    for name in names:
        # Texts and bytes have lengths of their own in each sample.
        is_number = 'int' in columns[name]
        sizes.append(np.dtype(columns[name]).itemsize if is_number else None)
    header = {
        'column_encodings': [columns[x] for x in names],
        'column_names': names,
        'column_sizes': sizes,
        'compression': None,
        'format': 'mds',
        'hashes': [],
        'size_limit': 1 << 26,
        'version': 2,
    }
    text = json.dumps(header, sort_keys=True).encode()
    entries = []
    for number, samples in enumerate(shards):
        encoded = []
        for sample in samples:
            values = [sample[name] for name in names]
            encoded.append(_encode_mds_sample(values, sizes))
        # The number of samples, an offset of each and one of the end, and the header.
        begin = 4 * (len(encoded) + 2) + len(text)
        offsets = begin + np.cumsum([0, *map(len, encoded)])
        head = np.array([len(encoded), *offsets], '<u4').tobytes() + text
        name = f'shard.{number:05}.mds'
        (folder / name).write_bytes(head + b''.join(encoded))
        raw = {'basename': name, 'bytes': int(offsets[-1]), 'hashes': {}}
        entries.append(header | {'raw_data': raw, 'samples': len(samples), 'zip_data': None})
    index = {'shards': entries, 'version': 2}
    (folder / 'index.json').write_text(json.dumps(index, sort_keys=True))


def _encode_mds_sample(values: Sequence[Any], sizes: Sequence[int | None]) -> bytes:
    """Returns the lengths of the values without a size of their column, uint32, then all values."""
    lengths = []
    contents = []
    for value, size in zip(values, sizes, strict=True):
        content = value.encode() if isinstance(value, str) else np.asarray(value).tobytes()
        contents.append(content)
        if size is None:
            lengths.append(len(content))
    return np.array(lengths, '<u4').tobytes() + b''.join(contents)


def nested_lists(values: np.ndarray, *, fixed: bool = False) -> pa.Array:
    """Lists of lists of numbers, as `datasets` has them in Parquet; `fixed` ones have sizes."""
    lists = pa.array(values.ravel())
    # From the innermost axis to the second one; each list of the first is a row.
    for size in values.shape[:0:-1]:
        if fixed:
            lists = pa.FixedSizeListArray.from_arrays(lists, size)
        else:
            offsets = pa.array(range(0, len(lists) + 1, size), pa.int32())
            lists = pa.ListArray.from_arrays(offsets, lists)
    return lists


def write_tar(path: pathlib.Path, samples: Mapping[str, Mapping[str, Any]]) -> None:
    """As `webdataset.TarWriter`: members of a sample side by side, with headers of pax."""
    with tarfile.open(path, 'w') as tar:
        for sample, parts in samples.items():
            for suffix in sorted(parts):
                data = _encode(parts[suffix])
                info = tarfile.TarInfo(f'{sample}.{suffix}')
                info.size = len(data)
                # A fraction of a second takes a header of pax.
                info.mtime = 1_700_000_000.5
                tar.addfile(info, io.BytesIO(data))


def write_moments(
    folder: pathlib.Path, moments: np.ndarray, labels: Sequence[int] | None, per_folder: int = 1000
) -> None:
    """As `dataset_tool.py encode` of EDM2: means and deviations, float32 `(n, 2C, H, W)`."""
    names = []
    for number, values in enumerate(moments):
        name = f'{number // per_folder:05}/img-mean-std-{number:08}.npy'
        names.append(name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, values)
    entries = None
    if labels is not None:
        entries = list(zip(names, map(int, labels), strict=True))
    (folder / 'dataset.json').write_text(json.dumps({'labels': entries}))


def _encode(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, value)
        return stream.getvalue()
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value).encode()
