"""How many samples of each source every lane gives to each batch, and positions in a mixture.

docs/design.md states the rules ("Mixtures"). A position is a step and a number of samples for each
source, and the position of any later step can be computed. A single source is a mixture of one.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np

from coyo11m_tfds.reading import arguments

# Steps of a cycle at most; finer weights of shapes are rounded.
_MAX_CYCLE = 1000


class Position(NamedTuple):
    """A position in a mixture."""

    step: int  # number of the next batch
    samples: tuple[int, ...]  # that each source has given in every lane


@dataclasses.dataclass(frozen=True)
class Stage:
    """A range of steps with fixed shares."""

    begin: int
    end: float  # one past the last step; infinite in the last stage
    counts: tuple[int, ...]  # samples that a lane of each source gives to a batch of its shape
    shapes: tuple[int, ...]  # number of each source's shape
    cycle: np.ndarray  # numbers of the shapes of consecutive steps, int64 (t,), without end

    def shape(self, step: int) -> int:
        """Returns the number of the shape of a step's batch."""
        return int(self.cycle[step % len(self.cycle)])

    def members(self, shape: int) -> list[int]:
        """Returns the sources that give samples to batches of a shape."""
        found = zip(self.counts, self.shapes, strict=True)
        return [number for number, (count, of) in enumerate(found) if count and of == shape]

    def taken(self, begin: int, end: int) -> tuple[int, ...]:
        """Returns how many samples each lane of each source gives to the steps `[begin, end)`."""
        steps = self._steps_before(end) - self._steps_before(begin)
        return tuple(c * int(steps[of]) for c, of in zip(self.counts, self.shapes, strict=True))

    def _steps_before(self, step: int) -> np.ndarray:
        """Batches of each shape before a step."""
        whole, rest = divmod(step, len(self.cycle))
        length = max(self.shapes) + 1
        of_rest = np.bincount(self.cycle[:rest], minlength=length)
        return whole * np.bincount(self.cycle, minlength=length) + of_rest


