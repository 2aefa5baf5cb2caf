"""Compiles a step for a TPU slice and reports its memory, traffic and time there.

    pip install -e '.[tpu]'
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4 \\
        --step=draw

No TPU is needed: libtpu's compiler runs on any CPU. Neither data nor
TensorFlow nor torch is needed. The report shows the memory of a chip, the
traffic between chips beside the least that the mesh requires, the time of a
step by the compiler's own estimate, by parts of the model, and the exchanges
between chips that do not run beside other work. It includes a frozen text
encoder without reading its weights. The exit status is 1 if the program does
not fit into a chip. Examples of topologies: `v5e:4x4`, `v5e:16x16`, `v6e:4x4`,
`v5p:2x2x4`, `v4:2x2x4`.
"""

import atexit
import collections
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec
from ml_collections import config_flags

from coyo11m_tfds import schema
from train_lib import (
    caption_encoder,
    chips,
    config_rules,
    device_memory,
    flow,
    models,
    run,
    sharding,
    state,
)
from train_lib.models.dit import POOLED
from train_lib.step import Program, make_program
from train_lib.tools import hlo

FLAGS = flags.FLAGS

TEXT_DIM, VOCABULARY = 640, 4096  # of texts without an encoder in the step
TRAIN, EVALUATE, DRAW = STEPS = 'train', 'evaluate', 'draw'

MEMORY, MOVED = 'memory of a chip, GB', 'received from other chips, MB a step'
TIME, WAITS = "the compiler's estimate, ms a step", 'exchanges that wait, ms a step at least'
ARITHMETIC = 'arithmetic of a chip, TFLOP a step'
LEFT_OUT = 'left out of the estimate'
_LISTED = 0.05  # ms; shorter exchanges are added up

# Parts of a step by the names of its operations; the first that fits counts.
_PARTS = {
    'text encoder': r'\bGemma\b',
    'MLP': r'/mlp_\d',
    'attention: qkv and out': r'/attention/.*(qkv|words|out)/',
    'attention: scores and values': r'/attention/.*dot_general',
    'attention: the rest': r'/attention/',
    'modulation, time and text': r'/(modulation|conditioning|words)/',
    'norms, sums and stacking in layers': r'/blocks\b|(jvp|transpose)\([^/]*/while/body/',
    'optimizer and the rest': '',
}

Report = dict[str, Any]


def analyze(
    config: ml_collections.ConfigDict, topology: str, *, num_tokens: int = 128, step: str = TRAIN
) -> Report:
    """Compiles a step of a configuration and adds up its cost for one chip.

    Args:
        topology: Topology of a slice, such as `v5e:4x4`.
        num_tokens: Number of token ids of a text, with `model.text='sequence'` or an encoder.
        step: `train`, `evaluate` (a batch of the same size) or `draw` (the previews).

    Returns:
        `program`, `verdict`, `fits`, `mfu`, `compile_seconds` and tables of numbers, all for one
        chip and one step.
    """
    config_rules.check_config(config, needs_data=False)
    schedules = _dumped_schedules()
    devices = slice_devices(topology)
    chip = chips.CHIPS.get(devices[0].device_kind)
    if chip is None:
        raise ValueError(
            f'{topology} has devices of kind {devices[0].device_kind!r}, expected one of '
            f'{", ".join(chips.CHIPS)}; add it to train_lib/chips.py'
        )
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    encoder = caption_encoder.abstract_step_encoder(config.encoder, mesh, dtype=config.model.dtype)
    text_dim, vocabulary = 0, VOCABULARY
    if encoder is not None:
        text_dim, vocabulary = encoder.dim, encoder.network.config.vocab_size
    elif config.model.text == POOLED:
        text_dim, vocabulary, num_tokens = TEXT_DIM, 0, 0
    stats = flow.no_stats(text_dim, vocabulary=vocabulary)
    program = make_program(config, mesh, stats, encoder)
    count, passes = _work(config, step)
    hosts = len({device.process_index for device in devices})
    axes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
    what = {TRAIN: '', EVALUATE: 'evaluation of ', DRAW: 'drawing of '}[step]
    flops = {'model': passes * program.flops(num_tokens) / 3}  # of training, which has three
    if encoder is not None:
        flops['text encoder'] = encoder.network.config.flops(num_tokens)
    remat = getattr(models.make_model(**config.model, vocabulary=vocabulary), 'remat', 'none')
    report: Report = {
        'program': f'{config.model.name}, remat {remat}, {what}{count} samples '
        f'on {len(devices)} chips of {chip.name} ({hosts} hosts), mesh {axes}',
        ARITHMETIC: {name: x * count / len(devices) / 1e12 for name, x in flops.items()},
    }
    began = time.monotonic()
    try:
        compiled = _lower(program, step, count, text_dim, num_tokens, mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        return report | {'fits': False, 'verdict': f'does not fit: {device_memory.reason(error)}'}
    report['compile_seconds'] = time.monotonic() - began
    report[MEMORY] = _memory(compiled) | {'the chip has': chip.memory / 1e9}
    if encoder is not None:
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(encoder.params))
        report[MEMORY]['weights of the encoder'] = nbytes / 1e9
    report |= cost_tables(hlo.read_costs(compiled.as_text() or ''), chip, schedules)
    if step == TRAIN:
        params = program.abstract_state.params
        least = least_bytes(
            params,
            mesh,
            compute_bytes=jnp.dtype(config.model.dtype).itemsize,
            accumulate=config.accumulate,
            mapped=state.is_for_muon(params) if config.optimizer.name == 'muon' else None,
        )
        report[MOVED]['least for this mesh'] = least / 1e6
    return report | judge_costs(report, chip)


