"""Tests of the mirror: from everywhere to everywhere, faults of both sides, kills and resumes."""

import dataclasses
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import mirror, schema, storage
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.storage import json_digest, locks
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.scratch import Scratch
from tests import children, damages
from tests.fakes.cloud import Fault

CAPTIONS = schema.CAPTIONS_FILE
LATENTS = schema.LATENTS_FOLDER


def _make_files(size: int = 300_000) -> dict[str, bytes]:
    """A source as far as the mirror looks at it: names and bytes."""
    chance = random.Random(0)
    names = [f'{LATENTS}/{i:06d}-{i + 9:06d}.pt' for i in range(0, 40, 10)]
    return {name: chance.randbytes(size + i) for i, name in enumerate([*names, CAPTIONS])}


FILES = _make_files()


def _files_in(place: object) -> dict[str, bytes | None]:
    """All files except those of the mirror itself."""
    folder = storage.open_folder(place)
    return {name: folder.read(name) for name in folder.sizes() if not name.startswith('.')}


@pytest.fixture
def local(tmp_path) -> str:
    for name, data in FILES.items():
        storage.open_writable_folder(tmp_path / 'from').write(name, data)
    return str(tmp_path / 'from')


@pytest.fixture
def in_bucket(gcs) -> str:
    for name, data in FILES.items():
        gcs.put('bucket', f'from/{name}', data)
    gcs.put('bucket', 'from/', b'')
    gcs.put('bucket', 'from/README.md', b'hello')
    return 'gs://bucket/from'


@pytest.fixture
def on_hub(hub) -> str:
    hub.commit({**FILES, 'README.md': b'hello', 'docs/more.md': b'more', '.git/x.md': b''})
    return 'hf://datasets/owner/name'


@pytest.fixture(params=['local', 'in_bucket', 'on_hub'])
def source(request) -> str:
    return request.getfixturevalue(request.param)


def test_all_files_arrive_once(source, place, gcs, tmp_path):
    for num_copied in (5, 0):
        gcs.clear()
        summary = mirror.mirror(source, place, scratch_dir=tmp_path / 'scratch')
        assert (summary.num_files, summary.num_copied) == (5, num_copied)
        assert summary.num_bytes == sum(len(data) for data in FILES.values())
        assert _files_in(place) == FILES
    written = [r.path for r in gcs.requests if r.action in ('upload', 'copy', 'start')]
    assert not [path for path in written if not path.endswith('.lock')]
    assert source_folder.find_source(place).caption_files[0].size == len(FILES[CAPTIONS])
    assert storage.open_folder(os.path.dirname(place)).read('set.lock') is None
    assert _files_in(tmp_path / 'scratch') == {}


def test_between_buckets_nothing_comes_here(gcs, in_bucket):
    mirror.mirror(in_bucket, 'gs://other')
    assert not any(r.action == 'read' and r.path.startswith('bucket/') for r in gcs.requests)
    assert {n for n in gcs.objects('other') if not n.startswith('.mirror/')} == set(FILES)


def test_long_names_in_other_letters(gcs, hub, tmp_path):
    """Of which each takes three bytes, and nine where it is quoted."""
    names = [f'{LATENTS}/{"潜" * 80}{digit}.pt' for digit in '12']
    files = {name: FILES[CAPTIONS][:1000] + name.encode() for name in names}
    files[CAPTIONS] = FILES[CAPTIONS]
    hub.commit(files)
    places = 'hf://datasets/owner/name', str(tmp_path / 'to'), 'gs://bucket/to', tmp_path / 'back'
    for source, target in itertools.pairwise(places):
        for num_copied in (3, 0):
            summary = mirror.mirror(source, target, scratch_dir=tmp_path / 'scratch')
            assert summary.num_copied == num_copied
        assert all(file.recorded for file in source_folder.find_source(target).latent_files)
    mirror.mirror(places[0], 'gs://bucket/hub', scratch_dir=tmp_path / 'scratch')
    assert _files_in(tmp_path / 'back') == _files_in('gs://bucket/hub') == files


