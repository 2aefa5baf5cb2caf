"""The record of checksums that every build leaves, however it went."""

import pathlib

import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.storage.file_state import FileState, of_file
from tests import made_sources
from tests.convert.build_kills import end, final_folder, finished_shards, run, start, wait_until


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    files = [range(200), range(200, 400)]
    return made_sources.write_source(tmp_path_factory.mktemp('source'), files)


def assert_recorded(final: pathlib.Path) -> None:
    """What is recorded is what is there, and nothing else is there."""
    recorded = manifest.parse((final / schema.CHECKSUMS_FILE).read_bytes())
    names = {path.name for path in final.iterdir()} - {schema.CHECKSUMS_FILE}
    assert len(names) > 20
    assert recorded == {name: of_file(final / name) for name in names}


@pytest.mark.slow
def test_of_a_build_that_was_killed_and_of_one_that_replaces_it(source, tmp_path):
    final = final_folder(tmp_path)
    process = start(source, final, num_workers=2)
    wait_until(lambda: finished_shards(final) >= 5)
    process.kill()
    end(process)
    run(source, final, num_workers=2)
    assert_recorded(final)
    run(source, final, overwrite=True, settings={'shard_bytes': 300_000})
    assert_recorded(final)


def test_the_bytes_do_not_depend_on_the_order_of_the_files(tmp_path):
    files = {'b': FileState(3, 0), 'a': FileState(0, 0xFFFFFFFF)}
    contents = []
    for order in (files, dict(reversed(files.items()))):
        manifest.write(tmp_path, order)
        contents.append((tmp_path / schema.CHECKSUMS_FILE).read_bytes())
    assert contents[0] == contents[1]
    assert manifest.parse(contents[0]) == files


def test_every_changed_byte_is_noticed(tmp_path):
    manifest.write(tmp_path, {'a': FileState(12, 0x1F2E3D4C), 'b': FileState(345, 7)})
    whole = (tmp_path / schema.CHECKSUMS_FILE).read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        with pytest.raises(ValueError):
            manifest.parse(bytes(damaged))


@pytest.mark.parametrize('content', [b'', b'3', b'[]', b'{}', b'{"digest": 1}', b'\xff'])
def test_what_is_no_record_is_refused(content):
    with pytest.raises(ValueError):
        manifest.parse(content)
