"""The benchmark of a cold disk on little data: a row a reader, and nothing left behind."""

import pytest

from benchmarks import cold


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs it on little, and without dropping what other programs have in the page cache."""

    def run(*flags: str) -> tuple[str, str]:
        monkeypatch.setattr(cold, '_DROP', tmp_path / 'absent' / 'drop_caches')
        small = ['--gb=0.06', '--seconds=0.2', '--repeats=1', '--only=rows_in_place,torch']
        cold.main([f'--dir={tmp_path / "bench"}', *small, *flags])
        return capsys.readouterr()

    return run


def test_it_compares_readers_and_removes_what_it_made(run, tmp_path):
    said, complained = run()
    (tmp_path / 'bench' / 'cold').mkdir()  # it is gone
    rows = [line.split('|') for line in said.splitlines() if line.startswith('|')]
    assert [row[1].strip() for row in rows[2:]] == [
        'by rows, latents in place',
        'torch `DataLoader`, mapped `.pt`',
    ]
    for row in rows[2:]:
        assert float(row[2].replace(',', '')) > 0
    assert 'what is read twice comes from the memory' in said
    assert 'The disk in sequence: ' in said
    assert 'directories and inodes stay in memory' in complained


def test_a_folder_that_is_there_is_left_alone(run, tmp_path):
    kept = tmp_path / 'bench' / 'cold' / 'mine'
    kept.mkdir(parents=True)
    with pytest.raises(FileExistsError, match='cold'):
        run()
    assert kept.is_dir()
