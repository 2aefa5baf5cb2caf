"""Checks a run before it starts: settings, data, memory and model.

    python -m train_lib.tools.check --config=demo \\
        --config.data.dir=OUT/coyo11m_tfds/hash/1.0.0
    {"devices": "1 x cpu", "data": "OUT/..., text embeddings of hash", ...}

A dry run: like a run before its first step, the program checks the settings,
the mesh, the data set, the memory for reading, the model, the optimizer and
the run that `init_from` names. It compiles nothing. After an error it ends
with one line and exit status 1. If the configuration is for several hosts
(`distributed`), the program makes the checks that one host can make, with a
mesh of this host's devices.
"""

import collections
import json

import ml_collections
from absl import flags
from ml_collections import config_flags

from coyo11m_tfds.process import command_line
from train_lib import run

FLAGS = flags.FLAGS


def check_configuration(config: ml_collections.ConfigDict) -> dict[str, str | dict[str, str]]:
    """Returns the `devices` and `data` of the run and, if any, the `unchecked` and how to check.

    Raises a ValueError, an OSError or a MemoryError, as the run would before its first step.
    """
    # After `run.prepare`, because they take seconds.
    import jax

    from coyo11m_tfds.pictures import vae_decoder
    from coyo11m_tfds.process import jax_environment
    from train_lib import run_setup
    from train_lib.data import TrainingData
    from train_lib.learning import flow, sharding, step
    from train_lib.lifecycle import beginnings, config_rules, writers

    jax_environment.check()
    writers.check_installed(config)
    unchecked = {}
    if config.distributed:
        unchecked['the mesh of all hosts'] = (
            'python -m train_lib.tools.compile with this --config and the --topology of the pod'
        )
        # The mesh of a pod needs the devices of all its hosts.
        mesh = sharding.make_mesh()
    else:
        mesh = sharding.make_mesh(**config.mesh)
    # The decoder is loaded only if pictures are drawn.
    vae = config.preview.vae if config.preview_every else ''
    data_summary = ''
    if config.data.dir or config.data.mix:
        data = TrainingData(config, mesh)
        data.check_reading()
        facts = data.facts
        _, num_channels, _, _ = facts.latents_shape
        # Made for its errors alone, like the beginning of the run.
        vae_decoder.make_painter(vae, num_channels, facts.vae, facts.latent_scale)
        program = step.for_data(config, mesh, facts)
        description = run_setup.describe_run(config, data, program)
        beginnings.find_beginning(config, None, description, program)
        if facts.vocabulary:
            text = f'tokens of {facts.text_encoder}'
        elif facts.text_dim:
            text = f'text embeddings of {facts.text_encoder}'
        else:
            text = 'no text'
        folders = ' and '.join(source.stored.folder for source in data.sources)
        data_summary = f'{folders}, {text}'
    else:
        data_checks = 'the data set, its encoder and the memory for reading it'
        unchecked[data_checks] = 'name a built data set: --config.data.dir'
        if config.init_from:
            unchecked['the weights of init_from'] = 'the same: they depend on the texts'
        config_rules.check_config(config, needs_data=False)
        vae_decoder.make_painter(vae)
        # The model and the optimizer need nothing of the data except the form of its texts: any
        # vocabulary will do.
        vocabulary = 1 if config.model.text == 'sequence' else 0
        step.make_program(config, mesh, flow.no_stats(text_dim=1, vocabulary=vocabulary))
    counts = collections.Counter(device.device_kind for device in jax.local_devices())
    devices = ', '.join(f'{count} x {kind}' for kind, count in counts.items())
    result: dict[str, str | dict[str, str]] = {'devices': devices, 'data': data_summary}
    if unchecked:
        result['unchecked'] = unchecked
    return result


def main() -> None:
    """Prints the result of the checks as JSON."""
    run.prepare(needs_data=False)
    command_line.print_lines(json.dumps(check_configuration(FLAGS.config)))


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, run.CONFIG_HELP, lock_config=True)
    run.start(main, required=['config'])
