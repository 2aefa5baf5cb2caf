"""Finding the files of a source, on disk, in a bucket and on the hub."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from typing import NamedTuple

import google_crc32c
import pytest

from coyo11m_tfds import mirror, schema, storage
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.stored_file import StoredFile
from tests import children
from tests.fakes.cloud import Fault
from tests.fakes.fake_http import FakeServer

CONTENTS = {
    'latents-3crop/000010-000019.pt': b'second file',
    'latents-3crop/000000-000009.pt': b'first',
    'latents-3crop/._000000-000009.pt': b'of macOS',
    'latents-3crop/README.md': b'latents',
    'latents-3crop/old/000000-000009.pt': b'in a folder',
    'coyo11m-meta.parquet': b'captions',
    'other.parquet': b'other',
    'README.md': b'source',
    'stray.pt': b'not in its folder',
}
LATENTS = ['000000-000009.pt', '000010-000019.pt']


class Place(NamedTuple):
    """Where a source lies: `root`; `put` makes it hold these files, and nothing else."""

    root: str
    put: Callable[[dict[str, bytes]], object]
    server: FakeServer


def make_place(request: pytest.FixtureRequest, kind: str) -> Place:
    if kind == 'hf':
        hub = request.getfixturevalue('hub')

        def commit(contents: dict[str, bytes]) -> None:
            files = {f'deep/source/{name}': data for name, data in contents.items()}
            hub.commit(files | {'README.md': b'beside', 'deep/source-and-more/x.pt': b''})

        return Place('hf://datasets/owner/name/deep/source', commit, hub)
    gcs = request.getfixturevalue('gcs')
    gcs.put('bucket', 'deep/source-and-more/x.pt', b'beside')
    root = str(request.getfixturevalue('tmp_path')) if kind == 'disk' else 'gs://bucket/deep'
    folder = storage.open_writable_folder(f'{root}/source')

    def put(contents: dict[str, bytes]) -> None:
        for name, data in contents.items():
            folder.write(name, data)

    return Place(folder.folder, put, gcs)


@pytest.fixture(params=['disk', 'gs', 'hf'])
def place(request: pytest.FixtureRequest) -> Place:
    return make_place(request, request.param)


@pytest.fixture(params=['gs', 'hf'])
def remote_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = make_place(request, request.param)
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.002')
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.3')
    place.put(CONTENTS)
    place.server.clear()
    return place


def test_the_files_of_a_source_in_order(place):
    place.put(CONTENTS)
    source = source_folder.find_source(place.root)
    assert [file.name for file in source.latent_files] == LATENTS
    assert [file.size for file in source.latent_files] == [5, 11]
    assert source.caption_files[0].name == schema.CAPTIONS_FILE
    assert source.caption_files[0].size == 8
    for file in source.latent_files:
        assert file.path == f'{source.root}/{schema.LATENTS_FOLDER}/{file.name}'
    assert source.caption_files[0].path == f'{source.root}/{schema.CAPTIONS_FILE}'
    assert source_folder.find_source(f'{place.root}/') == source
    assert source_folder.find_source(source.root) == source
    for name, file in source.by_name.items():
        label = '' if file in source.caption_files else name
        assert dataclasses.replace(storage.describe_file(file.path), label=label) == file
        assert bool(file.local_path) == bool(storage.local_path(place.root))


MISSING = {
    'the folder': ({}, r'{root} is not a folder; expected the folder of the source data\.'),
    'all files of latents': (
        {'coyo11m-meta.parquet', 'latents-3crop/._000000-000009.pt'},
        r'No \.safetensors, .*, \.parquet files in {root}/latents-3crop or {root}; expected files',
    ),
}


@pytest.mark.parametrize(('kept', 'message'), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_told(place, kept, message):
    place.put({name: data for name, data in CONTENTS.items() if name in kept})
    root = place.root
    if kept:  # on the hub it names the commit
        root = storage.open_folder(root).pin().folder
    with pytest.raises(ValueError, match=message.format(root=re.escape(root))):
        source_folder.find_source(place.root)


@pytest.mark.parametrize('name', ['a.tar.gz', 'latents-3crop/b.tgz', 'c.tar.zst'])
def test_compressed_tars_are_named(place, name):
    place.put({name: b'', 'coyo11m-meta.parquet': b''})
    with pytest.raises(ValueError, match=rf'{name} is compressed, and only plain tars are read'):
        source_folder.find_source(place.root)


def test_captions_may_lie_elsewhere(place):
    kept = {'latents-3crop/000000-000009.pt', 'other.parquet'}
    place.put({name: data for name, data in CONTENTS.items() if name in kept})
    source = source_folder.find_source(place.root)
    assert source.caption_files == ()
    message = rf'{source.root}/coyo11m-meta.parquet is missing; .*in the folder: other\.parquet\)'
    assert re.match(message, source.no_captions)


# Files that other programs put beside latents.
OTHERS = {'latents_stats.pt': b'', 'index.json.bak': b'', 'README.md': b''}


@pytest.mark.parametrize(
    'names',
    [
        ['latents_rank00_shard000.safetensors', 'latents_rank01_shard000.safetensors'],
        ['00000.tar', '00001.tar'],
        ['a.pt', 'latents_stats.pt'],
        ['shard.00000.mds', 'shard.00001.mds'],
    ],
    ids=lambda names: names[0],
)
def test_files_of_other_formats_beside_others(place, names):
    place.put(OTHERS | dict.fromkeys(names, b'x'))
    source = source_folder.find_source(place.root)
    assert list(source.by_name) == [file.name for file in source.latent_files] == names
    assert [file.label for file in source.latent_files] == names


def index_of(sizes: dict[str, int], compression: str | None = None) -> bytes:
    shards = [
        {'raw_data': {'basename': name, 'bytes': size}, 'compression': compression}
        for name, size in sizes.items()
    ]
    return json.dumps({'shards': shards}).encode()


def test_shards_in_the_order_of_their_index(place):
    sizes = {'1/shard.00000.mds': 3, '0/shard.00000.mds': 2}
    files = {name: b'x' * size for name, size in sizes.items()}
    place.put(files | {'index.json': index_of(sizes)})
    source = source_folder.find_source(place.root)
    assert [file.label for file in source.latent_files] == list(sizes)
    assert list(source.by_name) == [*sizes, 'index.json']
    for name, file in source.by_name.items():
        assert file.path == f'{source.root}/{name}'


BAD_INDICES = {
    'it names a shard that is gone': (
        index_of({'shard.00000.mds': 1, 'shard.00001.mds': 1}),
        '00001.mds: is missing, but ',
    ),
    'it says another size': (
        index_of({'shard.00000.mds': 9}),
        '00000.mds: has 1 byte, but .*index.json says 9 bytes',
    ),
    'its shards are compressed': (
        index_of({'shard.00001.mds': 1}, 'zstd'),
        r'00001\.mds: is compressed; write the shards',
    ),
    'it leads out of the folder': (
        index_of({'../shard.00000.mds': 1}),
        r'index\.json: is damaged or not an index',
    ),
    'it leads to a folder inside': (
        index_of({'0/1/shard.00000.mds': 1}),
        r'index\.json: is damaged or not an index',
    ),
    'it has no shards': (index_of({}), r'index\.json: has no shards'),
    'its shards are numbers': (b'{"shards": [3]}', r'index\.json: is damaged or not an index'),
    'it is nested too deeply': (
        b'{"shards":' + b'[' * 100_000,
        r'index\.json: is damaged or not an index',
    ),
}


@pytest.mark.parametrize(('index', 'message'), BAD_INDICES.values(), ids=BAD_INDICES)
def test_an_index_that_does_not_fit_is_refused(tmp_path, index, message):
    (tmp_path / 'shard.00000.mds').write_bytes(b'x')
    (tmp_path / 'index.json').write_bytes(index)
    with pytest.raises(ValueError, match=message):
        source_folder.find_source(tmp_path)


def test_a_file_instead_of_a_folder(place):
    place.put(CONTENTS)
    with pytest.raises(ValueError, match=r'README\.md is not a folder'):
        source_folder.find_source(f'{place.root}/README.md')


def test_a_file_that_is_not_there(place):
    place.put(CONTENTS)
    for name in ('absent.parquet', 'latents-3crop', 'README.md/x'):
        with pytest.raises(ValueError, match=rf'{name} is missing or a folder; expected a file'):
            storage.describe_file(f'{place.root}/{name}')


def test_versions_change_with_the_content_alone(place):
    place.put(CONTENTS)
    before = source_folder.find_source(place.root)
    place.put(CONTENTS | {'latents-3crop/000000-000009.pt': b'FIRST'})
    after = source_folder.find_source(place.root)
    assert after.latent_files[0].version != before.latent_files[0].version
    if not storage.local_path(place.root):  # written again, but the same
        assert after.latent_files[1].version == before.latent_files[1].version
        assert after.caption_files[0].version == before.caption_files[0].version


def test_a_link_to_nothing_is_not_overlooked(tmp_path):
    (tmp_path / 'latents-3crop').mkdir()
    (tmp_path / 'latents-3crop' / '000000-000009.pt').symlink_to(tmp_path / 'gone')
    with pytest.raises(ValueError, match=r'000000-000009\.pt is missing'):
        source_folder.find_source(tmp_path)


def test_importing_brings_no_library_of_a_storage():
    heavy = ('torch', 'tensorflow', 'gcsfs', 'huggingface_hub', 'fsspec', 'aiohttp', 'requests')
    code = f"""
        from coyo11m_tfds.source import source_folder
        from coyo11m_tfds.storage import disk, locks, retry, scratch
        print([name for name in {heavy} if name in sys.modules])
        source_folder.find_source(sys.argv[1])
    """
    with children.python(code, '/absent') as child:
        out, errors = child.communicate(timeout=60)
    assert out == '[]\n' and 'ValueError: /absent is not a folder' in errors


def test_checksums_in_a_bucket(gcs):
    gcs.put('bucket', 'x.pt', b'content')
    expected = f'crc32c:{google_crc32c.value(b"content"):08x}'
    file = storage.describe_file('gs://bucket/x.pt')
    assert file == StoredFile('gs://bucket/x.pt', 7, expected, expected)


def test_a_source_that_is_a_whole_bucket(gcs):
    for name, data in CONTENTS.items():
        gcs.put('bucket', name, data)
    for root in ('gs://bucket', 'gs://bucket/'):
        assert [file.name for file in source_folder.find_source(root).latent_files] == LATENTS
    for look in (source_folder.find_source, storage.describe_file):
        with pytest.raises(OSError, match=r'^gs://no-such-bucket: there is no such bucket'):
            look('gs://no-such-bucket/deep/source')


def test_more_files_than_a_page_of_the_listing_holds(gcs):
    for number in range(2100):
        gcs.put('bucket', f'latents-3crop/{number:06d}.pt', b'')
    gcs.put('bucket', 'coyo11m-meta.parquet', b'')
    assert len(source_folder.find_source('gs://bucket').latent_files) == 2100


def test_finding_reads_nothing_and_asks_seldom(remote_place):
    source_folder.find_source(remote_place.root)
    actions = [request.action for request in remote_place.server.requests]
    assert [action for action in actions if action != 'harnesses'] in (['list'] * 3, ['info'])


@pytest.fixture(params=['disk', 'gs'])
def mirrored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place that `mirror` has filled with `CONTENTS`."""
    place, original = make_place(request, request.param), tmp_path_factory.mktemp('original')
    for name in ('latents-3crop/000000-000009.pt', 'coyo11m-meta.parquet'):
        (original / name).parent.mkdir(exist_ok=True)
        (original / name).write_bytes(CONTENTS[name])
    mirror.mirror(original, place.root)
    return place


