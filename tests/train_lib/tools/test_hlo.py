"""What is read from compiled programs whose loops, estimates and exchanges are known."""

import json

import jax
import jax.numpy as jnp
import pytest

from tests import children
from train_lib.tools import hlo


def _loops(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo.read_costs(jax.jit(function).lower(*arguments).compile().as_text()).loops


def _layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_loops_have_their_lengths():
    def twice(x, weights):
        return jax.lax.fori_loop(0, 3, lambda _, x: _layers(x, weights), x)

    assert _loops(_layers, (4, 32), (7, 32, 32)) == {(), (7,)}
    assert _loops(twice, (4, 32), (7, 32, 32)) == {(), (3,), (3, 7)}


def test_a_loop_of_unknown_length_has_length_0():
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x + x @ x, x)

    assert (0,) in _loops(until, (8, 8))


# As libtpu writes a loop, a fusion that it has estimated, a kernel, and exchanges: one beside other
# work stands in each fusion that it spans, a reduce-scatter is an all-reduce and a slice of it.
_TPU = """HloModule m, num_partitions=8

%part.1 (a: bf16[8,16]) -> bf16[8,64] {
  %a = bf16[8,16]{1,0} parameter(0)
  ROOT %g = bf16[8,64]{1,0} all-gather(%a), channel_id=5, GROUPS
}

%part.2 (a.2: bf16[8,16]) -> bf16[8,64] {
  %a.2 = bf16[8,16]{1,0} parameter(0)
  ROOT %g.2 = bf16[8,64]{1,0} all-gather(%a.2), channel_id=5, GROUPS
}

%all-reduce-scatter.1 (s: f32[8,64]) -> f32[8,16] {
  %s = f32[8,64]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %r = f32[8,64]{1,0} all-reduce(%s), channel_id=6, replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %d = f32[8,16]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={8,16}
}

%body (p: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %p = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %b = bf16[64,256,64]{2,1,0:T(8,128)(2,1)} custom-call(), KERNEL, a={m={
"xprof_metadata":"{}"
}}, metadata={op_name="a kernel"}
  %c = bf16[8,64]{1,0:T(8,128)} fusion(%b), kind=kOutput, calls=%part.3, NAME, CYCLES:"1000"}}
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, /*index=1*/bf16[8,64]{1,0:T(8,128)}) tuple(%next, %c)
}

%part.3 (b.3: bf16[64,256,64]) -> bf16[8,64] {
  %b.3 = bf16[64,256,64]{2,1,0} parameter(0)
  ROOT %c.3 = bf16[8,64]{1,0} copy(%b.3), CYCLES:"9"}}
}

%condition (p.1: (s32[], bf16[8,64])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit = s32[]{:T(128)} constant(24)
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: bf16[8,16], y: f32[8,64]) -> bf16[8,64] {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = f32[8,64]{1,0} parameter(1)
  %f.1 = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%part.1
  %f.2 = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%part.2, CYCLES:"7"}}
  %f.3 = f32[8,16]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %f.4 = f32[6]{0} all-reduce(%y), channel_id=7, replica_groups={}, to_apply=%part.3
  %start = s32[]{:T(128)} constant(START)
  %start.1 = s32[]{:T(128)} copy(%start)
  %init = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)}) tuple(%start.1, /*index=1*/%f.2)
  %w = (s32[], bf16[8,64]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %r = bf16[8,64]{1,0} get-tuple-element(%w), index=1
}
"""
for _short, _long in {
    'GROUPS': 'replica_groups=[2,4]<=[8], dimensions={1}, frontend_attributes={chain_id="0"}',
    'KERNEL': 'custom_call_target="tpu_custom_call"',
    'NAME': 'metadata={op_name="jit(f)/mlp_1/dot"}',
    'CYCLES': 'backend_config={"window_config":{"estimated_cycles"',
}.items():
    _TPU = _TPU.replace(_short, _long)


@pytest.mark.parametrize(('start', 'times'), [(0, 24), (1, 23)])
def test_estimates_and_kernels_are_counted_as_often_as_they_run(start, times):
    costs = hlo.read_costs(_TPU.replace('START', str(start)))
    cycles = {name: count for name, count in costs.cycles.items() if count}
    assert cycles == {'jit(f)/mlp_1/dot': times * 1000, '': 7}
    assert costs.kernels == {hlo.Kernel('b', 64): times}


def test_collectives_as_libtpu_writes_them():
    exchanges = hlo.read_costs(_TPU.replace('START', '0')).collectives
    assert sorted((c.kind, c.members, c.arrays[0][0], c.nbytes, c.is_async) for c in exchanges) == [
        ('all-gather', 4, 'bf16', 3 * 8 * 16 * 2, True),
        ('all-reduce', 8, 'f32', 2 * 7 / 8 * 6 * 4, False),
        ('reduce-scatter', 4, 'f32', 3 / 4 * 8 * 64 * 4, False),
    ]


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match='not a compiled XLA program'):
        hlo.read_costs('module {}')


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('replica_groups={{0,1},{2,3}}', 2),
        ('replica_groups=[2,4]<=[2,4]T(1,0)', 4),
        ('replica_groups=[16]<=[16]', 16),
        ("replica_groups=mesh['a'=2,'b'=3] {'b'}, dimensions={1}", 3),
        ("replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a','b'}", 6),
        ('source_target_pairs={{0,2},{1,1},{3,1}}', 2),
        ('source_target_pairs={{0,0}}', 1),
    ],
)
def test_every_notation_of_groups(text, expected):
    assert hlo.members(f', channel_id=1, {text}, metadata={{}}') == expected


@pytest.mark.parametrize('text', ["replica_groups=mesh['a'=4] {'a':(1)2}", 'replica_groups=@x'])
def test_another_notation_of_groups_is_refused(text):
    with pytest.raises(ValueError, match='cannot tell how many devices'):
        hlo.members(text)


_EXCHANGES = """
import json
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from train_lib.learning import sharding
from train_lib.tools import hlo

mesh = sharding.make_mesh(4, 2)

def gathered(_, x):
    return jax.lax.all_gather(x, 'fsdp', tiled=True)[: len(x)] + x

functions = {
    'gather': lambda x: jax.lax.fori_loop(0, 5, gathered, x),
    'reduce': lambda x: jax.lax.psum(x, 'data') + x,
    'both': lambda x: jax.lax.psum(x, ('data', 'fsdp')) + x,
    'permute': lambda x: jax.lax.ppermute(x, 'data', [(i, (i + 1) % 4) for i in range(4)]),
    'exchange': lambda x: jax.lax.all_to_all(x, 'data', 0, 0, tiled=True),
}
exchanges = {}
for name, function in functions.items():
    rows = P(('data', 'fsdp'))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 128), jnp.float32)).compile().as_text()
    costs = hlo.read_costs(text).collectives
    exchanges[name] = [(c.kind, c.members, c.loops, c.nbytes) for c in costs]
print(json.dumps(exchanges))
"""


def test_collectives_have_their_sizes_and_times():
    own = 64 * 128 * 4 / 8  # bytes a device holds
    assert json.loads(children.output(_EXCHANGES, devices=8, forked=True)) == {
        'gather': [['all-gather', 2, [5], 5 * own]],
        'reduce': [['all-reduce', 4, [], 2 * 3 / 4 * own]],
        'both': [['all-reduce', 8, [], 2 * 7 / 8 * own]],
        'permute': [['collective-permute', 2, [], own]],
        'exchange': [['all-to-all', 4, [], 3 / 4 * own]],
    }
