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
    sizes = [np.dtype(columns[x]).itemsize if 'int' in columns[x] else None for x in names]
    described = {
        'column_encodings': [columns[x] for x in names],
        'column_names': names,
        'column_sizes': sizes,
        'compression': None,
        'format': 'mds',
        'hashes': [],
        'size_limit': 1 << 26,
        'version': 2,
    }
    text, listed = json.dumps(described, sort_keys=True).encode(), []
    for number, samples in enumerate(shards):
        encoded = []
        for sample in samples:
            values = [sample[x] for x in names]
            values = [x.encode() if isinstance(x, str) else np.asarray(x).tobytes() for x in values]
            heads = [len(x) for x, size in zip(values, sizes, strict=True) if size is None]
            encoded.append(np.array(heads, '<u4').tobytes() + b''.join(values))
        offsets = np.cumsum([0, *map(len, encoded)]) + 4 * (len(encoded) + 2) + len(text)
        head = np.array([len(encoded), *offsets], '<u4').tobytes() + text
        name = f'shard.{number:05}.mds'
        (folder / name).write_bytes(head + b''.join(encoded))
        raw = {'basename': name, 'bytes': int(offsets[-1]), 'hashes': {}}
        listed.append(described | {'raw_data': raw, 'samples': len(samples), 'zip_data': None})
    index = {'shards': listed, 'version': 2}
    (folder / 'index.json').write_text(json.dumps(index, sort_keys=True))


def nested_lists(values: np.ndarray, *, fixed: bool = False) -> pa.Array:
    """Lists of lists of numbers, as `datasets` has them in Parquet; `fixed` ones have sizes."""
    lists = pa.array(values.ravel())
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
                info.size, info.mtime = len(data), 1_700_000_000.5
                tar.addfile(info, io.BytesIO(data))


def write_moments(
    folder: pathlib.Path, moments: np.ndarray, labels: Sequence[int] | None, per_folder: int = 1000
) -> None:
    """As `dataset_tool.py encode` of EDM2: means and deviations, float32 `(n, 2C, H, W)`."""
    names = [f'{n // per_folder:05}/img-mean-std-{n:08}.npy' for n in range(len(moments))]
    for name, values in zip(names, moments, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, values)
    entries = None if labels is None else list(zip(names, map(int, labels), strict=True))
    (folder / 'dataset.json').write_text(json.dumps({'labels': entries}))


def _encode(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, value)
        return stream.getvalue()
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()
