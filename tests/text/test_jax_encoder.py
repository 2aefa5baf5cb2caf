"""Gemma 3 and Qwen3 in JAX against transformers: same tokens and hidden states from the same files.

The fast tests make tiny random models with everything in them that differs from layer to layer.
The slow one uses the real weights: see `tests/text/fetch_encoders.py`.
"""

import functools
import json
import os
import pathlib
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds.text import jax_encoder, language_model, model_encoder, text_encoders
from tests import children, hostile_models
from tests.text import offline_hub

CAPTIONS = [
    'a red circle',
    'a small blue square at the left of the picture, on a red  background',
    'two   spaces, three, and a word that is not in the vocabulary: zebra',
    'Grüße, 写真 <start_of_turn> and \n\n a new line',
    ' ',
    'a',
]
WINDOW = 8
# Everything that can differ differs, so that no two sizes can be taken for each other.
TEXT = {
    'hidden_size': 64,
    'intermediate_size': 96,
    'num_hidden_layers': 7,  # the sixth is global
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'sliding_window': WINDOW,
    'max_position_embeddings': 64,
    'initializer_range': 0.2,
}
# Of `config.json` of Qwen/Qwen3-0.6B what decides the computation.
QWEN = {
    'attention_bias': False,
    'head_dim': 128,
    'hidden_act': 'silu',
    'hidden_size': 1024,
    'intermediate_size': 3072,
    'max_position_embeddings': 40960,
    'model_type': 'qwen3',
    'num_attention_heads': 16,
    'num_hidden_layers': 28,
    'num_key_value_heads': 8,
    'rms_norm_eps': 1e-06,
    'rope_scaling': None,
    'rope_theta': 1000000,
    'sliding_window': None,
    'use_sliding_window': False,
    'vocab_size': 151936,
}
ODD = {
    'query_pre_attn_scalar': 50,
    'rms_norm_eps': 1e-3,
    'rope_parameters': {
        'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 5000.0},
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 200.0},
    },
}


def make_vocabulary() -> list[str]:
    """Tokens in Gemma's order: special ones, bytes, spaces, merged ones, letters."""
    merged = {}
    for word in ' '.join(CAPTIONS[:2]).split():
        for stop in range(2, len(word) + 1):
            merged[word[:stop]] = None
        merged['▁' + word] = None
    merged |= {'▁a': None, 'qu': None, 're': None, 'squ': None}
    letters = sorted(set(''.join(merged)) | set('▁,.:'))
    special = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>', '<start_of_turn>']
    spaces = ['▁' * n for n in range(2, 5)]
    return [*special, *(f'<0x{i:02X}>' for i in range(256)), '\n\n', *spaces, *merged, *letters]


VOCABULARY = make_vocabulary()


def randomize(model: torch.nn.Module) -> None:
    """Gives the norms scales too, which transformers initializes to one."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if 'norm' in name:
            torch.nn.init.uniform_(weight, -0.5, 0.5)


def make_model(**options) -> 'transformers.Gemma3TextModel':
    """A tiny random text model of transformers."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(vocab_size=len(VOCABULARY), **TEXT, **options)
    model = transformers.Gemma3TextModel(config).eval()
    randomize(model)
    return model


def make_tokenizer() -> 'transformers.PreTrainedTokenizerFast':
    """Gemma's kind: byte-pair encoding with spaces as tokens; every text gets a start."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    merges = [
        (token[:cut], token[cut:])
        for token in VOCABULARY
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ids and token[cut:] in ids
    ]
    bpe = tokenizers.models.BPE(ids, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = tokenizers.normalizers.Replace(' ', '▁')
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(' ', 'merged_with_previous')
    tokenizer.add_special_tokens(['<start_of_turn>'])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single='<bos> $A', special_tokens=[('<bos>', ids['<bos>'])]
    )
    named = {f'{name}_token': f'<{name}>' for name in ('pad', 'eos', 'bos', 'unk')}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def make_qwen_tokenizer() -> 'transformers.PreTrainedTokenizerBase':
    """Qwen's kind: byte-pair encoding of bytes; no text gets a start or an end."""
    words = [f'Ġ{word}' for word in ' '.join(CAPTIONS[:2]).split() if word.isascii()]
    words += [word[:stop] for word in words for stop in range(2, len(word))]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate(dict.fromkeys([*letters, *sorted(words, key=len)]))}
    merges = [(token[:-1], token[-1]) for token in ids if len(token) > 1]
    special = {'pad_token': '<|endoftext|>', 'eos_token': '<|im_end|>'}
    return transformers.Qwen2Tokenizer(ids, merges, **special)


