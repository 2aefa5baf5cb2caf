"""The data set as a run sees it: what is read, what is refused, and who says so."""

import json
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import latent_rgb
from tests import damages, runs
from tests.runs import losses, read_scalars, small_config
from train_lib import data, train
from train_lib.learning import sharding


def rewritten(data_dir, folder, field):
    """A copy of a data set whose metadata say that a field is 'another'."""
    shutil.copytree(data_dir, folder)
    path = folder / 'metadata.json'
    metadata = json.loads(path.read_text())
    assert field in metadata
    path.write_text(json.dumps(metadata | {field: 'another'}))
    next(folder.glob('checksums-*')).unlink()
    return folder


def metadata_alone(data_dir, folder, validation=50):
    """A data set that claims so many records for validation, of which TFDS can make up some."""
    folder.mkdir()
    for name in ('features.json', 'metadata.json'):
        shutil.copy(data_dir / name, folder)
    info = json.loads((data_dir / 'dataset_info.json').read_text())
    (split,) = (x for x in info['splits'] if x['name'] == schema.VALIDATION)
    split['shardLengths'] = [str(validation)]
    (folder / 'dataset_info.json').write_text(json.dumps(info))
    return folder


def test_a_data_set_without_text_embeddings_is_refused(mini_dataset, tmp_path):
    bare = metadata_alone(mini_dataset, tmp_path / 'bare')
    features = json.loads((bare / 'features.json').read_text())
    del features['featuresDict']['features'][schema.TEXT_EMBEDDING]
    (bare / 'features.json').write_text(json.dumps(features))
    with pytest.raises(ValueError, match=r"no feature 'text_embedding'; .* text=NAME chooses one"):
        train.set_up(small_config(bare), tmp_path / 'run')


def test_previews_take_the_recorded_scale_of_the_vae(copy, tmp_path):
    path, scale = copy / 'metadata.json', [3.0, 0.25]
    path.write_text(json.dumps(json.loads(path.read_text()) | {schema.META_LATENT_SCALE: scale}))
    next(copy.glob('checksums-*')).unlink()
    paint = train.set_up(small_config(copy), tmp_path / 'run').paint
    latents = np.random.default_rng(0).normal(size=(2, 4, 8, 8))
    np.testing.assert_array_equal(paint(latents), latent_rgb.latents_to_rgb(latents, scale))


def test_a_validation_split_of_too_few_records_is_refused_or_told(mini_dataset, tmp_path, caplog):
    none, few = (metadata_alone(mini_dataset, tmp_path / f'{n}', validation=n) for n in (0, 3))
    with pytest.raises(ValueError, match=r"eval_every=10: .* none in 'validation': build it"):
        train.set_up(small_config(none), tmp_path / 'run')
    for path in (mini_dataset, few):
        shutil.copy(next(mini_dataset.glob('chunk_index-train*')), few)
        data.TrainingData(small_config(path, eval_every=10), sharding.make_mesh())
        warnings = [
            x.getMessage() for x in caplog.records if 'validation_fraction' in x.getMessage()
        ]
        assert len(warnings) == (path == few)
    few_records = f"split 'validation' of {few} has only 3 records, too few to judge a model by"
    assert f'eval_every=10: {few_records}' in warnings[0]


def test_one_step_on_mocked_data(mini_dataset, tmp_path, monkeypatch):
    bare = metadata_alone(mini_dataset, tmp_path / 'bare')
    # Opened first: under mock_data TFDS does not read the features of a folder.
    builder = tfds.builder_from_directory(bare)
    monkeypatch.setattr(tfds, 'builder_from_directory', lambda folder: builder)
    with tfds.testing.mock_data(num_examples=16):
        state = runs.train(bare, tmp_path / 'run', num_steps=2, eval_every=2)
    assert int(state.step) == 2
    assert all(np.isfinite(loss) for loss in losses(tmp_path / 'run').values())


def test_what_evaluations_read_is_not_counted_as_read_for_training(mini_dataset):
    opened = data.TrainingData(small_config(mini_dataset), sharding.make_mesh())
    assert sum(1 for _ in opened.eval_batches(opened.sources[0])) > 1
    assert opened.read_counts().num_bytes == 0
    batches = opened.train_batches()
    next(batches)
    assert opened.read_counts().num_bytes > 0
    batches.close()


def test_records_that_cannot_be_read_stop_a_run_or_are_skipped_and_told(copy, tmp_path, caplog):
    for path in copy.glob('*-train*.tfrecord*'):
        for place in range(20_000, path.stat().st_size, 500_000):
            damages.flip(path, place)
    short = {'num_steps': 12, 'eval_every': 0, 'checkpoint_every': 0}
    state = runs.train(copy, tmp_path / 'run', **short, **{'data.on_bad_records': 'skip'})
    assert int(state.step) == 12
    told = [
        value
        for (tag, _), (value,) in read_scalars(tmp_path / 'run').items()
        if tag == 'input/bad_records'
    ]
    assert max(told) > 0
    assert all(np.isfinite(loss) for loss in losses(tmp_path / 'run').values())
    left_out = [r.getMessage() for r in caplog.records if 'were left out' in r.getMessage()]
    assert len(left_out) == 1 and int(left_out[0].split()[0]) >= max(told)

    message = r'^/[^\n]*train[^\n]*\.tfrecord[^\n]*: record \d+ cannot be read[^\n]*$'
    with pytest.raises(OSError, match=message):
        runs.train(copy, tmp_path / 'stop', **short)


def test_previews_show_the_first_records_of_the_split_that_is_asked_for(mini_dataset):
    shown = {}
    for split in ('train', 'validation'):
        config = small_config(mini_dataset, **{'preview.split': split})
        shown[split] = data.TrainingData(config, sharding.make_mesh()).preview_samples.captions
        examples = tfds.builder_from_directory(mini_dataset).as_dataset(split=split).take(3)
        expected = [example['caption'].decode() for example in tfds.as_numpy(examples)]
        assert list(shown[split]) == expected
    assert shown['train'] != shown['validation']