def test_a_copy_is_found_with_what_mirror_recorded(mirrored):
    source = source_folder.find_source(mirrored.root)
    for file, content in (
        (source.latent_files[0], b'first'),
        (source.caption_files[0], b'captions'),
    ):
        assert file.recorded == FileState(len(content), google_crc32c.value(content))


def test_a_copy_of_another_size_is_refused(mirrored):
    name = 'latents-3crop/000000-000009.pt'
    mirrored.put({name: b'longer than before'})
    message = rf'{name}: has 18 bytes .* when it was mirrored it had [58] bytes with'
    with pytest.raises(ValueError, match=message):
        source_folder.find_source(mirrored.root)
    if mirrored.root.startswith('gs://'):  # also of the same size, as its checksum is known
        mirrored.put({name: b'First'})
        with pytest.raises(ValueError, match=f'{name}: has 5 bytes with'):
            source_folder.find_source(mirrored.root)


def test_a_file_that_mirror_did_not_copy_is_told(mirrored, caplog):
    mirrored.put({'latents-3crop/000010-000019.pt': b'second file'})
    source = source_folder.find_source(mirrored.root)
    assert [file.recorded is None for file in source.latent_files] == [False, True]
    assert f'{source.latent_files[1].path}: mirror did not copy this file' in caplog.text