def test_only_what_changed_is_copied_again(local, place):
    mirror.mirror(local, place)
    first, second, third, fourth, _ = FILES
    # The source has another version of one file and lacks one.
    (pathlib.Path(local) / first).write_bytes(b'new')
    (pathlib.Path(local) / fourth).unlink()
    # At the destination one is gone, one has other bytes of the same length, one lost its record.
    target = storage.open_writable_folder(place)
    target.remove([second])
    target.write(third, bytes([FILES[third][0] ^ 1]) + FILES[third][1:])
    target.write(f'.mirror/{json_digest.sha256(CAPTIONS)[:32]}.json', b'{"version": 1')
    assert mirror.mirror(local, place).num_copied == 4
    assert _files_in(place) == FILES | {first: b'new'}
    assert mirror.mirror(local, place).num_copied == 0


def test_a_receipt_that_cannot_be_read_has_its_file_copied_again(local, tmp_path):
    target = tmp_path / 'to'
    mirror.mirror(local, target)
    receipts = sorted((target / '.mirror').iterdir())
    intact = receipts[0].read_bytes()
    for content in [*damages.record_damages(intact), receipts[1].read_bytes()]:
        receipts[0].write_bytes(content)
        assert len(source_folder.find_source(target).by_name) == 5
        assert mirror.mirror(local, target).num_copied == 1
        assert receipts[0].read_bytes() == intact
    receipts[0].unlink()
    receipts[0].mkdir()
    # What others leave in folders, and a receipt under another name.
    for name in ('.DS_Store', 'notes.json', b'\xff.json'.decode('utf-8', 'surrogateescape')):
        (target / '.mirror' / name).write_bytes(b'{}')
    (target / '.mirror' / f'{0:032}.json').write_bytes(intact)
    assert [mirror.mirror(local, target).num_copied for _ in range(2)] == [1, 0]
    assert _files_in(target) == FILES


def test_a_file_that_grows_while_it_is_copied(local, place, tmp_path):
    target = storage.open_writable_folder(place)
    path = os.path.join(local, CAPTIONS)
    file = dataclasses.replace(storage.describe_file(path), size=5)
    with pytest.raises(OSError, match=r'listed \(it has 300,004 bytes, not 5\)'):
        target.copy(file, 'x', Scratch(tmp_path / 'scratch'), ignore_bytes)
    assert target.inventory() == {}


