"""Introduces a run: what is trained, on what and where, in a few lines and as scalars.

introduction.show(setup, start=0)
scalars |= introduction.derived(setup, step, scalars)
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from train_lib import chips, models
from train_lib.console import say

if TYPE_CHECKING:
    from train_lib.train import Setup


def show(setup: 'Setup', start: int) -> None:
    """Logs machine, data, model and length of a run that begins with the step `start`."""
    config, state = setup.config, setup.program.abstract_state
    placed: Any = state.step.sharding  # a NamedSharding
    say(
        'machine: %d x %s, hosts: %d of %d cores, mesh data %d x fsdp %d',
        *(jax.device_count(), jax.devices()[0].device_kind, jax.process_count(), os.cpu_count()),
        *placed.mesh.shape.values(),
    )
    say('data: %s', setup.data.description)
    if (encoder := setup.program.encoder) is not None:
        say(
            'encoder: %s, %.4g million parameters, frozen, %.3g GFLOP a sample, %s',
            encoder.name,
            sum(leaf.size for leaf in jax.tree.leaves(encoder.params)) / 1e6,
            encoder.network.config.flops(setup.data.facts.max_tokens) / 1e9,
            encoder.network.dtype,
        )
    say(
        'model: %s, %.4g million parameters, %.3g GFLOP to train on a sample, %s',
        config.model.name,
        sum(leaf.size for leaf in jax.tree.leaves(state.params)) / 1e6,
        flops(setup) / 1e9,
        config.model.dtype,
    )
    say('steps %d to %d, into %s; compiling ...', start + 1, config.num_steps, setup.workdir)


def derived(setup: 'Setup', step: int, scalars: Mapping[str, float]) -> dict[str, float]:
    """Scalars that follow from those of a report, as `TrainLog` has them."""
    more = {}
    if (epoch := setup.data.epoch(setup.beginning.sample_at(step))) is not None:
        more['train/epoch'] = epoch
    if 'train/samples_per_second' in scalars:
        rate = flops(setup) * scalars['train/samples_per_second'] / jax.device_count()
        more['device/tflops_per_chip'] = rate / 1e12
        if (chip := chips.CHIPS.get(jax.devices()[0].device_kind)) is not None:
            more['device/model_flop_utilization'] = rate / chip.flops
    return more


def flops(setup: 'Setup') -> int:
    """Of the products of matrices that the model asks for, to train on one sample.

    Those of a frozen encoder are not among them.
    """
    facts, encoder = setup.data.facts, setup.program.encoder
    model = models.make(**setup.config.model, vocabulary=facts.vocabulary)
    text_dim = encoder.dim if encoder else facts.text_dim
    return 3 * model.flops(facts.latent_shape, text_dim, facts.max_tokens)