class BatchShares:
    """The shares of the sources in batches of one size, as a function of the step."""

    def __init__(
        self,
        each: int,
        weights: Sequence[float] = (1,),
        stages: Sequence[Mapping[str, Any]] = (),
        shapes: Sequence[Hashable] = (),
        names: Sequence[str] = (),
    ):
        """Computes the shares of batches with `each` samples of every lane.

        A stage is a dict of its first step, `from`, and its `weights`. `shapes` has a value for
        each source, equal for sources of one shape; () if all are equal. Raises a ValueError, which
        names values that work, if weights or stages are wrong, or a source gets no sample.
        """
        self.each = each
        self._names = names or [str(number) for number in range(len(weights))]
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
        self._shapes = tuple(numbers[x] for x in shapes) or (0,) * len(weights)
        asked = [(0, _fractions(weights, len(weights), 'weights'))]
        for stage in stages:
            first, found = _parse_stage(stage, len(weights))
            if first < asked[-1][0] or (first == asked[-1][0] and len(asked) > 1):
                raise ValueError(f"stages: 'from': {first} does not come after {asked[-1][0]}")
            asked = [x for x in asked if x[0] < first] + [(first, found)]
        ends = [first for first, _ in asked[1:]] + [math.inf]
        self._weights = [found for _, found in asked]
        self.stages = [
            Stage(first, end, *self._share_out(found))
            for (first, found), end in zip(asked, ends, strict=True)
        ]
        for name, *counts in zip(self._names, *(x.counts for x in self.stages), strict=True):
            if not any(counts):
                raise ValueError(f'source {name!r} has weight 0 in every stage: leave it out')

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step."""
        return self.stages[bisect.bisect(self.stages, step, key=lambda stage: stage.begin) - 1]

    def at(self, position: Position, step: int) -> Position:
        """Returns the position of `step`, which must not be before `position`."""
        at, samples = position
        while at < step:
            stage = self.stage(at)
            end = step if step < stage.end else int(stage.end)
            samples = tuple(map(sum, zip(samples, stage.taken(at, end), strict=True)))
            at = end
        return Position(step, samples)

    @functools.cached_property
    def summary(self) -> list[str]:
        """Returns a line for each stage: the sources' shares, and weights that would be exact."""
        return [self._tell(*x) for x in zip(self.stages, self._weights, strict=True)]

    def _share_out(
        self, weights: list[Fraction]
    ) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
        """Counts of sources, their shapes, and the cycle of the shapes."""
        of_shapes = [Fraction(0)] * (max(self._shapes) + 1)
        for weight, shape in zip(weights, self._shapes, strict=True):
            of_shapes[shape] += weight
        counts = [0] * len(weights)
        for shape, whole in enumerate(of_shapes):
            members = [i for i, of in enumerate(self._shapes) if of == shape and weights[i]]
            shares = [weights[i] / whole for i in members]
            for i, count in zip(members, _largest_remainders(shares, self.each), strict=True):
                counts[i] = count
                if not count:
                    self._refuse(i, weights[i] / whole)
        unit = math.lcm(*(x.denominator for x in of_shapes))
        quotas = [int(x * unit) for x in of_shapes]
        quotas = [x // math.gcd(*quotas) for x in quotas]
        if sum(quotas) > _MAX_CYCLE:
            quotas = _largest_remainders([Fraction(x, sum(quotas)) for x in quotas], _MAX_CYCLE)
        for number, shape in enumerate(self._shapes):
            if weights[number] and not quotas[shape]:
                share = f'{float(weights[number]):.4g} of {float(sum(weights)):.4g}'
                raise ValueError(
                    f'source {self._names[number]!r} has {share}, less than one batch of its shape '
                    f'in {_MAX_CYCLE} batches: give it a larger weight'
                )
        steps = [
            (Fraction(2 * k + 1, 2 * quota), shape)
            for shape, quota in enumerate(quotas)
            for k in range(quota)
        ]
        return tuple(counts), self._shapes, np.array([shape for _, shape in sorted(steps)])

    def _refuse(self, number: int, share: Fraction) -> None:
        raise ValueError(
            f'source {self._names[number]!r} has {float(share):.4g} of the weights, too little for '
            f'one of the {self.each} samples that a lane gives to a batch: give it a larger '
            f'weight, or set fewer lanes or a batch_size of {math.ceil(1 / share)} times the lanes'
        )

    def _tell(self, stage: Stage, weights: list[Fraction]) -> str:
        whole, told, exact = sum(weights), [], 1
        of_cycle = stage.taken(0, len(stage.cycle))
        for name, weight, taken in zip(self._names, weights, of_cycle, strict=True):
            asked, given = weight / whole, Fraction(taken, len(stage.cycle) * self.each)
            told.append(f'{name} {float(given):.4g}')
            if asked != given:
                told[-1] += f' (asked {float(asked):.4g})'
        if not any('asked' in x for x in told):
            return f'shares {", ".join(told)}'
        for shape in set(stage.cycle.tolist()):
            members = [weights[i] for i in stage.members(shape)]
            exact = math.lcm(exact, *((x / sum(members)).denominator for x in members))
        given_exactly = ':'.join(str(x // math.gcd(*of_cycle)) for x in of_cycle)
        return (
            f'shares {", ".join(told)}, in steps of 1/{self.each} (lanes/batch_size): weights '
            f'{given_exactly} are exact, and so is batch_size a multiple of {exact} times the lanes'
        )


def _parse_stage(stage: Any, count: int) -> tuple[int, list[Fraction]]:
    if not isinstance(stage, Mapping) or stage.keys() != {'from', 'weights'}:
        raise ValueError(
            f"stages has {stage!r}: expected {{'from': STEP, 'weights': (A NUMBER A SOURCE)}}"
        )
    first = arguments.convert("stages: 'from'", stage['from'], int)
    if first < 0:
        raise ValueError(f"stages: 'from': {first} is not a step: expected an int of at least 0")
    return first, _fractions(stage['weights'], count, "stages: 'weights'")


def _fractions(weights: Any, count: int, what: str) -> list[Fraction]:
    """Weights as they are written: 0.1 is a tenth."""
    try:
        found = [Fraction(str(float(x))) for x in weights]
    except (TypeError, ValueError):
        found = []
    if len(found) != count or min(found, default=-1) < 0 or not 0 < sum(found) < 10**12:
        raise ValueError(
            f'{what} {weights!r}: expected a number of at least 0 for each of {count} sources, not '
            'all of them 0'
        )
    return found


def _largest_remainders(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers that add up to a total, each its share rounded down or up."""
    exact = [share * total for share in shares]
    counts = [math.floor(x) for x in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


class Cursor(NamedTuple):
    """A position in a sequence of batches, with the shares for the following batches."""

    position: Position  # of the next batch
    shares: BatchShares
    sources: tuple[str, ...]  # a digest of each source and of the order of its samples
    stride: int = 1  # the sequence holds only every `stride`-th batch

    def after(self, count: int) -> Self:
        """Returns the place after `count` more batches of the sequence."""
        step = self.position.step + count * self.stride
        return self._replace(position=self.shares.at(self.position, step))

    def state(self) -> dict[str, Any]:
        """Returns the step and the samples of each source by digest, in plain Python values."""
        step, samples = self.position
        return {'step': step, 'samples': dict(zip(self.sources, samples, strict=True))}

    def at(self, state: Mapping[str, Any]) -> Self:
        """Returns the place of a state, which may come from another batch size or other sources.

        Raises a ValueError if `state` is malformed, or belongs to another data set or order.
        """
        try:
            taken = [state['samples'][digest] for digest in self.sources]
            step, *samples = (arguments.convert('', x, int) for x in (state['step'], *taken))
            if min(step, *samples) < 0:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise ValueError(
                f'{state!r} is not a state of these batches, whose order is '
                f'{" and ".join(self.sources)}: expected one of the same data set, split, seed, '
                'chunk, lanes, window and condition. A further source begins with 0 samples.'
            ) from None
        return self._replace(position=Position(step, tuple(samples)))
