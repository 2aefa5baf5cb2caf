"""The benchmark of images: all sides make the same latents."""

import io
import pathlib
import tarfile

import numpy as np
import pytest

from benchmarks import images
from tests import small_vae

pytestmark = pytest.mark.slow


def test_all_sides_make_the_same_latents(tmp_path, monkeypatch):
    vae = tmp_path / 'vae'
    small_vae.make_with_diffusers(vae, 'AutoencoderTiny')
    monkeypatch.setattr(images, 'SIZE', 64)
    latents = {}
    folder = images.make_images(tmp_path, 10)
    for name, side in images.SIDES.items():
        out = tmp_path / name
        out.mkdir()
        figures = side.function(images=str(folder), vae=str(vae), out=str(out))
        assert figures['rate'] == pytest.approx(10 / figures['seconds'])
        latents[name] = read_latents(out)
    assert latents['parts'].shape == (10, 4, 8, 8)
    # Those of diffusers are computed in another order.
    np.testing.assert_allclose(latents['diffusers'], latents['parts'], atol=2e-3)
    np.testing.assert_array_equal(latents['encode_images'], latents['parts'])


def read_latents(out: pathlib.Path) -> np.ndarray:
    if (out / 'latents.npy').exists():
        return np.load(out / 'latents.npy')
    with tarfile.open(out / '00000.tar') as tar:
        members = [member for member in tar if member.name.endswith('.npy')]
        return np.stack([np.load(io.BytesIO(tar.extractfile(x).read())) for x in members])
