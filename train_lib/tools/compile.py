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
import functools
import importlib.util
import json
import os
import pathlib
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
from jax.sharding import Mesh
from ml_collections import config_flags

from coyo11m_tfds import schema
from coyo11m_tfds.process import command_line
from coyo11m_tfds.process.sizes import format_count
from train_lib import run
from train_lib.learning import flow, models, sharding, state, step_encoder
from train_lib.learning.dit import SEQUENCE
from train_lib.learning.step import Program, make_program, sampling_settings
from train_lib.lifecycle import chips, config_rules, device_memory
from train_lib.tools import costs, hlo

FLAGS = flags.FLAGS

# Of texts without an encoder in the step.
TEXT_DIM = 640
VOCABULARY = 4096

TRAIN, EVALUATE, DRAW = STEPS = 'train', 'evaluate', 'draw'


def analyze(
    config: ml_collections.ConfigDict, topology: str, *, num_tokens: int = 128, step: str = TRAIN
) -> costs.Report:
    """Compiles a step of a configuration for a slice and adds up its cost for one chip.

    Args:
        config: Configuration of a run, whose data set is not needed.
        topology: Name of the slice, such as `v5e:4x4`.
        num_tokens: Tokens of a text, if the model takes some.
        step: One of `STEPS`.

    Returns:
        A report: a description of the program, tables by their titles, whether it `fits`, and a
        `verdict`.

    Raises:
        ValueError: A field has a wrong value, or there is no such slice.
    """
    config_rules.check_config(config, needs_data=False)
    # Before the topology, which loads libtpu: it reads its settings then, and only once.
    schedules = _dumped_schedules()
    devices = slice_devices(topology)
    chip = _find_chip(devices[0].device_kind, topology)
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    encoder = step_encoder.abstract_step_encoder(config.encoder, mesh, dtype=config.model.dtype)
    text_dim, vocabulary = _describe_texts(config, encoder)
    # Embeddings have no tokens.
    if not vocabulary:
        num_tokens = 0
    stats = flow.no_stats(text_dim, vocabulary=vocabulary)
    program = make_program(config, mesh, stats, encoder)
    count = _count_samples(config, step)
    # Of one sample, by who computes them: a frozen encoder is no part of the model.
    flops = {'model': _count_flops(config, program, step, num_tokens)}
    if encoder is not None:
        flops['text encoder'] = encoder.network.config.flops(num_tokens)
    model = models.make_model(**config.model, vocabulary=vocabulary)
    arithmetic = {}
    for name, of_sample in flops.items():
        arithmetic[name] = of_sample * count / len(devices) / 1e12
    report: costs.Report = {
        'program': _describe_program(config, model, step, count, mesh, chip),
        costs.ARITHMETIC: arithmetic,
    }
    # With shapes alone: no weight and no batch is made.
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
    report[costs.MEMORY] = _measure_memory(compiled) | {'the chip has': chip.memory / 1e9}
    if encoder is not None:
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(encoder.params))
        report[costs.MEMORY]['weights of the encoder'] = nbytes / 1e9
    report |= costs.tabulate(hlo.read_costs(compiled.as_text() or ''), chip, schedules)
    if step == TRAIN:
        least = _find_least_traffic(config, program.abstract_state.params, mesh)
        report[costs.MOVED]['least for this mesh'] = least / 1e6
    return report | costs.judge(report, chip)


def _describe_texts(
    config: ml_collections.ConfigDict, encoder: step_encoder.StepEncoder | None
) -> tuple[int, int]:
    """Returns the width of embeddings or states, and the number of token ids; 0 for none."""
    if encoder is not None:
        return encoder.dim, encoder.network.config.vocab_size
    # Without an encoder in the step, texts are as in a data set of token ids or of embeddings.
    if config.model.text == SEQUENCE:
        return 0, VOCABULARY
    return TEXT_DIM, 0


def _find_least_traffic(config: ml_collections.ConfigDict, params: Any, mesh: Mesh) -> float:
    """Returns the fewest bytes that a chip of this mesh can receive in a training step."""
    muon_mask = None
    if config.optimizer.name == 'muon':
        muon_mask = state.mask_muon_kernels(params)
    return costs.least_bytes(
        params,
        mesh,
        compute_bytes=jnp.dtype(config.model.dtype).itemsize,
        accumulate=config.accumulate,
        muon_mask=muon_mask,
        gradient_bytes=jnp.dtype(config.gradient_dtype).itemsize,
    )


