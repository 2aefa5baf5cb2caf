"""The benchmark of the input on little data: all sides resume, and are measured."""

import pytest

from benchmarks import input, readers, runner


@pytest.mark.slow
@pytest.mark.parametrize('cold', [False, True])
def test_the_command_measures_every_side(tmp_path, capsys, cold):
    arguments = [f'--dir={tmp_path}', '--gb=0.05', '--repeats=1', '--seconds=0.2']
    columns = {**input.COLUMNS, 'words': lambda runs: '' if 'resume' in runs[0] else 'once'}

    status = runner.main(
        '', input.SIDES, columns, input.FLAGS, input.prepare, [*arguments, *['--cold'] * cold]
    )

    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    header, _, *rows = [
        [cell.strip() for cell in line.split('|')[1:-1]] for line in lines if line[0] == '|'
    ]
    left_out = [line for line in lines if ', left out: ' in line]
    assert status == 0 and len(rows) + len(left_out) == len(input.SIDES)
    for row in (dict(zip(header, row, strict=True)) for row in rows):
        assert int(row['samples/s'].replace(',', '')) > 0
        # Also a warm reader may have to read a library.
        assert cold <= int(row['MB/s from the disk'].replace(',', '')) < (9999 if cold else 20)
        assert row['same batches'] == ('' if cold else 'yes'), row['side']
        assert bool(row['words']) == cold
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('cold', [False, True])
def test_epochs_that_are_too_short_are_refused(monkeypatch, cold):
    batches = [] if cold else [{}]
    stream = readers.BatchStream(lambda: batches, lambda count: '')
    monkeypatch.setattr(readers, 'short', lambda data, state: stream, raising=False)
    options = {'reader': 'short', 'data': '', 'format': '', 'module': '', 'num_samples': 256}
    with pytest.raises(RuntimeError, match=f'at least {"one" if cold else "two"} full batch'):
        input.read(seconds=0.1, cold=cold, **options)
