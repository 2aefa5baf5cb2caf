"""Tests of the check of text encoders, with tiny random models in folders."""

import json
import pathlib

import pytest
import tokenizers
import transformers

from coyo11m_tfds.checks import encoders

SIZES = {'hidden_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}


@pytest.fixture(scope='module')
def fast(tmp_path_factory) -> pathlib.Path:
    """A BERT with a tokenizer of whole words in Rust."""
    folder = tmp_path_factory.mktemp('fast')
    words = ['[UNK]', '[PAD]', 'a', 'boat', 'lake', 'red', 'sail']
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='[UNK]')
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token='[UNK]', pad_token='[PAD]'
    ).save_pretrained(folder)
    config = transformers.BertConfig(vocab_size=64, intermediate_size=64, **SIZES)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def slow(tmp_path_factory) -> pathlib.Path:
    """The half of a T5 of bytes, whose tokenizer exists in Python alone."""
    folder = tmp_path_factory.mktemp('slow')
    (folder / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': 'ByT5Tokenizer'}))
    config = transformers.T5Config(
        vocab_size=384, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2
    )
    transformers.T5EncoderModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_fast_tokenizer_passes_and_the_speed_is_rated(fast):
    tokenizer, encoder = encoders.check_encoder(f'hf:{fast}', num_captions=10, seconds=120)
    assert (tokenizer.status, 'in Rust' in tokenizer.text) == ('pass', True)
    assert (encoder.status, encoder.facts['rating'], encoder.facts['dim']) == ('pass', 'fast', 32)
    assert encoder.facts['captions_a_second'] > 0


def test_a_slow_tokenizer_fails_by_name_even_where_the_encoder_does_not_load(slow):
    tokenizer, encoder = encoders.check_encoder(f'hf:{slow}', num_captions=10, seconds=120)
    assert tokenizer.status == 'fail'
    assert tokenizer.text.startswith('ByT5Tokenizer of hf:')
    assert 'tokenizer.json' in tokenizer.mend
    assert (encoder.status, 'weights lack' in encoder.text) == ('fail', True)


def test_many_captions_make_an_encoder_slow():
    (encoder,) = encoders.check_encoder('hash', num_captions=10**12, seconds=60)
    assert (encoder.status, encoder.facts['rating']) == ('warn', 'slow')
    assert 'GPU' in encoder.mend


@pytest.mark.parametrize('spec', ['clip', 'hf:/no/such/folder', 'jax:/no/such/folder'])
def test_an_encoder_that_does_not_load_fails_with_its_message(spec):
    (found,) = encoders.check_encoder(spec, num_captions=10, seconds=60)
    assert found.status == 'fail'
    assert 'Traceback' not in found.text
    assert spec.partition(':')[2] in found.text


def test_an_encoder_that_takes_too_long_fails():
    (found,) = encoders.check_encoder('hash', num_captions=10, seconds=0.01)
    assert (found.status, 'no answer within 0.01 s' in found.text) == ('fail', True)
