"""Every configuration is complete, fits its machine, and can be built into a program."""

import importlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from coyo11m_tfds import schema
from tests.checkout import CHECKOUT
from train_lib import flow, sharding, step

NAMES = sorted(path.stem for path in (CHECKOUT / 'configs').glob('*.py'))

# (hosts, chips a host) of the machines that the names promise.
PODS = {'tpu_v5e_16': (4, 4), 'tpu_v5e_128': (32, 4), 'tpu_v5e_256': (64, 4)}

V5E_MEMORY = 16e9  # bytes a chip


def _get(name):
    return importlib.import_module(f'configs.{name}').get_config()


def _stats():
    return flow.Stats(*(np.ones(n, np.float32) for n in (4, 4, 640, 640)))


def test_the_configurations_that_were_promised_are_there():
    assert set(NAMES) == {'default', 'demo', 'gpu', *PODS}


@pytest.mark.parametrize('name', NAMES)
def test_fields_are_those_of_the_default_and_locked(name):
    config, default = _get(name), _get('default')
    assert config.is_locked
    assert jax.tree.structure(config.to_dict()) == jax.tree.structure(default.to_dict())
    with pytest.raises(AttributeError):
        config.learning_rte = 1


@pytest.mark.parametrize('name', NAMES)
def test_lanes_and_chunks_are_such_as_the_pipeline_takes(name):
    config, default = _get(name), _get('default')
    assert config.batch_size % config.data.lanes == 0
    assert config.data.chunk % schema.CHUNK_STRIDE == 0
    assert config.checkpoint_every > 0
    # Or more of a batch would come from the same chunks.
    share = config.batch_size // config.data.lanes
    assert share <= default.batch_size // default.data.lanes


@pytest.mark.parametrize(('name', 'pod'), PODS.items())
def test_a_pod_divides_lanes_and_batch(name, pod):
    config = _get(name)
    hosts, chips = pod
    said = re.search(
        r'\((\d+) hosts of (\d+) chips\)', importlib.import_module(f'configs.{name}').__doc__
    )
    assert tuple(map(int, said.groups())) == pod
    assert config.distributed
    assert config.data.lanes % hosts == 0
    assert config.batch_size % (hosts * chips) == 0
    assert chips % config.mesh.fsdp == 0  # weights are gathered inside a host


@pytest.mark.parametrize('name', NAMES)
def test_a_program_can_be_made(name):
    config = _get(name)
    config.mesh.fsdp = 1
    mesh = sharding.make_mesh(**config.mesh)
    vocabulary = 4096 if config.model.text == 'sequence' else 0
    made = step.make_program(
        config, mesh, _stats(), latent_shape=(32, 32, 4), vocabulary=vocabulary
    )
    assert made.abstract_state.step.shape == ()


@pytest.mark.parametrize('name', PODS)
def test_state_and_gradient_leave_half_of_a_chip_to_activations(name):
    config = _get(name)
    fsdp = config.mesh.fsdp
    config.mesh.fsdp = 1
    mesh = sharding.make_mesh(**config.mesh)
    abstract = step.make_program(config, mesh, _stats(), latent_shape=(32, 32, 4)).abstract_state

    def nbytes(leaf):
        split = sharding.partition_spec(leaf.shape, fsdp) != P()
        return np.prod(leaf.shape) * leaf.dtype.itemsize / (fsdp if split else 1)

    total = sum(map(nbytes, jax.tree.leaves((abstract, abstract.params))))
    assert total < V5E_MEMORY / 2


def test_the_default_configuration_explains_every_field():
    """There is no other description of the fields."""
    source = (CHECKOUT / 'configs' / 'default.py').read_text()
    for path, _ in jax.tree.leaves_with_path(_get('default').to_dict()):
        assert re.search(rf'\.{path[-1].key} = .*  # \S', source), path
