"""Token ids of a data set in training and in a drawing."""

import pathlib

import jax
import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import add_column, embed_captions, schema
from coyo11m_tfds.text import text_encoders
from tests import built, children, runs
from tests.checkout import CHECKOUT
from tests.runs import small_config
from train_lib import data, draw
from train_lib.learning import sharding
from train_lib.results import caption_encoder

LENGTH = 12


@pytest.fixture(scope='module')
def sidecar(sample_source, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('sidecar') / 'words.parquet'
    settings = embed_captions.EmbedSettings(tokens_only=True, max_tokens=LENGTH)
    embed_captions.embed(sample_source, 'words', path, settings)
    return path


def build(source, sidecar, out, **fields) -> pathlib.Path:
    return built.build(source, sidecar, out, name='words', shard_bytes=5_000_000, **fields)


@pytest.fixture(scope='module')
def dataset(sample_source, sidecar, tmp_path_factory) -> pathlib.Path:
    return build(sample_source, sidecar, tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='module')
def run(dataset, tmp_path_factory):
    """The workdir of a run on sequences of tokens, and its last state."""
    folder = tmp_path_factory.mktemp('run')
    changes = {'eval_every': 0, 'num_steps': 4}
    changes |= {'model.text': 'sequence', 'data.caption_dropout': 0.5}
    state = runs.train(dataset, folder, **changes)
    return folder, jax.device_get(state)


def test_a_run_learns_what_words_mean(run):
    _, state = run
    assert state.skipped == 0
    table = state.params['words']['table']
    assert table.shape == (818, 32)  # 817 words of the captions, and one for all others
    (moment,) = (
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if '.mu' in (found := jax.tree_util.keystr(path)) and "'table'" in found
    )
    assert 10 < np.any(moment, axis=1).sum() < 100  # of four batches


def test_a_drawing_takes_its_captions_apart_itself(run):
    artist = draw.Artist(run[0])
    assert (artist.facts.text_encoder, artist.facts.vocabulary, artist.facts.text_max_tokens) == (
        'words',
        818,
        LENGTH,
    )
    encoder = caption_encoder.load(artist.facts)
    pictures = artist.draw(['a red circle', 'A RED CIRCLE!', 'a blue square'], encoder)
    assert pictures.shape == (3, 32, 32, 3)
    alone = artist.draw(['a blue square', 'a red circle', 'a blue square'])
    np.testing.assert_array_equal(alone[2], pictures[2])
    assert not np.array_equal(alone[0], pictures[0])
    with pytest.raises(ValueError, match=r"'hash' of revision 1 encodes .*, but 'words"):
        artist.draw(['a red circle'], text_encoders.make_encoder('hash'))


def test_words_that_no_caption_of_the_data_has_are_named(dataset, caplog):
    facts = data.TrainingData(small_config(dataset), sharding.make_mesh()).facts
    assert type(facts).from_json(facts.to_json()).text_words == facts.text_words
    words = caption_encoder.load(facts)
    captions = ['Red circle.', 'a red Okapi on a blue Sofa, an okapi']
    assert caption_encoder.find_unknown_words(facts, words, captions) == ['okapi', 'sofa', 'an']
    caption_encoder.encode(facts, words, captions)
    assert "has 'okapi', 'sofa', 'an': the model does not know what they mean" in caplog.text
    caplog.clear()
    caption_encoder.encode(facts, words, captions[:1])
    assert not caplog.text


def test_another_vocabulary_is_another_identity(dataset, mini_dataset):
    mesh = sharding.make_mesh()
    ours = data.TrainingData(small_config(dataset), mesh).identity
    revision = caption_encoder.load(input_pipeline.open_data(dataset).stats()).revision
    assert ours['text_encoder'] == {'name': 'words', 'revision': revision, 'vocabulary': 818}
    theirs = data.TrainingData(small_config(mini_dataset), mesh).identity
    assert theirs['text_encoder'] == {'name': 'hash', 'revision': '1', 'width': 640}
    assert ours['model']['text'] == ''
    pooled = data.TrainingData(small_config(dataset, **{'model.text': 'pooled'}), mesh).identity
    assert pooled['model']['text'] == 'pooled'


def test_tokens_of_several_lengths_come_in_one_shape(sample_source, tmp_path):
    """Padded alike in training, evaluation and previews."""
    sidecars = {name: tmp_path / f'{name}.parquet' for name in ('long', 'short', 'alone')}
    short = 'caption_llava_short'
    for name, encoder, column, length in [
        ('long', 'words', schema.DEFAULT_CAPTION_COLUMN, 12),
        ('short', f'words:{sidecars["long"]}', short, 5),
        ('alone', 'words', short, 5),
    ]:
        settings = embed_captions.EmbedSettings(
            caption_column=column, tokens_only=True, max_tokens=length
        )
        embed_captions.embed(sample_source, encoder, sidecars[name], settings)
    path = built.build(sample_source, sidecars['long'], tmp_path / 'data', name='words')
    add_column.add(path, 'short', text=sidecars['short'])
    add_column.add(path, 'alone', text=sidecars['alone'])
    with pytest.raises(ValueError, match=r"'records' has tokens of 'words', .*, expected tokens"):
        input_pipeline.open_data(path).stats('alone:1,records:1')
    stats = input_pipeline.open_data(path).stats('short:1,records:1')
    assert (stats.num_tokens, stats.text_max_tokens, stats.text_dim) == (12, 12, 0)
    config = small_config(path, **{'data.text': 'short:1,records:1', 'model.text': 'sequence'})
    opened = data.TrainingData(config, sharding.make_mesh())
    assert opened.facts.text_max_tokens == 12
    assert opened.settings['data.text'] == 'short:1,records:1'
    trained, evaluated = next(opened.train_batches()), next(opened.eval_batches(opened.sources[0]))
    for batch in (trained, evaluated):
        assert batch[schema.TOKENS].shape == (8, 12)
    lengths = (np.asarray(trained[schema.TOKENS]) >= 0).sum(axis=1)
    assert lengths.min() <= 5 < lengths.max()  # some of each
    held_out = np.asarray(evaluated[schema.TOKENS])
    assert (held_out[:, 0] >= 0).all() and (held_out[:, 5:] == schema.TOKEN_PADDING).all()
    assert opened.preview_samples.text.shape == (3, 12)


@pytest.fixture(scope='module')
def without_text(sample_source, tmp_path_factory) -> pathlib.Path:
    return built.build(sample_source, '', tmp_path_factory.mktemp('plain'), name='plain')


def test_the_default_of_features_has_the_text_of_the_data_set(dataset, without_text):
    settings = {'batch_size': 16, 'seed': 0, 'lanes': 8}
    names = ['key', 'latents', 'crop']
    for folder, expected in ((dataset, [*names, 'tokens']), (without_text, names)):
        assert [*input_pipeline.train_batches(folder, **settings).spec] == expected
        batch = next(input_pipeline.eval_batches(folder, batch_size=16))
        assert batch.keys() == {*expected, 'mask'}
        engine = input_pipeline.train_batches(folder, **settings, engine='tf_data')
        assert next(engine).keys() == {*expected}
    mix = [{'dir': dataset}, {'dir': without_text, 'seed': 1}]
    assert [*input_pipeline.train_batches(mix, **settings).spec] == names


def test_the_torch_class_of_the_docs_reads_data_sets_of_all_texts(dataset, without_text):
    text = (CHECKOUT / 'docs' / 'pytorch.md').read_text()
    example = text.partition('```python\n')[2].partition('```')[0]
    program = """
        exec(sys.argv[1])
        from accelerate.data_loader import prepare_data_loader
        def load(folder, **share):
            data = Batches(folder, batch_size=16, seed=0, **share)
            return torch.utils.data.DataLoader(data, batch_size=None)
        for folder in sys.argv[2:]:
            batch = next(iter(load(folder)))
            print({name: tuple(values.shape[1:]) for name, values in batch.items()})
        for dispatch in (False, True):
            for share in ({}, {'process_index': 0, 'process_count': 2}):
                loader = prepare_data_loader(
                    load(folder, **share), torch.device('cpu'), 2, 0,
                    put_on_device=dispatch, dispatch_batches=dispatch,
                )
                try:
                    loader.set_epoch(0)
                    print('taken')
                except ValueError as error:
                    print(error)
    """
    with children.python(program, example, dataset, without_text, forked=True) as child:
        output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    shapes = "'key': (), 'latents': (4, 32, 32), 'crop': ()"
    refusal = 'leave this loader out of accelerator.prepare, which would split batches again'
    assert output.splitlines() == [
        f"{{{shapes}, 'tokens': ({LENGTH},)}}",
        f'{{{shapes}}}',
        *(['taken', refusal] * 2),
    ]
