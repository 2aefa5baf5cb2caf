"""Compiles a step for a TPU slice, and reports memory and traffic.

    pip install -e '.[tpu]'
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4 \\
        --step=draw
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4 \\
        --fsdp=4,8,16

No TPU is needed, because libtpu's compiler runs on any CPU, and neither data
nor TensorFlow nor torch. The report shows the memory of a chip, the traffic
between chips next to the least that the mesh requires, the time of a step by
the compiler's own estimate, by sections of the model, and the exchanges
between chips that run while nothing else does. It includes a frozen text
encoder without reading its weights. With `--fsdp`, a table compares meshes.
The exit status is 1 if a program does not fit into a chip. Examples of
topologies: `v5e:4x4`, `v5e:16x16`, `v6e:4x4`, `tpu7x:2x2x2`, `v5p:2x2x4`,
`v4:2x2x4`. A `tpu7x` has two devices, which the report counts as chips.
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
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec
from ml_collections import config_flags

from coyo11m_tfds import schema
from coyo11m_tfds.process import command_line
from coyo11m_tfds.process.sizes import format_count
from train_lib import run
from train_lib.learning import flow, models, sharding, state, step_encoder
from train_lib.learning.dit import SEQUENCE
from train_lib.learning.step import Program, make_program
from train_lib.lifecycle import chips, config_rules, device_memory
from train_lib.tools import hlo

FLAGS = flags.FLAGS

TEXT_DIM, VOCABULARY = 640, 4096  # of texts without an encoder in the step
TRAIN, EVALUATE, DRAW = STEPS = 'train', 'evaluate', 'draw'

MEMORY, MOVED = 'memory of a chip, GB', 'received from other chips, MB a step'
TIME, WAITS = "the compiler's estimate, ms a step", 'exchanges that wait, ms a step at least'
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


def analyze(
    config: ml_collections.ConfigDict, topology: str, *, num_tokens: int = 128, step: str = TRAIN
) -> Report:
    """Compiles a step of a configuration for a slice and adds up its cost for one chip."""
    config_rules.check_config(config, needs_data=False)
    # Before the topology, which loads libtpu: it reads its settings then, and only once.
    schedules = _dumped_schedules()
    devices = slice_devices(topology)
    chip = _chip(devices[0].device_kind, topology)
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    encoder = step_encoder.abstract_step_encoder(config.encoder, mesh, dtype=config.model.dtype)
    # Without an encoder in the step, texts are as in a data set of embeddings or of token ids.
    text_dim, vocabulary = 0, VOCABULARY
    if encoder is not None:
        text_dim, vocabulary = encoder.dim, encoder.network.config.vocab_size
    elif config.model.text != SEQUENCE:
        text_dim, vocabulary, num_tokens = TEXT_DIM, 0, 0
    stats = flow.no_stats(text_dim, vocabulary=vocabulary)
    program = make_program(config, mesh, stats, encoder)
    count, passes = _work(config, step)
    flops = {'model': passes * program.flops(num_tokens) / 3}  # of training, which has three
    if encoder is not None:
        flops['text encoder'] = encoder.network.config.flops(num_tokens)
    model = models.make_model(**config.model, vocabulary=vocabulary)
    report: Report = {
        'program': _describe_program(config, model, step, count, mesh, chip),
        ARITHMETIC: {name: x * count / len(devices) / 1e12 for name, x in flops.items()},
    }
    start = time.monotonic()
    # A program that does not fit is also a result: the compiler says by how much.
    try:
        compiled = _lower(program, step, count, text_dim, num_tokens, mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        return report | {
            'fits': False,
            'verdict': f'does not fit: {device_memory.find_memory_sentence(error)}',
        }
    report['compile_seconds'] = time.monotonic() - start
    report[MEMORY] = _memory(compiled) | {'the chip has': chip.memory / 1e9}
    if encoder is not None:
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(encoder.params))
        report[MEMORY]['weights of the encoder'] = nbytes / 1e9
    report |= cost_tables(hlo.read_costs(compiled.as_text() or ''), chip, schedules)
    if step == TRAIN:
        params, is_muon = program.abstract_state.params, config.optimizer.name == 'muon'
        muon_mask = state.mask_muon_kernels(params) if is_muon else None
        compute_bytes, gradient_bytes = (
            jnp.dtype(dtype).itemsize for dtype in (config.model.dtype, config.gradient_dtype)
        )
        least = least_bytes(
            params, mesh, compute_bytes, config.accumulate, muon_mask, gradient_bytes
        )
        report[MOVED]['least for this mesh'] = least / 1e6
    return report | judge_costs(report, chip)


def _chip(kind: str, topology: str) -> chips.Chip:
    if kind not in chips.CHIPS:
        raise ValueError(
            f'{topology} has devices of kind {kind!r}, expected one of {", ".join(chips.CHIPS)}; '
            'add it to train_lib/lifecycle/chips.py'
        )
    return chips.CHIPS[kind]


def _describe_program(
    config: ml_collections.ConfigDict, model: Any, step: str, count: int, mesh: Mesh, chip: Any
) -> str:
    devices = mesh.devices.ravel()
    hosts = len({device.process_index for device in devices})
    axes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
    kind = {TRAIN: '', EVALUATE: 'evaluation of ', DRAW: 'drawing of '}[step]
    remat = getattr(model, 'remat', 'none')
    return (
        f'{config.model.name}, remat {remat}, {kind}{format_count(count, "sample")} on '
        f'{format_count(len(devices), "device")} of {chip.name} ({format_count(hosts, "host")}), '
        f'mesh {axes}'
    )


def least_bytes(
    params,
    mesh: Mesh,
    compute_bytes: int = 2,
    accumulate: int = 1,
    muon_mask: Any = None,
    gradient_bytes: int = 4,
) -> float:
    """Returns the bytes that a device receives in a training step if only weights move."""
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

    def leaf_bytes(leaf, is_muon: bool) -> float:
        # Weights that do not divide lie whole on every device.
        f = fsdp if sharding.partition_spec(leaf.shape, fsdp) != PartitionSpec() else 1
        d = mesh.size // f
        group_bytes = (f - 1) / f * (2 * compute_bytes + gradient_bytes) * accumulate
        update_bytes = is_muon * ((f - 1) / f / mesh.size + (1 - 1 / mesh.size) / f) * compute_bytes
        return math.prod(leaf.shape) * (
            group_bytes + 2 * (d - 1) / d * gradient_bytes / f + update_bytes
        )

    muon_mask = jax.tree.map(lambda _: False, params) if muon_mask is None else muon_mask
    return float(sum(jax.tree.leaves(jax.tree.map(leaf_bytes, params, muon_mask))))


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
    # As `make_program` places them: previews are whole on every device.
    placement = sharding.replicated(mesh) if step == DRAW else sharding.batch(mesh)

    def rows(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=placement)

    # As batches of training and evaluation have them, without a data set.
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
    # A partial, whose argument is the weights of the encoder.
    return function.func.lower(*function.args, *arguments)


def slice_devices(topology: str) -> Sequence[jax.Device]:
    """Returns the chips of a slice, which this machine need not have; see `analyze`."""
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError("libtpu is not installed: pip install -c constraints.txt -e '.[tpu]'")
    # Nothing is run, so libtpu need neither query a cloud machine's metadata nor lock its chips.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    # Without these it warns about the machine; the topology does not depend on them.
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    # One device a chip, as JAX has it on a real v4.
    options = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
    try:
        description = topologies.get_topology_desc(
            platform='tpu', topology_name=topology, **options
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f'--topology={topology}: expected a name such as v5e:4x4, but libtpu says '
            f'{str(error).splitlines()[0]}'
        ) from error
    return description.devices


@functools.cache
def _dumped_schedules() -> pathlib.Path:
    """The folder where libtpu writes how many bundles each operation is scheduled in."""
    folder = tempfile.mkdtemp(prefix='schedules')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    dump = (
        f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true '
        '--xla_jf_dump_llo_pass_label_regex=final_bundles'
    )
    os.environ['LIBTPU_INIT_ARGS'] = f'{os.environ.get("LIBTPU_INIT_ARGS", "")} {dump}'
    return pathlib.Path(folder)


def bundles(schedules: pathlib.Path, instruction: str) -> int:
    """Returns an instruction's VLIW bundles in the last program compiled; 0 without a schedule."""
    # Libtpu schedules only one of equal instructions, so `x.1` may stand for `x.2`.
    stem = re.escape(instruction.split('.')[0])
    pattern = re.compile(rf'(\d+)-({stem}(?:\.\d+)?)-\d+-schedule-analysis')
    files = [(match, path) for path in schedules.iterdir() if (match := pattern.match(path.name))]
    if not files:
        return 0
    # Their names begin with the time: the last is of the program that was compiled last.
    _, path = max(files, key=lambda file: (file[0][2] == instruction, int(file[0][1])))
    total = re.search(r'total scheduled bundles:\s*(\d+)', path.read_text())
    return int(total[1]) if total else 0


