"""Every configuration is complete, fits its machine, and can be built into a program."""

import importlib
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from configs import default
from coyo11m_tfds import schema
from tests import built
from tests.checkout import CHECKOUT
from train_lib import draw, export, train
from train_lib.learning import flow, models, sharding, step, step_encoder
from train_lib.results import caption_encoder

NAMES = sorted(path.stem for path in (CHECKOUT / 'configs').glob('*.py'))

# (hosts, chips a host) of the machines that the names promise.
PODS = {'tpu_v5e_16': (4, 4), 'tpu_v5e_128': (32, 4), 'tpu_v5e_256': (64, 4)}

V5E_MEMORY = 16e9  # bytes a chip


def _get(name):
    return importlib.import_module(f'configs.{name}').get_config()


def test_the_configurations_that_were_promised_are_there():
    assert set(NAMES) == {'default', 'demo', 'emoji', 'gpu', 'small', *PODS}


@pytest.mark.parametrize('name', NAMES)
def test_fields_are_those_of_the_default_and_locked(name):
    config, base = _get(name), _get('default')
    assert config.is_locked
    assert jax.tree.structure(config.to_dict()) == jax.tree.structure(base.to_dict())
    with pytest.raises(AttributeError):
        config.learning_rte = 1


@pytest.mark.parametrize('name', NAMES)
def test_lanes_and_chunks_are_such_as_the_pipeline_takes(name):
    config, base = _get(name), _get('default')
    assert config.batch_size % config.data.lanes == 0
    assert config.data.chunk % schema.CHUNK_STRIDE == 0
    assert config.checkpoint_every > 0
    # Or more of a batch would come from the same chunks.
    share = config.batch_size // config.data.lanes
    assert share <= base.batch_size // base.data.lanes


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
    # Groups that gather weights are whole hosts.
    assert config.mesh.fsdp % chips == 0 == hosts * chips % config.mesh.fsdp


def _state(config):
    """Shapes of the state, on one device."""
    config.mesh.fsdp = 1
    mesh = sharding.make_mesh(**config.mesh)
    encoder = step_encoder.abstract_step_encoder(config.encoder, mesh, dtype=config.model.dtype)
    vocabulary = encoder.network.config.vocab_size if encoder else 0
    if not encoder and config.model.text != 'pooled':
        vocabulary = 4096  # as with records of tokens, which the demo has
    stats = flow.no_stats(640, vocabulary=vocabulary)
    return step.make_program(config, mesh, stats, encoder).abstract_state


def test_a_first_trial_needs_no_text_and_says_so(sample_source, tmp_path, caplog):
    caplog.set_level('INFO')
    config = _get('small')
    config.data.dir = str(built.build(sample_source, '', tmp_path))
    config.model.update(name='tiny/16', depth=1, width=8, num_heads=1)
    config.update(num_steps=2, eval_every=0, preview_every=2, log_every=1)
    config.optimizer.warmup_steps = 1
    config.preview.update(count=2, num_steps=2)
    state = train.train_and_evaluate(config, tmp_path / 'W')
    assert int(state.step) == 2 and not int(state.skipped)
    assert not any('text' in name for name in state.params['conditioning'])
    assert 'no text: the model learns to draw without captions' in caplog.text
    assert [*(tmp_path / 'W' / 'previews').iterdir()]
    with pytest.raises(ValueError, match='was trained without text and knows no captions'):
        caption_encoder.load(draw.Artist(tmp_path / 'W').facts)
    with pytest.raises(ValueError, match='was trained without text'):
        export.export(tmp_path / 'W', tmp_path / 'E')


def test_a_batch_of_the_default_keeps_little_for_the_backward_pass():
    """Or it would not fit into an accelerator of 16 GB; `make pods` compiles it for one."""
    assert models.make_model(**_get('default').model).remat == 'full'
    assert models.make_model(**_get('gpu').model).remat == 'dots'  # for 80 GB


@pytest.mark.parametrize('name', NAMES)
def test_a_program_can_be_made(name):
    assert _state(_get(name)).step.shape == ()


@pytest.mark.parametrize('name', PODS)
def test_state_and_gradient_leave_half_of_a_chip_to_activations(name):
    config = _get(name)
    fsdp = config.mesh.fsdp
    state = _state(config)

    def nbytes(leaf):
        split = sharding.partition_spec(leaf.shape, fsdp) != P()
        return np.prod(leaf.shape) * leaf.dtype.itemsize / (fsdp if split else 1)

    assert sum(map(nbytes, jax.tree.leaves((state, state.params)))) < V5E_MEMORY / 2


@pytest.mark.parametrize('name', [*PODS, 'gpu'])
def test_learning_rates_are_those_of_the_width(name):
    config, same = _get(name), _get('default')
    same.batch_size, same.optimizer.name = config.batch_size, config.optimizer.name
    default.set_learning_rates(same, models.make_model(**config.model, vocabulary=8).width)
    assert config.optimizer.to_dict() == same.optimizer.to_dict()


@given(st.integers(1, 2**16), st.sampled_from([384, 768, 1024, 1152]))
def test_learning_rates_follow_batch_size_and_width(samples, width):
    def rate(samples, width):
        config = _get('default')
        default.set_learning_rates(config, width)
        config.batch_size = samples  # as on the command line, later
        assert config.optimizer.muon_learning_rate == config.optimizer.learning_rate
        return config.optimizer.learning_rate

    assert rate(256, 1152) == 1e-4
    assert rate(4 * samples, width) == pytest.approx(2 * rate(samples, width))
    assert rate(samples, 2 * width) == pytest.approx(rate(samples, width) / 2)


def test_a_learning_rate_that_is_asked_for_stays():
    config = _get('tpu_v5e_16')
    config.optimizer.learning_rate = 1e-3
    config.batch_size = 4096
    assert config.optimizer.learning_rate == 1e-3 > config.optimizer.muon_learning_rate


def test_the_default_configuration_explains_every_field():
    """There is no other description of the fields."""
    source = (CHECKOUT / 'configs' / 'default.py').read_text()
    for path, _ in jax.tree.leaves_with_path(_get('default').to_dict()):
        assert re.search(rf'\.{path[-1].key} = .*  # \S', source), path
