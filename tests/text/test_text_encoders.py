"""Encoders: the hash's rule, and transformers models read safely and averaged rightly.

The fast tests make tiny random models. The slow ones use real ones, fetched by
`python tests/text/fetch_encoders.py --out DIR` and found through the environment variable
COYO11M_ENCODERS=DIR.
"""

import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import unicodedata

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import text
from coyo11m_tfds.dataset import word_list
from coyo11m_tfds.pictures import emoji
from coyo11m_tfds.text import text_encoders
from tests import children, damages, hostile_models
from tests.text import offline_hub

SHORT = 'a red circle'
LONG = 'a small blue square at the left of the picture on a red background'
WORDS = sorted(set(LONG.split()) | set(SHORT.split()))
SIZES = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2}
SIZES |= {'intermediate_size': 64}
# Initialized so widely that a mistake in positions or masks shows in the third digit.
WIDE = {'vocab_size': 64, 'initializer_range': 0.5}

# Worked out from the definition in plain Python integers: bucket -> sign.
RED_CIRCLE = {
    **{25: -1, 129: 1, 247: -1, 302: -1, 305: -1, 322: -1},
    **{329: -1, 408: 1, 420: -1, 437: -1, 537: -1, 582: -1},
}


def test_hash_never_changes():
    """Models are trained on these numbers; another rule would need another name."""
    encoder = text_encoders.make_encoder('hash')
    embeddings = encoder.encode(['Red circle.', ''])
    assert (encoder.name, encoder.dim, embeddings.dtype) == ('hash', 640, np.float32)
    places = np.flatnonzero(embeddings[0])
    signs = np.sign(embeddings[0, places]).astype(int)
    assert dict(zip(places.tolist(), signs.tolist(), strict=True)) == RED_CIRCLE
    np.testing.assert_allclose(np.abs(embeddings[0, places]), 12**-0.5, rtol=1e-6)
    assert not embeddings[1].any()


@given(st.lists(st.text(max_size=30), max_size=8))
def test_hash_of_a_caption_has_length_one_whatever_its_company_and_unicode_form(captions):
    encoder = text_encoders.HashEncoder()
    together = encoder.encode(captions)
    assert together.shape == (len(captions), 640)
    for vector, caption in zip(together, captions, strict=True):
        (alone,) = encoder.encode([unicodedata.normalize('NFD', caption)])
        np.testing.assert_array_equal(vector, alone)
        assert np.linalg.norm(vector) == pytest.approx(1 if vector.any() else 0, abs=1e-6)


def test_a_word_has_the_same_id_wherever_it_stands_and_however_it_is_written():
    captions = ['A red circle.', 'circle, RED', '', ' . ']
    words = text_encoders.list_words(captions)
    assert words == 'circle:2 red:2 a:1'
    tokenizer = text_encoders.make_tokenizer('words', 5, words)
    assert (tokenizer.vocabulary, tokenizer.revision) == (4, '2-07b2134366c9ea55')
    tokens = text_encoders.pad(tokenizer.tokenize(captions), 5)
    assert (tokens.dtype, tokens.shape) == (np.int32, (4, 5))
    # Of any machine, process and version: the ids are in data sets, and weights are learned by id.
    np.testing.assert_array_equal(tokens[0], [3, 2, 1, -1, -1])
    np.testing.assert_array_equal(tokens[1], [tokens[0, 2], tokens[0, 1], -1, -1, -1])
    assert (tokens[2:] == -1).all()
    assert tokenizer.truncated == 0
    assert tokenizer.tokenize(['a zebra']) == [[3, 0]]
    shorter = text_encoders.make_tokenizer('words', 2, 'one:3 two:3')
    tokens = shorter.tokenize(['one two three', 'one two', 'one two three four'])
    assert tokens == [[1, 2]] * 3
    assert shorter.truncated == 2


def test_no_two_words_of_the_sample_have_the_same_id():
    captions = [one.caption for one in emoji.read_emoji()]
    words = {word for caption in captions for word in text_encoders.split_words(caption)}
    listed = text_encoders.list_words(captions)
    tokens = text_encoders.make_tokenizer('words', 1, listed).tokenize(sorted(words))
    assert len(np.unique(tokens)) == len(words) > 1_000


