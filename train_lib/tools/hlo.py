"""Reads the text of a compiled XLA program: estimated cycles, kernels, exchanges between devices.

Unlike those of `cost_analysis()`, its figures count every iteration of a loop.
"""

import collections
import math
import re
import string
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
_KERNEL = 'custom_call_target="tpu_custom_call"'  # a Pallas kernel on a TPU
_CALLERS = 'while', 'fusion', 'call', 'conditional', 'async-start'
_ENTRY = 'ENTRY'  # name of the computation where the program starts
# Of `bf16[16,256]{1,0}`, or `f8e4m3fn[16]`, the dtype and the sizes.
_ARRAY = re.compile(r'\b([a-z]+\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]')
# `ENTRY %main.42 (x: f32[4]) -> f32[4] {`, `%body (...) -> ... {`.
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
# `  ROOT %add.1 = f32[4]{0} add(%x, %y), metadata={...}`: the fields of `_Instruction`.
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$')
# `calls=%fused`, `branch_computations={%a, %b}`.
_CALLED = re.compile(r'\b(?:calls|to_apply|body|branch_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))')

Array = tuple[str, tuple[int, ...]]
Loops = tuple[int, ...]  # lengths, outermost first; 0 for one that cannot be read, counted as 1


class Collective(NamedTuple):
    """One exchange between devices."""

    kind: str  # a key of `_RECEIVED`
    members: int  # devices that exchange data with each other
    arrays: list[Array]  # dtypes, such as `bf16`, and shapes of the result
    nbytes: float  # that a device receives in all iterations of the loops
    times: int
    loops: Loops  # around it
    is_async: bool  # whether it runs while other work is done


class Kernel(NamedTuple):
    """A Pallas kernel of a TPU, by the instruction that calls it."""

    name: str
    rows: int  # largest first axis of its results; for `models.attention_kernel`, the samples


class Costs(NamedTuple):
    """The costs of one run of a program."""

    # Libtpu's estimates for fusions and single operations, by name (`op_name`, '' without one); it
    # has none for kernels and for exchanges and copies that run while other work is done.
    cycles: collections.Counter[str]
    collectives: list[Collective]
    kernels: collections.Counter[Kernel]  # numbers of calls
    loops: set[Loops]  # around each computation


class _Instruction(NamedTuple):
    """One line: `%name = result opcode(operands), attributes`."""

    name: str
    result: str
    opcode: str
    operands: str
    attributes: str

    def operand(self, index: int) -> str:
        """Returns the name of an operand."""
        return self.operands.split(', ')[index].lstrip('%')

    def attribute(self, pattern: str) -> str:
        """Returns the match of the pattern's group in the attributes; '' without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ''

    def arrays(self) -> list[Array]:
        """Returns dtype and shape of each array of the result."""
        arrays = []
        for dtype, sizes in _ARRAY.findall(self.result):
            # A scalar has no sizes: `f32[]`.
            words = sizes.split(',') if sizes else []
            shape = tuple(int(word) for word in words)
            arrays.append((dtype, shape))
        return arrays

    def called(self) -> Iterator[str]:
        """Yields the names of the computations that this instruction calls."""
        for match in _CALLED.finditer(self.attributes):
            for name in (match[1] or match[2]).split(', '):
                yield name.lstrip('%')


_Program = dict[str, dict[str, _Instruction]]  # by names of computations and of instructions


def read_costs(text: str) -> Costs:
    """Adds up the costs in the text of `compiled.as_text()`, without conditions of loops.

    Raises a ValueError for other texts.
    """
    # Empty braces stand for all devices, whose number is in the first line.
    devices = re.search(r'num_partitions=(\d+)', text)
    if devices:
        text = text.replace('replica_groups={}', f'replica_groups=[1,{devices[1]}]<=[]')
    program = _parse_program(text)
    costs = Costs(collections.Counter(), [], collections.Counter(), set())
    seen_places = set[tuple[str, ...]]()
    # Computations to add up: the name, the loops around it, and the computation that has the fusion
    # around it, '' without one.
    stack: list[tuple[str, Loops, str]] = [(_ENTRY, (), '')]
    while stack:
        name, loops, fused_in = stack.pop()
        costs.loops.add(loops)
        for instruction in program[name].values():
            # An asynchronous exchange stands in each of the fusions that it spans.
            chain = instruction.attribute(r'chain_id="(\d+)"')
            channel = instruction.attribute(r'channel_id=(\d+)')
            place = fused_in, chain, channel
            if not chain or place not in seen_places:
                costs.collectives.extend(_collective(instruction, name, loops))
            seen_places.add(place)
            _add_estimate(costs, instruction, loops, is_fused=bool(fused_in))
            # Only these run another computation as a part of the program.
            if instruction.opcode not in _CALLERS:
                continue
            called_loops = loops
            called_in = fused_in
            if instruction.opcode == 'while':
                length = _trip_count(program, name, instruction)
                called_loops = (*loops, length)
            elif instruction.opcode == 'fusion':
                called_in = fused_in or name
            stack += [(called, called_loops, called_in) for called in instruction.called()]
    return costs


def _add_estimate(costs: Costs, instruction: _Instruction, loops: Loops, is_fused: bool) -> None:
    """Adds the compiler's estimate of an instruction, or the calls of a kernel."""
    times = _times(loops)
    if _KERNEL in instruction.attributes:
        rows = 1
        for _, shape in instruction.arrays():
            # Scalars have no first axis.
            if shape:
                rows = max(rows, shape[0])
        costs.kernels[Kernel(instruction.name, rows)] += times
    # The estimate of a fusion holds those of the instructions in it.
    if not is_fused:
        cycles = instruction.attribute(r'"estimated_cycles":"(\d+)"')
        estimate = int(cycles or 0)
        operation = instruction.attribute(r'op_name="([^"]*)"')
        costs.cycles[operation] += times * estimate


