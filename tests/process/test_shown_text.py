"""Names and texts of others come out without control characters and active markup."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coyo11m_tfds.process import shown_text

PLAIN = [
    "plain.jpg, it's 100% ok: [a] {b} <c> & \\d",
    'Grüße aus Köln, naïve façade, ¿qué?',
    '金色の猫 猫が好き 한국어 текст हिन्दी ไทย',
    'שלום עולם مرحبا بالعالم\u200f\u061c',
    '👩\u200d👩\u200d👧 🏴\U000e0067\U000e0062\U000e007f 👍🏽 e\u0301',
]
# What a terminal would obey, and how it is shown.
ACTIVE = {
    '\x1b]0;title\x07': r'\x1b]0;title\x07',
    'a\r\nb\tc': r'a\r\nb\tc',
    '\x9b31m\x85': r'\x9b31m\x85',
    'gpj.\u202eexe\u2066': r'gpj.\u202eexe\u2066',
    'a\u2028b\u2029': r'a\u2028b\u2029',
    'caf\udce9.jpg': r'caf\udce9.jpg',
    'nul\0\x7f': r'nul\x00\x7f',
}


@pytest.mark.parametrize('text', PLAIN)
def test_plain_text_stays_in_a_terminal(text):
    assert shown_text.escape_for_terminal(text) == text


@pytest.mark.parametrize('text', ACTIVE)
def test_a_terminal_gets_a_line_without_codes(text):
    assert shown_text.escape_for_terminal(text) == ACTIVE[text]


def is_printable(character: str) -> bool:
    has_control = unicodedata.category(character) in ('Cc', 'Cs', 'Zl', 'Zp')
    reorders = unicodedata.bidirectional(character) in (
        *('LRE', 'RLE', 'LRO', 'RLO', 'PDF'),
        *('LRI', 'RLI', 'FSI', 'PDI'),
    )
    return not has_control and not reorders


@given(st.text(st.characters(codec=None)))
@example('\ud83d\ude00')
def test_any_text_is_one_printable_line(text):
    shown = shown_text.escape_for_terminal(text)
    assert all(map(is_printable, shown))
    assert len(shown.splitlines()) <= 1
    shown.encode()
    if all(map(is_printable, text)):
        assert shown == text
    assert shown_text.escape_for_terminal(shown) == shown
