"""Texts of others stay apart from readable ones until they are counted."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds.foreign import arrow_texts, foreign_text

TEXTS = st.text(st.characters() | st.characters(categories=['Cs']))


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.binary() | st.text().map(str.encode))
def test_bytes_are_a_readable_text_if_they_are_utf_8(data):
    text = foreign_text.decode_utf8(data)
    assert foreign_text.is_readable(text) == is_utf8(data)
    if is_utf8(data):
        assert foreign_text.encode(text) == data


@given(TEXTS)
def test_a_text_becomes_utf_8_if_it_is_readable(text):
    assert is_utf8(foreign_text.encode(text)) == foreign_text.is_readable(text)


@given(st.lists(st.none() | st.binary() | TEXTS.map(foreign_text.encode)))
def test_arrow_finds_the_same_texts_unreadable(texts):
    found = arrow_texts.find_unreadable(pa.array(texts, pa.large_binary()))
    assert found.tolist() == [x is not None and not is_utf8(x) for x in texts]


@given(st.binary())
def test_every_file_has_a_caption(data):
    caption = foreign_text.decode_caption(data)
    assert caption == caption.strip('\n') and '\r' not in caption