def _memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    stats: Any = compiled.memory_analysis()
    sizes = {
        'arguments': stats.argument_size_in_bytes,
        'outputs': stats.output_size_in_bytes,
        'aliased': -stats.alias_size_in_bytes,  # outputs in the place of arguments
        'temporaries': stats.temp_size_in_bytes,
        'code': stats.generated_code_size_in_bytes,
    }
    sizes |= {'total': sum(sizes.values()), 'peak': stats.peak_memory_in_bytes}
    return {name: size / 1e9 for name, size in sizes.items()}


def cost_tables(costs: hlo.Costs, chip: chips.Chip, schedules: pathlib.Path) -> Report:
    """Returns a program's traffic and time; kernels take a cycle for each bundle and sample."""
    traffic, waits = _exchanges(costs.collectives, chip)
    milliseconds = 1e3 / chip.clock if chip.clock else 0
    times = dict.fromkeys(_SECTIONS, 0.0)
    for name, cycles in costs.cycles.items():
        section = next(x for x, pattern in _SECTIONS.items() if re.search(pattern, name))
        times[section] += cycles * milliseconds
    left_out = ['most iterations of a loop'] if any(0 in loops for loops in costs.loops) else []
    # The compiler estimates no kernels: their schedules say how long a sample takes.
    for kernel, calls in costs.kernels.items():
        count = bundles(schedules, kernel.name)
        section = f'kernel {kernel.name.split(".")[0]}'
        times[section] = times.get(section, 0) + count * kernel.rows * calls * milliseconds
        left_out += [] if count else [f'{section}, which has no schedule']
    in_all = {'in all': sum(times.values())}
    times = {name: x for name, x in times.items() if x} | in_all
    return {LEFT_OUT: left_out, MOVED: traffic, TIME: times, WAITS: waits}