def test_a_damaged_record_counts_as_none(gcs, caplog):
    for name, data in CONTENTS.items():
        gcs.put('bucket', f'copy/{name}', data)
    gcs.put('bucket', 'copy/.mirror/coyo11m-meta.parquet.json', b'{"version": ')
    assert source_folder.find_source('gs://bucket/copy').caption_files[0].recorded is None
    assert 'mirror did not copy' not in caplog.text


def test_checksums_on_the_hub(hub):
    hub.commit({'x.pt': b'content', 'small.txt': b'small'})
    sha256 = hashlib.sha256(b'content').hexdigest()
    sha1 = hashlib.sha1(b'blob 5\0small').hexdigest()
    for name, checksum in (('x.pt', f'sha256:{sha256}'), ('small.txt', f'git-sha1:{sha1}')):
        assert storage.describe_file(f'hf://datasets/owner/name/{name}').checksum == checksum


def test_all_files_are_of_the_commit_that_was_found(hub):
    first = hub.commit(CONTENTS)
    root = 'hf://datasets/owner/name'
    source = source_folder.find_source(root)
    assert source.root == f'{root}@{first}'
    second = hub.commit(CONTENTS | {'coyo11m-meta.parquet': b'other captions'})
    assert storage.describe_file(source.caption_files[0].path) == source.caption_files[0]
    assert source_folder.find_source(root).root == f'{root}@{second}'
    assert source_folder.find_source(f'{root}@{first}') == source
    commit = hub.commit(CONTENTS, branch='refs/pr/1')
    for url in (f'{root}@refs/pr/1', f'{root}@refs%2Fpr%2F1'):
        assert source_folder.find_source(url).root == f'{root}@{commit}'


