"""Compiles the training step for a TPU slice and says what limits the step.

    pip install -e '.[tpu]'
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4

No TPU is needed: libtpu's compiler runs on any CPU. Neither data nor
TensorFlow nor torch is needed. The table shows, for the compiled program, the
memory of a chip, the arithmetic and the traffic between chips, beside the
least that the model and the mesh require. It includes a frozen text encoder
(`--config.encoder=jax:FOLDER`), whose weights are not read. Times follow from
the rates that the chip's maker publishes, so no run can be faster. The exit
status is 1 if the program does not fit into a chip. Examples of topologies:
`v5e:4x4`, `v5e:16x16`, `v6e:4x4`, `v5p:2x2x4`, `v4:2x2x4`.
"""

import collections
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from jax.experimental import topologies
from ml_collections import config_flags

from train_lib import (
    chips,
    flow,
    models,
    run,
    settings,
    sharding,
    step_encoder,
)
from train_lib.models.dit import POOLED
from train_lib.program import make_program
from train_lib.tools import hlo, hlo_costs

FLAGS = flags.FLAGS

LATENT_SHAPE = 32, 32, 4  # height, width, channels

Report = dict[str, Any]


def analyze(
    config: ml_collections.ConfigDict,
    topology: str,
    *,
    text_dim: int,
    num_tokens: int = 128,
    vocabulary: int = 4096,
    num_slices: int = 1,
) -> Report:
    """Compiles the training step of a configuration and adds up what it takes of a chip.

    Args:
        config: see `configs/default.py`.
        topology: such as `v5e:4x4`.
        text_dim: width of the text embeddings, which texts are with `model.text='pooled'` unless an
            encoder is in the step.
        num_tokens: of a text, which it is made of else.
        vocabulary: ids of these are less than this.
        num_slices: slices of that topology. The network between them is not in the times: all that
            moves is taken to move over the links inside a slice.

    Returns:
        Plain values, bytes, FLOPs and seconds, for one chip and one step.

    Raises:
        ValueError: a setting is out of its range; libtpu is not installed or does not know the
            topology; `chips.CHIPS` does not know its chips; or the configuration does not fit their
            number.
    """
    settings.check(config, needs_data=False)
    devices = slice_devices(topology, num_slices)
    chip = chips.CHIPS.get(devices[0].device_kind)
    if chip is None:
        raise ValueError(
            f'{topology} has devices of kind {devices[0].device_kind!r}, expected one of '
            f'{", ".join(chips.CHIPS)}; add it to train_lib/chips.py'
        )
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    encoder = step_encoder.abstract(config.encoder, mesh, dtype=config.model.dtype)
    if encoder is not None:
        text_dim, vocabulary = encoder.dim, encoder.network.config.vocab_size
    elif config.model.text == POOLED:
        vocabulary = num_tokens = 0
    else:
        text_dim = 0
    program = make_program(
        config,
        mesh,
        flow.no_stats(text_dim),
        latent_shape=LATENT_SHAPE,
        vocabulary=vocabulary,
        encoder=encoder,
    )
    model = models.make(**config.model, vocabulary=vocabulary)
    flops = model.flops(LATENT_SHAPE, text_dim, num_tokens)
    report = {
        'topology': topology,
        'num_slices': num_slices,
        'chips': len(devices),
        'hosts': len({device.process_index for device in devices}),
        'model': dict(config.model),
        'mesh': dict(mesh.shape),
        'batch_size': config.batch_size,
        'accumulate': config.accumulate,
        'model_flops': 3 * flops * config.batch_size / len(devices),
        'least_bytes': sharding.least_bytes(
            program.abstract_state.params,
            mesh,
            compute_bytes=model.dtype.itemsize,
            accumulate=config.accumulate,
        ),
        'chip': chip.name,
        'chip_memory': chip.memory,
    }
    if encoder is not None:
        of_sample = encoder.network.config.flops(num_tokens)
        report['encoder'] = {
            'name': encoder.name,
            'flops': of_sample * config.batch_size / len(devices),
            'bytes': sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(encoder.params)),
        }
    batch = _abstract_batch(config.batch_size, text_dim, num_tokens, mesh)
    try:
        compiled = program.train_step.lower(program.abstract_state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        return report | {'fits': False, 'verdict': f'does not fit: {_first_sentence(error)}'}
    report |= _costs(compiled, mesh, model.turns)
    return report | judge(report, chip)


def slice_devices(topology: str, num_slices: int = 1) -> Sequence[jax.Device]:
    """The chips of a slice to compile for, whatever this machine has; see `analyze`."""
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError("libtpu is not installed: pip install -c constraints.txt -e '.[tpu]'")
    # Nothing is run: libtpu need not ask a cloud machine what it has, nor be alone with it.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    more: dict[str, Any] = {'num_slices': num_slices} if num_slices > 1 else {}
    if topology.startswith('v4:'):
        more['chip_config_name'] = 'megacore'  # one device a chip, as JAX has it on a real one
    try:
        described = topologies.get_topology_desc(platform='tpu', topology_name=topology, **more)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f'--topology={topology}: expected a name such as v5e:4x4, but libtpu says '
            f'{str(error).splitlines()[0]}'
        ) from error
    return described.devices


