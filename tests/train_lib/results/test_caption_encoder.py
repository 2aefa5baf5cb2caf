"""The encoder of a data set: for captions of one's own or in the step, the same one or none.

The encoder is a tiny random Gemma, or Qwen in runs; its tokenizer makes the ids of the data set.
"""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import default
from coyo11m_tfds import embed_captions
from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import jax_encoder, text_encoders
from tests import built, runs
from tests.runs import saved_steps, small_config
from tests.text.test_jax_encoder import models, our_states  # noqa: F401, one is a fixture
from tests.train_lib.learning.test_models import randomized
from train_lib import draw, train
from train_lib.learning import dit, flow, sharding, step, step_encoder
from train_lib.learning import models as networks
from train_lib.learning.word_vectors import Words
from train_lib.lifecycle import beginnings, checkpoint
from train_lib.results import caption_encoder

LENGTH = 10
CAPTIONS = ['a red circle', 'a small blue square at the left', 'a', 'a red square']


@pytest.fixture(scope='module')
def spec(models):  # noqa: F811
    return f'jax:{models}/text'


@pytest.fixture(scope='module')
def qwen_spec(models):  # noqa: F811
    return f'jax:{models}/qwen'


def facts_of(spec, **changes):
    """Of a data set that holds token ids of this encoder."""
    made = text_encoders.make_tokenizer(spec, LENGTH)
    known = {'text_encoder': made.name, 'text_revision': made.revision}
    known |= {'text_max_tokens': made.max_tokens, 'vocabulary': made.vocabulary}
    return flow.no_stats(text_dim=0, latents_shape=(1, 4, 8, 8), **known | changes)


def facts_with(encoder, revision='', dim=640, **fields):
    return flow.no_stats(dim, text_encoder=encoder, text_revision=revision, **fields)


@pytest.fixture
def local(models):  # noqa: F811
    """Facts of a data set whose embeddings a model in a local folder has made."""
    folder = models / 'text'
    return facts_with('hf:text', model_files.revision(str(folder)), dim=32, text_max_tokens=20)


OF_CLASSES = facts_with('labels', '1', dim=0, vocabulary=10, text_max_tokens=1)
NO_CLASSES = {
    'a number beyond the last': (
        ['3', '10'],
        "'10' has token 10, expected one of the 10 tokens",
    ),
    'a number beyond int32': (['99999999999'], "'99999999999' has token 99999999999, expected"),
    'a caption': (['a cat'], "'a cat': expected the number of a class"),
}


def test_classes_are_drawn_by_their_numbers():
    encoder = caption_encoder.load(OF_CLASSES)
    assert caption_encoder.encode(OF_CLASSES, encoder, ['7', '0']).tolist() == [[7], [0]]


@pytest.mark.parametrize(('captions', 'message'), NO_CLASSES.values(), ids=NO_CLASSES)
def test_what_is_no_class_is_refused(captions, message):
    with pytest.raises(ValueError, match=message):
        caption_encoder.encode(OF_CLASSES, caption_encoder.load(OF_CLASSES), captions)


def test_a_local_model_has_to_be_given(local):
    with pytest.raises(ValueError, match=r'folder named text \(sha256:.*--encoder=hf:/path/to/te'):
        caption_encoder.load(local)


def test_the_same_files_are_the_same_model_whatever_runs_them(local, models):  # noqa: F811
    captions = ['a b c', 'd']
    theirs = caption_encoder.load(local, f'hf:{models}/text')
    ours = caption_encoder.load(local, f'jax:{models}/text')
    assert (theirs.name, ours.name) == ('hf:text', 'jax:text')
    assert theirs.max_tokens == ours.max_tokens == 20
    np.testing.assert_allclose(ours.encode(captions), theirs.encode(captions), atol=1e-4)


