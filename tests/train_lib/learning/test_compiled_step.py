"""The compiled training step on eight devices: what moves between them, and what lies on each.

A child process has the devices; the model is small, its tokens are 15 and its words 7, which divide
no size of weights, so that what moves can be told from its shape.
"""

import json

import numpy as np
import pytest

from tests import children

_PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from configs import default
from train_lib.learning import flow, models, sharding, step
from train_lib.tools import hlo

models.SIZES['test'] = {'width': 128, 'depth': 3, 'num_heads': 4}
config = default.get_config()
config.update_from_flattened_dict({
    'batch_size': 16, 'num_steps': 20, 'model.name': 'test/2', 'model.remat': 'full',
    'optimizer.warmup_steps': 1, 'optimizer.learning_rate': 3e-2,
    'optimizer.muon_learning_rate': 3e-3,
})
rng = np.random.default_rng(0)
batch = {
    'latents': 4 + rng.standard_normal((16, 4, 6, 10)).astype(np.float16),
    'text_embedding': rng.standard_normal((16, 32)).astype(np.float16),
    'key': np.zeros((16, 2), np.uint32),
}

first = []  # the state, whose initialization is compiled once
words = rng.integers(-1, 1024, (16, 6), np.int32)  # and one for no text

def on_mesh(data, fsdp, optimizer='adamw', text='pooled'):
    config.optimizer.name, config.model.text = optimizer, text
    vocabulary = 1024 if text == 'sequence' else 0
    mesh = sharding.make_mesh(data, fsdp)
    facts = {'latents_shape': (1, 4, 6, 10), 'vocabulary': vocabulary}
    made = step.make_program(config, mesh, flow.no_stats(32, **facts))
    own = batch
    if vocabulary:
        own = {'tokens': words} | {name: batch[name] for name in ('latents', 'key')}
    placed = jax.device_put(own, sharding.batch(mesh))
    compiled = made.train_step.func.lower(None, made.abstract_state, placed).compile()
    if not first:
        first.append(jax.device_get(made.init()))
    placements = jax.tree.map(lambda leaf: leaf.sharding, made.abstract_state)
    state, losses = jax.device_put(first[0], placements), []
    for _ in range(4):
        state, update = compiled(None, state, placed)
        losses.append(float(update.loss.total) / 16)
    moved = [
        dict(kind=c.kind, members=c.members, layers=3 in c.loops, shapes=[x for _, x in c.arrays])
        for c in hlo.read_costs(compiled.as_text()).collectives
    ]
    of_state = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(made.abstract_state)
    )
    of_batch = sum(x.nbytes for x in own.values()) / 8
    return {
        'losses': losses, 'moved': moved, 'computed': int(of_state + of_batch),
        'arguments': compiled.memory_analysis().argument_size_in_bytes,
    }

options = {'plain': {}, 'muon': {'optimizer': 'muon'}, 'words': {'text': 'sequence'}}[sys.argv[1]]
print(json.dumps({'8x1': on_mesh(8, 1, **options), '4x2': on_mesh(4, 2, **options)}))
"""

KINDS = ['plain', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('muon', 'words'))]


@pytest.fixture(scope='module', params=KINDS)
def steps(request):
    """What the child says of the step on a mesh of 8 x 1 and on one of 4 x 2."""
    return json.loads(children.output(_PROGRAM, request.param, devices=8, forked=True))


def test_in_the_loop_over_layers_no_tokens_move_between_devices(steps):
    in_layers = [move for move in steps['4x2']['moved'] if move['layers']]
    assert {'all-gather', 'all-reduce'} <= {move['kind'] for move in in_layers}
    sizes = [np.prod(shape) for move in in_layers for shape in move['shapes']]
    assert not [size for size in sizes if size % 15 == 0 or size % 7 == 0]


def test_weights_move_along_fsdp_and_gradients_in_float32(steps):
    for mesh in steps.values():
        gathered = [m for m in mesh['moved'] if m['kind'] == 'all-gather' and m['layers']]
        assert all(move['members'] == 2 for move in gathered)
    assert [m for m in steps['4x2']['moved'] if m['kind'] == 'all-gather']


def test_fsdp_gives_the_losses_of_data_parallelism(steps):
    # bfloat16 has 8 bits: parts of a sum that are added in another order differ by 2^-8 or so,
    # and four steps carry that on.
    whole, split = (steps[mesh]['losses'] for mesh in ('8x1', '4x2'))
    np.testing.assert_allclose(split, whole, rtol=0.01)
    assert min(whole) < 0.9 * whole[0]  # it learns, so that the steps matter


def test_fsdp_takes_the_memory_of_a_device_that_was_computed(steps):
    for mesh in steps.values():
        assert mesh['arguments'] == pytest.approx(mesh['computed'], rel=0.001)
    assert steps['4x2']['arguments'] < 0.6 * steps['8x1']['arguments']  # all but small arrays