def _find_chip(kind: str, topology: str) -> chips.Chip:
    """Returns the figures of a kind of devices; raises a ValueError for one without figures."""
    if kind not in chips.CHIPS:
        raise ValueError(
            f'{topology} has devices of kind {kind!r}, expected one of {", ".join(chips.CHIPS)}; '
            'add it to train_lib/lifecycle/chips.py'
        )
    return chips.CHIPS[kind]


def _describe_program(
    config: ml_collections.ConfigDict, model: Any, step: str, count: int, mesh: Mesh, chip: Any
) -> str:
    """Returns a line about model, samples and devices."""
    devices = mesh.devices.ravel()
    hosts = len({device.process_index for device in devices})
    axes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
    kind = {TRAIN: '', EVALUATE: 'evaluation of ', DRAW: 'drawing of '}[step]
    # A model of another kind need not have one.
    remat = getattr(model, 'remat', 'none')
    slice_text = f'{format_count(len(devices), "device")} of {chip.name}'
    return (
        f'{config.model.name}, remat {remat}, {kind}{format_count(count, "sample")} on '
        f'{slice_text} ({format_count(hosts, "host")}), mesh {axes}'
    )


def _count_samples(config: ml_collections.ConfigDict, step: str) -> int:
    """Returns the number of samples of a step."""
    return config.preview.count if step == DRAW else config.batch_size


def _count_flops(
    config: ml_collections.ConfigDict, program: Program, step: str, num_tokens: int
) -> float:
    """Returns the FLOPs of the model for one sample."""
    training = program.flops(num_tokens)
    if step == TRAIN:
        return training
    # Training computes three products for each one of an evaluation of the model.
    evaluation = training / 3
    if step == EVALUATE:
        # With the own text and with another one.
        return 2 * evaluation
    return flow.count_evaluations(**sampling_settings(config.preview)) * evaluation


def _lower(
    program: Program, step: str, count: int, text_dim: int, num_tokens: int, mesh: Mesh
) -> jax.stages.Lowered:
    """Lowers a step for `count` samples, with shapes in the place of data."""
    # As `make_program` places them: previews are whole on every device.
    placement = sharding.replicated(mesh) if step == DRAW else sharding.batch(mesh)

    def rows(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        """Returns a feature of a batch, `(count, *shape)`."""
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=placement)

    # As batches of training and evaluation have them, without a data set.
    if num_tokens:
        text_name = 'tokens'
        text = rows(jnp.int32, num_tokens)
    else:
        text_name = 'text_embedding'
        text = rows(jnp.float16, text_dim)
    state = program.abstract_state
    batch = {
        text_name: text,
        'latents': rows(jnp.bfloat16, *schema.LATENT_SHAPE),
        'key': rows(jnp.uint32, 2),
    }
    function: Any
    arguments: tuple
    if step == TRAIN:
        batch['drop_text'] = rows(jnp.bool_)
        function = program.train_step
        arguments = state, batch
    elif step == EVALUATE:
        batch['mask'] = rows(jnp.bool_)
        function = program.eval_step
        arguments = state.params, batch
    else:
        first = jax.ShapeDtypeStruct((), jnp.int32)
        function = program.draw
        arguments = state.params, text, first
    # A partial, whose argument is the weights of the encoder.
    return function.func.lower(*function.args, *arguments)


def slice_devices(topology: str) -> Sequence[jax.Device]:
    """Returns the chips of a slice, which this machine need not have.

    Raises a ValueError if there is no such slice, or libtpu is not installed.
    """
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError("libtpu is not installed: pip install -c constraints.txt -e '.[tpu]'")
    # Nothing is run, so libtpu need neither query a cloud machine's metadata nor lock its chips.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    # Without these it warns about the machine; the topology does not depend on them.
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    options = {}
    if topology.startswith('v4:'):
        # One device a chip, as JAX has it on a real v4.
        options = {'chip_config_name': 'megacore'}
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
    """Returns the folder where libtpu writes how many bundles each operation is scheduled in."""
    folder = tempfile.mkdtemp(prefix='schedules')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    dump = (
        f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true '
        '--xla_jf_dump_llo_pass_label_regex=final_bundles'
    )
    # Behind what the user has set, which stays.
    own_arguments = os.environ.get('LIBTPU_INIT_ARGS', '')
    os.environ['LIBTPU_INIT_ARGS'] = f'{own_arguments} {dump}'
    return pathlib.Path(folder)