def test_embeddings_of_unknown_origin_need_an_encoder_of_their_size(caplog):
    with pytest.raises(ValueError, match='name it with --encoder'):
        caption_encoder.load(facts_with('pt'))
    assert caption_encoder.load(facts_with('pt'), 'hash').name == 'hash'
    assert 'does not say whether hash made' in caplog.text
    with pytest.raises(
        ValueError, match=r"'hash' of revision 1 encodes .*, but 'pt' made the texts"
    ):
        caption_encoder.load(facts_with('pt', dim=7), 'hash')


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('text', dit.SEQUENCE),
        pytest.param('qwen', dit.SEQUENCE, marks=pytest.mark.slow),
        pytest.param('text', dit.POOLED, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_hidden_states_computed_outside(models, name, text):  # noqa: F811
    spec = f'jax:{models}/{name}'
    tokenizer = text_encoders.make_tokenizer(spec, LENGTH)
    tokens = text_encoders.pad(tokenizer.tokenize(CAPTIONS), LENGTH)
    config = default.get_config()
    fields = {'name': 'tiny/4', 'width': 32, 'depth': 2, 'unroll': 1, 'dtype': 'float32'}
    fields['text'] = text
    config.update_from_flattened_dict({f'model.{name}': x for name, x in fields.items()})
    config.batch_size, config.encoder, config.optimizer.warmup_steps = 4, spec, 0
    facts, mesh = facts_of(spec), sharding.make_mesh()
    encoder = step_encoder.load_step_encoder(spec, facts, mesh, dtype='float32')
    made = step.make_program(config, mesh, facts, encoder)

    states = our_states(models / name, np.maximum(tokens, 0).tolist()).copy()
    states[tokens < 0] = 7  # no zeros, which would be too easy
    words = Words(jnp.asarray(states), jnp.asarray(tokens >= 0))

    rng = np.random.default_rng(0)
    batch = {
        'latents': rng.standard_normal((4, 4, 8, 8)).astype(np.float16),
        'key': rng.integers(0, 99, (4, 2), np.uint32),
        'tokens': tokens,
        'drop_text': np.array([False, False, False, True]),
    }
    x = flow.standardize_latents(jnp.asarray(batch['latents']), facts)
    model = networks.make_model(**config.model, vocabulary=facts.vocabulary)
    params = randomized(model, x, jnp.zeros(4), words)['params']
    noise, t = flow.noise_and_times_of_keys(batch['key'], (8, 8, 4), config.seed)

    @jax.jit
    def expected(words):
        given = words, batch['drop_text']
        predict = functools.partial(model.apply, {'params': params})
        return flow.squared_errors(lambda z, t: predict(z, t, *given), x, noise, t).mean()

    loss = made.eval_step(params, batch | {'mask': np.ones(4, bool)}).compute()['loss']
    np.testing.assert_allclose(loss, expected(words), rtol=1e-5)
    others = words._replace(vectors=words.vectors[::-1], present=words.present[::-1])
    assert abs(loss - expected(others)) > 1e-3  # the texts matter

    frozen, before = jax.device_get((encoder.params, params))
    after, update = made.train_step(made.init().replace(params=params), batch)
    assert update.compute()['grad_norm'] > 0
    projection = after.params['words']['projection']
    assert np.any(projection['kernel'] != before['words']['projection']['kernel'])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(encoder.params), frozen)


def test_the_encoder_is_the_one_of_the_token_ids(spec):
    mesh, facts = sharding.make_mesh(), facts_of(spec)
    assert step_encoder.load_step_encoder('', facts, mesh, dtype='float32') is None
    assert step_encoder.load_step_encoder(spec, facts, mesh, dtype='bfloat16').name == 'jax:text'
    by_hf = facts_of(spec.replace('jax:', 'hf:'))
    assert step_encoder.load_step_encoder(spec, by_hf, mesh, dtype='bfloat16').name == 'jax:text'


OTHER_ENCODERS = {
    'the words of another list': (
        None,
        lambda facts: facts_of('words', vocabulary=4096),
        'with 4096 ids made the texts',
    ),
    'another number of ids': (
        None,
        lambda facts: dataclasses.replace(facts, text_revision='', vocabulary=99),
        "but 'jax:text' with 99 ids made the texts",
    ),
    'embeddings': (
        None,
        lambda facts: dataclasses.replace(facts, vocabulary=0),
        "holds embeddings of 'jax:text', expected token ids",
    ),
    'a model of another library': (
        'hf:text',
        lambda facts: facts,
        "encoder='hf:text': expected jax:FOLDER",
    ),
    'a folder that is not there': ('jax:/no/such/one', lambda facts: facts, 'no such folder'),
}


@pytest.mark.parametrize(
    ('named', 'change', 'message'), OTHER_ENCODERS.values(), ids=OTHER_ENCODERS
)
def test_other_encoders_and_texts_are_refused_in_one_line(spec, named, change, message):
    facts = change(facts_of(spec))
    with pytest.raises(ValueError, match=message) as error:
        step_encoder.load_step_encoder(named or spec, facts, sharding.make_mesh(), dtype='float32')
    assert '\n' not in str(error.value)


def test_a_model_of_other_files_is_refused_by_both_revisions(models, spec, tmp_path):  # noqa: F811
    facts = facts_of(spec)
    other = shutil.copytree(models / 'text', tmp_path / 'text')
    (other / 'more.txt').write_text('x')
    message = (
        rf"encoder='jax:{other}': 'jax:text' of revision sha256:.*"
        f"but 'jax:text' of revision {facts.text_revision} with"
    )
    with pytest.raises(ValueError, match=message):
        step_encoder.load_step_encoder(f'jax:{other}', facts, sharding.make_mesh(), dtype='float32')