def test_a_list_has_the_most_frequent_words_and_all_others_share_an_id(monkeypatch):
    monkeypatch.setattr(word_list, 'MAX_WORDS', 3)
    captions = ['b b b c', 'a a c', 'd', 'e' * 65 + ' ' + 'e' * 65]
    words = text_encoders.list_words(captions)
    assert words == 'b:3 a:2 c:2'
    # The same with rare words forgotten in between.
    monkeypatch.setattr(word_list, '_MOST_COUNTED', 6)
    assert text_encoders.list_words([*captions, 'f g h']) == words
    assert text_encoders.make_tokenizer('words', 4, words).tokenize(['a b c d']) == [[2, 1, 3, 0]]


@pytest.mark.parametrize(
    'words', ['a', 'a:0', 'a:1  b:1', 'a:1 a:1', 'a b:1', 'a:-1', ':1', 'a:1\n']
)
def test_what_is_no_list_of_words_is_refused(words):
    with pytest.raises(ValueError, match=r'the list of words .*expected at most 8,191 different'):
        text_encoders.make_tokenizer('words', 4, words)


NEITHER = {
    'an encoder that is none': (
        lambda: text_encoders.make_encoder('clip'),
        "'clip'.*hash, jax:HUB_NAME.*jax:FOLDER",
    ),
    'a tokenizer that is none': (
        lambda: text_encoders.make_tokenizer('clip'),
        "unknown encoder 'clip'",
    ),
    'an encoder that makes only tokens': (
        lambda: text_encoders.make_encoder('words'),
        "'words'.*words makes only tokens",
    ),
    'a tokenizer of an encoder without tokens': (
        lambda: text_encoders.make_tokenizer('hash'),
        "'hash' has no token ids: use words",
    ),
    'a class of too large a number': (
        lambda: text_encoders.make_tokenizer('labels').tokenize(['7', '9' * 19]),
        "'9999999999999999999': expected the number of a class",
    ),
    'no tokens at all': (
        lambda: text_encoders.make_tokenizer('words', 0),
        'max_tokens=0: expected 1 to 4,096',
    ),
    'more tokens than there may be': (
        lambda: text_encoders.make_tokenizer('words', 4097),
        'max_tokens=4097: expected',
    ),
}


