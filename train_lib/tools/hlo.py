"""Reads the text of a compiled XLA program: its instructions, and how often each of them runs.

    module = hlo.parse(compiled.as_text())
    for step in hlo.executed(module):
        step.computation, step.times, step.loops

`cost_analysis()` counts the body of a loop once, whatever its length; this multiplies loops out.
The grammar is that of XLA's `HloModule::ToString`. Only what the costs need is understood.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {'pred': 8, 'token': 0, 'opaque': 0}  # of others the name says it
_ARRAY = re.compile(r'\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$')
_CALLED = re.compile(r'\b(?:calls|to_apply|body|branch_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))')


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of a value: its dtype by XLA's name, its shape, and the memory it lies in.

    `space` is XLA's number of a memory: 0 is the main memory of the device; on a TPU 1 is the
    vector memory on the chip and 5 the host's.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def nbytes(self) -> int:
        """Without the padding that tiles need."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int(re.findall(r'\d+', self.dtype)[0])
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `%name = outputs opcode(%operands), attributes`; a tuple's elements are flat."""

    name: str
    opcode: str
    outputs: tuple[Array, ...]
    operands: tuple[str, ...]
    inside: str  # the text between the parentheses
    attributes: str

    def attribute(self, name: str) -> str:
        """The text of `name=...` up to the next space or the closing brace; '' without one."""
        found = re.search(rf'\b{name}=(\{{[^}}]*\}}|[^\s,]+)', self.attributes)
        return found[1] if found else ''

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this one runs."""
        return tuple(
            name.lstrip('%')
            for match in _CALLED.finditer(self.attributes)
            for name in (match[1] or match[2]).split(', ')
        )


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text, and the one whose value is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """The instruction that makes an operand."""
        return self.instructions[instruction.operands[index]]


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name; `entry` is where the program starts."""

    computations: dict[str, Computation]
    entry: Computation


@dataclasses.dataclass(frozen=True)
class Executed:
    """A computation at one place of the program.

    Attributes:
        computation: what runs.
        times: how often, in one run of the program.
        loops: lengths of the loops around it, outermost first; 0 for one that cannot be read,
            which counts as 1 in `times`.
        place: the computation that is not part of a fusion around it, or itself.
    """

    computation: Computation
    times: int
    loops: tuple[int, ...]
    place: Computation

    @property
    def fused(self) -> bool:
        """True if the computation is inside a fusion, so that its values do not go to memory."""
        return self.place is not self.computation


def parse(text: str) -> Module:
    """Parses what `compiled.as_text()` gives.

    Raises:
        ValueError: it has no entry computation.
    """
    computations, entry, name, root = {}, None, None, None
    lines: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, lines, is_entry = header[2], {}, bool(header[1])
        # Not `startswith`: attributes of a kernel call have lines of their own, such as `}}, ...`.
        elif line.rstrip() == '}' and name and root:
            computations[name] = Computation(name, lines, root)
            entry = computations[name] if is_entry else entry
            name = None
        elif name and (match := _INSTRUCTION.match(line)):
            lines[match[2]] = _instruction(match[2], re.sub(r'/\*.*?\*/', '', match[3]))
            if match[1]:
                root = lines[match[2]]
    if entry is None:
        raise ValueError('the text is not a compiled XLA program: it has no ENTRY computation')
    return Module(computations, entry)


def executed(module: Module) -> Iterator[Executed]:
    """Yields every computation that runs, once for each place where it runs.

    Conditions of loops are left out, and computations that combine two numbers, such as the sum of
    a reduction.
    """
    stack = [Executed(module.entry, 1, (), module.entry)]
    while stack:
        here = stack.pop()
        yield here
        for instruction in here.computation.instructions.values():
            if instruction.opcode == 'while':
                length = trip_count(module, here.computation, instruction)
                times, loops = here.times * (length or 1), (*here.loops, length or 0)
            elif instruction.opcode in ('fusion', 'call', 'conditional', 'async-start'):
                times, loops = here.times, here.loops
            else:
                continue
            for name in instruction.called:
                inner = module.computations[name]
                fused = here.fused or instruction.opcode == 'fusion'
                stack.append(Executed(inner, times, loops, here.place if fused else inner))


def trip_count(module: Module, around: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs, where it counts up by one to a constant."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = module.computations[loop.attribute('condition').lstrip('%')]
    test = condition.root
    if test.opcode != 'compare' or test.attribute('direction') != 'LT':
        return None
    counter, limit = (condition.operand(test, index) for index in (0, 1))
    if counter.opcode != 'get-tuple-element' or limit.opcode != 'constant':
        return None
    start = around.operand(loop, 0)
    if start.opcode == 'tuple':
        start = around.operand(start, int(counter.attribute('index')))
        while start.opcode in ('copy', 'bitcast'):
            start = around.operand(start, 0)
    return int(limit.inside) - int(start.inside) if start.opcode == 'constant' else None


def _instruction(name: str, text: str) -> Instruction:
    shape_end = _closing(text, 0) if text.startswith('(') else text.index(' ')
    opening = text.index('(', shape_end)
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing - 1]
    return Instruction(
        name,
        opcode=text[shape_end:opening].strip(),
        outputs=tuple(_array(match) for match in _ARRAY.finditer(text[:shape_end])),
        operands=tuple(re.findall(r'%([\w.\-]+)', inside)),
        inside=inside,
        attributes=text[closing:],
    )


def _closing(text: str, opening: int) -> int:
    """The place after the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in re.finditer(r'[()]', text[opening:]):
        depth += 1 if place[0] == '(' else -1
        if not depth:
            return opening + place.end()
    raise ValueError(f'a parenthesis is not closed: {text[:80]!r}')


def _array(match: re.Match) -> Array:
    dtype, dimensions, layout = match.groups()
    space = re.search(r'S\((\d+)\)', layout or '')
    shape = tuple(map(int, filter(None, dimensions.split(','))))
    return Array(dtype, shape, int(space[1]) if space else 0)
