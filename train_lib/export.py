"""Exports a trained model for diffusers, and for PyTorch alone.

    python -m train_lib.export --workdir=W --out=EXPORT
    python EXPORT/transformer/reference_*.py EXPORT/transformer

    README.md, previews.png  the model's card
    model_index.json         what DiffusionPipeline.from_pretrained reads first
    pipeline_DIGEST.py       texts and pictures (diffusers_pipeline.py)
    transformer/
      model.safetensors      float32 weights, as blocks.0.attention.qkv.weight
      config.json            sizes of the model, statistics and text encoder of
                             its data, settings of the sampler
      example.safetensors    noise, a text, and the raw latents drawn from them
      reference_DIGEST.py    model and sampler in PyTorch (torch_reference.py)

The second command draws the example in PyTorch and compares. `config.json` is
written last, so an export with this file is complete. A former export stays
complete until all that replaces it has been made. After an interruption, the
same command replaces the files of the folder.
"""

import fnmatch
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import safetensors.numpy
from absl import flags
from etils import epath

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.pictures import latent_rgb, vae_decoder, vae_files
from coyo11m_tfds.process import command_line, jax_environment
from coyo11m_tfds.storage import file_state, model_files
from train_lib import results, run
from train_lib.learning import flow, models, sharding
from train_lib.learning.dit import DiT, flatten_weights
from train_lib.learning.step import bind_params, sampling_settings
from train_lib.learning.word_vectors import Words
from train_lib.lifecycle import checkpoint, workdirs
from train_lib.results import model_card

FLAGS = flags.FLAGS

# Fields of the model that the programs of an export need.
_SIZES = 'width', 'depth', 'num_heads', 'patch_size', 'mlp_ratio', 'text', 'prediction'
_NUM_EXAMPLES = 2
_NUM_TOKENS = 16  # of an example
_INDEX_FILE = 'model_index.json'
_LAST_FILE = 'transformer/config.json'  # without which an export is not complete
_PIPELINE_PATTERN = 'pipeline_*.py'
_REFERENCE_PATTERN = 'transformer/reference_*.py'


def export(
    place: epath.PathLike,
    out: epath.PathLike,
    *,
    step: int | None = None,
    average: bool = True,
    vae: str | None = None,
    datasets: Sequence[str] = (),
) -> None:
    """Writes the files of a checkpoint into a folder, which must be new or hold an export.

    Args:
        place: Folder of the run, as for `checkpoint.open_run`.
        out: Folder to write, local or `gs://`.
        step: Step of the checkpoint; None for the last.
        average: Whether to export the moving average of the weights.
        vae: Folder or hub name of the decoder of pictures; None for that of the run's previews.
        datasets: Names of the training data on the hub, for the card.

    Raises:
        ValueError: The run has no such checkpoint, its model is of another kind or has learned no
            texts, the VAE decodes other latents, or the folder holds other files.
        OSError: A file cannot be read or written.
    """
    jax_environment.check()
    saved = checkpoint.open_run(place, step)
    config = ml_collections.ConfigDict(saved.description.config)
    facts = DatasetStats.from_json(saved.description.facts)
    model = _make_model(place, config, facts)
    # Without fields that say nothing of how one picture is drawn.
    others = 'count', 'split'
    preview = {name: value for name, value in config.preview.items() if name not in others}
    vae = preview['vae'] if vae is None else vae
    painting = _describe_painting(vae, facts)
    # A folder of this machine says nothing to others.
    preview['vae'] = '' if painting['local_vae'] else vae
    # Absolute, because the model has the name of the folder.
    folder = workdirs.absolute(out)
    # Before the weights are read, which takes minutes for a large model.
    _check_export_folder(folder)
    # On one device, whatever the mesh of the run was: the example is small.
    placement = sharding.replicated(sharding.make_mesh(devices=jax.local_devices()[:1]))
    params = saved.restore_weights(placement, average=average)
    content = {
        'step': saved.step,
        'average': average,
        'model': {name: getattr(model, name) for name in _SIZES},
        'preview': preview,
        'data': facts.to_json(),
        'text': _name_text_model(facts, params),
        'painting': painting,
    }
    weights = flatten_weights(jax.device_get(params))
    num_weights = sum(array.size for array in weights.values())
    example = draw_example(model, params, facts, preview)
    files = model_card.make_card(
        saved,
        facts,
        name=folder.name,
        vae=model_files.public_name(vae) if vae else '',
        average=average,
        num_weights=num_weights,
        datasets=datasets,
    )
    files |= _make_programs()
    files['transformer/model.safetensors'] = safetensors.numpy.save(weights)
    files['transformer/example.safetensors'] = safetensors.numpy.save(example)
    files[_LAST_FILE] = _to_json(content)
    _replace_export(folder, files)