NOWHERE = {
    'a revision that is not there': ('hf://datasets/owner/name@absent', 'is not a folder'),
    'a model': ('hf://owner/name', 'is a model on the hub; expected hf://datasets/'),
    'an owner without a name': ('hf://datasets/owner', 'owner'),
}


@pytest.mark.parametrize(('url', 'message'), NOWHERE.values(), ids=NOWHERE)
def test_urls_of_the_hub_that_lead_nowhere(hub, url, message):
    hub.commit(CONTENTS)
    with pytest.raises(ValueError, match=message) as error:
        source_folder.find_source(url)
    assert url in str(error.value)


@pytest.mark.parametrize('kind', ['503', 'cut'])
def test_what_goes_wrong_twice_is_mended(remote_place, kind):
    expected = source_folder.find_source(remote_place.root)
    remote_place.server.inject(Fault(kind, count=2, match='list|info'))
    assert source_folder.find_source(remote_place.root) == expected
    remote_place.server.heal()
    remote_place.server.inject(Fault(kind, count=2, match='stat|list|info'))
    assert storage.describe_file(expected.caption_files[0].path) == expected.caption_files[0]


def test_what_stays_wrong_is_one_error(remote_place):
    remote_place.server.inject(Fault('503', count=None))
    with pytest.raises(OSError, match=r'listing .*source.*: given up after 8 attempts'):
        source_folder.find_source(remote_place.root)
    tries = [r for r in remote_place.server.requests if r.action in ('list', 'info')]
    assert len(tries) == 8  # no library makes eight of each of the eight


def test_missing_access_is_told_at_once(remote_place):
    remote_place.server.inject(Fault('401', count=None, match='list|info|stat'))
    command = r'`gcloud auth application-default login`|`hf auth login`.*/datasets/owner/name '
    for look in (source_folder.find_source, storage.describe_file):
        remote_place.server.clear()
        with pytest.raises(PermissionError, match=command) as error:
            look(f'{remote_place.root}')
        assert remote_place.root in str(error.value)
        assert len([r for r in remote_place.server.requests if r.action != 'harnesses']) <= 3


def test_a_gated_data_set_is_found_and_its_files_are_refused(hub):
    hub.commit(CONTENTS)
    hub.gated = True
    file = source_folder.find_source('hf://datasets/owner/name').caption_files[0]
    with pytest.raises(PermissionError, match=r'accept the terms .*datasets/owner/name '):
        file.read_range(0, 4)


def test_a_token_is_sent_to_the_hub_alone(hub, monkeypatch, tmp_path):
    """The stand-in refuses a token that comes with the signed address of the other host."""
    hub.commit(CONTENTS)
    hub.gated = True
    monkeypatch.setenv('HF_TOKEN', hub.token)
    netrc = tmp_path / 'netrc'
    netrc.write_text('machine 127.0.0.1 login someone password else\n')
    netrc.chmod(0o600)
    monkeypatch.setenv('NETRC', str(netrc))
    file = source_folder.find_source('hf://datasets/owner/name').caption_files[0]
    assert file.read_range(0, 8) == b'captions'
