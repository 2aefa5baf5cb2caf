"""The placement of arrays on devices: the mesh, and one rule from shapes to shardings.

    mesh = sharding.make_mesh(data=-1, fsdp=4)
    states = sharding.by_shape(jax.eval_shape(init, rng), mesh)   # pytree of NamedSharding
    batches = sharding.batch(mesh)

The mesh has two axes: a batch is split over both, large parameters only over `fsdp`. With `fsdp=1`
this is plain data parallelism. The whole state (weights, their average, the optimizer's moments)
follows the same rule, because moments have the shapes of their weights.
"""

import math
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA_AXIS = 'data'
FSDP_AXIS = 'fsdp'

# Arrays of fewer elements stay whole on every device: to gather a bias or a norm's scale takes
# longer than the memory it saves is worth.
MIN_SHARDED_SIZE = 2**16


def make_mesh(data: int = -1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays all devices out as `(data, fsdp)`.

    Processes come in their order, so that process p holds the p-th part of the rows of a batch,
    whatever the hardware: the same batch gives the same global array on any number of hosts. It
    also puts the members of an `fsdp` group on one host where they fit, on neighbouring hosts
    where they do not, and inside one of several slices, whose processes follow each other.
    Inside a host chips come such that each is linked to the next: the four of a TPU host make a
    ring, along which they gather weights, and chips with the same place in their hosts reduce
    gradients.

    `jax.experimental.mesh_utils.create_device_mesh` keeps to links as well, but gives a host rows
    that do not follow each other, and does not do 64 x 4 of v5e:16x16.

    Args:
        data: Size of the data axis; -1 takes what `fsdp` leaves.
        fsdp: Over how many devices parameters are split.
        devices: All devices of all processes by default.

    Raises:
        ValueError: The sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    ordered = sorted(devices, key=_place)
    if data == -1 and fsdp > 0:
        data = len(ordered) // fsdp
    if data < 1 or fsdp < 1 or data * fsdp != len(ordered):
        raise ValueError(
            f'mesh data={data} x fsdp={fsdp} does not make the {len(ordered)} devices there are: '
            f'set mesh.fsdp to a divisor of {len(ordered)} and mesh.data to -1'
        )
    return Mesh(np.asarray(ordered).reshape(data, fsdp), (DATA_AXIS, FSDP_AXIS))


def _place(device: jax.Device) -> tuple:
    """Sorts by process, then along a line that turns back at the end of each row of chips."""
    x, y, z = getattr(device, 'coords', None) or (0, 0, 0)
    return device.process_index, z, y, -x if y % 2 else x, device.id


def batch(mesh: Mesh) -> NamedSharding:
    """The first axis of a batch is split over all devices."""
    return NamedSharding(mesh, PartitionSpec((DATA_AXIS, FSDP_AXIS)))


class Rows:
    """Keeps activations `(b, ...)` on the devices of their rows.

    Where the devices do not divide b, as of a few pictures on a large pod, each group of `fsdp`
    devices computes all rows; where these do not divide it either, each device does.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def on_tpus(self) -> bool:
        """Whether `map` can call kernels for TPUs."""
        return self._mesh.devices.flat[0].platform == 'tpu'

    def __call__(self, x: jax.Array) -> jax.Array:
        """Says where `x` lies."""
        placed = NamedSharding(self._mesh, self._split(x.shape[0]))
        return jax.lax.with_sharding_constraint(x, placed)

    def map(self, function: Callable, rows: Any, shared: Any) -> Any:
        """Calls `function(rows, shared)` on each device with its rows; gives rows.

        For what the partitioner cannot split by itself, kernels.
        """
        split = self._split(jax.tree.leaves(rows)[0].shape[0])
        mapped = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(split, PartitionSpec()),
            out_specs=split,
            check_vma=False,
        )
        return mapped(rows, shared)

    def _split(self, count: int) -> PartitionSpec:
        for axes in ((DATA_AXIS, FSDP_AXIS), (FSDP_AXIS,)):
            if count % math.prod(self._mesh.shape[axis] for axis in axes) == 0:
                return PartitionSpec(axes)
        return PartitionSpec()


def replicated(mesh: Mesh) -> NamedSharding:
    """The same whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def partition_spec(shape: Sequence[int], fsdp: int) -> PartitionSpec:
    """Splits the largest dimension that `fsdp` divides; of equals, the last one.

    Arrays of fewer than `MIN_SHARDED_SIZE` elements, and arrays with no such dimension, are
    replicated.
    """
    if fsdp == 1 or np.prod(shape, dtype=np.int64) < MIN_SHARDED_SIZE:
        return PartitionSpec()
    divisible = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if not divisible:
        return PartitionSpec()
    axis = max(divisible, key=lambda axis: (shape[axis], axis))
    return PartitionSpec(*[None] * axis, FSDP_AXIS)


def by_shape(tree, mesh: Mesh):
    """Maps a pytree of arrays or `jax.ShapeDtypeStruct` to one of `NamedSharding`."""
    fsdp = mesh.shape[FSDP_AXIS]
    return jax.tree.map(lambda leaf: NamedSharding(mesh, partition_spec(leaf.shape, fsdp)), tree)


def abstract(array, placed: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array; another sharding than its own where one is given."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed or array.sharding)


def processes_on_host() -> int:
    """How many processes of the run share this host's memory: those with the same host name.

    Containers have names of their own, as they have memory of their own. All processes call it
    together.
    """
    own = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int((multihost_utils.process_allgather(own) == own).sum())


def least_bytes(params, mesh: Mesh, *, compute_bytes: int = 2, accumulate: int = 1) -> float:
    """Bytes that a device has to receive in a training step if nothing but weights is moved.

    A weight that is split over f devices is gathered for the forward and again for the backward
    pass, in the type of the computation: (f-1)/f of it each time, for each part of the batch. Its
    gradient is reduced in float32 over those f, (f-1)/f of it, and the own f-th of that over the d
    others that hold it, 2(d-1)/d (to reduce is half of that, to hand the sum on the other half).

    Args:
        params: Pytree of arrays or `jax.ShapeDtypeStruct`, as `by_shape` places them.
        mesh: Mesh of the devices.
        compute_bytes: bytes of a gathered number.
        accumulate: Parts that the batch is computed in.
    """

    def of(leaf) -> float:
        split = partition_spec(leaf.shape, mesh.shape[FSDP_AXIS]) != PartitionSpec()
        f = mesh.shape[FSDP_AXIS] if split else 1
        d = mesh.size // f
        size = np.prod(leaf.shape, dtype=np.float64)
        within = (f - 1) / f * (2 * compute_bytes + 4) * accumulate
        return size * (within + 2 * (d - 1) / d * 4 / f)

    return float(sum(map(of, jax.tree.leaves(params))))