def _make_model(
    place: epath.PathLike, config: ml_collections.ConfigDict, facts: DatasetStats
) -> DiT:
    """Returns the model of a run, in float32; raises a ValueError if it cannot be exported."""
    # The example is drawn in float32: a comparison with it shows mistakes, not roundings.
    with config.unlocked():
        config.model.dtype = 'float32'
    model = models.make_model(**config.model, vocabulary=facts.vocabulary)
    if not isinstance(model, DiT):
        raise ValueError(
            f'{place}: model.kind={config.model.kind!r} cannot be exported, expected dit'
        )
    if not (facts.vocabulary or facts.text_dim):
        raise ValueError(f'{place}: the model was trained without text, expected one with a text')
    return model


def _make_programs() -> dict[str, bytes]:
    """Returns the two programs, and the index of their classes, which diffusers reads first."""
    pipeline, pipeline_source = _name_program('pipeline', 'diffusers_pipeline')
    reference, reference_source = _name_program('reference', 'torch_reference')
    index = {
        '_class_name': [pipeline, 'LatentFlowPipeline'],
        'transformer': [reference, 'Transformer'],
    }
    return {
        f'{pipeline}.py': pipeline_source,
        f'transformer/{reference}.py': reference_source,
        _INDEX_FILE: _to_json(index),
    }


def _name_program(name: str, module: str) -> tuple[str, bytes]:
    """Returns the name of a program with a digest of its content, and the content."""
    # In a process, diffusers runs a program in the module of the last one of the same name, which
    # would replace the functions of a pipeline that has been loaded before.
    source = pathlib.Path(results.__file__).with_name(f'{module}.py').read_bytes()
    digest = hashlib.sha256(source).hexdigest()[:8]
    return f'{name}_{digest}', source


