"""The head of a remote `.pt`: enough to check it, little to read, and never more than little."""

import io
import os
import pathlib
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import pt_archive
from coyo11m_tfds.source import pt_file
from coyo11m_tfds.source.pt_file import PtFile
from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.stored_file import StoredFile
from tests import made_sources
from tests.fakes.cloud import Fault, Gcs
from tests.fakes.fake_http import FakeServer

NAME = '000000-000009.pt'


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where heads are put."""
    path = tmp_path / 'heads'
    path.mkdir()
    return path


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A `.pt` of 1.5 MB, so that the latents are a large entry."""
    path = tmp_path_factory.mktemp('whole') / NAME
    made_sources.write_pt(path, range(400, 460))
    return path


def upload(bucket: Gcs, data: bytes) -> StoredFile:
    bucket.put('bucket', NAME, data)
    file = storage.describe_file(f'gs://bucket/{NAME}')
    bucket.clear()
    return file


def received(server: FakeServer) -> int:
    return sum(request.nbytes for request in server.requests if request.action == 'read')


def num_reads(server: FakeServer) -> int:
    return sum(request.action == 'read' for request in server.requests)


def used(path: str | os.PathLike[str]) -> int:
    """Bytes on disk, without holes."""
    return os.stat(path).st_blocks * 512


def assert_alike(head: str, whole: pathlib.Path) -> None:
    """Both files say the same of themselves."""
    assert os.path.getsize(head) == whole.stat().st_size
    a, b = PtFile(head), PtFile(whole)
    np.testing.assert_array_equal(a.keys, b.keys)
    assert (a.dtype, a.embedding_dim, a.digest) == (b.dtype, b.embedding_dim, b.digest)


def test_a_head_says_what_the_whole_file_says(bucket, folder, whole):
    """Also of an object whose name is longer than that of a file may be."""
    name = f'{"0" * 300}.pt'
    bucket.put('bucket', name, whole.read_bytes())
    file = storage.describe_file(f'gs://bucket/{name}')
    bucket.clear()
    head = PtFile.fetch_head(file, folder)
    assert_alike(head, whole)
    assert received(bucket) < 300_000
    assert used(head) < 300_000
    assert num_reads(bucket) <= 5
    assert os.listdir(folder) == [os.path.basename(head)]


def test_a_local_file_is_its_own_head(folder, whole):
    assert PtFile.fetch_head(storage.describe_file(whole), folder) == str(whole)
    assert os.listdir(folder) == []


@pytest.mark.parametrize(('rows', 'width'), [(0, 640), (1, 640), (41, 640), (100, 20_000)])
def test_files_of_a_few_rows(bucket, folder, tmp_path, rows, width):
    """Large embeddings are no part of the head."""
    embeddings = {'embeddings': torch.rand(rows, width)}
    made_sources.write_pt(tmp_path / NAME, range(rows), 'bfloat16', embeddings)
    head = PtFile.fetch_head(upload(bucket, (tmp_path / NAME).read_bytes()), folder)
    assert_alike(head, tmp_path / NAME)
    assert received(bucket) < 1_200_000


def test_a_file_of_thousands_of_tensors(bucket, folder, tmp_path):
    """Its directory does not fit where that of other files ends."""
    more = {f'more {number:05}': torch.full((number % 7,), number) for number in range(3000)}
    made_sources.write_pt(tmp_path / NAME, range(20), replace=more)
    PtFile.check_contents(tmp_path / NAME)
    data = (tmp_path / NAME).read_bytes()
    assert zipfile.ZipFile(tmp_path / NAME).start_dir < len(data) - 3 * pt_archive.TAIL_BYTES
    file = upload(bucket, data)
    assert_alike(PtFile.fetch_head(file, folder), tmp_path / NAME)
    # The first two requests read where other directories end.
    bucket.inject(Fault('slow', count=2, action='read', seconds=0))
    bucket.inject(Fault('flip', action='read', after_bytes=99))
    assert_alike(PtFile.fetch_head(file, folder), tmp_path / NAME)


