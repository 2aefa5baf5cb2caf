"""Encoders of VAEs: those of diffusers, the same bytes for a picture in any company."""

import json

import numpy as np
import pytest
import safetensors.numpy
import torch

from coyo11m_tfds.pictures import vae_decoder, vae_files
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from tests import children, hostile_models, small_vae
from tests.checkout import COCO_SAMPLE

TAESDXL = COCO_SAMPLE.parent / 'taesdxl'
NO_LAYERS = {'use_quant_conv': False, 'mid_block_add_attention': False}


def random_pictures(number: int, height: int = 16, width: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, height, width, 3)).astype(np.uint8)


def test_a_picture_has_the_same_latents_in_any_company(tmp_path):
    small_vae.make_kl_encoder(tmp_path)
    encoder, pictures = VaeEncoder(str(tmp_path)), random_pictures(19)
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
        import hashlib
        import jax, numpy as np
        from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
        pictures = np.random.default_rng(0).integers(0, 256, (21, 16, 32, 3)).astype(np.uint8)
        latents = np.stack(VaeEncoder(sys.argv[1]).encode(pictures))
        print(hashlib.sha256(latents.tobytes()).hexdigest(), jax.local_device_count())
    """
    outputs = [children.output(code, tmp_path, devices=n).split() for n in (1, 3)]
    assert [count for _, count in outputs] == ['1', '3']
    assert outputs[0][0] == outputs[1][0]


FITS_NOT = r'safetensors: does not fit config\.json'
CONV = 'encoder.conv_in.weight'


NO_VAE = {
    'a weight is gone': (
        {},
        lambda w: w.pop(CONV),
        rf'{FITS_NOT}: .*encoder\.conv_in\.weight is mi',
    ),
    'a weight is unknown': (
        {},
        lambda w: w.update({'encoder.x': w[CONV]}),
        '1 weight is unknown, such as .encoder',
    ),
    'a weight has a channel less': (
        {},
        lambda w: w.update({CONV: w[CONV][:, 1:].copy()}),
        FITS_NOT,
    ),
    'a weight has twice the rows': (
        {},
        lambda w: w.update({n: np.repeat(w[n], 2, axis=0) for n in w if 'quant_conv' in n}),
        r'quant_conv\.weight has the shape \(16, 8, 1, 1\), expected \(8, 8, 1, 1\)',
    ),
    'a bias is gone': (
        {},
        lambda w: w.pop('encoder.conv_in.bias'),
        r'encoder\.conv_in\.bias is missing',
    ),
    'a kernel is smaller': (
        {},
        lambda w: w.update({CONV: w[CONV][..., :1].copy()}),
        r'shape \(8, 3, 3, 1\), expect',
    ),
    'more channels': ({'block_out_channels': [8, 16]}, None, r'expected \(16, 8, 3, 3\)'),
    'one block': (
        {'block_out_channels': [8]},
        None,
        r'block_out_channels is \[8\], expected one number',
    ),
    'groups that do not divide the channels': (
        {'norm_num_groups': 3},
        None,
        'norm_num_groups is 3, expected a divisor of the 8 channels',
    ),
    'a thousand million layers': (
        {'layers_per_block': 10**9},
        None,
        'layers_per_block is 1000000000, expected .* 1 to 64',
    ),
    'a VAE of another kind': (
        {'_class_name': 'VQModel'},
        None,
        "_class_name is 'VQModel', expected 'AutoencoderKL' or",
    ),
    'a block of another kind': (
        {'down_block_types': ['DownBlock2D']},
        None,
        "expected a list .* 'DownEncoderBlock2D'",
    ),
    'another activation': ({'act_fn': 'relu'}, None, "act_fn is 'relu', expected 'silu'"),
    'a number that is a word': (
        {'latent_channels': 'four'},
        None,
        "latent_channels is 'four', expected a whole number",
    ),
}


@pytest.mark.parametrize(('fields', 'change', 'message'), NO_VAE.values(), ids=NO_VAE)
def test_what_does_not_fit_is_refused_by_name(tmp_path, fields, change, message):
    small_vae.make_kl_encoder(tmp_path)
    config, path = tmp_path / 'config.json', tmp_path / vae_files.WEIGHTS_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    if change:
        weights = safetensors.numpy.load_file(path)
        change(weights)
        path.unlink()
        safetensors.numpy.save_file(weights, path)
    with pytest.raises(ValueError, match=message):
        VaeEncoder(str(tmp_path))


@pytest.mark.parametrize('kind', ['AutoencoderKL', 'AutoencoderTiny'])
def test_no_value_of_a_field_ends_in_anything_but_one_line(tmp_path, kind):
    load = VaeEncoder
    if kind == 'AutoencoderKL':
        small_vae.make_kl_encoder(tmp_path)
    else:
        load = vae_decoder.load_decoder
        small_vae.make(tmp_path)
    path = tmp_path / 'config.json'
    content = json.loads(path.read_text())
    assert load(str(tmp_path)).channels == 4
    refusals = []
    for fields in hostile_models.damage_fields(
        content, [*vae_files.KINDS[kind].rules, '_class_name']
    ):
        path.write_text(json.dumps(fields))
        refusals.append(hostile_models.refusal(lambda: load(str(tmp_path)), str(tmp_path)))
    # Fields of the other half may be anything within their bounds.
    assert sum(map(bool, refusals)) > 0.9 * len(refusals)


@pytest.mark.parametrize('dtype', hostile_models.QUANTIZED)
def test_only_weights_of_floating_point_are_read(tmp_path, dtype):
    small_vae.make_kl_encoder(tmp_path)
    hostile_models.quantize(tmp_path / vae_files.WEIGHTS_FILE, CONV, dtype)
    with pytest.raises(ValueError, match=rf"'{CONV}' is {dtype}, expected one of F64, F32, F16, B"):
        VaeEncoder(str(tmp_path))


DAMAGED = {
    'weights that are cut': (vae_files.WEIGHTS_FILE, b'\x08'),
    'no configuration': ('config.json', None),
    'a list as the configuration': ('config.json', b'[]'),
    'nothing as the configuration': ('config.json', b'null'),
    'a configuration that is cut': ('config.json', b'{'),
    'a configuration that is no UTF-8': ('config.json', b'\xff'),
    'a configuration that is nested too deeply': ('config.json', hostile_models.NESTED),
    'a number of 5,000 digits': ('config.json', b'{"latent_channels": %s}' % (b'9' * 5000)),
}


@pytest.mark.parametrize(('name', 'content'), DAMAGED.values(), ids=DAMAGED)
def test_damaged_and_missing_files_are_named(tmp_path, name, content):
    small_vae.make_kl_encoder(tmp_path)
    (tmp_path / name).unlink()
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf'{tmp_path}.*(_class_name is|save_pretrained)'):
        VaeEncoder(str(tmp_path))


@pytest.mark.parametrize('shape', [(1, 16, 31), (2, 15, 16), (0, 16, 16)])
def test_pictures_of_other_sizes_are_refused(tmp_path, shape):
    encoder = VaeEncoder(str(small_vae.make(tmp_path)))
    with pytest.raises(ValueError, match=r'encodes pictures of multiples of 2 pixels, got'):
        encoder.encode(np.zeros((*shape, 3), np.uint8))


@pytest.mark.skipif(not TAESDXL.is_dir(), reason=f'{TAESDXL} is absent')
def test_a_real_tiny_vae_gives_back_the_picture():
    rows, columns = np.mgrid[:64, :128] / 128
    picture = np.stack([rows * 2, columns, 1 - columns], axis=-1)
    picture[16:48, 32:64] = 0.9, 0.1, 0.2
    picture = (picture * 255).astype(np.uint8)
    mean, deviation = VaeEncoder(str(TAESDXL)).encode(picture[None])
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
    mean, deviation = VaeEncoder(str(tmp_path)).encode(pictures)
    if kind == 'AutoencoderTiny':
        assert deviation is None
        expected = code.latents.numpy()
    else:
        expected = code.latent_dist.mean.numpy()
        np.testing.assert_allclose(deviation, code.latent_dist.std.numpy(), atol=1e-3)
        assert deviation.std() > 0.01
    np.testing.assert_allclose(mean, expected, atol=1e-3)
    assert mean.std() > 0.1