def _abstract_batch(batch_size: int, text_dim: int, num_tokens: int, mesh: jax.sharding.Mesh):
    height, width, channels = LATENT_SHAPE

    def rows(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=sharding.batch(mesh))

    texts = {'text_embedding': rows(jnp.float16, text_dim)}
    if num_tokens:
        texts = {'tokens': rows(jnp.int32, num_tokens)}
    return texts | {
        'latents': rows(jnp.bfloat16, channels, height, width),
        'key': rows(jnp.uint32, 2),
        'drop_text': rows(jnp.bool_),
    }


def _costs(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, turns: int) -> Report:
    """Memory and traffic of the compiled program; `turns` is the length of the loop over layers."""
    memory: Any = compiled.memory_analysis()
    sizes = {
        'arguments': memory.argument_size_in_bytes,
        'outputs': memory.output_size_in_bytes,
        'aliased': memory.alias_size_in_bytes,  # outputs in the place of arguments
        'temporaries': memory.temp_size_in_bytes,
        'code': memory.generated_code_size_in_bytes,
    }
    sizes['total'] = sum(sizes.values()) - 2 * sizes['aliased']
    module = hlo.parse(compiled.as_text() or '')
    moved: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for collective in hlo_costs.collectives(module, mesh):
        where = 'layers' if turns in collective.loops else 'outside'
        axis = '+'.join(collective.axes)
        moved[collective.kind, axis, where] += collective.times * collective.nbytes
    return {
        'memory': sizes | {'peak': memory.peak_memory_in_bytes},
        'host_memory': memory.host_temp_size_in_bytes,
        'compiled_flops': hlo_costs.matmul_flops(module),
        'memory_bytes': hlo_costs.memory_bytes(module),
        'collectives': [
            {'kind': kind, 'axis': axis, 'where': where, 'bytes': round(nbytes)}
            for (kind, axis, where), nbytes in sorted(moved.items())
        ],
        'collective_bytes': round(sum(moved.values())),
        'loops_of_unknown_length': sum(
            step.loops[-1:] == (0,) for step in hlo.executed(module) if not step.fused
        ),
    }


def judge(report: Report, chip: chips.Chip) -> Report:
    """Times at the chip's published rates, what limits, and the verdict in one sentence.

    `mfu_bound` takes it that all three run beside each other, `mfu_exposed` that everything waits
    for the reductions of gradients in the loop over layers, as it does on a TPU.
    """
    reductions = sum(
        row['bytes']
        for row in report['collectives']
        if row['kind'] in ('all-reduce', 'reduce-scatter') and row['where'] == 'layers'
    )
    seconds = {
        # The products inside of kernels cannot be read, but are part of the model.
        'arithmetic': max(report['compiled_flops'], report['model_flops']) / chip.flops,
        'memory': report['memory_bytes'] / chip.memory_rate,
        'links': report['collective_bytes'] / chip.link_rate,
    }
    limit = max(seconds, key=lambda name: seconds[name])
    share = report['memory']['total'] / chip.memory
    bound = report['model_flops'] / chip.flops / seconds[limit]
    beside = seconds | {'links': (report['collective_bytes'] - reductions) / chip.link_rate}
    exposed_seconds = max(beside.values()) + reductions / chip.link_rate
    exposed = report['model_flops'] / chip.flops / exposed_seconds
    ratio = report['collective_bytes'] / max(report['least_bytes'], 1)
    fits = share <= 1
    return {
        'seconds': seconds,
        'memory_share': share,
        'traffic_ratio': ratio,
        'mfu_bound': bound,
        'mfu_exposed': exposed,
        'limit': limit,
        'fits': fits,
        'verdict': (
            f'{"fits" if fits else "does not fit"}: {share:.0%} of the memory, {ratio:.2f} times '
            f'the least traffic, at most {bound:.0%} of the peak rate, limited by {limit}, and '
            f'{exposed:.0%} if nothing runs beside the reductions of gradients'
        ),
    }


