"""Batches on the host: an iterator that knows where it is, what it gives, and whose share.

batches = Batches(read, Place(start=0, each=16, order='9f3a...'), spec, 29687.5, (0, 1), ahead=2)
next(batches)['latents']
state = batches.get_state()         # {'samples': 16, 'order': '9f3a...'}
batches.set_state(state)
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coyo11m_tfds.reading import memory
from coyo11m_tfds.reading.ahead import Ahead

T = TypeVar('T')

# What was asked for of some samples. Added columns come under names of their own.
Batch = dict[str, np.ndarray]


class ArraySpec(NamedTuple):
    """Of an array in every batch."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Place(NamedTuple):
    """Position at which a sequence of batches starts.

    Attributes:
        start: Samples before the first batch: in each lane or, in evaluation, over all processes.
        each: Samples of a batch, counted in the same way.
        order: Digest of the data set and the settings of the order.
        stride: The sequence has only every `stride`-th batch.
    """

    start: int
    each: int
    order: str
    stride: int = 1


class Resumable(Ahead[T]):
    """An iterator over a sequence of batches that can be entered anywhere."""

    def __init__(
        self, read: Callable[[int], Iterator[T]], place: Place, ahead: int, thread_name: str
    ):
        """Takes what reads from a number of samples on, and how many batches are kept ready."""
        self._read, self._begun = read, place
        super().__init__(read(place.start), ahead, thread_name)

    @property
    def place(self) -> Place:
        """Where the next batch begins."""
        samples = self._begun.start + self._given * self._begun.stride * self._begun.each
        return self._begun._replace(start=samples)

    @property
    def step(self) -> int:
        """How many batches come before the next one, from the beginning of the data on."""
        return self.place.start // self._begun.each

    def get_state(self) -> dict[str, int | str]:
        """The place of the next batch: samples, and a digest of the data set and the order."""
        return {'samples': self.place.start, 'order': self._begun.order}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called, with any number of processes.

        Raises:
            ValueError: the state is none, or of another data set, split or order.
        """
        samples, order = state.get('samples'), state.get('order')
        if not isinstance(samples, int) or samples < 0 or order != self._begun.order:
            raise ValueError(
                f'{dict(state)} is no state of these batches, whose order is '
                f'{self._begun.order!r}: expected one of the same data set, split, seed, chunk, '
                'lanes and window.'
            )
        self.go_to(samples)

    def go_to(self, samples: int) -> None:
        """Continues after so many samples of every lane."""
        self._restart(lambda: self._read(samples))
        self._begun = self._begun._replace(start=samples)


class Batches(Resumable[Batch]):
    """One process's part of batches in the memory of the host.

    A context manager closes it: `with train_batches(...) as batches`.

    Attributes:
        spec: shape and dtype of each array in a batch, by name.
        steps_per_epoch: batches that the split makes, on average; NaN if its size is unknown.
        process_index, process_count: whose part of how many it is.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[Batch]],
        place: Place,
        spec: Mapping[str, ArraySpec],
        steps_per_epoch: float,
        process: tuple[int, int],
        ahead: int,
        memory_need: memory.Need | None = None,
    ):
        super().__init__(read, place, ahead, 'batches')
        self._memory_need = memory_need
        self.spec, self.steps_per_epoch = spec, steps_per_epoch
        self.process_index, self.process_count = process

    def check_memory(self, ram_budget_gb: float = 0.0, processes_on_host: int = 1) -> None:
        """Checks that reading these batches fits into the memory of this host.

        `reading.memory` says what is counted. Rows, evaluation, and a data set without a chunk
        index always fit.

        Args:
            ram_budget_gb: 10^9 bytes that reading may take on this host; 0 for half of the memory
                that this machine or container has.
            processes_on_host: how many processes of the run share this host.

        Raises:
            ValueError: it takes more; the message says how much, and what would fit.
        """
        if self._memory_need:
            memory.check(
                self._memory_need, budget_gb=ram_budget_gb, processes_on_host=processes_on_host
            )


def specs_of(blank: Mapping[str, np.ndarray], size: int) -> dict[str, ArraySpec]:
    """Of batches of `size` rows, from a batch of any size."""
    return {name: ArraySpec((size, *x.shape[1:]), x.dtype) for name, x in blank.items()}
