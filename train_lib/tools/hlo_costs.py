"""Costs of one run of a compiled program on a device: arithmetic, memory traffic, collectives.

module = hlo.parse(compiled.as_text())
matmul_flops(module)              # of all products of matrices, loops multiplied out
memory_bytes(module)              # to and from the device's main memory
collectives(module, mesh)         # what moves between devices, how often, along which axes
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from train_lib.tools import hlo

COLLECTIVES = ('all-gather', 'reduce-scatter', 'all-reduce', 'collective-permute', 'all-to-all')

# Move nothing themselves: their values are parts or other names of values.
_FREE = frozenset(
    (
        *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'partition-id'),
        *('while', 'call', 'conditional', 'after-all', 'optimization-barrier'),
        *('async-start', 'async-update', 'async-done', 'copy-done', 'slice-done'),
        *('all-gather-done', 'all-reduce-done', 'collective-permute-done'),
    )
)


def matmul_flops(module: hlo.Module) -> int:
    """Two for each multiplication and addition in a `dot` or `convolution`.

    The rest of the arithmetic is done by the vector unit, beside the matrix unit, and left out.
    """
    count = {'dot': _dot_flops, 'convolution': _convolution_flops}
    return sum(
        step.times * count[instruction.opcode](step.computation, instruction)
        for step in hlo.executed(module)
        for instruction in step.computation.instructions.values()
        if instruction.opcode in count
    )


def _dot_flops(computation: hlo.Computation, dot: hlo.Instruction) -> int:
    shape = computation.operand(dot, 0).outputs[0].shape
    summed = [shape[int(axis)] for axis in _numbers(dot.attribute('lhs_contracting_dims'))]
    return 2 * math.prod(dot.outputs[0].shape) * math.prod(summed)


def _convolution_flops(computation: hlo.Computation, conv: hlo.Instruction) -> int:
    # On a TPU every product is a convolution; a batched one has the batch as a spatial dimension,
    # padded and dilated such that most positions of the window fall outside, which cost nothing.
    left, _, right = conv.attribute('dim_labels').partition('_')
    result = right.partition('->')[2]
    shape = computation.operand(conv, 0).outputs[0].shape
    out = conv.outputs[0].shape
    flops = 2 * shape[left.index('f')] * shape[left.index('b')] * out[result.index('f')]
    window = dict(re.findall(r'(\w+)=([\dx_\-]+)', conv.attribute('window')))
    for axis in range(len(left) - 2):
        flops *= _positions_inside(
            window, axis, shape[left.index(str(axis))], out[result.index(str(axis))]
        )
    groups = int(conv.attribute('feature_group_count') or 1)
    return flops // groups // int(conv.attribute('batch_group_count') or 1)


def _positions_inside(window: dict[str, str], axis: int, size: int, out: int) -> int:
    def number(name: str, default: int) -> int:
        return int(window[name].split('x')[axis]) if name in window else default

    padding = int(window['pad'].split('x')[axis].split('_')[0]) if 'pad' in window else 0
    dilation = number('lhs_dilate', 1)
    place = np.arange(out)[:, None] * number('stride', 1) - padding
    place = place + np.arange(number('size', 1))[None] * number('rhs_dilate', 1)
    return int(np.sum((place % dilation == 0) & (place >= 0) & (place < size * dilation)))


def memory_bytes(module: hlo.Module) -> int:
    """Bytes read from and written to the device's main memory.

    A fusion reads its operands and writes its results once; of an operand that it only slices,
    it reads the slices. What lies in another memory, such as that on the chip, costs nothing.
    """
    return sum(
        step.times * _instruction_bytes(module, step.computation, instruction)
        for step in hlo.executed(module)
        if not step.fused
        for instruction in step.computation.instructions.values()
        if instruction.opcode not in _FREE
    )


def _instruction_bytes(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> int:
    in_memory = [array.space == 0 for array in instruction.outputs]
    if instruction.opcode == 'fusion':
        fused = module.computations[instruction.called[0]]
        written = _written(module, fused, fused.root)
        read = [_read(module, fused, index) for index in range(len(instruction.operands))]
    else:
        written = [array.nbytes for array in instruction.outputs]
        read = [_nbytes(computation.instructions[name]) for name in instruction.operands]
        if instruction.opcode == 'dynamic-update-slice':
            update = _nbytes(computation.operand(instruction, 1))
            read, written = [0, update], [update]
        elif instruction.opcode in ('dynamic-slice', 'slice', 'slice-start', 'gather'):
            read = [written[0]]
        elif instruction.opcode.endswith('-start'):  # (operands, results, flags)
            written = [0, *written[1:2]]
    total = sum(n for n, there in zip(written, in_memory, strict=False) if there)
    for name, nbytes in zip(instruction.operands, read, strict=False):
        arrays = computation.instructions[name].outputs
        if len(arrays) == 1 and arrays[0].space == 0:
            total += min(nbytes, arrays[0].nbytes)
    return total


def _read(module: hlo.Module, fused: hlo.Computation, index: int) -> int:
    """Bytes that a fused computation reads of its parameter `index`."""
    parameter = next(
        i for i in fused.instructions.values() if i.opcode == 'parameter' and i.inside == str(index)
    )
    return min(_nbytes(parameter), _read_of(module, fused, parameter))


def _read_of(module: hlo.Module, fused: hlo.Computation, value: hlo.Instruction) -> int:
    total = 0
    for user in fused.instructions.values():
        for place, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode in ('dynamic-slice', 'slice', 'gather'):
                total += _nbytes(user)
            elif user.opcode in ('bitcast', 'reshape', 'transpose', 'copy') and user != fused.root:
                total += _read_of(module, fused, user)
            elif user.opcode == 'fusion':
                total += _read(module, module.computations[user.called[0]], place)
            elif user.opcode == 'dynamic-update-slice' and place == 0:
                continue  # written in place
            elif user.opcode in ('tuple', 'custom-call', *COLLECTIVES):
                continue  # handed on: a collective that runs beside other work
            else:
                return _nbytes(value)
    return total


def _written(module: hlo.Module, fused: hlo.Computation, result: hlo.Instruction) -> list[int]:
    """Bytes that a fused computation writes for each element of `result`."""
    if result.opcode == 'tuple':
        return [sum(_written(module, fused, fused.instructions[name])) for name in result.operands]
    if result.opcode == 'bitcast':
        return _written(module, fused, fused.operand(result, 0))
    if result.opcode == 'dynamic-update-slice':
        return [_nbytes(fused.operand(result, 1))]
    if result.opcode == 'fusion':
        inner = module.computations[result.called[0]]
        return _written(module, inner, inner.root)
    if result.opcode in ('parameter', 'custom-call'):
        return [0] * len(result.outputs)
    return [array.nbytes for array in result.outputs]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: of `COLLECTIVES`.
        arrays: what each device puts in.
        axes: of the mesh, along which the members of a group differ.
        group_size: number of members of a group.
        times: how often it happens in one run of the program.
        loops: as in `hlo.Executed`.
    """

    kind: str
    arrays: tuple[hlo.Array, ...]
    axes: tuple[str, ...]
    group_size: int
    times: int
    loops: tuple[int, ...]

    @property
    def nbytes(self) -> float:
        """Bytes that a device receives each time, by an algorithm that moves the fewest."""
        put_in, n = sum(array.nbytes for array in self.arrays), self.group_size
        factor = {
            'all-gather': n - 1,
            'reduce-scatter': (n - 1) / n,
            'all-reduce': 2 * (n - 1) / n,
            'all-to-all': (n - 1) / n,
            'collective-permute': 1,
        }
        return put_in * factor[self.kind]


