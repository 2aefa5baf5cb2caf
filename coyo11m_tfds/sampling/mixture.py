"""How many samples of each source every lane gives to each batch, and positions in a mixture.

docs/design.md states the rules ("Mixtures"). A single source is a mixture of one. A *lane* is one
of the streams that give each batch equally many samples; each source is in every lane. A *shape* is
that of latents: sources of several shapes take turns, because all samples of a batch have one. A
*cycle* says which shape each of some consecutive steps has, and is repeated.
"""

import bisect
import dataclasses
import functools
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np

from coyo11m_tfds.process import arguments
from coyo11m_tfds.process.errors import at_least

# Most steps of a cycle; finer weights of shapes are rounded.
_MAX_CYCLE = 1000


class Position(NamedTuple):
    """A position in a mixture, between two batches."""

    step: int  # number of the next batch
    samples: tuple[int, ...]  # of each source, taken from every lane so far


@dataclasses.dataclass(frozen=True)
class Stage:
    """A range of steps with fixed shares."""

    begin: int
    end: float  # one past the last step; infinite in the last stage
    counts: tuple[int, ...]  # samples of each source in a lane's share of a batch of its shape
    shapes: tuple[int, ...]  # number of each source's shape
    cycle: np.ndarray  # numbers of the shapes of consecutive steps, int64 (t,), repeated

    def shape(self, step: int) -> int:
        """Returns the number of the shape that the batch of a step has."""
        return int(self.cycle[step % len(self.cycle)])

    def members(self, shape: int) -> list[int]:
        """Returns the numbers of the sources that share the batches of a shape."""
        numbers = []
        for number, count in enumerate(self.counts):
            if count and self.shapes[number] == shape:
                numbers.append(number)
        return numbers

    def samples(self, begin: int, end: int) -> tuple[int, ...]:
        """Returns the samples of each source in a lane's share of the steps `[begin, end)`."""
        num_steps = self._count_steps(end) - self._count_steps(begin)  # of each shape
        samples = []
        for count, shape in zip(self.counts, self.shapes, strict=True):
            # A source gives nothing to batches of another shape.
            samples.append(count * int(num_steps[shape]))
        return tuple(samples)

    def _count_steps(self, end: int) -> np.ndarray:
        """Returns how many of the steps `[0, end)` have each shape, int64 `(num_shapes,)`."""
        # The cycle is counted from step 0 in every stage, so that a step's shape needs no history.
        num_cycles, remainder = divmod(end, len(self.cycle))
        # Also of shapes that have no step: their sources have no weight in this stage.
        num_shapes = max(self.shapes) + 1
        in_cycle = np.bincount(self.cycle, minlength=num_shapes)
        in_remainder = np.bincount(self.cycle[:remainder], minlength=num_shapes)
        return num_cycles * in_cycle + in_remainder


