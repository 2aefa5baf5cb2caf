"""An exported model, drawn by diffusers itself, gives the pictures of `draw`."""

import os
import pathlib
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
from train_lib import draw, export, results
from train_lib.results import caption_encoder

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
    expected = artist.draw(CAPTIONS, caption_encoder.load(artist.facts, encoder)).astype(int)
    drawn = pipe(CAPTIONS, latents=noise_of(artist, len(CAPTIONS)), **options).images
    assert expected.std() > 5
    assert len({picture.tobytes() for picture in expected}) == len(CAPTIONS)
    assert np.abs(np.stack([np.asarray(image) for image in drawn]) - expected).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize('kind', SIDECARS)
def test_diffusers_draws_what_draw_draws(kind, models, sample_source, tmp_path, from_pretrained):  # noqa: F811
    spec = SIDECARS[kind]['encoder'].format(models)
    settings = embed_captions.EmbedSettings(tokens_only=SIDECARS[kind].get('tokens_only', False))
    embed_captions.embed(sample_source, spec, tmp_path / 's', settings)
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
    pipe = from_pretrained(tmp_path / 'out', vae=str(vae.parent))
    for options in {}, {'num_steps': 3, 'guidance': 1.5}:
        artist = draw.Artist(small_run[0], vae=str(vae), **options)
        names = {'num_steps': 'num_inference_steps', 'guidance': 'guidance_scale'}
        options = {names[name]: value for name, value in options.items()}
        assert_same_pictures(pipe, artist, '', **options)
    linear = from_pretrained(tmp_path / 'out', vae='')
    assert_same_pictures(linear, draw.Artist(small_run[0], vae=''), '')
    with pytest.raises(ValueError, match=r"^the VAE 'repository' was in a local folder: give"):
        from_pretrained(tmp_path / 'out')('a cat')


UPLOAD = """
import sys
import huggingface_hub, numpy as np, torch
from diffusers import DiffusionPipeline

def load(place):
    return DiffusionPipeline.from_pretrained(place, trust_remote_code=True)

def draw(pipe):
    return np.asarray(pipe('a cat', generator=torch.Generator().manual_seed(0)).images[0])

if sys.argv[2] == 'folder':
    huggingface_hub.upload_folder(repo_id='owner/name', folder_path=sys.argv[1], token='hf_token')
else:
    load(sys.argv[1]).push_to_hub('owner/name', token='hf_token')
pipe = load('owner/name')
pipe.save_pretrained(sys.argv[1] + '-saved')
pictures = map(draw, [pipe, load(sys.argv[1]), load(sys.argv[1] + '-saved')])
print(len({picture.tobytes() for picture in pictures}))
"""


@pytest.mark.slow
@pytest.mark.parametrize('what', ['folder', 'pipeline'])
def test_it_is_uploaded_and_loaded_by_its_name(small_run, tmp_path, what):
    pytest.importorskip('diffusers')
    export.export(small_run[0], tmp_path / 'out')
    with fake_hub({}) as server:
        command = [sys.executable, '-c', UPLOAD, str(tmp_path / 'out'), what]
        env = os.environ | server.env
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert ended.stdout.splitlines()[-1:] == ['1'], ended.stderr
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
    # By their own names, not by those of the transformer.
    with pytest.raises(ValueError, match=r'^num_inference_steps=0: expected'):
        pipe('a', num_inference_steps=0)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob('*') if x.is_file()}


@pytest.mark.slow
def test_an_export_that_is_saved_again_is_a_copy(small_run, tmp_path, from_pretrained):
    export.export(small_run[0], tmp_path / 'out')
    pipe = from_pretrained(tmp_path / 'out', dtype=torch.bfloat16)
    # Into a new folder, over an export, over itself, and within itself.
    for name in ('new/copy', 'new/copy', 'out', 'out/copy'):
        expected = contents(tmp_path / 'out')
        pipe.save_pretrained(tmp_path / name)
        assert contents(tmp_path / name) == expected
    for options in {'safe_serialization': False}, {'variant': 'fp16'}, {'max_shard_size': '1GB'}:
        with pytest.raises(ValueError, match=f'^{next(iter(options))}'):
            pipe.save_pretrained(tmp_path / 'none', **options)
    with torch.no_grad():
        pipe.transformer.values[0] += 1
    for save in (pipe.save_pretrained, pipe.push_to_hub):
        with pytest.raises(ValueError, match=f'^{tmp_path}/out does not hold the weights'):
            save(str(tmp_path / 'none'))
    pipe = from_pretrained(tmp_path / 'out')
    pipe.transformer.config['preview']['guidance'] = 7.0
    with pytest.raises(ValueError, match=f'^{tmp_path}/out does not hold the weights and settings'):
        pipe.save_pretrained(tmp_path / 'none')
    (tmp_path / 'out').rename(tmp_path / 'moved')
    with pytest.raises(ValueError, match=f'^{tmp_path}/out: the export that .* not there any more'):
        pipe.save_pretrained(tmp_path / 'none')
    assert not (tmp_path / 'none').exists()


