"""Tests of the check of a configuration without a run."""

import re
import sys

import pytest

from tests import children, runs
from train_lib.tools import check


def test_a_configuration_that_fits(mini_dataset):
    # The decoder of a run without previews is not loaded.
    config = runs.small_config(mini_dataset, **{'preview.vae': '/none'})
    found = check.check_configuration(config)
    assert found['data'] == f'{mini_dataset}, text embeddings of hash'
    assert found['devices'] and 'unchecked' not in found


UNFIT = {
    'a batch of nothing': ('batch_size', 0, 'batch_size=0'),
    'a mesh of more devices than there are': ('mesh.fsdp', 7, 'mesh.*7'),
    'windows of more memory than there may be': ('data.ram_budget_gb', 1e-6, 'data.ram_budget_gb'),
    'lanes that do not divide the batch': ('data.lanes', 3, 'lanes'),
    'the weights of no run': ('init_from', '/', "init_from='/': / holds no checkpoint"),
    'a log of a package that is missing': ('wandb.project', 'x', 'wandb'),
}


@pytest.mark.parametrize(('field', 'value', 'message'), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_named(mini_dataset, monkeypatch, field, value, message):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    changes = {field: value, 'data.engine': 'chunks'}
    with pytest.raises(ValueError, match=message):
        check.check_configuration(runs.small_config(mini_dataset, **changes))


def test_without_a_data_set_all_else_is_checked_and_it_says_so():
    found = check.check_configuration(runs.small_config(''))
    assert (found['data'], list(found['unchecked'])) == (
        '',
        ['the data set, its encoder and the memory for reading it'],
    )
    with pytest.raises(ValueError, match=r"model\.name='huge/2': expected"):
        check.check_configuration(runs.small_config('', **{'model.name': 'huge/2'}))
    config = runs.small_config('', init_from='other', **{'model.text': 'sequence'})
    assert 'the weights of init_from' in check.check_configuration(config)['unchecked']


def test_of_a_pod_the_mesh_is_left_to_the_compiler(mini_dataset):
    config = runs.small_config(mini_dataset, distributed=True, **{'mesh.fsdp': 64})
    assert (
        'train_lib.tools.compile'
        in check.check_configuration(config)['unchecked']['the mesh of all hosts']
    )


def test_the_command_ends_with_one_line_of_what_is_wrong():
    flags = '--config=demo', '--config.data.dir=/no/such/folder'
    done = children.program('train_lib.tools.check', *flags, PYTHONPROFILEIMPORTTIME='1')
    assert (done.returncode, done.stdout) == (1, '')
    *lines, last = done.stderr.splitlines()
    assert last.startswith("error: --config.data.dir='/no/such/folder'")
    # It is known before the imports that take seconds.
    assert not [line for line in lines if re.search(r'\| +(jax|tensorflow|torch)$', line)]