def least_bytes(
    params, mesh: Mesh, *, compute_bytes: int = 2, accumulate: int = 1, mapped: Any = None
) -> float:
    """Returns the bytes that a device receives in a training step if only weights move.

    Devices gather a weight that is split over f devices once for the forward and once for the
    backward pass, for each part of the batch, in the dtype of the computation: (f-1)/f of the
    weight each time. They reduce its gradient in float32 over the f devices: (f-1)/f of it. The d
    groups then reduce each f-th part: 2(d-1)/d of the part, half to form the sum and half to
    distribute it.

    With `sharding.map_matrices`, each of the n = df devices gathers its n-th part of the matrices,
    of which it has an f-th, and its f-th part of the results, of which it computed an n-th.

    Args:
        params: Pytree of arrays or `jax.ShapeDtypeStruct`, as `sharding.by_shape` places them.
        mesh: Mesh of the devices.
        compute_bytes: Size of a gathered number in bytes.
        accumulate: Number of parts in which the batch is computed.
        mapped: Pytree of bool, True for weights whose updates come from `sharding.map_matrices`;
            None for no such weights.
    """

    def of(leaf, is_mapped: bool) -> float:
        f = mesh.shape[sharding.FSDP_AXIS]
        f = f if sharding.partition_spec(leaf.shape, f) != PartitionSpec() else 1
        d = mesh.size // f
        size = math.prod(leaf.shape)
        within = (f - 1) / f * (2 * compute_bytes + 4) * accumulate
        dealt = is_mapped * ((f - 1) / f / mesh.size + (1 - 1 / mesh.size) / f) * compute_bytes
        return size * (within + 2 * (d - 1) / d * 4 / f + dealt)

    mapped = jax.tree.map(lambda _: False, params) if mapped is None else mapped
    return float(sum(jax.tree.leaves(jax.tree.map(of, params, mapped))))


def _work(config: ml_collections.ConfigDict, step: str) -> tuple[int, int]:
    """Samples of a step, and how often the model's products are computed for each."""
    if step == DRAW:
        evaluations = config.preview.num_steps
        if config.preview.sampler == 'heun':
            evaluations = 2 * evaluations - 1
        return config.preview.count, 2 * evaluations  # with and without the text
    return config.batch_size, 3 if step == TRAIN else 2  # evaluated with two texts