def collectives(module: hlo.Module, mesh: Mesh) -> Iterator[Collective]:
    """Yields all exchanges of a program that was compiled for `mesh`."""
    seen = set()
    for step in hlo.executed(module):
        for instruction in step.computation.instructions.values():
            kind = instruction.opcode.removesuffix('-start')
            if kind not in COLLECTIVES:
                continue
            # One that runs beside other work stands in each of the fusions that it spans.
            chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
            if chain and step.fused:
                key = step.place.name, chain[1], instruction.attribute('channel_id')
                if key in seen:
                    continue
                seen.add(key)
            if kind == 'all-reduce' and step.fused and _only_sliced(step.computation, instruction):
                kind = 'reduce-scatter'
            groups = device_groups(instruction.attributes, mesh.devices.size)
            if groups.shape[1] == 1:
                continue
            yield Collective(
                kind,
                tuple(_operands(step.computation, instruction)),
                _axes(groups, mesh),
                groups.shape[1],
                step.times,
                step.loops,
            )


def _only_sliced(computation: hlo.Computation, value: hlo.Instruction) -> bool:
    """A TPU's reduce-scatter is a fusion of an all-reduce and the slice of it that is kept."""
    users = [i for i in computation.instructions.values() if value.name in i.operands]
    return bool(users) and all(user.opcode == 'dynamic-slice' for user in users)


def _operands(computation: hlo.Computation, instruction: hlo.Instruction) -> Iterator[hlo.Array]:
    for name in instruction.operands:
        yield from computation.instructions[name].outputs


def device_groups(attributes: str, count: int) -> np.ndarray:
    """The devices, as indices into the mesh, that take part in each exchange: int `(groups, n)`.

    XLA writes `{{0,1},{2,3}}`, `[2,2]<=[4]` (an iota, reshaped and perhaps transposed before),
    `mesh['a'=2,'b'=2] {'b'}` (the members differ along `b`) or pairs of source and target.

    Raises:
        ValueError: the notation is another one.
    """
    if pairs := re.search(r'source_target_pairs=(\{\{.*?\}\})', attributes):
        found = np.array(_numbers(pairs[1])).reshape(-1, 2)
        return found[found[:, 0] != found[:, 1]]
    if listed := re.search(r'replica_groups=\{(\{.*?\})?\}', attributes):
        rows = re.findall(r'\{([\d,]+)\}', listed[1] or '')
        return np.array([_numbers(row) for row in rows] or [list(range(count))])
    if iota := re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', attributes):
        return _iota(iota[2]).reshape(_numbers(iota[1]))
    if named := re.search(
        r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? \{([^}]*)\}', attributes
    ):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        devices = _iota(named[2]) if named[2] else np.arange(math.prod(map(int, axes.values())))
        devices = devices.reshape([int(size) for size in axes.values()])
        within = re.findall(r"'(\w+)'(?!:)", named[3])
        if len(within) == named[3].count("'") // 2 and count == devices.size:
            order = [list(axes).index(name) for name in axes if name not in within]
            inner = [list(axes).index(name) for name in within]
            size = math.prod(devices.shape[axis] for axis in inner)
            return devices.transpose(order + inner).reshape(-1, size)
    raise ValueError(f'cannot tell which devices exchange data: {attributes[:200]!r}')


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)` is 0 to 7, reshaped and then transposed; flat again."""
    sizes, _, order = text.partition('T')
    devices = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (devices.transpose(_numbers(order)) if order else devices).reshape(-1)


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    places = np.stack(np.unravel_index(groups, mesh.devices.shape))
    varies = np.any(places != places[..., :1], axis=(1, 2))
    return tuple(name for name, there in zip(mesh.axis_names, varies, strict=True) if there)


def _nbytes(instruction: hlo.Instruction) -> int:
    return sum(array.nbytes for array in instruction.outputs)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', text)]