def test_weights_are_bfloat16_but_for_a_model_that_computes_in_float32(models, spec):  # noqa: F811
    mesh, facts = sharding.make_mesh(), facts_of(spec)
    checkpoint = jax_encoder.open_checkpoint(str(models / 'text'))
    for dtype, expected in (('float32', 'float32'), ('bfloat16', 'bfloat16')):
        loaded = step_encoder.load_step_encoder(spec, facts, mesh, dtype=dtype)
        shapes = step_encoder.abstract_step_encoder(spec, mesh, dtype=dtype)
        assert loaded.network.dtype == expected
        assert loaded.params['embedding'].dtype == expected
        assert loaded.params['norm']['scale'].dtype == np.float32
        values = jax_encoder.load_params(checkpoint, loaded.network.dtype)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), values)
        jax.tree.map(
            lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding) or 1 / 0,
            shapes.params,
            loaded.params,
        )


@pytest.fixture(scope='module')
def dataset(sample_source, qwen_spec, tmp_path_factory):
    sidecar = tmp_path_factory.mktemp('sidecar') / 'tokens.parquet'
    settings = embed_captions.EmbedSettings(tokens_only=True, max_tokens=LENGTH)
    embed_captions.embed(sample_source, qwen_spec, sidecar, settings)
    out = tmp_path_factory.mktemp('data')
    return built.build(sample_source, sidecar, out, name='tokens', shard_bytes=5_000_000)


@pytest.fixture(scope='module')
def config_with(dataset, qwen_spec):
    def make(**changes):
        fields = {'encoder': qwen_spec, 'model.text': 'sequence', 'num_steps': 6}
        fields |= {'eval_every': 6, 'preview_every': 6, 'checkpoint_every': 3}
        fields |= {'data.caption_dropout': 0.5}
        return small_config(dataset, **fields | changes)

    return make


@pytest.fixture(scope='module')
def run(config_with, tmp_path_factory):
    """The workdir of a run of 6 steps, and its last state."""
    folder = tmp_path_factory.mktemp('run')
    state = runs.train_config(config_with(), folder)
    return folder, jax.device_get(state)


def test_a_checkpoint_names_the_encoder_and_holds_nothing_of_it(run, qwen_spec):
    workdir, state = run
    saved = checkpoint.open_run(workdir)
    revision = facts_of(qwen_spec).text_revision
    assert saved.description.facts['text_revision'] == revision
    assert saved.description.facts['text_max_tokens'] == LENGTH
    assert saved.description.identity['encoder'] == {'name': 'jax:qwen', 'revision': revision}
    stored = ocp.PyTreeCheckpointHandler().metadata(saved.folder / checkpoint.STATE)
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(stored.tree)]
    assert sorted(shapes) == sorted(leaf.shape for leaf in jax.tree.leaves(state))
    assert not [shape for shape in shapes if 512 in shape]  # the encoder's vocabulary
    assert state.params['words'].keys() == {'norm', 'nothing', 'projection'}


def test_another_encoder_or_none_is_refused_on_resume(run, config_with):
    with pytest.raises(beginnings.OtherRunError) as error:
        train.set_up(config_with(encoder=''), run[0])
    assert "encoder.name was 'jax:qwen' and is now absent" in str(error.value)
    assert saved_steps(run[0]) == [3, 6]


def test_a_drawing_encodes_its_captions_in_the_same_way(run, qwen_spec, tmp_path):
    artist = draw.Artist(run[0])
    assert artist.encoder == qwen_spec
    tokenizer = caption_encoder.load(artist.facts, artist.encoder)
    pictures = artist.draw(CAPTIONS, tokenizer)
    assert pictures.shape == (4, 32, 32, 3)
    moved = shutil.copytree(qwen_spec.removeprefix('jax:'), tmp_path / 'qwen')
    again = draw.Artist(run[0], encoder=f'jax:{moved}').draw(CAPTIONS, tokenizer)
    np.testing.assert_array_equal(again, pictures)
    swapped = artist.draw([CAPTIONS[1], *CAPTIONS[1:]], tokenizer)
    assert not np.array_equal(swapped[0], pictures[0])
    np.testing.assert_array_equal(swapped[1:], pictures[1:])
    with pytest.raises(
        ValueError, match=r"encoder='jax:/gone': .* no such folder; with --encoder, name"
    ):
        draw.Artist(run[0], encoder='jax:/gone')