def _times(loops: Loops) -> int:
    """Returns how often a computation runs that is in these loops."""
    return math.prod(length or 1 for length in loops)


def _parse_program(text: str) -> _Program:
    """Returns the instructions of each computation; raises a ValueError for other texts."""
    program: _Program = {}
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            instructions: dict[str, _Instruction] = {}
            program[_ENTRY if header[1] else header[2]] = instructions
            continue
        # Comments are such as the indices in long tuples.
        without_comments = re.sub(r'/\*.*?\*/', '', line)
        match = _INSTRUCTION.match(without_comments)
        if match:
            instructions[match[1]] = _Instruction(*match.groups())
    if _ENTRY not in program:
        raise ValueError('the text is not a compiled XLA program: it has no ENTRY computation')
    return program


def _trip_count(program: _Program, computation: str, loop: _Instruction) -> int:
    """Returns how often a `while` runs, if it counts up by one to a constant; otherwise 0."""
    count = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if count:
        return int(count)
    # Where XLA does not say, the condition compares a counter with the constant.
    condition = program[loop.attribute(r'condition=%?([\w.\-]+)')]
    tests = [test for test in condition.values() if test.opcode == 'compare']
    if len(tests) != 1 or 'direction=LT' not in tests[0].attributes:
        return 0
    counter = condition[tests[0].operand(0)]
    limit = condition[tests[0].operand(1)]
    if counter.opcode != 'get-tuple-element' or limit.opcode != 'constant':
        return 0
    # The counter is an element of the tuple that the loop begins with.
    instructions = program[computation]
    first_values = instructions[loop.operand(0)]
    if first_values.opcode != 'tuple':
        return 0
    index = int(counter.attribute(r'index=(\d+)'))
    start = instructions[first_values.operand(index)]
    # XLA may copy a constant before it puts it into the tuple.
    while start.opcode in ('copy', 'bitcast'):
        start = instructions[start.operand(0)]
    if start.opcode != 'constant':
        return 0
    return int(limit.operands) - int(start.operands)


def _collective(instruction: _Instruction, computation: str, loops: Loops) -> Iterator[Collective]:
    """Yields the exchange between devices that an instruction is, if it is one."""
    kind = instruction.opcode.removesuffix('-start')
    if kind not in _RECEIVED:
        return
    count = members(instruction.attributes)
    # Along an axis of one device nothing moves.
    if count == 1:
        return
    arrays = instruction.arrays()
    is_start = kind != instruction.opcode
    # The result of a start is (operand, result, flags).
    if is_start:
        arrays = arrays[1:2] or arrays
    result_nbytes = 0.0
    for dtype, shape in arrays:
        result_nbytes += math.prod(shape) * _bits(dtype) / 8
    # Its result is one share of the sum, of which `_RECEIVED` counts the whole.
    if kind == 'reduce-scatter':
        result_nbytes *= count
    elif computation.startswith('all-reduce-scatter'):  # a fusion that keeps a slice, on a TPU
        kind = 'reduce-scatter'
    is_async = is_start or 'chain_id=' in instruction.attributes
    nbytes = _times(loops) * result_nbytes * _RECEIVED[kind](count)
    yield Collective(kind, count, arrays, nbytes, _times(loops), loops, is_async)


def _bits(dtype: str) -> int:
    """Returns the bits of a number, such as 16 of `bf16`."""
    # A bool takes a byte. A token, which orders effects, takes nothing.
    if dtype == 'pred':
        return 8
    return int(dtype.lstrip(string.ascii_lowercase) or 0)


def members(attributes: str) -> int:
    """Returns how many devices exchange data with each other, by an instruction's attributes.

    Raises a ValueError for attributes that do not say so.
    """
    # XLA writes `{{0,1},{2,3}}`, `[2,2]<=[4]` (groups and members), `mesh['a'=2,'b'=2] {'b'}` (the
    # members differ along `b`) or pairs of source and target.
    pairs = re.search(r'source_target_pairs=\{(\{.*?\})\}', attributes)
    if pairs:
        # Where all send to themselves, nothing moves.
        for source, target in re.findall(r'\{(\d+),(\d+)\}', pairs[1]):
            if source != target:
                return 2
        return 1
    group = re.search(r'replica_groups=\{\{([\d,]+)\}', attributes)
    if group:
        return group[1].count(',') + 1
    group_size = re.search(r'replica_groups=\[[\d,]*?(\d+)\]<=\[', attributes)
    if group_size:
        return int(group_size[1])
    axes = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^ ]*\))? \{('\w+'(?:,'\w+')*)\}",
        attributes,
    )
    if axes:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        names = re.findall(r'\w+', axes[2])
        return math.prod(int(sizes[name]) for name in names)
    raise ValueError(f'cannot tell how many devices exchange data: {attributes[:200]!r}')
