"""Captions of one's own are encoded as those of the training data were, or not at all."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from coyo11m_tfds import embed_captions
from coyo11m_tfds.storage import model_files
from tests.checkout import CHECKOUT
from tests.text.test_gemma import models  # noqa: F401, a fixture
from train_lib import caption_encoder, data_facts, flow


def facts(encoder, revision='', dim=640, **fields):
    stats = flow.Stats(*(np.ones(n, np.float32) for n in (4, 4, dim, dim)))
    return data_facts.DataFacts((32, 32, 4), stats, encoder, revision, **fields)


def test_facts_survive_json():
    made = facts('hf:g', 'sha256:1', dim=3, max_tokens=77)
    made.stats.text_mean[:] = np.float32([1 / 3, 1e-30, -7])
    back = data_facts.from_json(json.loads(json.dumps(made.to_json())))
    for name, values in vars(made.stats).items():
        np.testing.assert_array_equal(getattr(back.stats, name), values)
        assert getattr(back.stats, name).dtype == np.float32
    assert back.to_json() == made.to_json()
    assert back.latent_shape == (32, 32, 4)


@pytest.fixture
def local(models):  # noqa: F811
    """Facts of a data set whose embeddings a model in a local folder has made."""
    folder = models / 'text'
    return facts('hf:text', model_files.revision(str(folder)), dim=32, max_tokens=20)


def test_a_local_model_has_to_be_given_and_is_asked_for_at_once(local):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r'folder named text \(sha256:.*--encoder=hf:/path/to/te'):
        caption_encoder.make(local)
    assert time.monotonic() - began < 5  # the hub is not asked, which takes ten times as long


def test_the_same_files_are_the_same_model_whatever_runs_them(local, models):  # noqa: F811
    captions = ['a b c', 'd']
    theirs = caption_encoder.make(local, f'hf:{models}/text')
    ours = caption_encoder.make(local, f'jax:{models}/text')
    assert (theirs.name, ours.name) == ('hf:text', 'jax:text')
    assert theirs.max_tokens == ours.max_tokens == 20
    np.testing.assert_allclose(ours.encode(captions), theirs.encode(captions), atol=1e-4)


def test_other_files_of_the_same_name_are_refused_with_both_revisions(
    local,
    models,  # noqa: F811
    tmp_path,
):
    shutil.copytree(models / 'text', tmp_path / 'text')
    (tmp_path / 'text' / 'more.txt').write_text('x')
    with pytest.raises(ValueError, match='by jax:text of revision sha256:') as error:
        caption_encoder.make(local, f'jax:{tmp_path}/text')
    assert local.encoder_revision in str(error.value)
    assert model_files.revision(str(tmp_path / 'text')) in str(error.value)


@pytest.mark.parametrize('spec', ['hf:/no/such/other', 'jax:owner/other', 'hash'])
def test_a_model_of_another_name_is_refused_before_it_is_loaded(local, spec):
    with pytest.raises(ValueError, match="but the model was trained with 'hf:text'") as error:
        caption_encoder.make(local, spec)
    assert 'other' in str(error.value) or 'hash' in str(error.value)
    assert local.encoder_revision in str(error.value)


def test_embeddings_of_unknown_origin_need_an_encoder_of_their_size(caplog):
    with pytest.raises(ValueError, match='name the text encoder with --encoder'):
        caption_encoder.make(facts('pt'))
    assert caption_encoder.make(facts('pt'), 'hash').name == 'hash'
    assert 'Nothing says whether hash made' in caplog.text
    with pytest.raises(ValueError, match="by 'hash', but the model was trained with 'pt'"):
        caption_encoder.make(facts('pt', dim=7), 'hash')


def test_a_data_set_keeps_the_revision_and_length_of_its_encoder(
    sample_source,
    models,  # noqa: F811
    tmp_path,
):
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
    from coyo11m_tfds.dataset import stored_dataset

    sidecar = tmp_path / 'vectors.parquet'
    encoder = caption_encoder.text_encoders.make_encoder(f'jax:{models}/text', max_tokens=12)
    embed_captions.embed(sample_source, encoder, sidecar)
    config = Coyo11mConfig(
        name='local', source=str(sample_source), text_embeddings=str(sidecar), num_workers=1
    )
    builder = Builder(data_dir=tmp_path / 'data', config=config)
    builder.download_and_prepare()
    stats = stored_dataset.open_data(builder.data_dir).stats()
    assert (stats.text_encoder, stats.text_max_tokens) == ('jax:text', 12)
    assert stats.text_revision == model_files.revision(str(models / 'text'))


@pytest.mark.parametrize(
    ('runner', 'missing', 'extra'),
    [
        ('hf', 'torch', 'text'),
        ('hf', 'transformers', 'text'),
        ('jax', 'tokenizers', 'text-jax'),
    ],
)
def test_what_is_not_installed_is_told_with_the_command(tmp_path, runner, missing, extra):
    script = (
        f'import sys; sys.modules[{missing!r}] = None\n'
        'from coyo11m_tfds.text import text_encoders\n'
        f'try: text_encoders.make_encoder({f"{runner}:{tmp_path}"!r})\n'
        'except ValueError as error: print(error)'
    )
    done = subprocess.run(
        [sys.executable, '-c', script],
        cwd=CHECKOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
    )
    assert (
        f"needs {missing}, which is not installed: pip install -c constraints.txt -e '.[{extra}]'"
        in (done.stdout)
    ), done.stderr
