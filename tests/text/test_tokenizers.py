"""Captions to token ids: the same on every machine, padded, and cut where they are too long."""

import numpy as np
import pytest

from coyo11m_tfds import sample_data
from coyo11m_tfds.text import text_encoders, tokenizers


def test_a_word_has_the_same_id_wherever_it_stands_and_however_it_is_written():
    words = tokenizers.make_tokenizer('words', 5)
    tokens = tokenizers.pad(words.tokenize(['A red circle.', 'circle, RED', '', ' . ']), 5)
    assert (tokens.dtype, tokens.shape) == (np.int32, (4, 5))
    # Of any machine, process and version: the ids are in data sets, and weights are learned by id.
    np.testing.assert_array_equal(tokens[0], [2112, 2317, 957, -1, -1])
    np.testing.assert_array_equal(tokens[1], [tokens[0, 2], tokens[0, 1], -1, -1, -1])
    assert (tokens[2:] == -1).all()
    assert words.truncated == 0


def test_longer_captions_are_cut_and_counted():
    words = tokenizers.make_tokenizer('words', 2)
    tokens = words.tokenize(['one two three', 'one two', 'one two three four'])
    assert tokens == [tokens[1]] * 3
    assert words.truncated == 2


def test_no_two_words_of_the_demo_have_the_same_id():
    scenes = [scene for scenes in sample_data.split_scenes() for scene in scenes]
    parts = [*sample_data.WORDINGS, *sample_data.PLACES, 'large small']
    parts += [f'{scene.colour} {scene.shape}' for scene in scenes]
    known = {word for part in parts for word in tokenizers.split_words(part)}
    tokens = tokenizers.make_tokenizer('words', 1).tokenize(sorted(known))
    assert len(np.unique(tokens)) == len(known) > 30


@pytest.mark.parametrize('max_tokens', [0, 4097])
def test_a_length_out_of_range_is_refused(max_tokens):
    with pytest.raises(ValueError, match=f'max_tokens={max_tokens}: expected 1 to 4,096'):
        tokenizers.make_tokenizer('words', max_tokens)


def test_what_makes_no_tokens_and_what_makes_nothing_else_are_refused():
    with pytest.raises(ValueError, match="the encoder 'hash' has no token ids: name words"):
        tokenizers.make_tokenizer('hash', 16)
    with pytest.raises(ValueError, match=r"unknown encoder 'words'.*words makes tokens alone"):
        text_encoders.make_encoder('words')
