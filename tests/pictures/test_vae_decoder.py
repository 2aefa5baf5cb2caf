"""Decoders of VAEs: those of diffusers, from files that fit or are refused."""

import json
import pathlib

import numpy as np
import pytest
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import latent_rgb, vae_decoder
from tests import small_vae
from tests.checkout import COCO_SAMPLE
from tests.text import offline_hub

TAESDXL = COCO_SAMPLE.parent / 'taesdxl'


@pytest.mark.slow
@pytest.mark.skipif(not TAESDXL.is_dir(), reason=f'{TAESDXL} is absent')
def test_real_latents_become_the_picture_that_the_linear_map_guesses(coco_sample):
    path = min((coco_sample / schema.LATENTS_FOLDER).iterdir())
    latents = torch.load(path, weights_only=True)[schema.PT_LATENTS][:3, 1].float().numpy()
    decoder = vae_decoder.load_decoder(str(TAESDXL))
    pictures = decoder(latents)
    assert (pictures.dtype, pictures.shape, decoder.factor) == (np.uint8, (3, 256, 256, 3), 8)
    small = pictures.reshape(3, 32, 8, 32, 8, 3).mean(axis=(2, 4))
    guessed = latent_rgb.latents_to_rgb(latents)
    assert np.corrcoef(small.ravel(), guessed.ravel())[0, 1] > 0.9
    # A picture does not depend on those beside it.
    np.testing.assert_allclose(decoder.decode(latents[1:2])[0], decoder.decode(latents)[1], 1e-3)


@pytest.mark.slow
def test_a_name_on_the_hub_is_read_from_its_cache(tmp_path):
    offline_hub.put(small_vae.make(tmp_path / 'tiny'), tmp_path, 'owner/tiny', commit='0' * 40)
    code = """
        from coyo11m_tfds.pictures.vae_decoder import load_decoder
        print(load_decoder('owner/tiny').factor)
        try:
            load_decoder('owner/none')
        except ValueError as error:
            print(error)
    """
    factor, said = offline_hub.run(code, tmp_path).split('\n', 1)
    assert factor == '2'
    assert "cannot load the VAE 'owner/none'" in said and 'needs the network' in said


def test_tiny_decoders_scale_latents_as_the_vae_that_made_them(tmp_path, caplog):
    caplog.set_level('WARNING')
    folders = [tmp_path / name for name in ('tiny', 'raw', 'maker')]
    for folder in folders:
        small_vae.make(folder)
    tiny, raw, maker = map(str, folders)
    for folder, factor in ((raw, 0.18215), (maker, 0.18215), (tiny, 1.0)):
        path = pathlib.Path(folder, 'config.json')
        path.write_text(json.dumps(json.loads(path.read_text()) | {'scaling_factor': factor}))
    scaled = np.random.default_rng(0).normal(size=(2, 4, 8, 8))

    def decoded(model: str, vae: str, factor: float, shift: float = 0) -> np.ndarray:
        return vae_decoder.load_decoder(model, 4, vae).decode(scaled / factor + shift)

    expected = decoded(tiny, 'sdxl', 0.13025)
    assert expected.std() > 0.01
    for arguments in (
        (tiny, 'sd3', 1.5305, 0.0609),
        (tiny, maker, 0.18215),
        (raw, '', 0.18215),
        (raw, 'flux', 0.3611, 0.1159),
    ):
        np.testing.assert_allclose(decoded(*arguments), expected, atol=1e-5)
    # That of a folder which is not here is recorded.
    recorded = vae_decoder.load_decoder(tiny, 4, 'maker', [0.3611, 0.1159])
    np.testing.assert_allclose(recorded.decode(scaled / 0.3611 + 0.1159), expected, atol=1e-5)
    # Latents of the VAE itself are scaled already; a folder is recorded by its name alone.
    for vae in (tiny, 'tiny'):
        np.testing.assert_allclose(decoded(tiny, vae, 1), expected, atol=1e-5)
    assert not caplog.messages
    np.testing.assert_allclose(decoded(tiny, '', 0.13025), expected, atol=1e-5)
    np.testing.assert_allclose(decoded(tiny, '/none/x', 0.13025), expected, atol=1e-5)
    unnamed, unknown = caplog.messages
    assert 'does not name the VAE' in unnamed and 'as those of SDXL' in unnamed
    assert "'/none/x', which made the latents, is unknown" in unknown


@pytest.mark.slow
@pytest.mark.parametrize('subfolder', ['', 'vae'])
@pytest.mark.parametrize('kind', ['AutoencoderKL', 'AutoencoderTiny'])
def test_decoders_give_what_those_of_diffusers_give(tmp_path, kind, subfolder):
    vae = small_vae.make_with_diffusers(tmp_path / subfolder, kind)
    decoder = vae_decoder.load_decoder(str(tmp_path))
    latents = 6 * torch.randn(5, 4, 8, 16)
    scaling = 1 if kind == 'AutoencoderKL' else schema.VAE_SCALING_FACTOR
    with torch.inference_mode():
        expected = vae.decode(scaling * latents).sample.movedim(1, -1).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(decoder.decode(latents.numpy()), expected, atol=1e-3)
