"""Encoders of VAEs: those of diffusers, the same bytes for a picture in any company."""

import json

import numpy as np
import pytest
import safetensors.numpy
import torch

from coyo11m_tfds.pictures import vae_decoder, vae_encoder, vae_parts
from tests import children, small_vae
from tests.checkout import COCO_SAMPLE

TAESDXL = COCO_SAMPLE.parent / 'taesdxl'
NO_LAYERS = {'use_quant_conv': False, 'mid_block_add_attention': False}


def random_pictures(number: int, height: int = 16, width: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, height, width, 3)).astype(np.uint8)


def test_a_picture_has_the_same_latents_in_any_company(tmp_path):
    small_vae.make_kl_encoder(tmp_path)
    encoder, pictures = vae_encoder.VaeEncoder(str(tmp_path)), random_pictures(19)
    assert (encoder.channels, encoder.factor, encoder.name) == (4, 2, tmp_path.name)
    assert encoder.revision.startswith('sha256:')
    assert (
        encoder.batch_size(256, 256)
        == 4 * encoder.batch_size(512, 512)
        > encoder.batch_size(9999, 9999)
    )
    waits = [encoder.start(pictures[i:j]) for i, j in ((0, 19), (0, 7), (7, 19), (18, 19))]
    results = [wait() for wait in waits]
    for part in (0, 1):
        whole, first, second, last = (result[part] for result in results)
        assert (whole.dtype, whole.shape) == (np.float32, (19, 4, 8, 16))
        np.testing.assert_array_equal(np.concatenate([first, second]), whole)
        np.testing.assert_array_equal(last, whole[-1:])
        assert whole.std(axis=(0, 2, 3)).min() > 1e-3
    assert results[0][1].min() > 0


@pytest.mark.slow
def test_several_devices_give_the_bytes_of_one(tmp_path):
    small_vae.make_kl_encoder(tmp_path)
    code = """
        import hashlib, os
        os.environ['XLA_FLAGS'] += f' --xla_force_host_platform_device_count={sys.argv[2]}'
        import jax, numpy as np
        from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
        pictures = np.random.default_rng(0).integers(0, 256, (21, 16, 32, 3)).astype(np.uint8)
        latents = np.stack(VaeEncoder(sys.argv[1]).encode(pictures))
        print(hashlib.sha256(latents.tobytes()).hexdigest(), jax.local_device_count())
    """
    digests = {}
    for devices in '1', '3':
        with children.python(code, tmp_path, devices) as child:
            digest, count = child.communicate()[0].split()
            digests[count] = digest
    assert digests.keys() == {'1', '3'}
    assert digests['1'] == digests['3']


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    small_vae.make_kl_encoder(tmp_path)
    config, path = tmp_path / 'config.json', tmp_path / vae_parts.WEIGHTS_FILE
    fields, weights = json.loads(config.read_text()), safetensors.numpy.load_file(path)
    conv = 'encoder.conv_in.weight'
    double = {
        name: np.repeat(weights[f'quant_conv.{name}'], 2, axis=0) for name in ('weight', 'bias')
    }
    for changes, changed_weights, message in (
        (
            {},
            {conv: None},
            r'safetensors: does not fit config.json: .*encoder.conv_in.weight is mi',
        ),
        ({}, {'encoder.more': weights[conv]}, r'1 weights are unknown, such as encoder.more'),
        ({}, {conv: weights[conv][:, 1:].copy()}, r'safetensors: does not fit config\.json'),
        ({}, {f'quant_conv.{x}': double[x] for x in double}, r'makes 8 channels, expected 4'),
        (
            {'_class_name': 'VQModel'},
            {},
            r"_class_name is 'VQModel', expected one of AutoencoderKL",
        ),
        ({'down_block_types': ['DownBlock2D']}, {}, r'expected only DownEncoderBlock2D and silu'),
        ({'act_fn': 'relu'}, {}, r"act_fn is 'relu', expected only DownEncoderBlock2D and silu"),
        ({'latent_channels': 'four'}, {}, r"latent_channels is 'four', expected a number"),
    ):
        config.write_text(json.dumps(fields | changes))
        all_weights = {n: w for n, w in (weights | changed_weights).items() if w is not None}
        path.unlink()
        safetensors.numpy.save_file(all_weights, path)
        with pytest.raises(ValueError, match=message):
            vae_encoder.VaeEncoder(str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cannot read the VAE '.*': .*save_pretrained"):
        vae_encoder.VaeEncoder(str(tmp_path))


@pytest.mark.parametrize('shape', [(1, 16, 31), (2, 15, 16), (0, 16, 16)])
def test_pictures_of_other_sizes_are_refused(tmp_path, shape):
    encoder = vae_encoder.VaeEncoder(str(small_vae.make(tmp_path)))
    with pytest.raises(ValueError, match=r'encodes pictures of multiples of 2 pixels, got'):
        encoder.encode(np.zeros((*shape, 3), np.uint8))


def test_a_real_tiny_vae_gives_back_the_picture(tmp_path):
    if not TAESDXL.is_dir():
        pytest.skip(f'{TAESDXL} is absent')
    rows, columns = np.mgrid[:64, :128] / 128
    picture = np.stack([rows * 2, columns, 1 - columns], axis=-1)
    picture[16:48, 32:64] = 0.9, 0.1, 0.2
    picture = (picture * 255).astype(np.uint8)
    mean, deviation = vae_encoder.VaeEncoder(str(TAESDXL)).encode(picture[None])
    assert deviation is None and mean.shape == (1, 4, 8, 16)
    # The data set names the VAE, so that the decoder does not scale the latents once more.
    decoder = vae_decoder.load_decoder(str(TAESDXL), 4, 'taesdxl')
    difference = np.abs(decoder(mean)[0].astype(float) - picture)
    assert difference.mean() < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'options'),
    [('AutoencoderKL', {}), ('AutoencoderKL', NO_LAYERS), ('AutoencoderTiny', {})],
)
def test_encoders_give_what_those_of_diffusers_give(tmp_path, kind, options):
    vae = small_vae.make_with_diffusers(tmp_path, kind, **options)
    pictures = random_pictures(11, 64, 96)
    with torch.inference_mode():
        code = vae.encode(torch.tensor(pictures).movedim(-1, 1) / 127.5 - 1)
    mean, deviation = vae_encoder.VaeEncoder(str(tmp_path)).encode(pictures)
    if kind == 'AutoencoderTiny':
        assert deviation is None
        expected = code.latents.numpy()
    else:
        expected = code.latent_dist.mean.numpy()
        np.testing.assert_allclose(deviation, code.latent_dist.std.numpy(), atol=1e-3)
        assert deviation.std() > 0.01
    np.testing.assert_allclose(mean, expected, atol=1e-3)
    assert mean.std() > 0.1
