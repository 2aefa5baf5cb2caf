"""What a run is before its first step: checked settings, opened data, and where it starts.

Nothing is compiled or written here, so a wrong command ends within seconds and leaves no trace.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import ml_collections
import numpy as np
from etils import epath

from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.process import jax_environment
from train_lib.data import TrainingData
from train_lib.learning import sharding
from train_lib.learning.step import Program, for_data
from train_lib.lifecycle import (
    beginnings,
    checkpoint,
    compiled_programs,
    config_rules,
    versions,
    workdirs,
    writers,
)
from train_lib.lifecycle.checkpoint import Description


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run with checked settings, before anything is compiled or written.

    Attributes:
        config: Configuration.
        workdir: Absolute path of the run's folder.
        data: The data sets.
        program: Functions that are compiled when they are called.
        beginning: Where the run starts.
        paint: Turns raw latents `(n, C, H, W)` into pictures, uint8 `(n, height, width, 3)`.
    """

    config: ml_collections.ConfigDict
    workdir: epath.Path
    data: TrainingData
    program: Program
    beginning: beginnings.Beginning
    paint: Callable[[np.ndarray], np.ndarray]

    def position_at(self, step: int) -> dict[str, Any]:
        """Returns the position in the data after a step, see `data.TrainingData`."""
        return self.data.position_at(self.beginning.description.position, step)


def set_up(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    accept_changes: Collection[str] = (),
) -> Setup:
    """Checks everything that a run needs before its first step.

    Args:
        config: See `configs/default.py`.
        workdir: Folder for checkpoints, TensorBoard logs and previews, local or `gs://`.
        accept_changes: Fields that may differ from the last checkpoint; see
            `config_rules.changeable_fields`.

    Raises:
        ValueError: A setting is out of its range, or does not fit the devices or the data.
        beginnings.OtherRunError: The last checkpoint in `workdir` belongs to another run.
        OSError: The data set does not exist, or `workdir` cannot be written to.
    """
    # First what fails at once: opening the data and the decoder takes seconds.
    jax_environment.check()
    # Before the next check writes to the folder: Orbax would take this one for another.
    workdirs.check_takes_checkpoints(workdir)
    workdirs.check_writable(workdir)
    config_rules.check_accepted_changes(accept_changes, config)
    # JAX asks for its cache at the first compilation, which may be that of the decoder.
    compiled_programs.use_cache(config, workdir)
    writers.check_installed(config)
    last = checkpoint.find_last(workdir)
    # A resumed run reads the commits of the hub that it has read before.
    earlier_config = last.description.config if last else None
    config = versions.pin_data_sets(config, earlier_config)
    mesh = sharding.make_mesh(**config.mesh)
    data = TrainingData(config, mesh)
    data.check_reading()
    facts = data.facts
    # The decoder is loaded only if pictures are drawn.
    vae = config.preview.vae if config.preview_every else ''
    _, num_channels, _, _ = facts.latents_shape
    paint = vae_decoder.make_painter(vae, num_channels, facts.vae, facts.latent_scale)
    if config.preview_every:
        # Read now and kept, so that errors are reported now and not hours later.
        _ = data.preview_samples
    program = for_data(config, mesh, facts)
    # Last, since the checkpoint is compared with the data and with the weights of the program.
    description = describe_run(config, data, program)
    beginning = beginnings.find_beginning(config, last, description, program, accept_changes)
    return Setup(config, workdirs.absolute(workdir), data, program, beginning, paint)


def describe_run(
    config: ml_collections.ConfigDict, data: TrainingData, program: Program
) -> Description:
    """Returns the description of a run at step 0, which a resumed run compares with its own."""
    identity = data.identity
    # Weights of an encoder are in no checkpoint, so another one could take its place unnoticed.
    if program.encoder is not None:
        encoder = {'name': program.encoder.name, 'revision': program.encoder.revision}
        identity = identity | {'encoder': encoder}
    return Description(
        identity=identity,
        settings=data.settings,
        config=config_rules.with_absolute_places(config),
        facts=data.facts.to_json(),
        position=data.position,
    )