def table(report: Report) -> str:
    """The report as text for people."""
    lines = [
        f'{report["model"]["name"]}, remat {report["model"]["remat"]}, '
        f'{report["batch_size"]} samples on {report["chips"]} chips of {report["chip"]} '
        f'({report["hosts"]} hosts), mesh '
        + ' x '.join(f'{axis} {size}' for axis, size in report['mesh'].items()),
        '',
    ]
    if 'memory' in report:
        lines += [*_memory_lines(report), '', *_moved_lines(report), '', *_time_lines(report), '']
    return '\n'.join([*lines, f'Verdict: {report["verdict"]}.'])


def _memory_lines(report: Report) -> list[str]:
    sizes = report['memory']
    lines = ['memory of a chip                GB']
    lines += [f'  {name:24}{size / 1e9:10.2f}' for name, size in sizes.items()]
    if 'encoder' in report:
        lines.append(f'  {"of which the encoder":24}{report["encoder"]["bytes"] / 1e9:10.2f}')
    if report['host_memory']:
        lines.append(f'  {"in the host":24}{report["host_memory"] / 1e9:10.2f}')
    lines.append(f'  {"the chip has":24}{report["chip_memory"] / 1e9:10.2f}')
    return lines


def _moved_lines(report: Report) -> list[str]:
    lines = ['received from other chips       MB a step']
    for row in report['collectives']:
        if row['bytes'] >= 1e6:  # less is scalars and biases
            what = f'{row["kind"]}, {row["axis"]}, '
            what += 'in layers' if row['where'] == 'layers' else 'outside'
            lines.append(f'  {what:42}{row["bytes"] / 1e6:10.0f}')
    lines.append(f'  {"in all":42}{report["collective_bytes"] / 1e6:10.0f}')
    lines.append(f'  {"least for this mesh":42}{report["least_bytes"] / 1e6:10.0f}')
    return lines


def _time_lines(report: Report) -> list[str]:
    seconds = report['seconds']
    parts = f'the model {report["model_flops"] / 1e12:.1f}'
    if 'encoder' in report:
        parts += f', the encoder {report["encoder"]["flops"] / 1e12:.1f}'
    work = {
        'arithmetic': f'{report["compiled_flops"] / 1e12:.1f} TFLOP, of which {parts}',
        'memory': f'{report["memory_bytes"] / 1e9:.1f} GB',
        'links': f'{report["collective_bytes"] / 1e9:.2f} GB',
    }
    lines = ['at the published rates          ms a step']
    lines += [f'  {name:24}{seconds[name] * 1e3:10.0f}   {work[name]}' for name in seconds]
    if report['loops_of_unknown_length']:
        lines.append(
            f'  loops of unknown length, counted once: {report["loops_of_unknown_length"]}'
        )
    return lines


def _first_sentence(error: Exception) -> str:
    """The message of libtpu about memory, without the list of allocations that follows."""
    sums = r'Used [\d.]+\w? of [\d.]+\w?|the total memory required .* \([\d.]+\w?\)'
    found = re.search(sums, str(error))
    return found[0] if found else str(error).splitlines()[0]


def main() -> None:
    """Prints the report; the exit status is 1 where the program does not fit."""
    jax.config.update('jax_platforms', 'cpu')  # not the devices of this machine
    with run.errors_in_one_line((ValueError,)):
        report = analyze(
            FLAGS.config,
            FLAGS.topology,
            text_dim=FLAGS.text_dim,
            num_tokens=FLAGS.num_tokens,
            vocabulary=FLAGS.vocabulary,
            num_slices=FLAGS.num_slices,
        )
    print(json.dumps(report, indent=2) if FLAGS.json else table(report))
    sys.exit(not report['fits'])


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, run.CONFIG_HELP, lock_config=True)
    flags.DEFINE_string('topology', None, 'Slice to compile for, such as v5e:4x4.')
    flags.DEFINE_integer('num_slices', 1, 'Number of slices.')
    flags.DEFINE_integer('text_dim', 640, 'Width of the text embeddings.')
    flags.DEFINE_integer('num_tokens', 128, 'Tokens of a text, for a sequence or an encoder.')
    flags.DEFINE_integer('vocabulary', 4096, 'Number of token ids.')
    flags.DEFINE_bool('json', False, 'Print the report as JSON.')
    run.start(main, required=['config', 'topology'])
