"""Batches of one size as the order plans them, for tests that read such batches.

plan = planned.of_data(path, batch_size=16, seed=5, lanes=4)
epoch, shard, record = plan.batch(3)      # int64 (16,)
"""

import dataclasses

import numpy as np

import input_pipeline
from input_pipeline import Order


@dataclasses.dataclass(frozen=True)
class Planned:
    """Global batches of an order."""

    order: Order
    batch_size: int

    @property
    def steps(self) -> int:
        """Whole batches of an epoch."""
        return self.order.lane_length * self.order.settings.lanes // self.batch_size

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, shard and record of each sample."""
        lanes = self.order.settings.lanes
        each = self.batch_size // lanes
        found = self.order.samples(range(lanes), step * each, (step + 1) * each)
        return np.tile(found.epoch, lanes), found.shard.ravel(), found.record.ravel()


def of_data(path: object, batch_size: int, **settings: int) -> Planned:
    """Of a data set, with settings of the order."""
    plan = input_pipeline.train_plan(path, batch_size=batch_size, **settings)
    return Planned(plan.orders[0], batch_size)