def test_a_directory_that_would_be_most_of_a_file_is_refused(tmp_path, monkeypatch):
    more = {f'{number}': torch.zeros(1) for number in range(2000)}
    made_sources.write_pt(tmp_path / NAME, range(20), replace=more)
    monkeypatch.setattr(pt_archive, '_MAX_DIRECTORY', 1 << 17)
    with pytest.raises(ValueError, match=r'not a \.pt file .*its directory would take \d+,\d+ b'):
        PtFile(tmp_path / NAME)


def write_large_pt(path: pathlib.Path, rows: int) -> np.ndarray:
    """Writes a `.pt` with a hole for latents, but with its keys; returns these.

    torch leaves room for all storages, with a CRC-32 of 0; the keys and theirs are put in here.
    """
    keys = np.arange(rows, dtype=np.int64) * 7919
    latents = torch.empty((rows, *schema.LATENTS_SHAPE), dtype=torch.float16)  # never touched
    with torch.serialization.skip_data():
        torch.save({schema.PT_KEYS: torch.from_numpy(keys), schema.PT_LATENTS: latents}, path)
    with zipfile.ZipFile(path) as archive:
        entry, directory = archive.getinfo(f'{path.stem}/data/0'), archive.start_dir
    with path.open('r+b') as file:
        file.seek(entry.header_offset + 26)
        name, padding = struct.unpack('<HH', file.read(4))
        file.seek(name + padding, os.SEEK_CUR)
        file.write(keys.tobytes())
        file.seek(directory)
        crc_at = directory + file.read().index(entry.filename.encode()) - 46 + 16
        file.seek(crc_at)
        file.write(struct.pack('<I', zlib.crc32(keys.tobytes())))
    return keys


