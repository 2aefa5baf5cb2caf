"""The benchmark of recipes: it draws with what it trained, and repeats nothing that is complete."""

import pytest

from benchmarks import recipes, runner


@pytest.mark.slow
def test_complete_runs_are_not_repeated_and_samplers_share_the_weights(tmp_path, capsys):
    flags = recipes.FLAGS, recipes.prepare
    arguments = [f'--dir={tmp_path}', '--keep', '--only=demo,guidance_2', '--repeats=2']
    arguments += ['--steps=12', '--num_prompts=4']

    def rows():
        assert runner.main('', recipes.SIDES, recipes.COLUMNS, *flags, arguments) == 0
        return capsys.readouterr().out.splitlines()[-2:]

    first = rows()
    assert [row.split('|')[1].strip() for row in first] == ['the demo', 'guidance of 2']
    # One loss a seed, whatever the sampler.
    losses = [row.split('|')[10] for row in first]
    assert losses[0] == losses[1]
    assert len(set(losses[0].split(' to '))) == 2
    (data,) = tmp_path.glob('*/emoji')
    results = list(data.glob('*.json'))
    assert len(results) == 4
    assert len(list(data.glob('*/checkpoints'))) == 2
    times = [path.stat().st_mtime_ns for path in results]
    assert rows() == first
    assert [path.stat().st_mtime_ns for path in results] == times