def _to_json(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON file."""
    return f'{json.dumps(content, indent=1)}\n'.encode()


def _name_text_model(facts: DatasetStats, params: Any) -> dict[str, Any]:
    """Returns the model of transformers that tokenizes texts, and whether its network is needed.

    The network is needed, `encoded`, where the model takes hidden states or embeddings.
    """
    _, _, name = facts.text_encoder.partition(':')
    revision = facts.text_revision
    # Of a folder, the data set knows the name alone.
    if revision.startswith('sha256:'):
        name = ''
        revision = ''
    # A model with a table of its own takes token ids, another one what an encoder makes of them.
    encoded = not facts.vocabulary or 'projection' in params['words']
    return {'model': name, 'revision': revision, 'encoded': encoded}


def _describe_painting(vae: str, facts: DatasetStats) -> dict[str, Any]:
    """Returns how raw latents become pictures, and the name of a VAE in a local folder.

    This is the linear map to colours, and the scale for an `AutoencoderTiny`. Raises a ValueError
    for a VAE of other latents.
    """
    scale = latent_rgb.find_scale(facts.vae, facts.latent_scale) or latent_rgb.SCALES['sdxl']
    factor, shift = scale
    # The linear map is one of scaled latents, and an export has raw ones.
    rgb = factor * schema.RGB_FACTORS
    bias = schema.RGB_BIAS - shift * rgb.sum(axis=0)
    local_vae = ''
    if vae:
        config = vae_files.read_vae_config(vae)
        _, num_channels, _, _ = facts.latents_shape
        # That of a class that only diffusers knows may have another name.
        decoded_channels = config.get('latent_channels', num_channels)
        if decoded_channels != num_channels:
            raise ValueError(
                f'the VAE {vae!r} decodes latents of {decoded_channels} channels, expected '
                f'{num_channels}, as the data have: name the VAE that made their latents'
            )
        scale = vae_decoder.scale_of_latents(vae, config, facts.vae, facts.latent_scale)
        if model_files.local_folder(vae, 'VAE'):
            local_vae = model_files.public_name(vae)
    return {
        'scale': scale,
        'rgb': rgb.tolist(),
        'rgb_bias': bias.tolist(),
        'local_vae': local_vae,
    }


@jax_environment.promote_as_usual
def draw_example(
    model: DiT, params: Any, facts: DatasetStats, preview: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns noise, a random text, and the raw latents that the model draws from them.

    Args:
        model: Model in float32.
        params: Its weights.
        facts: Those of the training data.
        preview: Settings of the sampler.

    Returns:
        `noise`, float32 `(n, H, W, C)`, `text` and perhaps `present`, as `torch_reference` takes
        them, and `latents`, float32 `(n, C, H, W)`.
    """
    random = np.random.default_rng(0)
    count = _NUM_EXAMPLES
    _, channels, height, width = facts.latents_shape
    noise = random.normal(size=(count, height, width, channels)).astype(np.float32)
    example, text = _make_text(random, params, facts)
    settings = sampling_settings(preview)
    velocity = bind_params(model, params)

    @jax.jit
    def sample(noise: jax.Array, text: Any) -> jax.Array:
        """Returns standardized latents."""
        return flow.sample(velocity, noise, text, **settings)

    # GPUs and TPUs would multiply float32 in fewer bits.
    with jax.default_matmul_precision('highest'):
        latents = flow.raw_latents(sample(noise, text), facts)
    return {'noise': noise, **example, 'latents': np.asarray(latents)}


def _make_text(
    random: np.random.Generator, params: Any, facts: DatasetStats
) -> tuple[dict[str, np.ndarray], Any]:
    """Returns random texts as an export holds them, and as the model takes them."""
    count = _NUM_EXAMPLES
    # Of a text with tokens, a random number is there, and at least one.
    num_present = random.integers(1, _NUM_TOKENS, (count, 1))
    present = np.arange(_NUM_TOKENS) < num_present
    if not facts.vocabulary:
        normal = random.normal(size=(count, facts.text_dim))
        raw = (normal * facts.text_std + facts.text_mean).astype(np.float16)
        embeddings = flow.standardize_text(jnp.asarray(raw), facts)
        return {'text': raw}, embeddings
    # A model of hidden states has this layer in the place of a table.
    if 'projection' in params['words']:
        width = params['words']['projection']['kernel'].shape[0]
        states = random.normal(size=(count, _NUM_TOKENS, width)).astype(np.float32)
        words = Words(jnp.asarray(states), jnp.asarray(present))
        return {'text': states, 'present': present.astype(np.uint8)}, words
    ids = random.integers(facts.vocabulary, size=(count, _NUM_TOKENS))
    ids = np.where(present, ids, -1).astype(np.int32)
    return {'text': ids}, ids


def _check_export_folder(folder: epath.Path) -> None:
    """Raises a ValueError for a folder with other files than those of an export."""
    workdirs.check_writable(folder)
    if not folder.exists():
        return
    own_names = [_INDEX_FILE, 'transformer']
    own_names += model_card.FILES
    for name in sorted(path.name for path in folder.iterdir()):
        # Unrelated files would look like parts of the export.
        if name not in own_names and not fnmatch.fnmatch(name, _PIPELINE_PATTERN):
            raise ValueError(f'{folder} holds {name}: expected a new folder, or an export.')


def _replace_export(folder: epath.Path, files: Mapping[str, bytes]) -> None:
    """Writes all files of an export in place of a former one; `_LAST_FILE` completes it."""
    # An interrupted export must not look like a complete one.
    (folder / _LAST_FILE).unlink(missing_ok=True)
    (folder / 'transformer').mkdir(parents=True, exist_ok=True)
    # Of the former export, which may have had other programs or a picture.
    for pattern in model_card.PREVIEWS_FILE, _PIPELINE_PATTERN, _REFERENCE_PATTERN:
        # A list, because files go away from the folder that is listed.
        for path in list(folder.glob(pattern)):
            if path.relative_to(folder).as_posix() not in files:
                path.unlink()
    # False comes before True: the last file is written last.
    for name in sorted(files, key=lambda name: name == _LAST_FILE):
        with file_state.naming(folder / name):
            (folder / name).write_bytes(files[name])


def main() -> None:
    """Exports the checkpoint of the flags."""
    run.prepare()
    export(
        FLAGS.workdir,
        FLAGS.out,
        step=FLAGS.step,
        average=FLAGS.average,
        vae=FLAGS.vae,
        datasets=FLAGS.datasets,
    )
    command_line.print_lines(f'exported: {FLAGS.out}')


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run, local or gs://.')
    flags.DEFINE_string('out', None, 'Folder to write, local or gs://.')
    flags.DEFINE_integer('step', None, 'Step of the checkpoint; default: the last.', lower_bound=0)
    flags.DEFINE_bool('average', True, 'Export the moving average of the weights.')
    flags.DEFINE_string('vae', None, "VAE decoder; default: that of the run's previews.")
    flags.DEFINE_list('datasets', [], 'Names of the data on the hub, for the card.')
    run.start(main, required=['workdir', 'out'])
