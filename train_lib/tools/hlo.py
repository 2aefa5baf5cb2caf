"""Reads the text of a compiled XLA program: estimated cycles, and what moves between devices.

    program = hlo.parse(compiled.as_text())
    hlo.cycles(program)             # libtpu's own estimates, by the name of the operation
    hlo.collectives(program)        # what moves, how often, among how many devices

All figures are those of one run on one device, with loops multiplied out (`cost_analysis()` counts
the body of a loop once). The grammar is that of XLA's `HloModule::ToString`.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Share of the result of an exchange among n devices that each of them receives, by an algorithm
# that moves the fewest bytes; the result of a reduce-scatter counts as the whole sum.
_RECEIVED = {
    'all-gather': lambda n: (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
}
_ENTRY = 'ENTRY'  # name of the computation where the program starts
_ARRAY = re.compile(r'\b([a-z]+)(\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$')
_CALLED = re.compile(r'\b(?:calls|to_apply|body|branch_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))')


class Instruction(NamedTuple):
    """One line: `%name = result opcode(operands), attributes`."""

    name: str
    result: str
    opcode: str
    operands: str
    attributes: str

    def operand(self, index: int) -> str:
        """Name of an operand."""
        return self.operands.split(', ')[index].lstrip('%')

    def attribute(self, pattern: str) -> str:
        """What the group of the pattern finds in the attributes; '' for nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ''


Program = dict[str, dict[str, Instruction]]  # by names of computations and of instructions


class Executed(NamedTuple):
    """An instruction at one place of the program."""

    instruction: Instruction
    computation: str  # name of the one that holds it
    times: int  # how often it runs
    # Lengths of the loops around it, outermost first; a length that cannot be read is 0, and counts
    # as 1 in `times`.
    loops: tuple[int, ...]
    fused_in: str  # name of the computation with the fusion that it is part of, if any


class Collective(NamedTuple):
    """One exchange among `members` devices, which runs `times` times in these `loops`."""

    kind: str  # one of `_RECEIVED`
    shapes: list[tuple[int, ...]]  # shapes of the result
    nbytes: float  # what a device receives each time
    members: int
    times: int
    loops: tuple[int, ...]
    is_async: bool  # runs beside other work


def parse(text: str) -> Program:
    """Parses what `compiled.as_text()` gives.

    Raises:
        ValueError: it has no entry computation.
    """
    program: Program = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = program[_ENTRY if header[1] else header[2]] = {}
        elif found := _INSTRUCTION.match(re.sub(r'/\*.*?\*/', '', line)):
            lines[found[1]] = Instruction(*found.groups())
    if _ENTRY not in program:
        raise ValueError('the text is no compiled XLA program: it has no ENTRY computation')
    return program


def executed(program: Program) -> Iterator[Executed]:
    """Every instruction at every place where it runs; not the condition of a loop.

    Also skipped is what only combines two numbers, such as the sum of a reduction.
    """
    stack: list[tuple[str, int, tuple[int, ...], str]] = [(_ENTRY, 1, (), '')]
    while stack:
        name, times, loops, fused_in = stack.pop()
        for instruction in program[name].values():
            yield Executed(instruction, name, times, loops, fused_in)
            inner, inside = (times, loops), fused_in
            if instruction.opcode == 'while':
                length = _length(program, name, instruction)
                inner = times * (length or 1), (*loops, length)
            elif instruction.opcode == 'fusion':
                inside = fused_in or name
            elif instruction.opcode not in ('call', 'conditional', 'async-start'):
                continue
            for found in _CALLED.finditer(instruction.attributes):
                for called in (found[1] or found[2]).split(', '):
                    stack.append((called.lstrip('%'), *inner, inside))