def _exchanges(
    collectives: Sequence[hlo.Collective], chip: chips.Chip
) -> tuple[dict[str, float], dict[str, float]]:
    """Megabytes of each kind of exchange, and milliseconds of each that runs alone."""
    megabytes, times, wait_ms = (collections.defaultdict[str, float](float) for _ in range(3))
    for exchange in collectives:
        kind = f'{exchange.kind} of {exchange.members}'
        megabytes[kind + ', asynchronous' * exchange.is_async] += exchange.nbytes / 1e6
        # Asynchronous ones run while the chip computes, and cost no time of their own if they end
        # before their results are needed.
        if not exchange.is_async:
            name = f'{kind}, {_largest(exchange)}'
            times[name] += exchange.times
            wait_ms[name] += exchange.nbytes / chip.link_rate * 1e3
    longest = sorted(wait_ms.items(), key=lambda item: -item[1])
    listed = {f'{times[name]:.0f} x {name}': x for name, x in longest if x >= _LISTED}
    total = sum(wait_ms.values())
    traffic = dict(sorted(megabytes.items())) | {'in all': sum(megabytes.values())}
    return traffic, listed | {'shorter ones': total - sum(listed.values()), 'in all': total}


def _largest(exchange: hlo.Collective) -> str:
    """The largest array of an exchange, as XLA writes it, and how many more there are."""
    dtype, shape = max(exchange.arrays, key=lambda array: math.prod(array[1]))
    count = len(exchange.arrays)
    return f'{dtype}[{",".join(map(str, shape))}]' + f' and {count - 1} more' * (count > 1)


