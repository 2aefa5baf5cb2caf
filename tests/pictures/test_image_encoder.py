"""Features of pictures and captions, by encoders that transformers wrote."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from coyo11m_tfds.pictures.image_encoder import ImageEncoder
from tests.fakes import image_models

PICTURES = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), np.uint8)
CAPTIONS = ['a cat', 'two dogs', 'a cat', 'a caption with more letters than it has positions'] * 10


def test_pictures_and_captions_in_one_space(tmp_path):
    folder = image_models.save_clip(tmp_path / 'clip')
    encoder = ImageEncoder(folder)
    features, texts = encoder.encode(PICTURES), encoder.encode_texts(CAPTIONS)
    assert features.shape == texts.shape == (40, image_models.DIM)
    assert features.dtype == texts.dtype == np.float32
    np.testing.assert_allclose(encoder.encode(PICTURES[37:38]), features[37:38], atol=1e-5)
    np.testing.assert_array_equal(texts[0], texts[2])
    assert np.abs(texts[0] - texts[1]).max() > 1e-3
    assert (encoder.name, encoder.revision[:7]) == ('clip', 'sha256:')
    # As transformers itself scores a picture and a text.
    model = transformers.CLIPModel.from_pretrained(folder)
    processor = transformers.CLIPImageProcessor.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(['a cat'], return_tensors='pt')
    with torch.inference_mode():
        inputs = processor(images=[PICTURES[0]], return_tensors='pt')
        cosine = model(**tokens, **inputs).logits_per_image / model.logit_scale.exp()
    ours = features[0] @ texts[0] / np.linalg.norm(features[0]) / np.linalg.norm(texts[0])
    assert ours == pytest.approx(cosine.item(), abs=1e-5)


def test_an_encoder_of_pictures_alone(tmp_path):
    encoder = ImageEncoder(image_models.save_vit(tmp_path / 'vit'))
    assert not encoder.has_texts
    assert encoder.encode(PICTURES[:3]).shape == (3, 16)


def damage(folder: pathlib.Path, how: str) -> None:
    path = folder / 'model.safetensors'
    weights = safetensors.numpy.load_file(path)
    path.unlink()
    if how == 'lacking':
        weights.pop('visual_projection.weight')
        safetensors.numpy.save_file(weights, path, {'format': 'pt'})
    elif how == 'pickled':
        tensors = {name: torch.from_numpy(x) for name, x in weights.items()}
        torch.save(tensors, folder / 'pytorch_model.bin')
    else:
        config = {'model_type': 'distilbert', 'dim': 8, 'hidden_dim': 8, 'n_heads': 2}
        (folder / 'config.json').write_text(json.dumps(config))


@pytest.mark.parametrize('how', ['lacking', 'pickled', 'of another kind'])
def test_what_does_not_fit_is_refused_by_name(tmp_path, how):
    folder = image_models.save_clip(tmp_path / 'clip')
    damage(tmp_path / 'clip', how)
    with pytest.raises(
        ValueError, match=rf"^cannot load the image encoder '{folder}': (?s:.*)xpec"
    ):
        ImageEncoder(folder)


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match=r"cannot load the image encoder '/none/x': no such fold"):
        ImageEncoder('/none/x')