class BatchShares:
    """The shares of the sources in batches of one size, as a function of the step."""

    def __init__(
        self,
        per_lane: int,
        weights: Sequence[float] = (1,),
        stages: Sequence[Mapping[str, Any]] = (),
        shapes: Sequence[Hashable] = (),
        names: Sequence[str] = (),
    ):
        """Takes the samples of a lane in a batch, and the shape of each source; () if all equal.

        Raises a ValueError for stages that do not follow each other, and for weights that give a
        source no sample.
        """
        self.per_lane = per_lane
        self._names = names or [str(number) for number in range(len(weights))]
        self._shapes = (0,) * len(weights)
        if shapes:
            # Shapes are numbered in the order of their first sources.
            distinct_shapes = list(dict.fromkeys(shapes))
            self._shapes = tuple(distinct_shapes.index(shape) for shape in shapes)
        begins = [0]
        self._weights = [_fractions(weights, len(weights), 'weights')]
        for stage in stages:
            begin, stage_weights = _parse_stage(stage, len(weights))
            # A stage from step 0 replaces the weights of the sources.
            if begin == 0 and len(begins) == 1:
                begins.clear()
                self._weights.clear()
            elif begin <= begins[-1]:
                raise ValueError(f"stages: 'from': {begin} does not come after {begins[-1]}")
            begins.append(begin)
            self._weights.append(stage_weights)
        # A stage ends where the next begins, and the last has no end.
        ends: list[float] = []
        ends += begins[1:]
        ends.append(math.inf)
        self.stages = []
        for begin, end, stage_weights in zip(begins, ends, self._weights, strict=True):
            counts = self._share_out(stage_weights)
            cycle = self._plan_cycle(stage_weights)
            self.stages.append(Stage(begin, end, counts, self._shapes, cycle))
        # Its data would be opened in vain, and the weight is probably a mistake.
        for number, name in enumerate(self._names):
            if not any(stage.counts[number] for stage in self.stages):
                raise ValueError(f'source {name!r} has weight 0 in every stage: leave it out')

    def stage_at(self, step: int) -> Stage:
        """Returns the stage that holds a step."""
        num_begun = bisect.bisect(self.stages, step, key=lambda stage: stage.begin)
        return self.stages[num_begun - 1]

    def advance(self, position: Position, step: int) -> Position:
        """Returns the position of `step`, which must not be before `position`."""
        begin, samples = position
        # Shares are constant within a stage, so there is a sum for each stage.
        while begin < step:
            stage = self.stage_at(begin)
            end = int(min(step, stage.end))
            in_stage = stage.samples(begin, end)
            samples = tuple(map(operator.add, samples, in_stage))
            begin = end
        return Position(step, samples)

    @functools.cached_property
    def summary(self) -> list[str]:
        """Returns a line for each stage: shares of the sources, and weights that would be exact."""
        lines = []
        for stage, weights in zip(self.stages, self._weights, strict=True):
            lines.append(self._summarize(stage, weights))
        return lines

    def _weigh_shapes(self, weights: list[Fraction]) -> list[Fraction]:
        """Returns the sum of the weights of the sources of each shape."""
        shape_weights = [Fraction(0)] * (max(self._shapes) + 1)
        for weight, shape in zip(weights, self._shapes, strict=True):
            shape_weights[shape] += weight
        return shape_weights

    def _share_out(self, weights: list[Fraction]) -> tuple[int, ...]:
        """Returns how many samples each source gives to a lane's share of a batch of its shape.

        Raises a ValueError for a source with a weight above 0 that is too small for one sample.
        """
        # Batches have one shape: a source competes only with others of its shape. It gives the same
        # number of samples to each of these batches.
        counts = [0] * len(weights)
        for shape, total in enumerate(self._weigh_shapes(weights)):
            members = []
            for number, source_shape in enumerate(self._shapes):
                if source_shape == shape and weights[number]:
                    members.append(number)
            shares = [weights[number] / total for number in members]
            rounded = _largest_remainders(shares, self.per_lane)
            for number, share, count in zip(members, shares, rounded, strict=True):
                counts[number] = count
                if not count:
                    name = self._names[number]
                    raise ValueError(
                        f'source {name!r} has {float(share):.4g} of the weights, too '
                        f'little for one of the {self.per_lane} samples that a lane gives to a '
                        'batch: give it a larger weight, or set fewer lanes or a batch_size of '
                        f'{math.ceil(1 / share)} times the lanes'
                    )
        return tuple(counts)

    def _plan_cycle(self, weights: list[Fraction]) -> np.ndarray:
        """Returns the shapes of consecutive steps, in proportion to their weights, int64 `(t,)`.

        Raises a ValueError for a shape that gets no step of the longest cycle.
        """
        # The shortest cycle.
        quotas = _reduce_to_integers(self._weigh_shapes(weights))
        num_steps = sum(quotas)
        # Nobody needs shares finer than this, and a cycle of any length would take any memory.
        if num_steps > _MAX_CYCLE:
            shares = [Fraction(quota, num_steps) for quota in quotas]
            quotas = _largest_remainders(shares, _MAX_CYCLE)
        for number, shape in enumerate(self._shapes):
            if weights[number] and not quotas[shape]:
                raise ValueError(
                    f'source {self._names[number]!r} has {float(weights[number]):.4g} of '
                    f'{float(sum(weights)):.4g}, less than one batch of its shape in {_MAX_CYCLE} '
                    'batches: give it a larger weight'
                )
        # Each shape's batches stand in the middles of equal parts of the cycle, so that the shapes
        # alternate as evenly as they can. Fractions, because a float would decide ties by rounding.
        steps = []
        for shape, quota in enumerate(quotas):
            for number in range(quota):
                middle = Fraction(2 * number + 1, 2 * quota)
                steps.append((middle, shape))
        # Of equal middles, the shape with the lower number comes first.
        return np.array([shape for _, shape in sorted(steps)])

    def _summarize(self, stage: Stage, weights: list[Fraction]) -> str:
        """Returns the shares of a stage and, if they are rounded, what would make them exact."""
        # A cycle has every shape as often as any other cycle.
        samples = stage.samples(0, len(stage.cycle))
        shares = []
        is_exact = True
        for name, weight, count in zip(self._names, weights, samples, strict=True):
            exact_share = weight / sum(weights)
            share = Fraction(count, len(stage.cycle) * self.per_lane)
            note = ''
            if share != exact_share:
                is_exact = False
                note = f' (requested {float(exact_share):.4g})'
            shares.append(f'{name} {float(share):.4g}{note}')
        if is_exact:
            return f'shares {", ".join(shares)}'
        # A lane gives whole samples. So the share of a source among those of its shape is exact if
        # its denominator divides `per_lane`.
        denominators = []
        for shape in set(stage.cycle.tolist()):
            members = stage.members(shape)
            total = sum(weights[number] for number in members)
            for number in members:
                share_in_shape = weights[number] / total
                denominators.append(share_in_shape.denominator)
        divisor = math.gcd(*samples)
        exact_weights = ':'.join(str(count // divisor) for count in samples)
        return (
            f'shares {", ".join(shares)}, in steps of 1/{self.per_lane} (lanes/batch_size): '
            f'weights {exact_weights} are exact, and so is batch_size a multiple of '
            f'{math.lcm(*denominators)} times the lanes'
        )


def _parse_stage(stage: Any, count: int) -> tuple[int, list[Fraction]]:
    """Returns the first step of a stage, and the weights of the `count` sources from it on."""
    if not isinstance(stage, Mapping) or stage.keys() != {'from', 'weights'}:
        raise ValueError(
            f"stages has {stage!r}: expected {{'from': STEP, 'weights': (A NUMBER A SOURCE)}}"
        )
    begin = arguments.convert("stages: 'from'", stage['from'], int)
    at_least(0).check("stages: 'from'", begin)
    return begin, _fractions(stage['weights'], count, "stages: 'weights'")


def _fractions(weights: Any, count: int, argument: str) -> list[Fraction]:
    """Returns `count` weights as they are written: 0.1 is a tenth; ValueError for other things."""
    try:
        # By its text: as a binary number, 0.1 is a fraction that makes the cycle long.
        fractions = [Fraction(str(float(weight))) for weight in weights]
    # Infinity and NaN are no fractions.
    except (TypeError, ValueError):
        fractions = []
    has_negative = any(fraction < 0 for fraction in fractions)
    is_possible = 0 < sum(fractions) < 10**12
    if len(fractions) != count or has_negative or not is_possible:
        raise ValueError(
            f'{argument} {weights!r}: expected a number of at least 0 for each of {count} sources, '
            'not all of them 0'
        )
    return fractions


def _reduce_to_integers(weights: Sequence[Fraction]) -> list[int]:
    """Returns the smallest whole numbers in proportion to some weights."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * unit) for weight in weights]
    divisor = math.gcd(*numbers)
    return [number // divisor for number in numbers]


def _largest_remainders(shares: Sequence[Fraction], total: int) -> list[int]:
    """Returns whole numbers that add up to a total, each its share rounded down or up."""
    exact = [share * total for share in shares]
    counts = [math.floor(x) for x in exact]
    # What is missing goes to those that lost most by rounding down; of equal losses, to the first.
    gains = [count - share for count, share in zip(counts, exact, strict=True)]
    by_loss = sorted(range(len(gains)), key=lambda number: gains[number])
    num_missing = total - sum(counts)
    for number in by_loss[:num_missing]:
        counts[number] += 1
    return counts


class Cursor(NamedTuple):
    """A position in a sequence of batches, with the shares of the following batches."""

    position: Position  # of the next batch
    shares: BatchShares
    digests: tuple[str, ...]  # of each source and of the order of its samples
    stride: int = 1  # the sequence holds only every `stride`-th batch

    def after(self, count: int) -> Self:
        """Returns the cursor after `count` more batches of the sequence."""
        step = self.position.step + count * self.stride
        return self._replace(position=self.shares.advance(self.position, step))

    def state(self) -> dict[str, Any]:
        """Returns the step and the samples of each source by digest, in plain Python values."""
        step, samples = self.position
        return {'step': step, 'samples': dict(zip(self.digests, samples, strict=True))}

    def at(self, state: Mapping[str, Any]) -> Self:
        """Returns the cursor of a state, also of another batch size or of other sources.

        Raises a ValueError for anything else, such as the state of another order.
        """
        try:
            step = arguments.convert('', state['step'], int)
            # By digest, not by position: sources may come in another order. Samples of sources that
            # are no longer mixed are forgotten.
            samples = []
            for digest in self.digests:
                samples.append(arguments.convert('', state['samples'][digest], int))
            if min(step, *samples) < 0:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise ValueError(
                f'{state!r} is not a state of these batches, whose order is '
                f'{" and ".join(self.digests)}: expected one of the same data set, split, seed, '
                'chunk, lanes, window and condition. A further source begins with 0 samples.'
            ) from None
        return self._replace(position=Position(step, tuple(samples)))
