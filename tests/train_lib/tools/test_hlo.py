"""Costs read from compiled programs whose loops, products and exchanges are known."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import children
from train_lib.tools import hlo, hlo_costs


def _module(function, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return hlo.parse(jax.jit(function).lower(*arguments).compile().as_text())


def _layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_a_loop_is_multiplied_out():
    module = _module(_layers, (4, 32), (7, 32, 32))
    assert hlo_costs.matmul_flops(module) == 7 * 2 * 4 * 32 * 32
    assert {step.loops for step in hlo.executed(module)} == {(), (7,)}


def test_a_loop_in_a_loop_is_multiplied_out():
    def twice(x, weights):
        return jax.lax.fori_loop(0, 3, lambda _, x: _layers(x, weights), x)

    module = _module(twice, (4, 32), (7, 32, 32))
    assert hlo_costs.matmul_flops(module) == 3 * 7 * 2 * 4 * 32 * 32
    assert (3, 7) in {step.loops for step in hlo.executed(module)}


def test_products_of_batches_and_with_transposed_factors():
    module = _module(lambda a, b: jnp.einsum('bik,bjk->bij', a, b), (6, 5, 16), (6, 9, 16))
    assert hlo_costs.matmul_flops(module) == 2 * 6 * 5 * 9 * 16


def test_convolutions_count_what_lies_inside():
    def same(x, kernel):
        return jax.lax.conv(x, kernel, (1, 1), 'SAME')

    # Of 8 places in each direction, 3 kernel positions less the two that stick out: 22.
    module = _module(same, (2, 4, 8, 8), (5, 4, 3, 3))
    assert hlo_costs.matmul_flops(module) == 2 * 2 * 4 * 5 * 22 * 22


# As libtpu writes a product of batches: 64 of 256 x 64 times 64 x 256.
_TPU_PRODUCT = """HloModule m