def judge_costs(report: Report, chip: chips.Chip) -> Report:
    """Returns whether the program fits, its model FLOP utilization, and a sentence about both."""
    share = report[MEMORY]['total'] * 1e9 / chip.memory
    traffic, estimate, wait = report[MOVED], report[TIME]['in all'], report[WAITS]['in all']
    # Of the model alone: neither rematerialization nor a frozen encoder counts as useful.
    ideal = report[ARITHMETIC]['model'] * 1e12 / chip.flops * 1e3
    mfu, with_waits = (ideal / (estimate + x) if estimate else 0.0 for x in (0, wait))
    clauses = [f'{"fits" if share <= 1 else "does not fit"}: {share:.0%} of the memory']
    if least_traffic := traffic.get('least for this mesh'):
        clauses.append(f'{traffic["in all"] / least_traffic:.2f} times the least traffic')
    if estimate:
        clauses.append(f'{estimate:.0f} ms a step by the compiler, an MFU of {mfu:.0%}')
        clauses.append(f'{with_waits:.0%} with the exchanges that wait')
    else:
        clauses.append(f'no estimate of the time on {chip.name}')
    clauses += [f'without {x}' for x in report.get(LEFT_OUT, ())]
    judgement = {'fits': share <= 1, 'verdict': ', '.join(clauses)}
    return {'mfu': mfu, 'mfu_with_waits': with_waits} | judgement


def format_report(report: Report) -> str:
    lines = [report['program'], '']
    for title, rows in report.items():
        if isinstance(rows, dict):
            width = max(54, *map(len, rows))
            lines += [title, *(f'  {x:{width}}{value:10,.2f}' for x, value in rows.items()), '']
    verdict = textwrap.fill(f'Verdict: {report["verdict"]}.', 96, subsequent_indent=' ' * 9)
    return '\n'.join([*lines, verdict])


def format_meshes(reports: Mapping[int, Report]) -> str:
    """Returns a table with a row for each `mesh.fsdp`, and warnings."""
    lines = ['  fsdp  ms a step   MFU  with the exchanges that wait  memory, GB']
    for fsdp, report in reports.items():
        if TIME not in report:
            lines.append(f'{fsdp:6}  {report["verdict"]}')
            continue
        traffic, estimate = report[MOVED], report[TIME]['in all']
        mfus = f'{report["mfu"]:6.0%}{report["mfu_with_waits"]:30.0%}'
        row = f'{fsdp:6}{estimate:11,.0f}{mfus}{report[MEMORY]["total"]:12.1f}'
        # XLA may cut products into pieces that pass around a ring, each too small for the matrix
        # units. L/2 on v5e-16 with fsdp 16 has a third of its traffic so, other meshes below 1%.
        permuted = sum(x for kind, x in traffic.items() if kind.startswith('collective-permute'))
        if permuted > traffic['in all'] / 10:
            row += f'  warning: products in small pieces, {permuted:,.0f} MB pass between chips'
        lines.append(row if report['fits'] else f'{row}  does not fit')
    return '\n'.join(lines)


def main() -> None:
    """Prints the report; the exit status is 1 if a program does not fit."""
    # Not the devices of this machine, which may be in use.
    jax.config.update('jax_platforms', 'cpu')
    outlook = f'compiling for {FLAGS.topology}: minutes for a large model ...'
    command_line.print_lines(outlook, file=sys.stderr)
    reports, options = {}, {'num_tokens': FLAGS.num_tokens, 'step': FLAGS.step}
    for fsdp in map(int, FLAGS.fsdp or [FLAGS.config.mesh.fsdp]):
        FLAGS.config.mesh.fsdp = fsdp
        reports[fsdp] = report = analyze(FLAGS.config, FLAGS.topology, **options)
    if FLAGS.fsdp:
        text = json.dumps(reports, indent=2) if FLAGS.json else format_meshes(reports)
        command_line.print_lines(*text.splitlines())
        sys.exit(not all(report['fits'] for report in reports.values()))
    text = json.dumps(report, indent=2) if FLAGS.json else format_report(report)
    command_line.print_lines(*text.splitlines())
    if not FLAGS.json and report['fits']:
        minutes = report['compile_seconds'] / 60
        command_line.print_lines(f'Compiled in {minutes:.1f} minutes.')
    sys.exit(not report['fits'])


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, run.CONFIG_HELP, lock_config=True)
    flags.DEFINE_string('topology', None, 'Slice to compile for, such as v5e:4x4.')
    help_of_tokens = 'Tokens of a text, for text=sequence or an encoder.'
    flags.DEFINE_integer('num_tokens', 128, help_of_tokens, lower_bound=1)
    flags.DEFINE_enum('step', TRAIN, STEPS, 'Step to compile; draw is that of the previews.')
    flags.DEFINE_list('fsdp', [], 'Values of mesh.fsdp to compare, such as 4,8,16.')
    flags.DEFINE_bool('json', False, 'Print the report as JSON.')
    run.start(main, required=['config', 'topology'])