def _lower(
    program: Program, step: str, count: int, text_dim: int, num_tokens: int, mesh: Mesh
) -> jax.stages.Lowered:
    placed = sharding.replicated(mesh) if step == DRAW else sharding.batch(mesh)

    def rows(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=placed)

    texts = {'text_embedding': rows(jnp.float16, text_dim)}
    if num_tokens:
        texts = {'tokens': rows(jnp.int32, num_tokens)}
    state = program.abstract_state
    batch = texts | {
        'latents': rows(jnp.bfloat16, *schema.LATENT_SHAPE),
        'key': rows(jnp.uint32, 2),
        'drop_text' if step == TRAIN else 'mask': rows(jnp.bool_),
    }
    first = jax.ShapeDtypeStruct((), jnp.int32)
    steps: dict[str, tuple[Any, tuple]] = {
        TRAIN: (program.train_step, (state, batch)),
        EVALUATE: (program.eval_step, (state.params, batch)),
        DRAW: (program.draw, (state.params, *texts.values(), first)),
    }
    function, arguments = steps[step]
    return function.func.lower(*function.args, *arguments)  # a partial of the encoder's weights


def slice_devices(topology: str) -> Sequence[jax.Device]:
    """Returns the chips of a slice, which this machine need not have; see `analyze`."""
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError("libtpu is not installed: pip install -c constraints.txt -e '.[tpu]'")
    # Nothing is run: libtpu need not ask a cloud machine what it has, nor be alone with it.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    # Without these it complains of the machine; the topology does not depend on them.
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    # One device a chip, as JAX has it on a real v4.
    more = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
    try:
        described = topologies.get_topology_desc(platform='tpu', topology_name=topology, **more)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f'--topology={topology}: expected a name such as v5e:4x4, but libtpu says '
            f'{str(error).splitlines()[0]}'
        ) from error
    return described.devices


@functools.cache
def _dumped_schedules() -> pathlib.Path:
    """The folder where libtpu writes how many bundles each operation is scheduled in.

    Libtpu reads the variable once, when it is loaded.
    """
    folder = tempfile.mkdtemp(prefix='schedules')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    dump = (
        f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true '
        '--xla_jf_dump_llo_pass_label_regex=final_bundles'
    )
    os.environ['LIBTPU_INIT_ARGS'] = f'{os.environ.get("LIBTPU_INIT_ARGS", "")} {dump}'
    return pathlib.Path(folder)


def bundles(schedules: pathlib.Path, instruction: str) -> int:
    """Returns an instruction's VLIW bundles in the last program compiled; 0 without a schedule.

    Libtpu schedules only one of equal instructions, so `x.1` may stand for `x.2`.
    """
    stem = re.escape(instruction.split('.')[0])
    name = re.compile(rf'(\d+)-({stem}(?:\.\d+)?)-\d+-schedule-analysis')
    files = [(found, x) for x in schedules.iterdir() if (found := name.match(x.name))]
    if not files:
        return 0
    # They begin with the time.
    _, file = max(files, key=lambda file: (file[0][2] == instruction, int(file[0][1])))
    found = re.search(r'total scheduled bundles:\s*(\d+)', file.read_text())
    return int(found[1]) if found else 0


def _memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    sizes: Any = compiled.memory_analysis()
    found = {
        'arguments': sizes.argument_size_in_bytes,
        'outputs': sizes.output_size_in_bytes,
        'aliased': -sizes.alias_size_in_bytes,  # outputs in the place of arguments
        'temporaries': sizes.temp_size_in_bytes,
        'code': sizes.generated_code_size_in_bytes,
    }
    found |= {'total': sum(found.values()), 'peak': sizes.peak_memory_in_bytes}
    return {name: size / 1e9 for name, size in found.items()}


