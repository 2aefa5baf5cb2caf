"""Compiles the training step for a TPU slice and says what it takes there.

    pip install -e '.[tpu]'
    python -m train_lib.tools.compile --config=tpu_v5e_16 --topology=v5e:4x4

No TPU is needed: libtpu's compiler runs on any CPU. Neither data nor
TensorFlow nor torch is needed. The report shows the memory of a chip, the
traffic between chips beside the least that the mesh requires, and the time of
a step by the compiler's own estimate, by parts of the model. The estimate
leaves out Pallas kernels and exchanges between chips. A frozen text encoder
(`--config.encoder=jax:FOLDER`) is included; its weights are not read. The exit
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

from train_lib import caption_encoder, chips, flow, models, run, settings, sharding
from train_lib.models.dit import POOLED
from train_lib.step import make_program
from train_lib.tools import hlo

FLAGS = flags.FLAGS

LATENT_SHAPE = 32, 32, 4  # height, width, channels

MEMORY, MOVED = 'memory of a chip, GB', 'received from other chips, MB a step'
TIME, LEFT_OUT = "the compiler's estimate, ms a step", 'not in the estimate'
ARITHMETIC = 'arithmetic of a chip, TFLOP a step'

# Parts of a step by the names of its operations; the first that fits counts.
_PARTS = {
    'text encoder': r'\bGemma\b',
    'MLP': r'/mlp_\d',
    'attention: qkv and out': r'/attention/.*(qkv|out)/',
    'attention: scores and values': r'/attention/.*dot_general',
    'attention: the rest': r'/attention/',
    'modulation, time and text': r'/(modulation|conditioning|words)/',
    'norms, sums and stacking in layers': r'/blocks\b|(jvp|transpose)\([^/]*/while/body/',
    'optimizer and the rest': '',
}

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
        config: See `configs/default.py`.
        topology: Such as `v5e:4x4`.
        text_dim: Width of the text embeddings, which stand for texts with `model.text='pooled'`
            unless an encoder is in the step.
        num_tokens: Token ids of a text otherwise.
        vocabulary: Number of different token ids.
        num_slices: Slices of that topology.

    Returns:
        `program`, `verdict`, `fits`, `mfu` and tables of numbers, all for one chip and one step.

    Raises:
        ValueError: A setting is out of its range; libtpu is not installed or does not know the
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
    encoder = caption_encoder.abstract(config.encoder, mesh, dtype=config.model.dtype)
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
    samples = config.batch_size / len(devices)
    model_flops = 3 * model.flops(LATENT_SHAPE, text_dim, num_tokens) * samples
    hosts = len({device.process_index for device in devices})
    report: Report = {
        'program': f'{config.model.name}, remat {config.model.remat}, {config.batch_size} samples '
        f'on {len(devices)} chips of {chip.name} ({hosts} hosts), mesh '
        + ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items()),
        ARITHMETIC: {'model': model_flops / 1e12},
    }
    if encoder is not None:
        flops = encoder.network.config.flops(num_tokens) * samples
        report[ARITHMETIC]['text encoder'] = flops / 1e12
    batch = _abstract_batch(config.batch_size, text_dim, num_tokens, mesh)
    try:
        compiled = program.train_step.lower(program.abstract_state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        return report | {'fits': False, 'verdict': f'does not fit: {_first_sentence(error)}'}
    report[MEMORY] = _memory(compiled) | {'the chip has': chip.memory / 1e9}
    if encoder is not None:
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(encoder.params))
        report[MEMORY]['weights of the encoder'] = nbytes / 1e9
    least = sharding.least_bytes(
        program.abstract_state.params,
        mesh,
        compute_bytes=model.dtype.itemsize,
        accumulate=config.accumulate,
    )
    report |= _of_text(hlo.read(compiled.as_text() or ''), chip, model.turns)
    report[MOVED]['least for this mesh'] = least / 1e6
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


def _memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    sizes: Any = compiled.memory_analysis()
    found = {
        'arguments': sizes.argument_size_in_bytes,
        'outputs': sizes.output_size_in_bytes,
        'aliased': -sizes.alias_size_in_bytes,  # outputs in the place of arguments
        'temporaries': sizes.temp_size_in_bytes,
        'code': sizes.generated_code_size_in_bytes,
    }
    found['total'] = sum(found.values())
    found |= {'peak': sizes.peak_memory_in_bytes, 'in the host': sizes.host_temp_size_in_bytes}
    return {name: size / 1e9 for name, size in found.items()}


def _of_text(costs: hlo.Costs, chip: chips.Chip, turns: int) -> Report:
    """Traffic and time of a program; `turns` is the length of the loop over layers."""
    moved: dict[str, float] = collections.defaultdict(float)
    waited = 0.0
    for each in costs.collectives:
        where = 'in layers' if turns in each.loops else 'outside'
        how = ', asynchronous' if each.is_async else ''
        moved[f'{each.kind} of {each.members}, {where}{how}'] += each.nbytes / 1e6
        waited += 0 if each.is_async else each.nbytes / chip.link_rate
    time = dict.fromkeys(_PARTS, 0.0)
    for name, cycles in costs.cycles.items():
        part = next(part for part, pattern in _PARTS.items() if re.search(pattern, name))
        time[part] += cycles / chip.clock * 1e3 if chip.clock else 0
    return {
        MOVED: dict(sorted(moved.items())) | {'in all': sum(moved.values())},
        TIME: {name: x for name, x in time.items() if x} | {'in all': sum(time.values())},
        LEFT_OUT: {
            'synchronous exchanges, ms at least': waited * 1e3,
            'calls of kernels': costs.kernels,
            'loops of unknown length, counted once': sum(0 in loops for loops in costs.loops),
        },
    }


def judge(report: Report, chip: chips.Chip) -> Report:
    """Whether the program fits, its model FLOP utilization, and both in one sentence."""
    share = report[MEMORY]['total'] * 1e9 / chip.memory
    ratio = report[MOVED]['in all'] / max(report[MOVED]['least for this mesh'], 1e-6)
    milliseconds = report[TIME]['in all']
    mfu = report[ARITHMETIC]['model'] * 1e12 / chip.flops / (milliseconds / 1e3 or float('inf'))
    time = f'{milliseconds:.0f} ms a step by the compiler, an MFU of {mfu:.0%}'
    return {
        'mfu': mfu,
        'fits': share <= 1,
        'verdict': f'{"fits" if share <= 1 else "does not fit"}: {share:.0%} of the memory, '
        f'{ratio:.2f} times the least traffic, '
        + (time if milliseconds else f'no estimate of the time on {chip.name}'),
    }


def table(report: Report) -> str:
    """The report as text for people."""
    lines = [report['program'], '']
    for title, rows in report.items():
        if isinstance(rows, dict):
            lines += [title, *(f'  {name:52}{value:10,.2f}' for name, value in rows.items()), '']
    return '\n'.join([*lines, f'Verdict: {report["verdict"]}.'])


def _first_sentence(error: Exception) -> str:
    """The message of libtpu about memory, without the list of allocations that follows."""
    sums = r'Used [\d.]+\w? of [\d.]+\w?|the total memory required .* \([\d.]+\w?\)'
    found = re.search(sums, str(error))
    return found[0] if found else str(error).splitlines()[0]


def main() -> None:
    """Prints the report; the exit status is 1 where the program does not fit."""
    jax.config.update('jax_platforms', 'cpu')  # not the devices of this machine
    with run.errors_in_one_line((ValueError,)):
        names = 'text_dim', 'num_tokens', 'vocabulary', 'num_slices'
        asked: dict[str, Any] = {name: FLAGS[name].value for name in names}
        report = analyze(FLAGS.config, FLAGS.topology, **asked)
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
