"""Training on several captions of each image, from the captions of a source to batches."""

import collections
import itertools
import pathlib
import shutil

import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import add_column, embed_captions, schema
from tests import built, runs
from tests.reading.planned import Planned
from tests.runs import small_config
from train_lib import data, sharding

TEXT = 'records:2,short:1'


@pytest.fixture(scope='module')
def two_captions(mini_dataset, sample_source, tmp_path_factory) -> pathlib.Path:
    """A data set built with long captions, to which short ones were added."""
    folder = tmp_path_factory.mktemp('two')
    embed_captions.embed(sample_source, 'hash', folder / 'short', 'caption_llava_short')
    copy = folder / 'coyo11m_tfds' / 'hash' / schema.VERSION
    shutil.copytree(mini_dataset, copy)
    add_column.add(copy, 'short', folder / 'short')
    return copy


def texts_by_key(path, text, feature=schema.TEXT_EMBEDDING) -> dict[int, bytes]:
    batches = input_pipeline.eval_batches(
        path, batch_size=64, features=(schema.KEY, feature), split=schema.TRAIN, text=text
    )
    return {
        int(key): row.tobytes()
        for batch in batches
        for key, row in zip(batch[schema.KEY][batch['mask']], batch[feature], strict=False)
    }


def taken_in_an_epoch(opened: data.TrainingData, long, short) -> list[dict[int, str]]:
    """Of two epochs the text that each key came with."""
    found: list[dict[int, str]] = [{}, {}]
    plan = Planned(opened.plan.orders[0], runs.SMALL['batch_size'])
    for step, batch in enumerate(itertools.islice(opened.train_batches(), 2 * plan.steps)):
        keys = np.asarray(batch[schema.KEY]).astype('<u4').view('<i8')[:, 0]
        rows = np.asarray(batch[schema.TEXT_EMBEDDING])
        for epoch, key, row in zip(plan.batch(step)[0], keys.tolist(), rows, strict=True):
            by_row = {short[key]: 'short', long[key]: 'long'}
            found[epoch][key] = by_row[row.tobytes()]
    return found


def test_captions_are_taken_in_the_shares_asked_for_and_anew_in_each_epoch(two_captions):
    opened = data.TrainingData(
        small_config(two_captions, **{'data.text': TEXT}), sharding.make_mesh()
    )
    long, short = (texts_by_key(two_captions, text) for text in ('', 'short'))
    first, second = taken_in_an_epoch(opened, long, short)
    for epoch in (first, second):
        share = collections.Counter(epoch.values())['short'] / len(epoch)
        assert abs(share - 1 / 3) < 0.06  # of 1,000 samples: four standard deviations
    both = first.keys() & second.keys()
    assert len(both) > 900
    assert 0.3 < np.mean([first[key] != second[key] for key in both]) < 0.6  # 4/9 are expected
    assert opened.settings['data.text'] == TEXT


def test_tokens_of_several_lengths_come_in_one_shape(sample_source, tmp_path):
    """Padded alike in training, evaluation and previews."""
    sidecars = {}
    for name, column, length in [
        ('long', schema.DEFAULT_CAPTION_COLUMN, 12),
        ('short', 'caption_llava_short', 5),
    ]:
        sidecars[name] = tmp_path / f'{name}.parquet'
        embed_captions.embed(
            sample_source, 'words', sidecars[name], column, tokens_only=True, max_tokens=length
        )
    path = built.build(sample_source, sidecars['long'], tmp_path / 'data', name='words')
    add_column.add(path, 'short', text=sidecars['short'])
    stats = input_pipeline.open_data(path).stats('short:1,records:1')
    assert (stats.num_tokens, stats.text_max_tokens, stats.text_dim) == (12, 12, 0)
    config = small_config(path, **{'data.text': 'short:1,records:1', 'model.text': 'sequence'})
    opened = data.TrainingData(config, sharding.make_mesh())
    assert opened.facts.max_tokens == 12
    for batch in (next(opened.train_batches()), next(opened.eval_batches(opened.sources[0]))):
        assert batch[schema.TOKENS].shape == (8, 12)
    held_out = np.asarray(batch[schema.TOKENS])
    assert (held_out[:, :3] >= 0).all() and (held_out[:, 5:] == schema.TOKEN_PADDING).all()
    assert opened.preview_samples.text.shape == (3, 12)
