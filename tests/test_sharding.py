"""Placement is a function of shapes: tables of what goes where."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from train_lib import sharding


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


@given(
    shape=st.lists(st.integers(1, 3000), max_size=3).map(tuple),
    fsdp=st.integers(1, 64),
)
def test_partition_spec_splits_one_dimension_evenly_or_none(shape, fsdp):
    spec = sharding.partition_spec(shape, fsdp)
    split = [size for size, axis in zip(shape, spec, strict=False) if axis is not None]
    assert len(split) <= 1
    assert all(size % fsdp == 0 for size in split)
    if split:
        assert np.prod(shape) >= sharding.MIN_SHARDED_SIZE
        assert split[0] == max(size for size in shape if size % fsdp == 0)


@pytest.mark.parametrize(
    ('data', 'fsdp'), [(2, 1), (-1, 2), (-1, 0), (0, 1), (-1, -1), (-2, 1), (1, 3)]
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(data, fsdp):
    with pytest.raises(ValueError, match=rf'data=.* x fsdp={fsdp} does not make the 1 devices'):
        sharding.make_mesh(data, fsdp, jax.devices()[:1])


def test_mesh_is_ordered_by_process_and_id():
    class Device:
        def __init__(self, process_index, number):
            self.process_index, self.id = process_index, number

        def __repr__(self):
            return f'{self.process_index}:{self.id}'

    # As on a TPU pod, where the ids of a host's chips need not follow each other.
    devices = [Device(p, i) for p, i in [(1, 2), (0, 5), (0, 0), (1, 3), (0, 1), (1, 7)]]
    mesh = sharding.make_mesh(-1, 3, devices)
    assert str(mesh.devices.tolist()) == '[[0:0, 0:1, 0:5], [1:2, 1:3, 1:7]]'
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 3}


def test_arrays_land_as_told():
    program = """
        import jax, jax.numpy as jnp
        from train_lib import sharding
        mesh = sharding.make_mesh(-1, 2)
        tree = {'kernel': jnp.zeros((256, 512)), 'bias': jnp.zeros(512)}
        placed = jax.device_put(tree, sharding.by_shape(tree, mesh))
        print({name: x.addressable_shards[0].data.shape for name, x in placed.items()})
        batch = jax.device_put(jnp.arange(8), sharding.batch(mesh))
        print([shard.data.tolist() for shard in batch.addressable_shards])
        print(jax.device_put(jnp.arange(3), sharding.replicated(mesh)).is_fully_replicated)
    """
    env = os.environ | {
        'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
        'JAX_PLATFORMS': 'cpu',
    }
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(program)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "{'bias': (512,), 'kernel': (256, 256)}",
        '[[0, 1], [2, 3], [4, 5], [6, 7]]',
        'True',
    ]


_COUNT = """
import socket, sys
import jax
from train_lib import sharding

port, index, name = sys.argv[1:]
jax.distributed.initialize(f'127.0.0.1:{port}', 3, int(index))
socket.gethostname = lambda: name
print(sharding.processes_on_host())
"""


def test_processes_of_one_host_share_its_memory():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, '-c', _COUNT, port, str(index), name],
            cwd=pathlib.Path(__file__).parents[1],
            env=os.environ | {'JAX_PLATFORMS': 'cpu'},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, name in enumerate(['a', 'b', 'a'])
    ]
    try:
        told = [process.communicate(timeout=120)[0].split()[-1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert told == ['2', '1', '2']
