"""Sends host batches to devices as sharded `jax.Array`s, while the devices use earlier ones."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading.batches import Ahead, ArraySpec, Batches, Resumable
from coyo11m_tfds.sampling.mixture import Cursor

if TYPE_CHECKING:
    import tensorflow as tf


def key_words(keys: np.ndarray) -> np.ndarray:
    """Returns the low and the high word of keys, int64 `(b,)`, as uint32 `(b, 2)`."""
    # In the byte order of the view, so that the low word comes first on every machine.
    words = np.ascontiguousarray(keys, '<i8').view('<u4').reshape(-1, 2)
    return words.astype(np.uint32, copy=False)


class Arrays(Resumable[dict[str, jax.Array]]):
    """Batches on the devices; `step`, `get_state` and `set_state` count returned batches.

    Attributes:
        spec: Shape and dtype of each global array in a batch, by name.
        steps_per_epoch: As for the host's batches.
        process_index: As for the host's batches.
        process_count: As for the host's batches.
    """

    def __init__(self, batches: Batches, sharding: jax.sharding.Sharding, ahead: int):
        """Takes an iterator of host batches, and continues at its position."""
        cursor = batches.cursor
        self._batches = batches

        def read(start: Cursor) -> Iterator[dict[str, jax.Array]]:
            # Only `set_state` starts elsewhere than the host's batches are.
            if start is not cursor:
                batches.seek(start)
            # Closed with this iterator: nobody else reads the host's batches.
            with batches:
                yield from (_send(batch, sharding) for batch in batches)

        super().__init__(read, cursor, ahead, 'to_device')
        self.spec: dict[str, ArraySpec] = {}
        for name, (shape, dtype) in batches.spec.items():
            # A global array has the rows of all processes.
            size = shape[0] * batches.process_count
            # JAX has no int64 by default, and devices hold no strings.
            if name == schema.KEY:
                self.spec[name] = ArraySpec((size, 2), np.dtype(np.uint32))
            elif name != schema.CAPTION:
                _check_dtype(name, dtype)
                self.spec[name] = ArraySpec((size, *shape[1:]), dtype)
        self.steps_per_epoch = batches.steps_per_epoch
        self.process_index = batches.process_index
        self.process_count = batches.process_count

    def end_pauses(self) -> None:
        """See `Ahead`; the host's batches are read by a thread of their own."""
        super().end_pauses()
        self._batches.end_pauses()


def process_share(sharding: jax.sharding.Sharding) -> tuple[int, int]:
    """Returns which share of a global batch this process holds, and the number of shares.

    Processes that hold the same rows, for example of a batch that is copied to all devices, have
    the same share. Raises a ValueError if shares overlap, or if `sharding` is not a sharding.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(
            f'sharding={sharding!r}: expected a jax.sharding.Sharding, such as NamedSharding(mesh, '
            "PartitionSpec('data'))"
        )
    # An array with a row for each device shows which rows a process holds.
    count = len(sharding.device_set)
    rows: dict[int, set[int]] = {}
    device_indices: Mapping[Any, Any] = sharding.devices_indices_map((count,))
    for device, (index,) in device_indices.items():
        device_rows = range(*index.indices(count))
        rows.setdefault(device.process_index, set()).update(device_rows)
    share_of = {process: tuple(sorted(numbers)) for process, numbers in rows.items()}
    # Each share once, in the order of the rows: processes count as many as hold different rows.
    shares = sorted(set(share_of.values()))
    # Shares that overlap have more rows together than the array.
    if sum(map(len, shares)) != count:
        raise ValueError(
            f'{sharding}: the rows that processes hold of a batch overlap; expected of any two '
            'processes that they hold the same rows, or no row in common'
        )
    own_share = share_of[jax.process_index()]
    return shares.index(own_share), len(shares)


@overload
def to_device(batches: Batches, sharding: jax.sharding.Sharding, ahead: int = ...) -> Arrays: ...
@overload
def to_device(
    batches: 'tf.data.Dataset | Iterable[Mapping[str, np.ndarray]]',
    sharding: jax.sharding.Sharding,
    ahead: int = ...,
) -> Ahead[dict[str, jax.Array]]: ...
def to_device(batches, sharding, ahead=2):
    """Sends batches to the devices while the devices use earlier ones.

    Every process passes its rows of the global batch. `key` arrives as `key_words`; `caption` is
    left out, because devices hold no strings. A thread reads and sends: with a step of 20 ms and
    batches of 256 on 2 busy cores, the loop waited 0.3 to 0.8 ms for a batch, and 2.8 to 4.2 ms
    without the thread. `sharding` is that of the leading axis of every feature, and `ahead` batches
    are sent before they are needed.

    Returns:
        An iterator of global arrays with a leading axis of length `b * process_count`. It can be
        used after a Ctrl-C; `close()` ends its thread. For batches with a position it is an
        `Arrays`.

    Raises:
        ValueError: `ahead` is less than 1; the batches are the share of another process; or JAX
            would change the numbers of a column, such as int64 (for batches of other readers, the
            first batch raises this).
    """
    if ahead < 1:
        raise ValueError(f'ahead={ahead} must be at least 1; 2 lets one arrive while one is used')
    # These have no position: nothing can be resumed.
    if not isinstance(batches, Batches):
        on_host = iter(batches)
        # A tf.data.Dataset gives tensors otherwise.
        if hasattr(batches, 'as_numpy_iterator'):
            on_host = batches.as_numpy_iterator()
        return Ahead((_send(batch, sharding) for batch in on_host), ahead, 'to_device')
    expected = process_share(sharding)
    if (batches.process_index, batches.process_count) != expected:
        raise ValueError(
            f'process_index={batches.process_index} with process_count={batches.process_count} is '
            f'not the share of a batch that this process holds by its sharding: expected '
            f'process_index={expected[0]} with process_count={expected[1]}, as `process_share` says'
        )
    return Arrays(batches, sharding, ahead)


def _send(batch: Mapping[str, Any], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """Returns the arrays of a batch on the devices, with keys as `key_words`."""
    arrays = {}
    for name, x in batch.items():
        # Devices hold no strings.
        if name == schema.CAPTION:
            continue
        if name == schema.KEY:
            x = key_words(x)
        _check_dtype(name, x.dtype)
        arrays[name] = jax.make_array_from_process_local_data(sharding, x)
    return arrays


def _check_dtype(name: str, dtype: np.dtype) -> None:
    """Raises a ValueError if JAX would change the numbers of a feature."""
    # Without `jax_enable_x64`, JAX takes 32 of 64 bits.
    device_dtype = jax.dtypes.canonicalize_dtype(dtype)
    if device_dtype != dtype:
        raise ValueError(
            f'{name!r} is {dtype}, which devices would hold as {device_dtype}, with other numbers. '
            f'Leave it out of `features`, add the column as {device_dtype}, or set jax_enable_x64.'
        )
