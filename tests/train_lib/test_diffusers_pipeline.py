"""An exported model, drawn by diffusers itself, gives the pictures of `draw`."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

from coyo11m_tfds import embed_captions
from tests import built, runs, small_vae
from tests.fakes.cloud import fake_hub
from tests.text.test_jax_encoder import models  # noqa: F401, a fixture
from train_lib import draw, export

CAPTIONS = ['a red circle', 'A small, blue SQUARE on the left', '', 'quokka']
# How texts are made, by `words`, `hash` or a small Gemma.
SIDECARS = {
    'words': {'encoder': 'words', 'tokens_only': True},
    'hash': {'encoder': 'hash'},
    'pooled': {'encoder': 'hf:{}/text'},
    'tokens': {'encoder': 'jax:{}/text', 'tokens_only': True},
    'states': {'encoder': 'jax:{}/text', 'tokens_only': True},
}


@pytest.fixture
def from_pretrained(monkeypatch, tmp_path):
    """Of diffusers, which copies the code that it runs to a folder."""
    diffusers = pytest.importorskip('diffusers')
    from diffusers.utils import dynamic_modules_utils

    monkeypatch.setattr(dynamic_modules_utils, 'HF_MODULES_CACHE', str(tmp_path / 'modules'))
    monkeypatch.setattr(sys, 'path', [*sys.path])

    def load(folder, **options):
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            folder, trust_remote_code=True, **options
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load


def noise_of(artist: draw.Artist, count: int) -> torch.Tensor:
    """The noise that `draw` begins with, `(n, C, H, W)`."""
    _, channels, height, width = artist.facts.latents_shape
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(count)]
    noise = np.stack([jax.random.normal(key, (height, width, channels)) for key in keys])
    return torch.tensor(noise).permute(0, 3, 1, 2)


def assert_same_pictures(pipe, artist: draw.Artist, encoder: str, **options) -> None:
    expected = artist.draw(CAPTIONS, draw.load_caption_encoder(artist.facts, encoder)).astype(int)
    drawn = pipe(CAPTIONS, latents=noise_of(artist, len(CAPTIONS)), **options).images
    assert expected.std() > 5
    assert len({picture.tobytes() for picture in expected}) == len(CAPTIONS)
    assert np.abs(np.stack([np.asarray(image) for image in drawn]) - expected).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize('kind', SIDECARS)
def test_diffusers_draws_what_draw_draws(kind, models, sample_source, tmp_path, from_pretrained):  # noqa: F811
    spec = SIDECARS[kind]['encoder'].format(models)
    embed_captions.embed(sample_source, **SIDECARS[kind] | {'encoder': spec, 'out': tmp_path / 's'})
    data = built.build(sample_source, tmp_path / 's', tmp_path / 'data')
    changes = {'num_steps': 3, 'eval_every': 0, 'model.text': 'sequence', 'preview.guidance': 3.0}
    if kind in ('hash', 'pooled'):
        changes['model.text'] = 'pooled'
    in_step = spec if kind == 'states' else ''
    runs.train(data, tmp_path / 'run', encoder=in_step, **changes)
    export.export(tmp_path / 'run', tmp_path / 'out')
    model = str(models / 'text')
    is_model = ':' in spec
    pipe = from_pretrained(tmp_path / 'out', **({'encoder': model} if is_model else {}))
    artist = draw.Artist(tmp_path / 'run', encoder=in_step)
    assert_same_pictures(pipe, artist, spec)
    if is_model:
        with pytest.raises(ValueError, match=r"text' made the texts .*encoder="):
            from_pretrained(tmp_path / 'out')('a cat')


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['AutoencoderTiny', 'AutoencoderKL'])
def test_a_vae_of_diffusers_paints(kind, small_run, tmp_path, from_pretrained):
    vae = tmp_path / 'repository' / 'vae'
    small_vae.make_with_diffusers(vae, kind)
    export.export(small_run[0], tmp_path / 'out', vae=str(vae.parent))
    for options in {}, {'num_steps': 3, 'guidance': 1.5}:
        artist = draw.Artist(small_run[0], vae=str(vae), **options)
        names = {'num_steps': 'num_inference_steps', 'guidance': 'guidance_scale'}
        options = {names[name]: value for name, value in options.items()}
        assert_same_pictures(from_pretrained(tmp_path / 'out'), artist, '', **options)
    linear = from_pretrained(tmp_path / 'out', vae='')
    assert_same_pictures(linear, draw.Artist(small_run[0], vae=''), '')


UPLOAD = """
import sys
import huggingface_hub, numpy as np, torch
from diffusers import DiffusionPipeline

huggingface_hub.upload_folder(repo_id='owner/name', folder_path=sys.argv[1], token='hf_token')

def draw(place):
    pipe = DiffusionPipeline.from_pretrained(place, trust_remote_code=True)
    return np.asarray(pipe('a cat', generator=torch.Generator().manual_seed(0)).images[0])

print(np.array_equal(draw('owner/name'), draw(sys.argv[1])))
"""


@pytest.mark.slow
def test_it_is_uploaded_and_loaded_by_its_name(small_run, tmp_path):
    pytest.importorskip('diffusers')
    export.export(small_run[0], tmp_path / 'out')
    with fake_hub({}) as server:
        command = [sys.executable, '-c', UPLOAD, str(tmp_path / 'out')]
        env = os.environ | server.env
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert ended.stdout.splitlines()[-1:] == ['True'], ended.stderr
        assert server.errors == []


@pytest.mark.slow
def test_arguments_are_those_of_other_pipelines(small_run, tmp_path, from_pretrained):
    export.export(small_run[0], tmp_path / 'out')
    pipe = from_pretrained(tmp_path / 'out', dtype=torch.bfloat16)
    assert (pipe.dtype, pipe.device.type) == (torch.bfloat16, 'cpu')

    def draw_seed(seed: int, **options) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        return pipe('a red circle', generator=generator, output_type='np', **options).images

    assert draw_seed(0).shape == (1, 32, 32, 3)
    np.testing.assert_array_equal(draw_seed(0), draw_seed(0))
    assert np.abs(draw_seed(0) - draw_seed(1)).mean() > 0.01
    embeds = pipe.encode_prompt(['a red circle'])
    np.testing.assert_array_equal(draw_seed(0), draw_seed(0, prompt_embeds=embeds))
    latents = pipe(['a', 'b'], num_inference_steps=1, output_type='latent').images
    assert latents.shape == (2, 4, 32, 32)
