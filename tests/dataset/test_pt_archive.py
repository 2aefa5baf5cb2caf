"""The archive of a `.pt`: whatever happened to it is told, or has done no harm."""

import io
import json
import pathlib
import random
import struct
import zipfile

import pytest
import torch

from coyo11m_tfds.dataset import pt_archive
from coyo11m_tfds.source.pt_file import PtFile
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.file_state import FileState
from tests import children, made_sources
from tests.damages import damages

NAME = '000000-000009.pt'
LATENTS = made_sources.make_latents(5)


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    """A good file of 100 KB."""
    made_sources.write_pt(
        tmp_path / NAME, range(50, 54), replace={'embeddings': torch.rand(4, 5).half()}
    )
    return tmp_path / NAME


def contents(path: pathlib.Path) -> tuple:
    """All that a build takes from a file, after the checks that it makes."""
    PtFile.check_contents(path)
    shard = PtFile(path)
    rows = range(len(shard.keys))
    raw, _ = shard.latents(rows)
    embeddings = shard.embeddings(rows).tolist() if shard.embedding_dim else None
    return shard.keys.tolist(), raw.tobytes(), shard.dtype, embeddings


def patched(data: bytes, at: int, replacement: bytes) -> bytes:
    return data[:at] + replacement + data[at + len(replacement) :]


def shared_storages() -> dict:
    latents, keys = made_sources.make_latents(6), torch.arange(6)
    return {'more': latents[:2], 'latents': latents[1:], 'keys': keys[:5], 'again': keys}


@pytest.mark.parametrize(
    'content',
    [
        {'keys': torch.arange(3), 'latents': made_sources.make_latents(3, 'bfloat16')},
        {'keys': torch.arange(0), 'latents': made_sources.make_latents(0)},
        {'odd': torch.zeros(77, dtype=torch.uint8), 'ä': 'text', **shared_storages()},
        {'keys': torch.arange(9)[::3], 'latents': made_sources.make_latents(6)[::2]},
    ],
    ids=['plain', 'empty', 'shared', 'strided'],
)
def test_what_torch_saves_is_accepted(tmp_path, content):
    torch.save(content, tmp_path / NAME)
    keys, raw, _, _ = contents(tmp_path / NAME)
    assert keys == content['keys'].tolist()
    assert raw == content['latents'].contiguous().view(torch.uint8).numpy().tobytes()


class ComparingZipFile(zipfile.ZipFile):
    """Looks for the zip64 record where its locator says, as Python does since CVE-2025-8291."""

    def __init__(self, file):
        assert file.seek(0, io.SEEK_END) == file.tell()
        assert file.seek(-22 - 20, io.SEEK_END) == file.tell()
        locator, _, offset, _ = struct.unpack('<4sLQL', file.read(20))
        assert locator == b'PK\x06\x07'
        assert file.seek(offset) == file.tell() == offset
        if file.read(4) != b'PK\x06\x06':
            raise zipfile.BadZipFile('Corrupt zip64 end of central directory locator')
        super().__init__(file)


@pytest.mark.parametrize('rows', [2, 60], ids=['smaller than the tail', 'larger'])
def test_a_zipfile_that_compares_offsets_reads_the_same(tmp_path, monkeypatch, rows):
    made_sources.write_pt(tmp_path / NAME, range(rows))
    archive, expected = pt_archive.open_archive(tmp_path / NAME), contents(tmp_path / NAME)
    with zipfile.ZipFile(tmp_path / NAME) as whole:
        assert [m.begin for m in archive.members] == [x.header_offset for x in whole.infolist()]
    monkeypatch.setattr(zipfile, 'ZipFile', ComparingZipFile)
    assert pt_archive.open_archive(tmp_path / NAME) == archive
    assert contents(tmp_path / NAME) == expected