%body (p: (s32[], f32[64,256,256])) -> (s32[], f32[64,256,256]) {
  %p = (s32[]{:T(128)}, f32[64,256,256]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %a = bf16[64,256,64]{2,1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="x"
  %b = bf16[64,256,64]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="x", a={m={
"xprof_metadata":"{}"
}}, metadata={op_name="a kernel"}
  %c = f32[64,256,256]{2,1,0:T(8,128)} convolution(%a, %b), WINDOW, dim_labels=0bf_0oi->0bf
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, f32[64,256,256]{2,1,0:T(8,128)}) tuple(%next, %c)
}

%condition (p.1: (s32[], f32[64,256,256])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[64,256,256]{2,1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit = s32[]{:T(128)} constant(24)
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: f32[64,256,256]) -> f32[64,256,256] {
  %x = f32[64,256,256]{2,1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} constant(START)
  %init = (s32[]{:T(128)}, f32[64,256,256]{2,1,0:T(8,128)}) tuple(%start, /*index=1*/%x)
  %w = (s32[], f32[64,256,256]{2,1,0}) while(%init), condition=%condition, body=%body
  ROOT %r = f32[64,256,256]{2,1,0:T(8,128)} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(('start', 'times'), [(0, 24), (1, 23)])
def test_a_loop_and_a_product_as_libtpu_writes_them(start, times):
    window = 'window={size=64 stride=63 lhs_dilate=64}'
    module = hlo.parse(_TPU_PRODUCT.replace('START', str(start)).replace('WINDOW', window))
    assert hlo_costs.matmul_flops(module) == times * 64 * 2 * 256 * 64 * 256
    read, written = 64 * 256 * 64 * 2, 64 * 256 * 256 * 4
    # `a` lies on the chip, so only `b` is read; what the custom calls write they write once.
    scalars = 3 * 4
    assert hlo_costs.memory_bytes(module) == times * (2 * read + written + scalars)


def test_a_loop_of_unknown_length_is_told():
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x + x @ x, x)

    module = _module(until, (8, 8))
    assert (0,) in {step.loops for step in hlo.executed(module)}
    assert hlo_costs.matmul_flops(module) == 2 * 8**3


def test_memory_traffic_is_that_of_operands_and_results():
    module = _module(lambda x, y: jnp.exp(x) + y * y, (256, 1024), (256, 1024))
    assert hlo_costs.memory_bytes(module) == 3 * 256 * 1024 * 4


def test_of_what_is_sliced_in_a_loop_the_slices_are_read():
    def total(x):
        return jax.lax.scan(lambda s, row: (s + jnp.sin(row), None), jnp.zeros(4096), x)[0]

    nbytes = hlo_costs.memory_bytes(_module(total, (1000, 4096)))
    # Each turn reads a row and the sum and writes the sum; not the thousand rows.
    assert 3 * 1000 * 4096 * 4 <= nbytes < 6 * 1000 * 4096 * 4


@pytest.mark.parametrize(
    ('dtype', 'nbytes'),
    [('pred', 6), ('s4', 3), ('f8e4m3fn', 6), ('bf16', 12), ('f32', 24), ('token', 0)],
)
def test_bytes_of_an_array(dtype, nbytes):
    assert hlo.Array(dtype, (2, 3)).nbytes == nbytes


def test_a_step_with_a_callback_has_costs():
    def told(x):
        jax.debug.callback(lambda _: None, x[0, 0], ordered=True)
        return x + 1

    nbytes = hlo_costs.memory_bytes(_module(told, (256, 1024)))
    assert nbytes >= 2 * 256 * 1024 * 4


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match='no compiled XLA program'):
        hlo.parse('module {}')


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('replica_groups={{0,1},{2,3}}', [[0, 1], [2, 3]]),
        ('replica_groups={}', [[0, 1, 2, 3]]),
        ('replica_groups=[2,2]<=[4]', [[0, 1], [2, 3]]),
        ('replica_groups=[2,2]<=[2,2]T(1,0)', [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={1}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ('source_target_pairs={{0,2},{1,1},{3,1}}', [[0, 2], [3, 1]]),
    ],
)
def test_every_notation_of_groups(text, expected):
    assert hlo_costs.device_groups(f', channel_id=1, {text}, metadata={{}}', 4).tolist() == expected


@pytest.mark.parametrize('text', ["replica_groups=mesh['a'=4] {'a':(1)2}", 'replica_groups=@x'])
def test_another_notation_of_groups_is_refused(text):
    with pytest.raises(ValueError, match='cannot tell which devices'):
        hlo_costs.device_groups(text, 4)


_EXCHANGES = """
import json, os
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from train_lib import sharding
from train_lib.tools import hlo, hlo_costs

mesh = sharding.make_mesh(4, 2)

def loop(function):
    return lambda x: jax.lax.fori_loop(0, 5, lambda _, x: function(x), x)

def gathered(x):
    return jax.lax.all_gather(x, 'fsdp', tiled=True)[: len(x)] + x

functions = {
    'gather': loop(gathered),
    'reduce': lambda x: jax.lax.psum(x, 'data') + x,
    'both': lambda x: jax.lax.psum(x, ('data', 'fsdp')) + x,
    'permute': lambda x: jax.lax.ppermute(x, 'data', [(i, (i + 1) % 4) for i in range(4)]),
    'exchange': lambda x: jax.lax.all_to_all(x, 'data', 0, 0, tiled=True),
}
found = {}
for name, function in functions.items():
    rows = P(('data', 'fsdp'))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 128), jnp.float32)).compile().as_text()
    found[name] = [
        (c.kind, c.axes, c.group_size, c.times, c.nbytes)
        for c in hlo_costs.collectives(hlo.parse(text), mesh)
    ]
print(json.dumps(found))
"""


def test_collectives_are_found_with_axis_size_and_times():
    with children.python(_EXCHANGES) as child:
        out, error = child.communicate()
    assert child.returncode == 0, error
    own = 64 * 128 * 4 / 8  # bytes a device holds
    assert json.loads(out) == {
        'gather': [['all-gather', ['fsdp'], 2, 5, own]],
        'reduce': [['all-reduce', ['data'], 4, 1, 2 * 3 / 4 * own]],
        'both': [['all-reduce', ['data', 'fsdp'], 8, 1, 2 * 7 / 8 * own]],
        'permute': [['collective-permute', ['data'], 2, 1, own]],
        'exchange': [['all-to-all', ['data'], 4, 1, 3 / 4 * own]],
    }


# As libtpu writes them: an exchange beside other work stands in each fusion that it spans, and a
# reduce-scatter is an all-reduce of which a slice is kept.
_TPU_EXCHANGES = """HloModule m

%part.1 (a: bf16[8,16]) -> bf16[8,64] {
  %a = bf16[8,16]{1,0} parameter(0)
  ROOT %g = bf16[8,64]{1,0} all-gather(%a), channel_id=5, GROUPS, chain_id="0"
}

%part.2 (a.2: bf16[8,16]) -> bf16[8,64] {
  %a.2 = bf16[8,16]{1,0} parameter(0)
  ROOT %g.2 = bf16[8,64]{1,0} all-gather(%a.2), channel_id=5, GROUPS, chain_id="0"
}

%scatter (s: f32[8,64]) -> f32[8,16] {
  %s = f32[8,64]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %r = f32[8,64]{1,0} all-reduce(%s), channel_id=6, replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %d = f32[8,16]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={8,16}
}

ENTRY %main (x: bf16[8,16], y: f32[8,64]) -> f32[8,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = f32[8,64]{1,0} parameter(1)
  %f.1 = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%part.1
  %f.2 = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%part.2
  ROOT %f.3 = f32[8,16]{1,0} fusion(%y), kind=kCustom, calls=%scatter
}
"""


def test_collectives_as_libtpu_writes_them():
    mesh = types.SimpleNamespace(devices=np.zeros((2, 4)), axis_names=('data', 'fsdp'))
    text = _TPU_EXCHANGES.replace('GROUPS', 'replica_groups=[2,4]<=[8], dimensions={1}')
    found = hlo_costs.collectives(hlo.parse(text), mesh)
    assert sorted((c.kind, c.axes, c.nbytes) for c in found) == [
        ('all-gather', ('fsdp',), 3 * 8 * 16 * 2),
        ('reduce-scatter', ('fsdp',), 3 / 4 * 8 * 64 * 4),
    ]