def cost_tables(costs: hlo.Costs, chip: chips.Chip, schedules: pathlib.Path) -> Report:
    """Returns a program's traffic and time; kernels take a cycle for each bundle and sample."""
    moved: dict[str, float] = collections.defaultdict(float)
    waits: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0])
    for each in costs.collectives:
        kind = f'{each.kind} of {each.members}'
        moved[kind + ', asynchronous' * each.is_async] += each.nbytes / 1e6
        if not each.is_async:
            wait = waits[f'{kind}, {_largest(each)}']
            wait[0] += each.times
            wait[1] += each.nbytes / chip.link_rate * 1e3
    listed = {f'{count:.0f} x {name}': x for name, (count, x) in waits.items() if x >= _LISTED}
    waiting = sum(x for _, x in waits.values())
    milliseconds = 1e3 / chip.clock if chip.clock else 0
    parts = dict.fromkeys(_PARTS, 0.0)
    for name, cycles in costs.cycles.items():
        part = next(part for part, pattern in _PARTS.items() if re.search(pattern, name))
        parts[part] += cycles * milliseconds
    left_out = ['most turns of a loop'] if any(0 in loops for loops in costs.loops) else []
    for kernel, calls in costs.kernels.items():
        found = bundles(schedules, kernel.name)
        part = f'kernel {kernel.name.split(".")[0]}'
        parts[part] = parts.get(part, 0) + found * kernel.rows * calls * milliseconds
        left_out += [] if found else [f'{part}, which has no schedule']
    return {
        LEFT_OUT: left_out,
        MOVED: dict(sorted(moved.items())) | {'in all': sum(moved.values())},
        TIME: {name: x for name, x in parts.items() if x} | {'in all': sum(parts.values())},
        WAITS: dict(sorted(listed.items(), key=lambda item: -item[1]))
        | {'shorter ones': waiting - sum(listed.values()), 'in all': waiting},
    }


def _largest(exchange: hlo.Collective) -> str:
    """The largest array of an exchange, as XLA writes it, and how many there are."""
    dtype, shape = max(exchange.arrays, key=lambda array: math.prod(array[1]))
    count = len(exchange.arrays)
    return f'{dtype}[{",".join(map(str, shape))}]' + f' and {count - 1} more' * (count > 1)


def judge_costs(report: Report, chip: chips.Chip) -> Report:
    """Returns whether the program fits, its model FLOP utilization, and a sentence about both."""
    share = report[MEMORY]['total'] * 1e9 / chip.memory
    moved, estimate, wait = report[MOVED], report[TIME]['in all'], report[WAITS]['in all']
    ideal = report[ARITHMETIC]['model'] * 1e12 / chip.flops * 1e3
    mfu = ideal / (estimate or float('inf'))
    parts = [f'{"fits" if share <= 1 else "does not fit"}: {share:.0%} of the memory']
    if least := moved.get('least for this mesh'):
        parts.append(f'{moved["in all"] / least:.2f} times the least traffic')
    if estimate:
        parts.append(f'{estimate:.0f} ms a step by the compiler, an MFU of {mfu:.0%}')
        parts.append(f'{ideal / (estimate + wait):.0%} with the exchanges that wait')
    else:
        parts.append(f'no estimate of the time on {chip.name}')
    parts += [f'without {what}' for what in report.get(LEFT_OUT, ())]
    return {'mfu': mfu, 'fits': share <= 1, 'verdict': ', '.join(parts)}


def format_report(report: Report) -> str:
    """Formats the report as text for people."""
    lines = [report['program'], '']
    for title, rows in report.items():
        if isinstance(rows, dict):
            width = max(54, *map(len, rows))
            lines += [title, *(f'  {x:{width}}{value:10,.2f}' for x, value in rows.items()), '']
    return '\n'.join([*lines, f'Verdict: {report["verdict"]}.'])


def main() -> None:
    """Prints the report; the exit status is 1 if the program does not fit."""
    jax.config.update('jax_platforms', 'cpu')  # not the devices of this machine
    print(f'compiling for {FLAGS.topology}: minutes for a large model ...', file=sys.stderr)
    with run.errors_in_one_line((ValueError,)):
        report = analyze(FLAGS.config, FLAGS.topology, num_tokens=FLAGS.num_tokens, step=FLAGS.step)
    print(json.dumps(report, indent=2) if FLAGS.json else format_report(report))
    if not FLAGS.json and report['fits']:
        print(f'Compiled in {report["compile_seconds"] / 60:.1f} minutes.')
    sys.exit(not report['fits'])


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, run.CONFIG_HELP, lock_config=True)
    flags.DEFINE_string('topology', None, 'Slice to compile for, such as v5e:4x4.')
    help_of_tokens = 'Tokens of a text, for text=sequence or an encoder.'
    flags.DEFINE_integer('num_tokens', 128, help_of_tokens, lower_bound=1)
    flags.DEFINE_enum('step', TRAIN, STEPS, 'Step to compile; draw is that of the previews.')
    flags.DEFINE_bool('json', False, 'Print the report as JSON.')
    run.start(main, required=['config', 'topology'])