def make_qwen(kind: type, **options) -> 'transformers.PreTrainedModel':
    """A tiny random Qwen3; heads are wider than the model."""
    sizes = {name: size for name, size in TEXT.items() if name != 'sliding_window'}
    sizes |= {'num_hidden_layers': 3, 'vocab_size': 512, 'rms_norm_eps': 1e-3, 'rope_theta': 50.0}
    torch.manual_seed(3)
    model = kind(transformers.Qwen3Config(**sizes | options)).eval()
    for name, weight in model.named_parameters():
        if 'norm' in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """Folders with the same kind of model, saved in each way that there is."""
    root = tmp_path_factory.mktemp('models')
    make_model(**ODD).save_pretrained(root / 'text')

    causal = transformers.Gemma3ForCausalLM(make_model(**ODD).config).eval()
    randomize(causal)
    causal.to(torch.bfloat16).save_pretrained(root / 'causal', max_shard_size='100KB')

    vision = {'hidden_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    config = transformers.Gemma3Config(
        text_config=make_model(**ODD).config.to_dict(),
        vision_config=vision | {'intermediate_size': 32, 'image_size': 32, 'patch_size': 16},
    )
    torch.manual_seed(2)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(root / 'images')

    for name in ('text', 'causal', 'images'):
        make_tokenizer().save_pretrained(root / name)

    make_qwen(transformers.Qwen3Model).save_pretrained(root / 'qwen')
    causal_qwen = make_qwen(transformers.Qwen3ForCausalLM, tie_word_embeddings=False)
    causal_qwen.to(torch.bfloat16).save_pretrained(root / 'qwen_causal', max_shard_size='100KB')
    for name in ('qwen', 'qwen_causal'):
        make_qwen_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture
def text(models, tmp_path):
    """A copy of a model that a test may damage."""
    return pathlib.Path(shutil.copytree(models / 'text', tmp_path / 'text'))


