"""The benchmark of recipes: it draws with what it trained, and repeats nothing that is complete."""

import pytest

from benchmarks import recipes, runner


@pytest.mark.slow
def test_complete_runs_are_not_repeated_and_samplers_share_the_weights(tmp_path, capsys):
    flags = recipes.FLAGS, recipes.prepare
    arguments = [f'--dir={tmp_path}', '--keep', '--only=demo,guidance_2,last_05', '--repeats=2']
    arguments += ['--steps=12', '--num_prompts=4']

    def rows():
        assert runner.main('', recipes.SIDES, recipes.COLUMNS, *flags, arguments) == 0
        return capsys.readouterr().out.splitlines()[-3:]

    first = rows()
    titles = [row.split('|')[1].strip() for row in first]
    assert titles == [
        'the demo',
        'guidance of 2',
        "mean of the times' logits 0.5 in the last 30%",
    ]
    # One loss a seed, whatever the sampler; a last phase has its own.
    losses = [row.split('|')[10] for row in first]
    assert losses[0] == losses[1] != losses[2]
    assert len(set(losses[0].split(' to '))) == 2
    (data,) = tmp_path.glob('*/emoji')
    results = list(data.glob('*.json'))
    assert len(results) == 6
    assert len(list(data.glob('*/checkpoints'))) == 4
    times = [path.stat().st_mtime_ns for path in results]
    assert rows() == first
    assert [path.stat().st_mtime_ns for path in results] == times