@pytest.fixture
def local_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Remote files are read from the disk instead, their URL being `gs:/` and a path.

    Lists how many bytes each read asked for.
    """
    lengths: list[int] = []

    def read_range(file: StoredFile, start: int, length: int) -> bytes:
        lengths.append(length)
        with open(file.path.removeprefix('gs:/'), 'rb') as stream:
            stream.seek(start)
            return stream.read(length)

    monkeypatch.setattr(StoredFile, 'read_range', read_range)
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)
    return lengths


def as_remote(path: pathlib.Path) -> StoredFile:
    return StoredFile(f'gs:/{path}', path.stat().st_size, 'v1', None)


def test_a_file_beyond_4_gb(folder, tmp_path, local_reads):
    """Its latents, and all that lies behind them, need the fields of 64 bits."""
    path = tmp_path / NAME
    keys = write_large_pt(path, 180_000)
    assert path.stat().st_size > 2**32
    head = PtFile.fetch_head(as_remote(path), folder)
    np.testing.assert_array_equal(PtFile(head).keys, keys)
    assert_alike(head, path)
    assert sum(local_reads) < 1_700_000  # keys have 1.44 MB
    assert used(head) < 1_700_000


@pytest.mark.parametrize(
    ('number', 'place'), [(0, -60), (0, -500), (1, -60), (1, -500), (2, 1000), (2, 20_000)]
)
def test_a_flipped_byte_on_its_way_does_no_harm(bucket, folder, whole, number, place):
    """In the directory, which is read twice, it may change the checksum of the latents."""
    file = upload(bucket, whole.read_bytes())
    bucket.inject(Fault('slow', count=number, action='read', seconds=0))
    after_bytes = place % min(file.size, pt_archive.TAIL_BYTES)
    bucket.inject(Fault('flip', action='read', after_bytes=after_bytes))
    assert_alike(PtFile.fetch_head(file, folder), whole)


def patch(data: bytes, changes: dict[int, bytes]) -> bytes:
    """`data` with these bytes at these places; negative ones count from the end."""
    changed = bytearray(data)
    for place, replacement in changes.items():
        place %= len(data)
        changed[place : place + len(replacement)] = replacement
    return bytes(changed)


def field(data: bytes, name: str, offset: int) -> int:
    """Where the directory has a field of an entry."""
    return data.rindex(f'{pathlib.Path(NAME).stem}/{name}'.encode()) - 46 + offset


def zip_of(sizes: dict[str, int], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, 'w', method) as archive:
        for name, size in sizes.items():
            archive.writestr(f'archive/{name}', bytes(size))
    return made.getvalue()


U32, U64 = struct.Struct('<I').pack, struct.Struct('<Q').pack
# The end of a .pt: the record of the directory's place in 64 bits, where that is, the old record.
END_64, LOCATOR, END = -22 - 20 - 56, -22 - 20, -22

HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    'empty': (lambda data: b'', r'truncated or not a .pt file \(0 bytes'),
    'truncated': (lambda data: data[:-1000], 'truncated or not a .pt file'),
    'a directory of 2**40 bytes': (
        lambda data: patch(data, {END_64 + 40: U64(2**40), END + 12: U32(2**32 - 1)}),
        'truncated or not a .pt file',
    ),
    'a directory of the whole file': (
        lambda data: patch(
            bytes(64 << 20) + data[-1000:],
            {END_64 + 40: U64((64 << 20) + 1000 - 98), END_64 + 48: U64(0)},
        ),
        'truncated or not a .pt file',
    ),
    'a directory beyond the end': (
        lambda data: patch(data, {END_64 + 48: U64(2**62), END + 16: U32(2**32 - 1)}),
        'does not fit before|truncated or not a .pt file',  # the latter of a newer zipfile
    ),
    'overlapping entries': (
        lambda data: patch(data, {field(data, 'data/1', 42): U32(0)}),
        'does not fit before',
    ),
    'many small entries': (
        lambda data: zip_of({f'data/{number}': 1 << 20 for number in range(10)}),
        'small members take 10,486,200 bytes, expected no more',
    ),
    'compressed': (
        lambda data: zip_of({'data/0': 1 << 24}, zipfile.ZIP_DEFLATED),
        'is compressed or encrypted',
    ),
    'same name': (lambda data: zip_of({'x': 1, 'X': 1}), 'two members have the same name'),
    'no members': (lambda data: zip_of({}), 'it has no members'),
    'prepended': (lambda data: b'#!/bin/sh\n' + data, 'does not begin at its first byte'),
}


@pytest.mark.parametrize('kind', HOSTILE)
def test_a_bad_file_is_refused_for_little(folder, tmp_path, whole, local_reads, kind):
    make, message = HOSTILE[kind]
    path = tmp_path / NAME
    path.write_bytes(make(whole.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as error:
            PtFile.fetch_head(as_remote(path), folder)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert sum(local_reads) < 150_000
    if kind != 'many small entries':  # which only a head would take
        for check in (PtFile.check_contents, pt_file.check_small_members, PtFile):
            with pytest.raises(ValueError, match=f'^{path}: .*({message})'):
                check(path)


@hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
def test_any_damage_of_the_directory_ends_in_one_of_two_errors(
    folder, tmp_path, whole, local_reads, data
):
    content = whole.read_bytes()
    changes = data.draw(
        st.dictionaries(
            st.integers(-1100, -1),
            st.sampled_from([b'\0', b'\1', b'\xff', b'\x7f', b'\xff' * 4, b'PK\1\2', U64(2**40)]),
            min_size=1,
            max_size=4,
        )
    )
    path = tmp_path / NAME
    path.write_bytes(patch(content, changes)[: len(content)])
    local_reads.clear()
    tracemalloc.start()
    try:
        PtFile.fetch_head(as_remote(path), folder)
    except (ValueError, retry.GivenUp) as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 10_000_000
    assert sum(local_reads) < 8 * 300_000
