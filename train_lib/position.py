"""Where in its data a run is, also after its batch size or its data set has changed.

    place = Position()                        # a new run: step s takes batch s of the order
    place.batch_at(1000)                      # 1000
    place = carry_over(place, 1000, before, now, order)
    place.batch_at(1000)                      # the batch of the new order to resume with

Positions are counted in samples. A run that has used u samples of the order resumes with the first
whole batch of the new order that begins at or after the u-th sample. If only the batch size
differs, no record is repeated, and fewer than one new batch of records is left out. With other
lanes, chunks, windows or another seed the rest of this epoch comes out of another permutation, so
that some of its records are repeated and others not at all. Another data set is read from its
beginning.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import logging

from input_pipeline import Order

DATA_SET = 'data.dir'  # the setting whose value says which data set there is

# Fields of the configuration that decide which batch is which.
_ORDER = ('seed', 'batch_size', 'data.chunk', 'data.lanes', 'data.window')


@dataclasses.dataclass(frozen=True)
class Position:
    """The order that is read now began at `step`, with its batch `batch`.

    Attributes:
        step: of the run; 0, or that of the last change.
        batch: number of a global batch of the present order.
        samples: that the run had used up to `step`.
    """

    step: int = 0
    batch: int = 0
    samples: int = 0

    def batch_at(self, step: int) -> int:
        """The global batch that the step after `step` takes."""
        return self.batch + step - self.step

    def samples_at(self, step: int, batch_size: int) -> int:
        """Samples used up to `step` with the present batch size."""
        return self.samples + (step - self.step) * batch_size


def carry_over(
    place: Position,
    step: int,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    order: Order | None,
) -> Position:
    """The position of a run that resumes after `step`; a change of the order is logged.

    Args:
        place: until now.
        step: the last that was trained.
        before: settings until now, by names of fields.
        now: settings from now on.
        order: of the data set that is read now; None for one without a planned order.
    """
    changed = {name for name in (DATA_SET, *_ORDER) if before[name] != now[name]}
    if not changed:
        return place
    old_size, new_size = before['batch_size'], now['batch_size']
    samples = place.samples_at(step, old_size)
    if DATA_SET in changed:
        batch, told = 0, 'the other data set is read from its beginning'
    else:
        used = place.batch_at(step) * old_size
        batch = -(-used // new_size)
        told = (
            f'reading resumes with batch {batch} of {new_size}, {batch * new_size - used} samples '
            'further on'
        )
        if changed != {'batch_size'} and order is not None:
            told += '; in the rest of this epoch some records come twice and others not at all'
    logging.info('%d samples were used in %d steps; %s.', samples, step, told)
    return Position(step, batch, samples)
