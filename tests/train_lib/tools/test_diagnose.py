"""What holds a run back: its own engine is timed, and the times lead to a verdict."""

import re

import numpy as np
import pytest

from tests import children, runs
from train_lib.tools import diagnose

SMALL = {'batch_size': 16, 'data.lanes': 4}


@pytest.mark.parametrize(
    ('step', 'batch', 'words'),
    [
        ([0.1, 0.12], [0.005, 0.09], 'The devices are the limit'),
        ([0.1, 0.12], [0.2, 0.24], 'The input is the limit: devices wait about 50% of the time'),
        ([0.1, 0.12], [0.11, 0.2], 'The times overlap'),
        ([0.1, 0.12], [0.01, 0.13], 'The times overlap'),
    ],
)
def test_the_verdict_hedges_where_times_overlap(step, batch, words):
    said = diagnose.verdict(step, batch, 'rows')
    assert said.startswith(words)
    assert ('faster disk' in said) == ('input' in words)


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
def test_the_engine_of_the_run_is_timed(mini_dataset, engine):
    config = runs.small_config(mini_dataset, **SMALL, **{'data.engine': engine})
    step, batch, used = diagnose.time_steps_and_batches(config, hosts=2, step_ms=7.0, seconds=0.1)
    assert (step, used) == ([0.007], engine)
    assert min(batch) > 0


@pytest.mark.parametrize('hosts', [1, 2])
def test_the_mesh_is_that_of_the_run(mini_dataset, hosts):
    config = runs.small_config(mini_dataset, **SMALL, **{'mesh.fsdp': 7})
    with pytest.raises(ValueError, match=r'fsdp=7 does not make the \d+ devices'):
        diagnose.time_steps_and_batches(config, hosts=hosts, step_ms=7.0, seconds=0.1)


@pytest.mark.slow
def test_the_command_times_a_step_of_the_model_here(mini_dataset):
    fields = runs.SMALL | SMALL | {'data.dir': mini_dataset}
    flags = ['--config=default', '--seconds=0.2']
    flags += [f'--config.{name}={value}' for name, value in fields.items()]
    ended = children.program('train_lib.tools.diagnose', *flags)
    assert ended.returncode == 0, ended.stderr
    times = re.findall(r'^- a (?:step|batch) alone.*: ([\d.,]+) ms \(', ended.stdout, re.MULTILINE)
    assert len(times) == 2 and np.greater([float(t.replace(',', '')) for t in times], 0).all()
    assert len(ended.stdout.splitlines()) == 3


WRONG = {
    '--config.data.dir=none': 'none',
    '--seconds=nan': '--seconds=nan: expected a finite number',
    '--hosts=3': '--hosts=3 does not divide --config.batch_size=256',
}


@pytest.mark.parametrize(('flag', 'words'), WRONG.items(), ids=WRONG)
def test_what_cannot_be_diagnosed_is_an_error_in_one_line(mini_dataset, flag, words):
    given = '--config=default', '--step_ms=1', f'--config.data.dir={mini_dataset}'
    ended = children.program('train_lib.tools.diagnose', *given, flag, forked=True)
    assert (ended.returncode, ended.stdout) == (1, '')
    last = ended.stderr.splitlines()[-1]
    assert last.startswith('error: ') and words in last