def _measure_memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns the memory of a device that a program takes, in GB."""
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


def format_report(report: costs.Report) -> str:
    """Returns the tables of a report and its verdict, for people."""
    lines = [report['program'], '']
    for title, rows in report.items():
        # The other entries are for the verdict, and for JSON.
        if not isinstance(rows, dict):
            continue
        width = max(54, *map(len, rows))
        lines.append(title)
        lines += [f'  {name:{width}}{value:10,.2f}' for name, value in rows.items()]
        lines.append('')
    verdict = f'Verdict: {report["verdict"]}.'
    lines.append(textwrap.fill(verdict, 96, subsequent_indent=' ' * 9))
    return '\n'.join(lines)


def format_meshes(reports: Mapping[int, costs.Report]) -> str:
    """Returns a table with a row for each `mesh.fsdp`, and warnings."""
    lines = ['  fsdp  ms a step   MFU  with the exchanges that wait  memory, GB']
    for fsdp, report in reports.items():
        if costs.TIME not in report:
            lines.append(f'{fsdp:6}  {report["verdict"]}')
            continue
        # In the columns of the heading.
        row = f'{fsdp:6}{report[costs.TIME]["in all"]:11,.0f}'
        row += f'{report["mfu"]:6.0%}{report["mfu_with_waits"]:30.0%}'
        row += f'{report[costs.MEMORY]["total"]:12.1f}'
        traffic = report[costs.MOVED]
        # XLA may cut products into pieces that pass around a ring, each too small for the matrix
        # units. L/2 on v5e-16 with fsdp 16 has a third of its traffic so, other meshes below 1%.
        permuted = 0.0
        for kind, megabytes in traffic.items():
            if kind.startswith('collective-permute'):
                permuted += megabytes
        if permuted > traffic['in all'] / 10:
            row += f'  warning: products in small pieces, {permuted:,.0f} MB pass between chips'
        if not report['fits']:
            row += '  does not fit'
        lines.append(row)
    return '\n'.join(lines)


def _parse_fsdp(words: Sequence[str]) -> list[int]:
    """Returns the values of `--fsdp`; raises a ValueError for words that are no numbers."""
    values = []
    for word in words:
        if not word.isdecimal():
            raise ValueError(f'--fsdp={",".join(words)}: expected numbers such as 4,8,16')
        values.append(int(word))
    return values


def main() -> None:
    """Prints the report; the exit status is 1 if a program does not fit."""
    config = FLAGS.config
    # Before the first mesh is compiled, which takes minutes.
    fsdp_values = _parse_fsdp(FLAGS.fsdp) or [config.mesh.fsdp]
    # Not the devices of this machine, which may be in use.
    jax.config.update('jax_platforms', 'cpu')
    outlook = f'compiling for {FLAGS.topology}: minutes for a large model ...'
    command_line.print_lines(outlook, file=sys.stderr)
    reports = {}
    for fsdp in fsdp_values:
        config.mesh.fsdp = fsdp
        report = analyze(config, FLAGS.topology, num_tokens=FLAGS.num_tokens, step=FLAGS.step)
        reports[fsdp] = report
    # A list of meshes makes a table, also a list of one.
    if FLAGS.fsdp:
        text = json.dumps(reports, indent=2) if FLAGS.json else format_meshes(reports)
        command_line.print_lines(*text.splitlines())
        fits = all(report['fits'] for report in reports.values())
        sys.exit(not fits)
    text = json.dumps(report, indent=2) if FLAGS.json else format_report(report)
    command_line.print_lines(*text.splitlines())
    # JSON has it as a field, and must stay alone; a program that does not fit may have no time.
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