def test_any_damage_is_told_or_does_no_harm(path):
    data, expected = path.read_bytes(), contents(path)
    with zipfile.ZipFile(path) as archive:
        directory = range(archive.start_dir, len(data), 2)
    choose, refused = random.Random(0), 0
    damaged = [choose.choice([*damages(data, choose, data[1:]).values()]) for _ in range(300)]
    # The directory has no checksum.
    changes = [(at, data[at] ^ choose.choice((0x01, 0x80, 0xFF))) for at in directory]
    damaged += [patched(data, at, bytes([byte])) for at, byte in changes]
    for content in damaged:
        path.write_bytes(content)
        try:
            assert contents(path) == expected
        except ValueError as error:
            assert str(error).startswith(f'{path}: '), repr(error)
            assert type(error) is ValueError
            refused += 1
    assert refused > 200 + len(directory) / 2


CONTRADICTIONS = {
    'no signature': (0, b'QK'),
    'a method of compression': (8, b'\x08'),
    'another name': (30, b'x'),
    'more fields than there are': (28, b'\xff\xff'),
}


@pytest.mark.parametrize(('offset', 'replacement'), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_header_that_contradicts_the_directory_is_refused(path, offset, replacement):
    begin = pt_archive.open_archive(path).members[4].begin
    path.write_bytes(patched(path.read_bytes(), begin + offset, replacement))
    with pytest.raises(ValueError, match=r'data/0.* contradicts the directory'):
        PtFile.check_contents(path)


def test_a_file_saved_without_checksums_needs_to_be_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        made_sources.write_pt(tmp_path / NAME, range(3))
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(ValueError, match=r'set_crc32_options\(False\), set check_crc to false in'):
        PtFile.check_contents(tmp_path / NAME)
    PtFile.check_contents(tmp_path / NAME, check_crc=False)


@pytest.mark.parametrize('check_crc', [True, False])
def test_a_copy_must_be_what_was_recorded(path, check_crc):
    recorded = file_state.compute_state(path)
    PtFile.check_contents(path, check_crc=check_crc, recorded=recorded)
    data = path.read_bytes()
    header = data.index(b'ZZZZ')  # padding, of which no CRC-32 tells
    path.write_bytes(patched(data, header, b'Y'))
    with pytest.raises(
        ValueError, match=rf'{NAME}: has .* but when it was mirrored it had {len(data):,}'
    ):
        PtFile.check_contents(path, check_crc=check_crc, recorded=recorded)
    with pytest.raises(ValueError, match='mirrored'):
        PtFile.check_contents(path, check_crc=check_crc, recorded=FileState(5, 7))


BOMBS = {
    'keys .*share memory': {'keys': torch.zeros(1, dtype=torch.int64).expand(10**8)},
    'latents .* strides .*share memory': {
        'latents': torch.zeros(1).half().expand(10**6, 3, 4, 32, 32)
    },
    'latents .*share memory': {
        'latents': torch.zeros(12_388).half().as_strided((100, 3, 4, 32, 32), (1,) * 5)
    },
    'embeddings .*share memory': {'embeddings': torch.zeros(1).expand(50, 10**8)},
}


def test_tensors_that_are_not_stored_are_refused_for_little_memory(tmp_path):
    """In a process of its own, whose memory may grow by 100 MB."""
    refused = {}
    for number, (message, content) in enumerate(BOMBS.items()):
        refused[f'{tmp_path}/{number}.pt'] = message
        made_sources.write_pt(tmp_path / f'{number}.pt', range(50), replace=content)
    claims = tmp_path / 'claims.pt'
    made_sources.write_pt(claims, range(300), replace={'latents': LATENTS})
    in_pickle = [b'M' + struct.pack('<H', count) for count in (300, 60_000)]
    claims.write_bytes(claims.read_bytes().replace(*in_pickle))
    message = r'keys of shape \(60000,\) takes 480,000 bytes, but 2,400 are stored'
    refused[str(claims)] = message
    program = """
        import json, re
        from coyo11m_tfds.source.pt_file import PtFile
        def peak():
            with open('/proc/self/status') as status:
                return int(re.search('VmHWM:(.*)kB', status.read())[1])
        before = peak()
        for path, message in json.loads(sys.argv[1]).items():
            try:
                PtFile(path)
            except ValueError as error:
                said = str(error)
                assert f'{path}: ' in said and re.search(message, said), error
            else:
                sys.exit(path)
        assert peak() - before < 100_000, peak() - before
    """
    with children.python(program, json.dumps(refused)) as child:
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
