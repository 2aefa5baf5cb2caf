"""Placement is a function of shapes: tables of what goes where."""

import collections
import contextlib
import dataclasses
import json
import random
import types

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from tests import children, runs
from train_lib.learning import sharding
from train_lib.tools import compile, costs


@pytest.mark.parametrize(
    ('shape', 'fsdp', 'expected'),
    [
        ((), 4, P()),
        ((1152,), 4, P()),  # small
        ((2**16,), 4, P('fsdp')),
        ((2**16 - 4,), 4, P()),  # just small
        ((1152, 3456), 4, P(None, 'fsdp')),  # the largest
        ((4608, 1152), 4, P('fsdp')),
        ((512, 512), 4, P(None, 'fsdp')),  # of equals, the last
        ((28, 1152, 4608), 4, P(None, None, 'fsdp')),
        ((28, 4608, 1152), 4, P(None, 'fsdp')),
        ((1001, 512), 4, P(None, 'fsdp')),  # the largest is not divisible
        ((1001, 513), 4, P()),  # none is
        ((28, 1152, 4608), 1, P()),  # nothing to split over
        ((28, 1152, 4608), 5, P()),
        ((28, 1152, 4608), 7, P('fsdp')),
    ],
)
def test_partition_spec(shape, fsdp, expected):
    assert sharding.partition_spec(shape, fsdp) == expected