def reference_states(folder: pathlib.Path, tokens: list[int]) -> np.ndarray:
    """What transformers makes of one text without padding, float32 `(T, width)`."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).last_hidden_state[0].numpy()


def our_states(folder: pathlib.Path, tokens: list[list[int]]) -> np.ndarray:
    checkpoint = jax_encoder.open_checkpoint(str(folder))
    params = jax_encoder.load_params(checkpoint, np.float32)
    network = language_model.LanguageModel(checkpoint.config, jnp.float32)
    return np.asarray(jax.jit(network.apply)({'params': params}, jnp.array(tokens)))


@pytest.mark.parametrize('name', ['causal', 'images', 'qwen'])
def test_hidden_states_are_those_of_transformers(models, name):
    """Shorter than the window, as long, and much longer; padding behind changes nothing."""
    rng = np.random.default_rng(0)
    longest = rng.integers(6, len(VOCABULARY), 4 * WINDOW).tolist()
    lengths = (1, 5, WINDOW, WINDOW + 1, len(longest))
    rows = [longest[:n] + [0] * (len(longest) - n) for n in lengths]
    states = our_states(models / name, rows)
    assert (states.shape, states.dtype) == ((5, 4 * WINDOW, 64), np.float32)
    for row, length in zip(states, lengths, strict=True):
        expected = reference_states(models / name, longest[:length])
        assert expected.std() > 0.3
        np.testing.assert_allclose(row[:length], expected, atol=1e-5)


def test_flops_are_those_of_the_matrix_products(models):
    # One layer, since XLA counts a loop's body once; many tokens, so that scores matter.
    checkpoint = jax_encoder.open_checkpoint(str(models / 'text'))
    config = language_model.LanguageModelConfig(**{**vars(checkpoint.config), 'is_local': (False,)})
    network, tokens = (
        language_model.LanguageModel(config, jnp.float32),
        jnp.zeros((3, 200), jnp.int32),
    )
    params = jax.eval_shape(network.init, jax.random.key(0), tokens)
    cost = jax.jit(network.apply).lower(params, tokens).compile().cost_analysis()['flops']
    assert 3 * config.flops(200) == pytest.approx(cost, rel=0.1)  # and elementwise operations


@pytest.mark.parametrize('name', ['text', 'qwen'])
def test_bfloat16_is_close_and_stays_bfloat16(models, name):
    checkpoint = jax_encoder.open_checkpoint(str(models / name))
    params = jax_encoder.load_params(checkpoint, jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'bfloat16', 'float32'}
    assert params['layers']['mlp']['up']['kernel'].dtype == jnp.bfloat16
    tokens = list(range(10, 30))
    network = language_model.LanguageModel(checkpoint.config)
    states = jax.jit(network.apply)({'params': params}, jnp.array([tokens]))
    assert states.dtype == jnp.bfloat16
    expected = reference_states(models / name, tokens)
    assert cosines(np.asarray(states[0], np.float32), expected).min() > 0.99


def test_means_are_over_real_tokens():
    states = jnp.array([[[1.0], [3.0], [jnp.nan]], [[jnp.nan]] * 3], jnp.bfloat16)
    means = language_model.mean_states(states, jnp.array([2, 0]))
    assert (means.dtype, means.tolist()) == (jnp.float32, [[2.0], [0.0]])


def test_older_and_sparse_configurations_mean_what_they_mean_to_transformers():
    sparse = {
        'model_type': 'gemma3',
        'text_config': {
            'model_type': 'gemma3_text',
            'hidden_size': 2560,
            'num_hidden_layers': 4,
            'sliding_window_pattern': 2,
            'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
            'rope_theta': 7.0,
            'rope_local_base_freq': 5.0,
        },
    }
    theirs = transformers.Gemma3Config(**sparse).text_config
    config = jax_encoder.parse_model_config(sparse, 'config.json')
    assert_sizes(config, theirs)
    kinds = tuple(kind == 'sliding_attention' for kind in theirs.layer_types)
    assert config.is_local == kinds == (True, False, True, False)
    assert (config.window, config.query_scalar) == (
        theirs.sliding_window,
        theirs.query_pre_attn_scalar,
    )
    ropes = language_model.Rope(7.0, 8.0), language_model.Rope(5.0)
    assert (config.global_rope, config.local_rope) == ropes
    assert (config.activation, config.scale_embeddings, config.post_norms) == (nn.gelu, True, True)
    full, sliding = (theirs.rope_parameters[f'{x}_attention'] for x in ('full', 'sliding'))
    assert (full['factor'], full['rope_theta'], sliding['rope_theta']) == (8.0, 7.0, 5.0)


def assert_sizes(config: language_model.LanguageModelConfig, theirs) -> None:
    for ours, name in jax_encoder._SIZES.items():
        assert getattr(config, ours) == getattr(theirs, name)
    assert (config.depth, config.norm_epsilon) == (theirs.num_hidden_layers, theirs.rms_norm_eps)


def test_the_sizes_of_qwen_are_those_of_its_config_json():
    published = language_model.PUBLISHED['Qwen/Qwen3-0.6B']
    assert jax_encoder.parse_model_config(QWEN, 'config.json') == published
    params = jax.tree.leaves(language_model.abstract_params(published, jnp.bfloat16))
    assert sum(leaf.size for leaf in params) == 596_049_920

    fields = {'model_type': 'qwen3', 'rope_theta': 7.0}
    sparse = jax_encoder.parse_model_config(fields, 'config.json')
    theirs = transformers.Qwen3Config.from_dict(fields)
    assert_sizes(sparse, theirs)
    assert sparse.global_rope == language_model.Rope(theirs.rope_parameters['rope_theta'])


OTHER_MODELS = {
    'Llama': ('llama', {}, "model_type is 'llama', expected one of gemma3, gemma3_text, qwen3"),
    'no type': (None, {}, 'model_type is None, expected'),
    'Gemma that looks both ways': (
        'gemma3_text',
        {'use_bidirectional_attention': True},
        'use_bidirectional_attention is Tr',
    ),
    'Gemma with another activation': (
        'gemma3_text',
        {'hidden_activation': 'silu'},
        "hidden_activation is 'silu'",
    ),
    'Gemma with the kind of one layer': (
        'gemma3_text',
        {'layer_types': ['full_attention']},
        'for each of 26 layers',
    ),
    'Gemma with positions of YaRN': (
        'gemma3_text',
        {'rope_scaling': {'rope_type': 'yarn'}},
        "rope_type is 'yarn'",
    ),
    'Qwen with positions of YaRN': (
        'qwen3',
        {'rope_parameters': {'rope_type': 'yarn'}},
        "rope_type is 'yarn'",
    ),
    'Qwen with a window': (
        'qwen3',
        {'use_sliding_window': True},
        'use_sliding_window is True, expected False',
    ),
    'Qwen with a bias': (
        'qwen3',
        {'attention_bias': True},
        'attention_bias is True, expected False',
    ),
    'Qwen with another activation': (
        'qwen3',
        {'hidden_act': 'gelu'},
        "hidden_act is 'gelu', expected 'silu'",
    ),
    'Qwen with layers of a window': (
        'qwen3',
        {'layer_types': ['sliding_attention'] * 28},
        'expected full_attention for each',
    ),
    'Qwen with heads that groups do not divide': (
        'qwen3',
        {'num_attention_heads': 15},
        'num_attention_heads is 15, expected .* multiple of 8',
    ),
    'Qwen with heads of an odd size': (
        'qwen3',
        {'head_dim': 127},
        'head_dim is 127, expected .* a multiple of 2',
    ),
    'Qwen with a size that is a text': (
        'qwen3',
        {'hidden_size': '1024'},
        "hidden_size is '1024', expected a whole number",
    ),
    'Qwen without layers': (
        'qwen3',
        {'num_hidden_layers': 0},
        'num_hidden_layers is 0, expected a whole .* 1 to 1024',
    ),
    'Qwen with a vocabulary of a thousand million': (
        'qwen3',
        {'vocab_size': 10**9},
        'vocab_size is 1000000000, expected a whole number from 1',
    ),
    'Gemma without its text part': (
        'gemma3',
        {'text_config': None},
        'text_config is None, expected an object',
    ),
    'Qwen with positions of no factor': (
        'qwen3',
        {'rope_scaling': {'type': 'linear'}},
        'factor is None, expected a number from',
    ),
}


@pytest.mark.parametrize(('kind', 'change', 'message'), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_models_that_would_be_computed_wrongly_are_refused(kind, change, message):
    sizes = QWEN if kind == 'qwen3' else {}
    with pytest.raises(ValueError, match=rf'here\.json: .*{message}') as error:
        jax_encoder.parse_model_config({**sizes, 'model_type': kind, **change}, 'here.json')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('kind', ['gemma3_text', 'qwen3'])
def test_no_value_of_a_field_ends_in_anything_but_one_line(kind):
    architecture = jax_encoder.ARCHITECTURES[kind]
    content = {**architecture.defaults, 'model_type': kind}
    fields = [*jax_encoder.RULES, *architecture.fixed, 'model_type', 'text_config']
    parse = functools.partial(jax_encoder.parse_model_config, name='x.json')
    refusals = [
        hostile_models.refusal(functools.partial(parse, damaged), 'x.json')
        for damaged in hostile_models.damage_fields(content, fields)
    ]
    # Null is as good as missing.
    assert sum(map(bool, refusals)) > 0.85 * len(refusals)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def plain_loop(model, tokenizer, captions: list[str]) -> np.ndarray:
    """The definition: one caption at a time, no padding, the mean of its last hidden states."""
    embeddings = []
    for caption in captions:
        tokens = tokenizer(caption, return_tensors='pt')['input_ids']
        with torch.inference_mode():
            embeddings.append(model(input_ids=tokens).last_hidden_state[0].mean(dim=0).numpy())
    return np.stack(embeddings)


def rules(tokenizer: tokenizers.Tokenizer) -> dict:
    """What decides the tokens of a text."""
    parts = json.loads(tokenizer.to_str())
    parts['post_processor'] = parts['post_processor']['single']
    parts['added_tokens'].sort(key=lambda token: token['id'])
    return {name: part for name, part in parts.items() if name != 'truncation'}


def test_tokens_are_those_of_transformers(models):
    theirs = transformers.AutoTokenizer.from_pretrained(models / 'text')
    encoder = text_encoders.make_encoder(f'jax:{models / "text"}')
    assert rules(encoder.checkpoint.tokenizer()[0]) == rules(theirs.backend_tokenizer)
    tokens = encoder.tokenize(CAPTIONS)
    assert tokens == theirs(CAPTIONS)['input_ids']
    assert tokens[0] == [2, *(VOCABULARY.index(token) for token in ('a', '▁red', '▁circle'))]
    assert VOCABULARY.index('<start_of_turn>') in tokens[3]
    assert VOCABULARY.index('▁▁▁') in tokens[2]


def test_texts_for_qwen_have_no_start_and_an_empty_one_is_padding(models, tmp_path):
    captions = ['', *CAPTIONS, '<|im_end|> é']
    folder = pathlib.Path(shutil.copytree(models / 'qwen', tmp_path / 'qwen'))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = text_encoders.make_tokenizer(f'jax:{folder}').tokenize(captions)
    assert tokens == [[theirs.pad_token_id], *theirs(captions[1:])['input_ids']]
    assert text_encoders.make_tokenizer(f'hf:{folder}').tokenize(captions) == tokens

    # As in Qwen3-Embedding, whose tokenizer.json adds an end; nothing heeds the other file.
    path, settings_path = folder / 'tokenizer.json', folder / 'tokenizer_config.json'
    options = json.loads(settings_path.read_text())
    settings_path.write_text(json.dumps(options | {'add_bos_token': False}))
    rule = tokenizers.processors.TemplateProcessing(
        single='$A <|endoftext|>', special_tokens=[('<|endoftext|>', theirs.pad_token_id)]
    )
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = rule
    backend.save(str(path))
    ended = text_encoders.make_tokenizer(f'jax:{folder}').tokenize(captions)
    assert ended[1:] == [[*ids, theirs.pad_token_id] for ids in tokens[1:]]
    assert text_encoders.make_tokenizer(f'hf:{folder}').tokenize(captions) == ended


@pytest.mark.parametrize('name', ['causal', 'qwen_causal'])
def test_a_vector_is_the_mean_of_hidden_states_in_any_company(models, name):
    encoder = text_encoders.make_encoder(f'jax:{models / name}')
    assert (encoder.name, encoder.dim, encoder.truncated) == (f'jax:{name}', 64, 0)
    model = transformers.AutoModel.from_pretrained(models / name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / name)
    expected = plain_loop(model, tokenizer, CAPTIONS)
    together = encoder.encode(CAPTIONS)
    assert together.dtype == np.float32
    np.testing.assert_allclose(together, expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode(CAPTIONS[::-1])[::-1], expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode(CAPTIONS[1:2]), expected[1:2], atol=1e-5)
    assert encoder.encode([]).shape == (0, 64)


def test_long_captions_are_cut_and_counted(models):
    encoder = text_encoders.make_encoder(f'jax:{models / "text"}')
    assert encoder.max_tokens == 64  # the model was made for no more
    assert [len(ids) for ids in encoder.tokenize(['zebra ' * 50, 'zebra'])] == [64, 6]
    assert encoder.truncated == 1
    with pytest.raises(ValueError, match='max_tokens is 1, expected more than the 1 special'):
        text_encoders.make_encoder(f'jax:{models / "text"}', max_tokens=1)


@pytest.mark.slow
def test_several_devices_share_a_batch_without_torch_and_tensorflow(models, tmp_path):
    program = f"""
        for name in ('torch', 'tensorflow', 'transformers'):
            sys.modules[name] = None  # its import fails
        import numpy as np
        from coyo11m_tfds.text.text_encoders import make_encoder
        encoder = make_encoder(sys.argv[1], batch_tokens=64)
        pool = encoder._pool
        def check_shares(params, tokens, lengths):
            shares = [shard.data.shape[0] for shard in tokens.addressable_shards]
            assert shares == 3 * [len(tokens) // 3], shares
            return pool(params, tokens, lengths)
        encoder._pool = check_shares
        np.save(sys.argv[2], encoder.encode({CAPTIONS!r}))
    """
    spec = f'jax:{models / "text"}'
    children.output(program, spec, tmp_path / 'embeddings.npy', devices=3)
    expected = text_encoders.make_encoder(spec).encode(CAPTIONS)
    np.testing.assert_allclose(np.load(tmp_path / 'embeddings.npy'), expected, atol=1e-5)


@pytest.mark.slow
def test_a_name_on_the_hub_is_a_model_in_the_cache(models, tmp_path):
    commit = 'cd' * 20
    offline_hub.put(models / 'qwen_causal', tmp_path, 'Qwen/Qwen3-0.6B', commit)
    code = """
        from coyo11m_tfds.text.text_encoders import make_encoder
        encoder = make_encoder('jax:Qwen/Qwen3-0.6B')
        print(encoder.name, encoder.revision, *encoder.encode(['a red circle']).shape)
    """
    assert offline_hub.run(code, tmp_path) == f'jax:Qwen/Qwen3-0.6B {commit} 1 64\n'


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), max_size=60).map(np.array),
    st.integers(1, 4096),
    st.integers(1, 5),
)
def test_batches_hold_each_row_once(lengths, batch_tokens, num_devices):
    seen = []
    for rows, (height, width) in model_encoder.plan_batches(lengths, batch_tokens, num_devices):
        assert len(rows) <= height
        assert height % num_devices == 0
        assert lengths[rows].max() <= width
        assert height == num_devices or height * width <= batch_tokens
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


MLP = 'layers.1.mlp.up_proj.weight'
UNFIT = {
    'one is gone and one is unknown': (
        lambda kernel: {'layers.0.self_attn.q_proj.bias': np.zeros(64, np.float32)},
        r'text: .* 1 missing.*1\.mlp\.up.*1 unexpected.*bias',
    ),
    'one has a row less': (
        lambda kernel: {MLP: np.ascontiguousarray(kernel[1:])},
        r'1\.mlp\.up_proj.* \(95, 64\), expected \(96, 64\)',
    ),
    'one is of whole numbers': (
        lambda kernel: {MLP: kernel.astype(np.int8)},
        r'1\.mlp\.up_proj.* is I8, expected one of F64, F32, F16',
    ),
}


@pytest.mark.parametrize(('change', 'message'), UNFIT.values(), ids=UNFIT)
def test_weights_that_do_not_fit_are_refused_in_one_line(text, change, message):
    path = text / 'model.safetensors'
    weights = safetensors.numpy.load_file(path)
    kernel = weights.pop(MLP)
    safetensors.numpy.save_file(weights | change(kernel), path)
    with pytest.raises(ValueError, match=message):
        text_encoders.make_encoder(f'jax:{text}')


DAMAGED = {
    'weights of another file again': (
        'copy',
        lambda data: data,
        r'model\.safetensors: .* comes in another file',
    ),
    'weights are cut': (
        'model',
        lambda data: data[: len(data) // 2],
        r'text.model\.safetensors: cannot be read',
    ),
    'weights are gone': (
        'model',
        lambda data: None,
        r'expected \*\.safetensors in the folder, which has',
    ),
    'the tokenizer is gone': ('tokenizer.json', lambda data: None, r'tokenizer\.json is missing'),
    'the tokenizer is nothing': (
        'tokenizer.json',
        lambda data: b'{}',
        r'tokenizer\.json is not a tokenizer',
    ),
    'the tokenizer is nested too deeply': (
        'tokenizer.json',
        lambda data: hostile_models.NESTED,
        r'tokenizer\.json: .* too deeply',
    ),
    'the settings of the tokenizer are a list': (
        'tokenizer_config.json',
        lambda data: b'[]',
        r'tokenizer_config\.json: has \[\], expected',
    ),
    'its last token is a number': (
        'tokenizer_config.json',
        lambda data: b'{"eos_token": 5}',
        r'tokenizer_config\.json: eos_token is 5, expected null, a text, or',
    ),
    'the configuration is nested too deeply': (
        'config.json',
        lambda data: hostile_models.NESTED,
        r'config\.json: .* nested too deeply',
    ),
    'the index leads out of the folder': (
        'model.safetensors.index.json',
        lambda data: b'{"weight_map": {"norm.weight": "../text/model.safetensors"}}',
        r'index\.json: weight_map is .*, expected an object with a \*\.safetens',
    ),
}


@pytest.mark.parametrize(('name', 'damage', 'message'), DAMAGED.values(), ids=DAMAGED)
def test_damaged_and_missing_files_are_named(text, name, damage, message):
    path = text / (name if '.' in name else f'{name}.safetensors')
    data = damage((text / 'model.safetensors').read_bytes())
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        text_encoders.make_encoder(f'jax:{text}')


def test_sizes_that_the_weights_do_not_have_take_no_memory(text):
    path = text / 'config.json'
    sizes = {'vocab_size': 1 << 22, 'hidden_size': 1 << 16, 'num_hidden_layers': 1000}
    fields = json.loads(path.read_text()) | sizes | {'layer_types': None}
    path.write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match=r'the weights do not fit the configuration, with \d+ missing'
    ):
        text_encoders.make_encoder(f'jax:{text}')
    path.write_text(json.dumps(fields | {'num_hidden_layers': TEXT['num_hidden_layers']}))
    with pytest.raises(ValueError, match=r'embed_tokens.* expected \(4194304, 65536\)'):
        text_encoders.make_encoder(f'jax:{text}')


# These are panics of the package, and the last one would end the process.
FAILING = {
    'no special tokens': (
        'post_processor',
        {'special_tokens': {}},
        'text: its tokenizer fails: no entry found',
    ),
    'a prefix of subwords': (
        'model',
        {'continuing_subword_prefix': '<unk>'},
        r'_prefix is .<unk>., expected null or .',
    ),
    'a token beyond what is counted': (
        'model',
        {'vocab': {'a': 2**32 - 1}, 'merges': []},
        # transformers 5.18 leaves that token out of the vocabulary.
        'text: its tokenizer (has the token id 4294967295, expecte|fails: Unk token .<unk>. not)',
    ),
}


@pytest.mark.parametrize(('part', 'change', 'message'), FAILING.values(), ids=FAILING)
def test_tokenizers_that_fail_are_named(text, part, change, message):
    path = text / 'tokenizer.json'
    content = json.loads(path.read_text())
    content[part] |= change
    path.write_text(json.dumps(content))
    for runner in ('jax', 'hf'):
        with pytest.raises(ValueError, match=message):
            text_encoders.make_tokenizer(f'{runner}:{text}').tokenize(['a red circle'])


@pytest.mark.slow
def test_real_weights_give_the_embeddings_of_transformers(coco_sample):
    """In float32 to rounding; bfloat16 is what an accelerator computes."""
    if 'COYO11M_ENCODERS' not in os.environ:
        pytest.skip('COYO11M_ENCODERS is not set; see tests/text/fetch_encoders.py')
    folder = pathlib.Path(os.environ['COYO11M_ENCODERS']) / 'gemma'
    table = pq.read_table(
        coco_sample / 'coyo11m-meta.parquet', columns=['caption', 'caption_llava']
    )
    columns = [column.to_pylist() for column in table.columns]
    captions = [text for column in columns for text in column if text and text.strip()]
    odd = ['写真 🎉 <start_of_turn>   three spaces\n\n\tand a tab', 'ﬁ Åström ⅷ <eos> [multimodal]']
    theirs = text_encoders.make_encoder(f'hf:{folder}')
    ours = text_encoders.make_encoder(f'jax:{folder}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert rules(ours.checkpoint.tokenizer()[0]) == rules(tokenizer.backend_tokenizer)
    assert ours.tokenize(captions + odd) == theirs.tokenize(captions + odd)
    some = captions[::40] + odd
    plain = plain_loop(theirs._model, tokenizer, some)
    embeddings = ours.encode(some)
    assert cosines(embeddings, plain).min() > 0.999999
    assert cosines(embeddings, theirs.encode(some)).min() > 0.999999
    assert cosines(ours.encode(some[:1]), plain[:1]).min() > 0.999999
    half = jax_encoder.JaxEncoder(str(folder), 512, dtype=jnp.bfloat16)
    assert cosines(half.encode(some), plain).min() > 0.999