def test_mixed_faults(gcs, on_hub, hub, tmp_path, monkeypatch):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.4')
    kinds = ['429', '503', 'cut', 'stall', 'reset', 'flip']
    hub.inject_share(kinds, share=0.2, seed=1)
    gcs.inject_share([*kinds, 'lost'], share=0.1, seed=2, everywhere=True)
    mirror.mirror(on_hub, 'gs://bucket/to', scratch_dir=tmp_path / 'scratch')
    mirror.mirror('gs://bucket/to', tmp_path / 'back')
    mirror.mirror('gs://bucket/to', 'gs://bucket/again')
    gcs.heal()
    for place in ('gs://bucket/to', 'gs://bucket/again', tmp_path / 'back'):
        assert _files_in(place) == FILES


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT])
def test_a_killed_mirror_leaves_nothing_half_made(gcs, tmp_path, number):
    files = _make_files(2_000_000)
    for name, data in files.items():
        gcs.put('bucket', f'from/{name}', data)
    # Half of each file arrives, and then nothing more.
    gcs.inject(
        Fault('stall', count=None, match='read bucket/from', after_bytes=1_000_000, seconds=1.5)
    )
    command = sys.executable, '-m', 'coyo11m_tfds.mirror', 'gs://bucket/from', tmp_path / 'to'
    with subprocess.Popen(
        command,
        env=os.environ | {'COYO11M_STALL_SECONDS': '60'},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        parts = tmp_path / 'to' / '.staging'
        children.wait_until(
            lambda: sum(path.stat().st_size for path in parts.glob('*/x')) > 3_000_000
        )
        child.send_signal(number)
        gcs.heal()
        _, errors = child.communicate()
    if number != signal.SIGKILL:  # it has cleared up and said how far it was
        assert child.returncode == 128 + number
        assert '0 of 5 files' in errors and 'Traceback' not in errors
        assert ('Interrupted: what was copied stays' in errors) == (number == signal.SIGINT)
        assert not (tmp_path / 'to.lock').exists()
    assert not set(files) & set(_files_in(tmp_path / 'to'))
    gcs.heal()
    assert mirror.mirror('gs://bucket/from', tmp_path / 'to').num_copied == 5
    assert _files_in(tmp_path / 'to') == files
    assert not (tmp_path / 'to' / '.staging').exists()


def test_the_command(command, gcs, on_hub, hub, tmp_path):
    scratch = tmp_path / 'scratch'
    arguments = on_hub, 'gs://bucket/to', f'--scratch={scratch}'
    status, said, errors = command(mirror, *arguments, '--parallel=2')
    assert (status, _files_in('gs://bucket/to')) == (0, FILES), errors
    assert said == '5 files, 1.5 MB, are verified at gs://bucket/to; 5 of them were copied now.\n'
    hub.inject(Fault('401', count=None))
    status, _, errors = command(mirror, *arguments)
    assert status == 1
    assert errors.startswith('error: ') and 'hf auth login' in errors


REFUSED = {
    'no folder to read': (
        ('', 'to'),
        {},
        'no folder given, expected one to read',
    ),
    'no folder to write to': (('.', ''), {}, 'no folder given, expected one to write to'),
    'nothing at once': (('.', 'to'), {'parallel': 0}, 'parallel=0: expected at least 1'),
    'a remote scratch folder, before the source is looked for': (
        ('absent', 'to'),
        {'scratch_dir': 'hf://datasets/a/b'},
        "scratch_dir is 'hf://datasets/a/b', expected a local folder",
    ),
}


@pytest.mark.parametrize(('places', 'options', 'message'), REFUSED.values(), ids=REFUSED)
def test_empty_text_is_no_folder(local, monkeypatch, places, options, message):
    """As of a variable of the shell that is not set: neither `/` nor the current folder."""
    monkeypatch.chdir(local)
    with pytest.raises(ValueError, match=message):
        mirror.mirror(*places, **options)


def test_captions_do_not_replace_latents_of_their_name(tmp_path):
    for folder, column in (('hub', 'latents'), ('captions', 'caption')):
        (tmp_path / folder).mkdir()
        table = pa.table({'key': [1], column: [b'x']})
        pq.write_table(table, tmp_path / folder / 'train.parquet')
    captions = str(tmp_path / 'captions' / 'train.parquet')
    message = rf'^captions={captions!r}: the copy would take the place of .*/hub/train\.parquet'
    with pytest.raises(ValueError, match=message):
        mirror.mirror(tmp_path / 'hub', tmp_path / 'copy', captions=captions)
    assert not (tmp_path / 'copy').exists()


def test_a_disk_with_just_enough_for_the_rest(in_bucket, tmp_path, monkeypatch):
    left = sum(len(data) for data in FILES.values())
    usage = shutil.disk_usage(tmp_path)._replace(free=left)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=left - 1))
    with pytest.raises(OSError, match=r'to has 1\.\d MB free, but needs 1\.\d MB more'):
        mirror.mirror(in_bucket, tmp_path / 'to')
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    assert mirror.mirror(in_bucket, tmp_path / 'to').num_copied == 5


def test_another_mirror_to_the_same_place(local, tmp_path):
    with (
        locks.hold(tmp_path / 'to'),
        pytest.raises(TimeoutError, match=f'process {os.getpid()} on .* is working there'),
    ):
        mirror.mirror(local, tmp_path / 'to')