@pytest.mark.slow
def test_exports_of_two_versions_keep_their_code(small_run, tmp_path, from_pretrained, monkeypatch):
    place = pathlib.Path(results.__file__).parent
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
        for module in ('torch_reference', 'diffusers_pipeline'):
            # Of equal length, as a changed number is.
            text = (place / f'{module}.py').read_text() + f'\nVERSION = {name!r}\n'
            text = text.replace(
                '    latents = z * stats',
                '    z = z.sign() if VERSION == "two" else z\n    latents = z * stats',
            )
            text = text.replace(
                'changes = {_SETTINGS', 'print(VERSION)\n        changes = {_SETTINGS'
            )
            (tmp_path / name / f'{module}.py').write_text(text)
        monkeypatch.setattr(results, '__file__', str(tmp_path / name / '__init__.py'))
        export.export(small_run[0], tmp_path / name / 'out')

    def draw_with(pipe) -> np.ndarray:
        return pipe(
            'a cat', generator=torch.Generator().manual_seed(0), output_type='latent'
        ).images

    one = from_pretrained(tmp_path / 'one' / 'out')
    before = draw_with(one)
    two = from_pretrained(tmp_path / 'two' / 'out')
    assert not torch.equal(draw_with(two), before)
    torch.testing.assert_close(draw_with(one), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('options', 'problem'),
    [
        *[
            ({'num_inference_steps': x}, 'a whole number of at least 1')
            for x in (0, 4.5, True, '9')
        ],
        *[({'guidance_scale': x}, 'a finite number') for x in (np.nan, -np.inf, '3', True)],
        *[
            ({'prompt': x}, 'a caption or a list of')
            for x in (None, [], [None], ['a', 3], 5, b'a', ())
        ],
        *[({'generator': x}, r'torch\.Generator') for x in (0, [0], 'cpu')],
        ({'generator': [torch.Generator()] * 2}, '1, one for each caption'),
        ({'latents': torch.zeros(2, 4, 32, 32)}, r'\(1, 4, 32, 32\)'),
        ({'output_type': 'pill'}, "one of .*'latent'"),
        ({'prompt': None, 'prompt_embeds': torch.zeros(0, 640)}, 'at least one'),
        ({'prompt': None, 'prompt_embeds': torch.zeros(1, 64)}, r'embeddings, float \(n, 640\)'),
        ({'prompt': None, 'prompt_embeds': np.zeros((1, 640))}, 'a tensor or'),
    ],
)
def test_what_no_run_would_draw_is_refused(loaded, options, problem):
    with pytest.raises(ValueError, match=f'expected {problem}') as refusal:
        loaded(**{'prompt': 'a cat'} | options)
    assert '\n' not in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize('caption', ['a cat', '-1', '10', '9' * 30])
def test_what_is_no_class_is_refused(loaded, monkeypatch, caption):
    facts = loaded.transformer.config['data']
    monkeypatch.setitem(facts, 'text_encoder', 'labels')
    monkeypatch.setitem(facts, 'vocabulary', 10)
    assert loaded.encode_prompt(' 7').tolist() == [[7]]
    with pytest.raises(
        ValueError, match=f"^'{caption}': expected the number of a class, from 0 to"
    ):
        loaded.encode_prompt(caption)


@pytest.fixture(scope='module')
def loaded(small_run, tmp_path_factory):
    diffusers = pytest.importorskip('diffusers')
    folder = tmp_path_factory.mktemp('export')
    export.export(small_run[0], folder)
    return diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
