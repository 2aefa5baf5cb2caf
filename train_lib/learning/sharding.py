"""The placement of arrays on devices: the mesh, and one rule that maps shapes to shardings.

The mesh has two axes: a batch is split over both, large arrays of the state only over `fsdp`.
"""

import math
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coyo11m_tfds.process.errors import FieldError

DATA_AXIS = 'data'
FSDP_AXIS = 'fsdp'

# Arrays of fewer elements stay whole on every device: splitting a bias or a norm's scale saves too
# little memory for the time that gathering it takes.
MIN_SHARDED_SIZE = 2**16


def make_mesh(data: int = -1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays devices out as a mesh with the axes `data` and `fsdp`.

    Args:
        data: Number of groups of devices; -1 stands for the number of devices divided by `fsdp`.
        fsdp: Number of devices in a group, which splits large arrays of the state.
        devices: Devices to lay out; all of the run by default.

    Raises:
        FieldError: The product of the two is not the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    # In the order of processes, so process p holds the p-th share of a batch's rows on all
    # hardware, and the same batch gives the same global array on any number of hosts. This order
    # also puts the members of an `fsdp` group on one host if they fit, otherwise on neighbouring
    # hosts of one slice. Within a host each chip is linked to the next: the four chips of a TPU
    # host form a ring, along which they gather weights, and chips with the same place in their
    # hosts reduce gradients. `jax.experimental.mesh_utils.create_device_mesh` also follows the
    # links, but gives a host rows that are not consecutive, and cannot make 64 x 4 of v5e:16x16.
    ordered = sorted(devices, key=_rank_device)
    if data == -1 and fsdp > 0:
        data = len(ordered) // fsdp
    if data < 1 or fsdp < 1 or data * fsdp != len(ordered):
        problem = (
            f'data={data} x fsdp={fsdp} does not make the {len(ordered)} devices there are: set '
            f'mesh.fsdp to a divisor of {len(ordered)} and mesh.data to -1'
        )
        raise FieldError('mesh.fsdp', fsdp, problem)
    return Mesh(np.asarray(ordered).reshape(data, fsdp), (DATA_AXIS, FSDP_AXIS))


def _rank_device(device: jax.Device) -> tuple:
    """Sorts by process, then along a line that turns back at the end of each row of chips."""
    # Only TPUs have coordinates.
    x, y, z = getattr(device, 'coords', None) or (0, 0, 0)
    place_in_row = -x if y % 2 else x
    return device.process_index, z, y, place_in_row, device.id


def batch(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batches: the first axis is split over all devices."""
    return NamedSharding(mesh, PartitionSpec((DATA_AXIS, FSDP_AXIS)))


class RowPinning:
    """Keeps activations `(b, ...)` on the devices of their rows."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def on_tpus(self) -> bool:
        """Whether `map` can call kernels for TPUs."""
        return self._mesh.devices.flat[0].platform == 'tpu'

    def __call__(self, x: jax.Array) -> jax.Array:
        """Keeps `(b, ...)` on the devices of its rows."""
        rows = NamedSharding(self._mesh, self._split_rows(x.shape[0]))
        return jax.lax.with_sharding_constraint(x, rows)

    def map(self, function: Callable, rows: Any, shared: Any) -> Any:
        """Calls `function(rows, shared)` on each device with its rows; returns all rows.

        Args:
            function: Takes and returns pytrees of arrays.
            rows: Arrays `(b, ...)`, of which each device gets its own rows.
            shared: Arrays that every device gets whole.
        """
        # Kernels need this, because the partitioner cannot split them.
        first_array = jax.tree.leaves(rows)[0]
        split = self._split_rows(first_array.shape[0])
        mapped = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(split, PartitionSpec()),
            out_specs=split,
            check_vma=False,
        )
        return mapped(rows, shared)

    def _split_rows(self, count: int) -> PartitionSpec:
        """Returns how `count` rows are split over the devices."""
        # If the number of devices does not divide the rows (a few pictures on a large pod), each
        # group of `fsdp` devices computes all rows; if `fsdp` does not divide them either, each
        # device does.
        fsdp = self._mesh.shape[FSDP_AXIS]
        if count % self._mesh.size == 0:
            return PartitionSpec((DATA_AXIS, FSDP_AXIS))
        if count % fsdp == 0:
            return PartitionSpec((FSDP_AXIS,))
        return PartitionSpec()


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def partition_spec(shape: Sequence[int], fsdp: int) -> PartitionSpec:
    """Returns the placement of an array of the state on groups of `fsdp` devices.

    The largest dimension that `fsdp` divides is split, of equal ones the last. Arrays of fewer
    than `MIN_SHARDED_SIZE` elements stay whole.
    """
    divisible = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if fsdp == 1 or not divisible or math.prod(shape) < MIN_SHARDED_SIZE:
        return PartitionSpec()
    split_axis = max(divisible, key=lambda axis: (shape[axis], axis))
    whole_axes = [None] * split_axis
    return PartitionSpec(*whole_axes, FSDP_AXIS)


def by_shape(tree: Any, mesh: Mesh) -> Any:
    """Maps a pytree of arrays or `jax.ShapeDtypeStruct` to a pytree of `NamedSharding`."""
    fsdp = mesh.shape[FSDP_AXIS]

    def place(leaf: Any) -> NamedSharding:
        """Returns the sharding of one array."""
        return NamedSharding(mesh, partition_spec(leaf.shape, fsdp))

    return jax.tree.map(place, tree)


def map_matrices(
    mesh: Mesh, function: Callable[[jax.Array], jax.Array], stack: jax.Array
) -> jax.Array:
    """Calls a function of whole matrices `(n, rows, columns)` with a few of a stack on each device.

    The stack, `(..., rows, columns)`, is placed by `partition_spec`, and so is the result.
    """
    data = mesh.shape[DATA_AXIS]
    fsdp = mesh.shape[FSDP_AXIS]
    spec = partition_spec(stack.shape, fsdp)
    # The axis of `(n, rows, columns)` that is split, the last of the spec; matrices are whole if it
    # is none of the last two.
    sharded_axis = len(spec) + 2 - stack.ndim
    are_whole = len(spec) == 0 or sharded_axis <= 0

    def exchange(matrices: jax.Array, split_axis: int, concat_axis: int) -> jax.Array:
        """Exchanges slices of matrices between the devices of a group."""
        if are_whole:
            return matrices
        return jax.lax.all_to_all(matrices, FSDP_AXIS, split_axis, concat_axis, tiled=True)

    def on_device(shard: jax.Array) -> jax.Array:
        """Computes this device's share of the matrices; returns its slice of all results."""
        matrices = shard.reshape(-1, *shard.shape[-2:])
        count = len(matrices)
        members = 1 if are_whole else fsdp
        # The groups of `fsdp` devices share the matrices. If fewer groups leave no device with more
        # matrices, the others repeat their work.
        groups = _choose_num_groups(count, data, members)
        per_group = math.ceil(count / groups)
        # The share of this group.
        group = jax.lax.axis_index(DATA_AXIS) % groups
        first = group * per_group
        matrices = _pad_stack(matrices, groups * per_group)
        matrices = jax.lax.dynamic_slice_in_dim(matrices, first, per_group)
        # The devices of a group share its matrices: they exchange the slices that `partition_spec`
        # gave them for whole matrices, and the results for slices of these. If the counts do not
        # divide, some devices compute zeros.
        padded = _pad_stack(matrices, members)
        whole = exchange(padded, split_axis=0, concat_axis=sharded_axis)
        results = exchange(function(whole), split_axis=sharded_axis, concat_axis=0)
        # Without those of the zeros.
        results = results[:per_group]
        # The groups of a row below have all matrices together, and gather the results.
        group_indices = np.arange(data).reshape(-1, groups).tolist()
        results = jax.lax.all_gather(
            results, DATA_AXIS, axis_index_groups=group_indices, tiled=True
        )
        return results[:count].reshape(shard.shape)

    map_shards = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return map_shards(stack)


def _choose_num_groups(count: int, data: int, members: int) -> int:
    """Returns the least divisor of `data` with which a device has as few matrices as possible."""
    divisors = [groups for groups in range(1, data + 1) if data % groups == 0]

    def count_on_device(groups: int) -> int:
        """Returns the most matrices that a device computes if so many groups share them."""
        per_group = math.ceil(count / groups)
        return math.ceil(per_group / members)

    return min(divisors, key=count_on_device)


def _pad_stack(matrices: jax.Array, divisor: int) -> jax.Array:
    """Appends zeros so that `divisor` divides the number of matrices."""
    num_missing = -len(matrices) % divisor
    return jnp.pad(matrices, [(0, num_missing), (0, 0), (0, 0)])


def abstract_array(
    array: Any, placement: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array with its sharding, or with `placement`."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placement or array.sharding)


def processes_on_host() -> int:
    """Counts the processes of the run on this host; all processes must call this together."""
    # By the host's name: a container counts as a host, with its own name and its own memory.
    own_host = np.uint32(zlib.crc32(socket.gethostname().encode()))
    hosts = multihost_utils.process_allgather(own_host)
    return int(np.sum(hosts == own_host))
