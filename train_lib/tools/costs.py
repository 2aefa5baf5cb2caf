"""What a compiled program costs a chip: tables of traffic and time, and a verdict on them."""

import collections
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from train_lib.learning import sharding
from train_lib.lifecycle import chips
from train_lib.tools import hlo

# Keys of a report: the titles of its tables, and what the verdict names.
MEMORY = 'memory of a chip, GB'
MOVED = 'received from other chips, MB a step'
TIME = "the compiler's estimate, ms a step"
WAITS = 'exchanges that wait, ms a step at least'
ARITHMETIC = 'arithmetic of a chip, TFLOP a step'
LEFT_OUT = 'left out of the estimate'
_LISTED = 0.05  # ms; shorter exchanges are added up

# Sections of a step by the names of its operations; the first that matches counts.
_SECTIONS = {
    'text encoder': r'\bLanguageModel\b',
    'MLP': r'/mlp_\d',
    'attention: qkv and out': r'/attention/.*(qkv|words|out)/',
    'attention: scores and values': r'/attention/.*dot_general',
    'attention: the rest': r'/attention/',
    'modulation, time and text': r'/(modulation|conditioning|words)/',
    'norms, sums and stacking in layers': r'/blocks\b|(jvp|transpose)\([^/]*/while/body/',
    'optimizer and the rest': '',
}

Report = dict[str, Any]


def tabulate(costs: hlo.Costs, chip: chips.Chip, schedules: pathlib.Path) -> Report:
    """Returns a program's traffic and time.

    Args:
        costs: Those of the program.
        chip: Chip that it is compiled for; without a clock there are no times.
        schedules: Folder with the schedules of kernels, which take a cycle for each bundle and
            sample.
    """
    milliseconds = 0.0  # of a cycle
    if chip.clock:
        milliseconds = 1e3 / chip.clock
    times = dict.fromkeys(_SECTIONS, 0.0)
    for name, cycles in costs.cycles.items():
        times[_find_section(name)] += cycles * milliseconds
    left_out = []
    if any(0 in loops for loops in costs.loops):
        left_out.append('most iterations of a loop')
    # The compiler estimates no kernels: their schedules say how long a sample takes.
    for kernel, calls in costs.kernels.items():
        count = bundles(schedules, kernel.name)
        # Without the number that XLA gives to each call.
        stem, _, _ = kernel.name.partition('.')
        section = f'kernel {stem}'
        cycles = count * kernel.rows * calls
        times[section] = times.get(section, 0) + cycles * milliseconds
        if not count:
            left_out.append(f'{section}, which has no schedule')
    total = sum(times.values())
    # A program that only draws has no optimizer, and so on.
    times = {section: time for section, time in times.items() if time}
    times['in all'] = total
    return {
        LEFT_OUT: left_out,
        MOVED: _add_up_traffic(costs.collectives),
        TIME: times,
        WAITS: _add_up_waits(costs.collectives, chip),
    }


def _find_section(operation: str) -> str:
    """Returns the section of a step that an operation belongs to."""
    for section, pattern in _SECTIONS.items():
        if re.search(pattern, operation):
            return section
    raise AssertionError  # the last pattern matches every name


def _add_up_traffic(collectives: Sequence[hlo.Collective]) -> dict[str, float]:
    """Returns the megabytes of each kind of exchange."""
    megabytes = collections.defaultdict[str, float](float)
    for exchange in collectives:
        kind = f'{exchange.kind} of {exchange.members}'
        if exchange.is_async:
            kind += ', asynchronous'
        megabytes[kind] += exchange.nbytes / 1e6
    traffic = dict(sorted(megabytes.items()))
    traffic['in all'] = sum(megabytes.values())
    return traffic


def _add_up_waits(collectives: Sequence[hlo.Collective], chip: chips.Chip) -> dict[str, float]:
    """Returns the milliseconds of each exchange that runs alone, the longest first."""
    times = collections.Counter[str]()
    wait_ms = collections.defaultdict[str, float](float)
    for exchange in collectives:
        # Asynchronous ones run while the chip computes, and cost no time of their own if they end
        # before their results are needed.
        if exchange.is_async:
            continue
        name = f'{exchange.kind} of {exchange.members}, {_describe_largest(exchange)}'
        times[name] += exchange.times
        wait_ms[name] += exchange.nbytes / chip.link_rate * 1e3
    waits = {}
    for name in sorted(wait_ms, key=lambda name: -wait_ms[name]):
        if wait_ms[name] >= _LISTED:
            waits[f'{times[name]} x {name}'] = wait_ms[name]
    # Also those that were not listed: the rows above and the last but one add up to it.
    total = sum(wait_ms.values())
    waits['shorter ones'] = total - sum(waits.values())
    waits['in all'] = total
    return waits


def _describe_largest(exchange: hlo.Collective) -> str:
    """Returns the largest array of an exchange, as XLA writes it, and how many more there are."""
    dtype, shape = max(exchange.arrays, key=lambda array: math.prod(array[1]))
    sizes = ','.join(map(str, shape))
    description = f'{dtype}[{sizes}]'
    num_others = len(exchange.arrays) - 1
    if num_others:
        description += f' and {num_others} more'
    return description


