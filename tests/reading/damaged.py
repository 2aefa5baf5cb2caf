"""A small data set that tests damage: its shape, and where to damage it."""

import pathlib

import input_pipeline
from coyo11m_tfds import schema

LENGTHS = {schema.TRAIN: (70, 0, 97, 64, 131), schema.VALIDATION: (37, 12)}
ORDER = dict(batch_size=16, seed=5, chunk=64, lanes=4, window=24)


def shard_path(path: pathlib.Path, shard: int, split: str = schema.TRAIN) -> pathlib.Path:
    """The file of a shard."""
    split_of_data = input_pipeline.open_data(path).split(split)
    return pathlib.Path(split_of_data.file(shard))


def damage(
    path: pathlib.Path, shard: int, record: int, at: int = 100, split: str = schema.TRAIN
) -> None:
    """Changes one byte of a record; those before `at=12` belong to its length."""
    file = shard_path(path, shard, split)
    data = bytearray(file.read_bytes())
    begin = 0
    for _ in range(record):
        # A length of 8 bytes, and checksums of it and of the record of 4 bytes each.
        size = int.from_bytes(data[begin : begin + 8], 'little')
        begin += 16 + size
    data[begin + at] ^= 1
    file.write_bytes(data)
