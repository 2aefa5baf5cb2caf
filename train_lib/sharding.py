"""Where every array lies: the mesh, and one rule from shapes to shardings.

    mesh = sharding.make_mesh(data=-1, fsdp=4)
    states = sharding.by_shape(jax.eval_shape(init, rng), mesh)   # pytree of NamedSharding
    batches = sharding.batch(mesh)

Two axes: a batch is split over both, large parameters over `fsdp` alone. With `fsdp=1` this is
plain data parallelism. The whole state (weights, their average, the optimizer's moments) follows
the same rule, since moments have the shapes of their weights.
"""

import socket
import zlib
from collections.abc import Sequence

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

    Devices come in the order of (process, id), so that process p holds the p-th part of the rows
    of a batch, whatever the hardware: the same batch gives the same global array on any number of
    hosts. It also puts the members of an `fsdp` group on one host where they fit.

    Args:
        data: size of the data axis; -1 takes what `fsdp` leaves.
        fsdp: over how many devices parameters are split.
        devices: all devices of all processes by default.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    if data == -1 and fsdp > 0:
        data = len(ordered) // fsdp
    if data < 1 or fsdp < 1 or data * fsdp != len(ordered):
        raise ValueError(
            f'mesh data={data} x fsdp={fsdp} does not make the {len(ordered)} devices there are: '
            f'set mesh.fsdp to a divisor of {len(ordered)} and mesh.data to -1'
        )
    return Mesh(np.asarray(ordered).reshape(data, fsdp), (DATA_AXIS, FSDP_AXIS))


def batch(mesh: Mesh) -> NamedSharding:
    """The first axis of a batch is split over all devices."""
    return NamedSharding(mesh, PartitionSpec((DATA_AXIS, FSDP_AXIS)))


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


def processes_on_host() -> int:
    """How many processes of the run share this host's memory: those with the same host name.

    Containers have names of their own, as they have memory of their own. All processes call it
    together.
    """
    own = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int((multihost_utils.process_allgather(own) == own).sum())