def _length(program: Program, around: str, loop: Instruction) -> int:
    """How often the body of a `while` runs, where it counts up by one to a constant; else 0."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = program[loop.attribute(r'condition=%?([\w.\-]+)')]
    tests = [i for i in condition.values() if i.opcode == 'compare']
    if len(tests) != 1 or 'direction=LT' not in tests[0].attributes:
        return 0
    counter, limit = (condition[tests[0].operand(index)] for index in (0, 1))
    before = program[around]
    start = before[loop.operand(0)]
    if (counter.opcode, limit.opcode, start.opcode) != ('get-tuple-element', 'constant', 'tuple'):
        return 0
    start = before[start.operand(int(counter.attribute(r'index=(\d+)')))]
    while start.opcode in ('copy', 'bitcast'):
        start = before[start.operand(0)]
    return int(limit.operands) - int(start.operands) if start.opcode == 'constant' else 0


def cycles(program: Program) -> dict[str, int]:
    """Cycles by the name of the operation that they are for (`op_name`, '' where there is none).

    They are libtpu's estimates for fusions and single operations. Kernels, exchanges and copies
    that run beside other work have none; programs for other devices have none at all.
    """
    found: dict[str, int] = collections.Counter()
    for step in executed(program):
        if not step.fused_in:
            estimate = step.instruction.attribute(r'"estimated_cycles":"(\d+)"')
            name = step.instruction.attribute(r'op_name="([^"]*)"')
            found[name] += step.times * int(estimate or 0)
    return found


def collectives(program: Program) -> Iterator[Collective]:
    """Every exchange between devices, at every place where it happens."""
    seen = set()
    for step in executed(program):
        instruction, kind = step.instruction, step.instruction.opcode.removesuffix('-start')
        if kind not in _RECEIVED or (count := members(instruction.attributes)) == 1:
            continue
        # One that runs beside other work is a pair of start and done, or stands in each of the
        # fusions that it spans.
        is_start, chain = kind != instruction.opcode, instruction.attribute(r'chain_id="(\d+)"')
        place = step.fused_in, chain, instruction.attribute(r'channel_id=(\d+)')
        if chain and place in seen:
            continue
        seen.add(place)
        arrays = _ARRAY.findall(instruction.result)
        if is_start:
            arrays = arrays[1:2] or arrays  # (operand, result, flags)
        whole = sum(_nbytes(*array) for array in arrays)
        if kind == 'reduce-scatter':
            whole *= count
        elif step.computation.startswith('all-reduce-scatter'):  # and keeps a slice, on a TPU
            kind = 'reduce-scatter'
        yield Collective(
            kind,
            [_shape(dimensions) for *_, dimensions in arrays],
            whole * _RECEIVED[kind](count),
            count,
            step.times,
            step.loops,
            is_async=is_start or bool(chain and step.fused_in),
        )


def members(attributes: str) -> int:
    """How many devices exchange data with each other.

    XLA writes `{{0,1},{2,3}}`, `[2,2]<=[4]` (rows of so many), `mesh['a'=2,'b'=2] {'b'}` (the
    members differ along `b`) or pairs of source and target.

    Raises:
        ValueError: the notation is another one.
    """
    if pairs := re.search(r'source_target_pairs=\{(\{.*?\})\}', attributes):
        found = re.findall(r'\{(\d+),(\d+)\}', pairs[1])
        return 2 if any(source != target for source, target in found) else 1
    if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
        return listed[1].count(',') + 1
    if rows := re.search(r'replica_groups=\[[\d,]*?(\d+)\]<=\[', attributes):
        return int(rows[1])
    axes = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^ ]*\))? \{('\w+'(?:,'\w+')*)\}"
    if named := re.search(axes, attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r'\w+', named[2]))
    raise ValueError(f'cannot tell how many devices exchange data: {attributes[:200]!r}')


def _shape(dimensions: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, dimensions.split(','))))


def _nbytes(kind: str, bits: str, dimensions: str) -> float:
    return math.prod(_shape(dimensions)) * int(bits or 8 * (kind == 'pred')) / 8