@pytest.mark.parametrize(
    ('data', 'fsdp'), [(2, 1), (-1, 2), (-1, 0), (0, 1), (-1, -1), (-2, 1), (1, 3)]
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(data, fsdp):
    with pytest.raises(ValueError, match=rf'data=.* x fsdp={fsdp} does not make the 1 devices'):
        sharding.make_mesh(data, fsdp, jax.devices()[:1])


@dataclasses.dataclass(frozen=True)
class _Chip:
    id: int
    coords: tuple[int, int, int]
    process_index: int


def _tpu_slice(columns, rows):
    """Stand-ins of the chips of a slice whose hosts have 2 x 2, shuffled; as on v5e and v6e."""
    chips = [
        _Chip(id=columns * y + x, coords=(x, y, 0), process_index=y // 2 * (columns // 2) + x // 2)
        for y in range(rows)
        for x in range(columns)
    ]
    return random.Random(0).sample(chips, len(chips))


def _assert_the_mesh_keeps_rows_and_links(mesh, hosts):
    devices = list(mesh.devices.flat)
    # Rows are split over the mesh in this order: process p has to have the p-th part.
    assert [d.process_index for d in devices] == sorted(d.process_index for d in devices)
    places = collections.defaultdict(list)
    for device in devices:
        places[device.process_index].append(device.coords)
    assert len(places) == hosts
    for coords in places.values():
        ring = zip(coords, coords[1:] + coords[:1], strict=True)
        assert all(sum(map(abs, np.subtract(a, b))) == 1 for a, b in ring)  # one link apart
        own = np.subtract(coords, coords[0])
        np.testing.assert_array_equal(own, np.subtract(places[0], places[0][0]))


@pytest.mark.parametrize('fsdp', [1, 2, 4, 8, 16])
@pytest.mark.parametrize('shape', [(4, 4), (8, 16), (16, 16)])
def test_on_a_slice_hosts_keep_their_rows_and_their_chips_make_a_ring(shape, fsdp):
    mesh = sharding.make_mesh(-1, fsdp, _tpu_slice(*shape))
    _assert_the_mesh_keeps_rows_and_links(mesh, hosts=shape[0] * shape[1] // 4)
    groups = [{device.process_index for device in row} for row in mesh.devices]
    assert {len(group) for group in groups} == {max(1, fsdp // 4)}  # hosts that share weights


def test_stand_ins_are_as_the_chips_of_real_topologies():
    pytest.importorskip('libtpu')

    def facts(devices):
        return sorted((d.id, tuple(d.coords), d.process_index) for d in devices)

    for shape in ((4, 4), (8, 16), (16, 16)):
        real = compile.slice_devices(f'v5e:{shape[0]}x{shape[1]}')
        assert facts(real) == facts(_tpu_slice(*shape))
    slices = topologies.get_topology_desc(platform='tpu', topology_name='v5e:4x4', num_slices=2)
    mesh = sharding.make_mesh(-1, 4, slices.devices)
    assert [d.slice_index for d in mesh.devices.flat] == [0] * 16 + [1] * 16
    _assert_the_mesh_keeps_rows_and_links(mesh, hosts=8)


@pytest.mark.parametrize(
    ('data', 'fsdp', 'expected', 'options'),
    [
        (1, 1, 0, {}),
        (8, 1, 2 * 7 / 8 * 4 * (2**20 + 10), {}),  # an all-reduce of float32
        (8, 1, 2 * 7 / 8 * 2 * (2**20 + 10), {'gradient_bytes': 2}),
        (1, 4, 3 / 4 * (2 + 2 + 4) * 2**20 + 2 * 3 / 4 * 4 * 10, {}),  # the bias stays whole
        (2, 4, (3 / 4 * 8 + 2 / 2 * 4 / 4) * 2**20 + 2 * 7 / 8 * 4 * 10, {}),
    ],
)
def test_least_bytes_of_a_step(data, fsdp, expected, options):
    params = {'kernel': np.zeros((2**10, 2**10), np.float32), 'bias': np.zeros(10, np.float32)}
    mesh = types.SimpleNamespace(shape={'data': data, 'fsdp': fsdp}, size=data * fsdp)
    assert costs.least_bytes(params, mesh, **options) == pytest.approx(expected)


_MAP = """
import json
import jax, numpy as np
from train_lib.learning import sharding
from train_lib.tools import costs, hlo

sharding.MIN_SHARDED_SIZE = 64

def on_mesh(shape, data, fsdp):
    mesh, taken = sharding.make_mesh(data, fsdp, jax.devices()[:data * fsdp]), []
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 7
    placed = jax.device_put(x, sharding.by_shape(x, mesh))

    def function(matrices):
        taken.append(matrices.shape)
        return matrices * matrices.sum((1, 2), keepdims=True)  # whole numbers: no rounding

    jitted = jax.jit(lambda x: sharding.map_matrices(mesh, function, x))
    compiled = jitted.lower(placed).compile()
    result = compiled(placed)
    least = [costs.least_bytes(x, mesh, compute_bytes=4, muon_mask=m) for m in (True, False)]
    np.testing.assert_array_equal(result, x * x.sum((-2, -1), keepdims=True))
    return {
        'taken': taken[0],
        'placed': result.sharding == placed.sharding,
        'moved': sum(c.nbytes for c in hlo.read_costs(compiled.as_text()).collectives),
        'least': least[0] - least[1],
    }

print(json.dumps([on_mesh(*arguments) for arguments in json.loads(sys.argv[1])]))
"""

# Shape of a stack, data, fsdp: matrices that a device takes, and whether the least moves.
TAKEN = {
    ((8, 16, 48), 1, 1): (8, True),
    ((8, 16, 48), 8, 1): (1, True),
    ((8, 16, 48), 2, 4): (1, True),
    ((8, 48, 16), 4, 2): (1, True),
    ((2, 4, 16, 48), 2, 2): (2, True),
    ((8, 3, 5), 2, 4): (1, False),  # split along the stack: whole as they are
    ((7, 16, 48), 2, 4): (1, False),
    ((5, 5, 5), 2, 4): (3, False),  # nothing to split: every device of a group takes all
    ((3, 16, 48), 8, 1): (1, False),  # four groups and four more
    ((16, 48), 2, 4): (1, False),
}


def test_devices_take_whole_matrices_and_all_get_what_one_device_would():
    out = children.output(_MAP, json.dumps([(*key,) for key in TAKEN]), devices=8, forked=True)
    for key, found in zip(TAKEN, json.loads(out), strict=True):
        count, is_least = TAKEN[key]
        assert found['taken'] == [count, *key[0][-2:]], key
        assert found['placed'], key
        assert not is_least or found['moved'] == found['least'], key


_COUNT = """
import os, socket
os.environ['JAX_PLATFORMS'] = 'cpu'
import jax
from train_lib.learning import sharding

port, index, name = sys.argv[1:]
jax.distributed.initialize(f'127.0.0.1:{port}', 3, int(index))
socket.gethostname = lambda: name
print(sharding.processes_on_host())
"""


@pytest.mark.slow
def test_processes_of_one_host_share_its_memory():
    port = runs.free_port()
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(children.python(_COUNT, port, index, name))
            for index, name in enumerate('aba')
        ]
        told = [child.communicate(timeout=120)[0].split()[-1] for child in started]
    assert told == ['2', '1', '2']