def judge(report: Report, chip: chips.Chip) -> Report:
    """Returns whether the program fits, its model FLOP utilization, and a sentence about both."""
    share = report[MEMORY]['total'] * 1e9 / chip.memory
    fits = share <= 1
    # Of the model alone: neither rematerialization nor a frozen encoder counts as useful.
    ideal = report[ARITHMETIC]['model'] * 1e12 / chip.flops * 1e3
    estimate = report[TIME]['in all']
    mfu = 0.0
    mfu_with_waits = 0.0
    if estimate:
        mfu = ideal / estimate
        mfu_with_waits = ideal / (estimate + report[WAITS]['in all'])
    outcome = 'fits' if fits else 'does not fit'
    clauses = [f'{outcome}: {share:.0%} of the memory']
    traffic = report[MOVED]
    least_traffic = traffic.get('least for this mesh')
    if least_traffic:
        ratio = traffic['in all'] / least_traffic
        clauses.append(f'{ratio:.2f} times the least traffic')
    if estimate:
        clauses.append(f'{estimate:.0f} ms a step by the compiler, an MFU of {mfu:.0%}')
        clauses.append(f'{mfu_with_waits:.0%} with the exchanges that wait')
    else:
        clauses.append(f'no estimate of the time on {chip.name}')
    clauses += [f'without {name}' for name in report.get(LEFT_OUT, ())]
    return {
        'mfu': mfu,
        'mfu_with_waits': mfu_with_waits,
        'fits': fits,
        'verdict': ', '.join(clauses),
    }


def bundles(schedules: pathlib.Path, instruction: str) -> int:
    """Returns an instruction's VLIW bundles in the last program compiled; 0 without a schedule."""
    # Libtpu schedules only one of equal instructions, so `x.1` may stand for `x.2`.
    stem, _, _ = instruction.partition('.')
    pattern = re.compile(rf'(\d+)-({re.escape(stem)}(?:\.\d+)?)-\d+-schedule-analysis')
    candidates = []
    for path in schedules.iterdir():
        match = pattern.match(path.name)
        if match:
            # Names begin with the time: the last is of the program that was compiled last.
            is_exact = match[2] == instruction
            candidates.append((is_exact, int(match[1]), path))
    if not candidates:
        return 0
    # The schedule of the instruction itself, if there is one, before later ones of its equals.
    *_, path = max(candidates)
    total = re.search(r'total scheduled bundles:\s*(\d+)', path.read_text())
    return int(total[1]) if total else 0


def least_bytes(
    params,
    mesh: Mesh,
    compute_bytes: int = 2,
    accumulate: int = 1,
    muon_mask: Any = None,
    gradient_bytes: int = 4,
) -> float:
    """Returns the bytes that a device receives in a training step if only weights move.

    Args:
        params: Weights, or their shapes.
        mesh: Devices.
        compute_bytes: Bytes of a number in the dtype of the computation.
        accumulate: Pieces of a batch, each of which needs all weights.
        muon_mask: Pytree of bool, True for the weights that Muon updates; None for none.
        gradient_bytes: Bytes of a number in the dtype of the gradients.
    """
    # Devices gather a weight that is split over f devices for the forward and for the backward
    # pass, for each of `accumulate` pieces of the batch, in the dtype of the computation: (f-1)/f
    # of the weight each time. They reduce its gradient over the f devices: (f-1)/f of it, in the
    # dtype of the gradients of blocks, which are nearly all. The d groups then reduce each f-th of
    # it: 2(d-1)/d of that, half to form the sum and half to distribute it.
    #
    # Where `muon_mask` is True, `sharding.map_matrices` makes the update: each of the n = df
    # devices gathers its n-th of the matrices, of which it has an f-th, and its f-th of the
    # results, of which it computed an n-th.
    fsdp = mesh.shape[sharding.FSDP_AXIS]
    n = mesh.size

    def count_bytes(leaf, is_muon: bool) -> float:
        """Returns the bytes for one array of weights."""
        # Weights that do not divide lie whole on every device.
        is_split = sharding.partition_spec(leaf.shape, fsdp) != PartitionSpec()
        # The letters of the comment above.
        f = fsdp if is_split else 1
        d = n // f
        within_groups = (f - 1) / f * (2 * compute_bytes + gradient_bytes) * accumulate
        between_groups = 2 * (d - 1) / d * gradient_bytes / f
        update = 0.0
        if is_muon:
            gathered = (f - 1) / f / n
            received = (1 - 1 / n) / f
            update = (gathered + received) * compute_bytes
        return math.prod(leaf.shape) * (within_groups + between_groups + update)

    if muon_mask is None:
        muon_mask = jax.tree.map(lambda _: False, params)
    sizes = jax.tree.map(count_bytes, params, muon_mask)
    return float(sum(jax.tree.leaves(sizes)))