@pytest.mark.parametrize(('make', 'message'), NEITHER.values(), ids=NEITHER)
def test_what_is_no_encoder_or_no_tokenizer_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ('runner', 'missing', 'extra'),
    [('hf', 'transformers', 'text'), ('jax', 'tokenizers', 'text-jax')],
)
def test_what_is_not_installed_is_told_with_the_command(
    tmp_path, monkeypatch, runner, missing, extra
):
    for name in ('hf_encoder', 'model_encoder', 'jax_encoder'):  # imported anew
        monkeypatch.delitem(sys.modules, f'coyo11m_tfds.text.{name}', raising=False)
        monkeypatch.delattr(text, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it is an error
    message = rf'needs {missing}, which is not installed: pip install .*\[{extra}\]'
    with pytest.raises(ValueError, match=message):
        text_encoders.make_encoder(f'{runner}:{tmp_path}')


def save_tokenizer(folder: pathlib.Path, ends: bool, **options) -> None:
    """A word is a token; with `ends`, between [CLS] and [SEP] as BERT has it."""
    vocabulary = {word: i for i, word in enumerate(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token='[UNK]'))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if ends:
        core.post_processor = tokenizers.processors.BertProcessing(('[SEP]', 3), ('[CLS]', 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token='[UNK]', eos_token='[SEP]', **options
    ).save_pretrained(folder)


def save_model(folder: pathlib.Path, kind: str) -> None:
    """Saves a tiny random model, of the kinds whose padding and positions differ."""
    torch.manual_seed(0)
    if kind == 'bert':
        config = transformers.BertConfig(**SIZES, **WIDE, max_position_embeddings=16)
        model = transformers.BertForMaskedLM(config)
    elif kind == 'llama':
        config = transformers.LlamaConfig(**SIZES, **WIDE, num_key_value_heads=1)
        model = transformers.LlamaForCausalLM(config)
    elif kind == 'gpt2':
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **WIDE)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {'d_model': 32, 'd_ff': 64, 'd_kv': 16, 'num_layers': 2, 'num_heads': 2}
        config = transformers.T5Config(vocab_size=64, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(folder)


TOKENIZERS = {
    'bert': {'ends': True, 'pad_token': '[PAD]', 'padding_side': 'right'},
    'llama': {'ends': False, 'pad_token': '[PAD]', 'padding_side': 'left'},
    'gpt2': {'ends': False, 'padding_side': 'left'},  # no token for padding, absolute positions
    't5': {'ends': True, 'pad_token': '[PAD]', 'padding_side': 'right'},
}


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """A folder with a tiny model of each kind."""
    root = tmp_path_factory.mktemp('models')
    for kind, options in TOKENIZERS.items():
        save_model(root / kind, kind)
        save_tokenizer(root / kind, **options)
    return root


@pytest.fixture
def bert(models, tmp_path):
    """A copy of a model that a test may damage."""
    return pathlib.Path(shutil.copytree(models / 'bert', tmp_path / 'bert'))


def reference(folder: pathlib.Path, caption: str) -> np.ndarray:
    """The plain definition: one caption, no padding, the mean of its last hidden states."""
    kind = transformers.T5EncoderModel if folder.name == 't5' else transformers.AutoModel
    model = kind.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        caption, truncation=True, max_length=16, return_tensors='pt'
    )
    with torch.inference_mode():
        states = model(input_ids=tokens['input_ids']).last_hidden_state
    return states[0].mean(dim=0).numpy()


def test_a_model_loads_beside_tensorflow_where_triton_is_installed(models, tmp_path):
    """TensorFlow first and then triton is a segmentation fault."""
    # PyTorch's builds for CPUs do without triton: there this one stands for it.
    crash = 'import os, signal, sys\nif "tensorflow" in sys.modules: os.kill(os.getpid(), 11)\n'
    (tmp_path / 'triton.py').write_text(crash)
    code = """
        import tensorflow
        sys.path.append(sys.argv[2])  # after what is installed
        from coyo11m_tfds.text import text_encoders
        encoder = text_encoders.make_encoder(f'hf:{sys.argv[1]}/llama')
        print(encoder.encode(['a cat']).shape)
    """
    assert children.output(code, models, tmp_path, forked=True) == '(1, 32)\n'


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_vector_is_the_mean_of_hidden_states_in_any_company(models, kind):
    encoder = text_encoders.make_encoder(f'hf:{models / kind}')
    assert (encoder.name, encoder.dim, encoder.truncated) == (f'hf:{kind}', 32, 0)
    expected = np.stack([reference(models / kind, caption) for caption in (SHORT, LONG)])
    assert np.abs(expected[0] - expected[1]).max() > 0.05
    together = encoder.encode([SHORT, LONG])
    assert together.dtype == np.float32
    np.testing.assert_allclose(together, expected, atol=2e-5)
    np.testing.assert_allclose(encoder.encode([LONG, LONG, SHORT])[2], expected[0], atol=2e-5)
    np.testing.assert_allclose(encoder.encode([SHORT])[0], expected[0], atol=2e-5)
    assert encoder.encode([]).shape == (0, 32)
    assert np.isfinite(encoder.encode([' '])).all()


def test_long_captions_are_cut_between_their_special_tokens_and_counted(models):
    encoder = text_encoders.make_encoder(f'hf:{models / "bert"}')
    assert encoder.max_tokens == 16  # the model has no more positions
    long = f'{LONG} {LONG}'
    embeddings = encoder.encode([long, SHORT, LONG])
    assert encoder.truncated == 1
    np.testing.assert_allclose(embeddings[0], reference(models / 'bert', long), atol=2e-5)
    shorter = text_encoders.make_encoder(f'hf:{models / "bert"}', max_tokens=3)
    np.testing.assert_allclose(shorter.encode([LONG])[0], encoder.encode(['a'])[0], atol=2e-5)
    assert shorter.truncated == 1


def test_the_revision_of_a_folder_changes_with_weights_and_tokenizer_alone(bert):
    def revision() -> str:
        return text_encoders.make_encoder(f'hf:{bert}').revision

    first = revision()
    assert re.fullmatch(r'sha256:[0-9a-f]{64}', first)
    (bert / 'README.md').write_text('about it')
    os.utime(bert / 'model.safetensors')
    assert revision() == first
    damages.flip(bert / 'model.safetensors', -1)
    second = revision()
    tokenizer = (bert / 'tokenizer.json').read_text()
    (bert / 'tokenizer.json').write_text(tokenizer + '\n')
    assert len({first, second, revision()}) == 3


@pytest.mark.slow
def test_a_model_on_the_hub_is_known_by_its_commit_and_one_that_cannot_be_had_is_named(
    models, tmp_path
):
    commit = 'ab' * 20
    offline_hub.put(models / 'bert', tmp_path, 'owner/tiny', commit)
    code = """
        from coyo11m_tfds.text.text_encoders import make_encoder
        encoder = make_encoder('hf:owner/tiny')
        print(encoder.name, encoder.revision)
        try:
            make_encoder('hf:google/gemma-3-270m')
        except ValueError as error:
            print(error)
    """
    found, said = offline_hub.run(code, tmp_path).split('\n', 1)
    assert found == f'hf:owner/tiny {commit}'
    assert "cannot load the text encoder 'google/gemma-3-270m'" in said
    assert 'needs the network unless the model is in the cache' in said


@pytest.mark.parametrize('max_tokens', [-1, 0, 2])
def test_captions_need_room_beside_their_special_tokens(models, max_tokens):
    with pytest.raises(ValueError, match=rf'max_tokens is {max_tokens}, .* the 2 special tokens'):
        text_encoders.make_encoder(f'hf:{models / "bert"}', max_tokens=max_tokens)


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_a_tokenizer_alone_is_that_of_the_encoder_without_its_weights(models, tmp_path, kind):
    encoder = text_encoders.make_encoder(f'hf:{models / kind}', max_tokens=9)
    folder = shutil.copytree(models / kind, tmp_path / kind)
    tokenizer = text_encoders.make_tokenizer(f'hf:{folder}', max_tokens=9)
    assert (tokenizer.name, tokenizer.revision) == (encoder.name, encoder.revision)
    captions = [SHORT, LONG, ' ']
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.truncation_side = 'right'
    expected = [theirs(text, truncation=True, max_length=9)['input_ids'] for text in captions]
    tokens = tokenizer.tokenize(captions)
    assert tokens == encoder.tokenize(captions)
    assert tokens[:2] == expected[:2]
    assert tokens[2] == expected[2] or not expected[2]  # a model needs one token at least
    assert tokenizer.truncated == encoder.truncated == 1
    assert max(map(len, tokenizer.tokenize(captions))) == tokenizer.max_tokens == 9
    (folder / 'model.safetensors').write_bytes(b'')
    text_encoders.make_tokenizer(f'hf:{folder}')


def test_thousands_of_captions_keep_their_order_and_are_all_counted(models):
    count = 2500
    tokenizer = text_encoders.make_tokenizer(f'hf:{models / "bert"}', max_tokens=9)
    words = [WORDS[i % len(WORDS)] for i in range(count)]
    ids = {word: tokenizer.tokenize([word])[0] for word in WORDS}
    assert tokenizer.tokenize(words) == [ids[word] for word in words]
    assert tokenizer.tokenize([LONG] * count) == tokenizer.tokenize([LONG])[:1] * count
    assert tokenizer.truncated == count + 1


def test_a_tokenizer_in_python_is_refused(tmp_path):
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / 'slow')  # has no fast kind
    transformers.T5Config(d_model=32).save_pretrained(tmp_path / 'slow')
    (tmp_path / 'slow' / 'model.safetensors').touch()
    with pytest.raises(ValueError, match=r'slow.: its tokenizer, ByT5Tokenizer, runs in Python'):
        text_encoders.make_tokenizer(f'hf:{tmp_path / "slow"}')


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_weights_are_refused_unread(bert, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere': no such folder"):
        text_encoders.make_encoder(f'hf:{tmp_path / "nowhere"}')
    (bert / 'model.safetensors').unlink()
    (bert / 'pytorch_model.bin').write_bytes(pickle.dumps(Trap(tmp_path / 'sprung')))
    with pytest.raises(ValueError, match=r'bert.*safetensors.*pytorch_model\.bin.*a pickle can'):
        text_encoders.make_encoder(f'hf:{bert}')
    assert not (tmp_path / 'sprung').exists()


def test_code_in_a_model_folder_is_not_run(bert, tmp_path):
    config = json.loads((bert / 'config.json').read_text())
    config |= {'model_type': 'unheard', 'auto_map': {'AutoConfig': 'x.X', 'AutoModel': 'x.X'}}
    (bert / 'config.json').write_text(json.dumps(config))
    (bert / 'x.py').write_text(f'import os\nos.mkdir({str(tmp_path / "sprung")!r})\n')
    with pytest.raises(ValueError, match=r'cannot load the text encoder .*bert'):
        text_encoders.make_encoder(f'hf:{bert}')
    assert not (tmp_path / 'sprung').exists()


def remove_one(path: pathlib.Path) -> None:
    weights = safetensors.torch.load_file(path)
    del weights['bert.encoder.layer.1.output.dense.weight']
    safetensors.torch.save_file(weights, path, {'format': 'pt'})


def cut(path: pathlib.Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


BAD_WEIGHTS = {
    'one is gone': (remove_one, r'lack 1 tensor that.*layer\.1\.output\.dense\.weight'),
    'they are cut': (cut, r'cannot load the text encoder .*bert'),
}


@pytest.mark.parametrize(('damage', 'message'), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_missing_and_damaged_weights_are_refused(bert, damage, message):
    damage(bert / 'model.safetensors')
    with pytest.raises(ValueError, match=message):
        text_encoders.make_encoder(f'hf:{bert}')


HOSTILE = {
    'a thousand million layers': (
        'config.json',
        {'num_hidden_layers': 10**9},
        r'config\.json: num_hidden_layers is 10000000',
    ),
    'a thousand million experts with a point': (
        'config.json',
        {'x': {'n_experts': 1e9}},
        r'config\.json: n_experts is 1000000000\.0, expec',
    ),
    'layers in lists of lists': (
        'config.json',
        {'num_hidden_layers': json.loads('[' * 600 + ']' * 600)},
        r"cannot load the text encoder '.*bert': ",
    ),
    'weights of fewer bits': (
        'config.json',
        {'quantization_config': {}},
        r'config\.json: quantization_config is \{\}, e',
    ),
    'a width of 0': ('config.json', {'hidden_size': 0}, "cannot load the text encoder '.*bert': "),
    'a width of a thousand million': (
        'config.json',
        {'hidden_size': 10**9},
        "cannot load the text encoder '.*bert': ",
    ),
    'an activation that is none': (
        'config.json',
        {'hidden_act': 'x'},
        "cannot load the text encoder '.*bert': ",
    ),
    'a vocabulary that is a text': (
        'config.json',
        {'vocab_size': '64'},
        "the text encoder '.*bert': .*vocab_size",
    ),
    'a configuration that is nested too deeply': (
        'config.json',
        hostile_models.NESTED,
        r'config\.json: .* nested too deeply',
    ),
    'settings of the tokenizer that are nested too deeply': (
        'tokenizer_config.json',
        hostile_models.NESTED,
        r'tokenizer_config\.json: .* too deeply',
    ),
    'a tokenizer that is nested too deeply': (
        'tokenizer.json',
        hostile_models.NESTED,
        r'tokenizer\.json: .* nested too deeply',
    ),
    'weights of whole numbers': (
        'model.safetensors',
        'I8',
        r"safetensors: 'bert\.encoder.* is I8, expected one of F64, F32",
    ),
    'weights of 8 bits': (
        'model.safetensors',
        'F8_E4M3',
        r"safetensors: 'bert\.enc.* is F8_E4M3, expected one of F",
    ),
}


@pytest.mark.parametrize(('name', 'content', 'message'), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_end_in_one_line(bert, name, content, message):
    path = bert / name
    if isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        hostile_models.quantize(path, 'bert.encoder.layer.1.output.dense.weight', content)
    refusal = hostile_models.refusal(lambda: text_encoders.make_encoder(f'hf:{bert}'), 'bert')
    assert re.search(message, refusal)


CAPTIONS = [
    'A man rides a brown horse along the beach.',
    'Someone on horseback gallops over the sand by the sea.',
    'A plate of pasta with tomato sauce stands on a wooden table.',
    'Red double-decker buses are parked in a row in front of a brick station building, and people '
    'with umbrellas wait for them in the rain.',
]


@pytest.fixture(scope='module')
def encoders():
    """The folder that fetch_encoders.py made."""
    if 'COYO11M_ENCODERS' not in os.environ:
        pytest.skip('COYO11M_ENCODERS is not set; see tests/text/fetch_encoders.py')
    return pathlib.Path(os.environ['COYO11M_ENCODERS'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'dim', 'least', 'most'), [('gemma', 640, 0.6, 0.95), ('minilm', 384, -0.1, 0.5)]
)
def test_real_encoder(encoders, name, dim, least, most):
    encoder = text_encoders.make_encoder(f'hf:{encoders / name}')
    assert (encoder.name, encoder.dim) == (f'hf:{name}', dim)
    embeddings = encoder.encode(CAPTIONS)
    alone = np.concatenate([encoder.encode([caption]) for caption in CAPTIONS])
    np.testing.assert_allclose(embeddings, alone, atol=1e-5 * np.abs(embeddings).max())
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosines = (units @ units.T)[np.triu_indices(len(CAPTIONS), 1)]
    assert cosines.argmax() == 0, 'the two captions of one scene are the most alike'
    assert least < cosines.mean() < most
