"""Names and texts of others come out without control characters and active markup."""

import html
import re
import unicodedata

import markdown_it
import pytest
import yaml
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


HOSTILE = [
    *('<img src=x onerror=alert(1)>', '"\' onclick=alert(1) \'"', '<!-- x', '&lt;b&gt;'),
    *('![x](http://a)', '[x](javascript:alert(1))', '[x]: /a', '<http://a.b>', '`` ` ``', '```'),
    *('**b** __b__ *i* _i_ ~~s~~', 'a | b || c\\', '---', '$x$', '\n\n# x\n- y', 'snake_case'),
]
TEXTS = st.text(st.characters(codec=None)) | st.text('`<>&|*_~$[]()!\\"\'-# \nab')


def examples(test):
    for text in (*HOSTILE, *PLAIN, *ACTIVE):
        test = example(text)(test)
    return test


@given(TEXTS)
@examples
def test_html_shows_any_text_and_has_no_markup_of_it(text):
    shown = shown_text.escape_for_html(text)
    assert not set('<>"\'') & set(shown)
    assert all(is_printable(x) or x in '\n\t' for x in shown)
    lines = re.split('([\n\t])', text)
    assert html.unescape(shown) == ''.join(
        x if x in ('\n', '\t') else shown_text.escape_for_terminal(x) for x in lines
    )


MARKDOWN = markdown_it.MarkdownIt('commonmark').enable(['table', 'strikethrough'])


@pytest.mark.parametrize('text', [*PLAIN[1:], 'snake_case', 'CC-BY-4.0', 'google/gemma-3-1b-pt'])
def test_plain_text_stays_in_markdown(text):
    assert shown_text.escape_for_markdown(text) == text


@given(TEXTS)
@examples
def test_markdown_shows_any_text_and_has_no_markup_of_it(text):
    cell = shown_text.escape_for_markdown(text)
    assert not set('<>&') & set(re.sub(r'&#\d+;', '', cell))
    page = MARKDOWN.render(f'# .{cell}.\n\n| .{cell}. | b |\n|---|---|\n\n.{cell}.\n')
    expected = html.escape(f'.{shown_text.escape_for_terminal(text)}.', quote=False)
    pieces = [html.escape(html.unescape(x), quote=False) for x in re.split(r'<[^>]*>\n?', page)]
    assert [x for x in pieces if x] == [expected, expected, 'b', expected]


@given(TEXTS)
@examples
def test_a_block_of_markdown_shows_lines_as_they_are(text):
    page = MARKDOWN.render(shown_text.quote_in_markdown(text, 'bibtex') + '\n\nnext')
    content = page.removeprefix('<pre><code class="language-bibtex">')
    shown, end = content.split('</code></pre>')
    assert end == '\n<p>next</p>\n'
    assert html.unescape(shown).removesuffix('\n') == html.unescape(
        shown_text.escape_for_html(text)
    )


@given(TEXTS)
@examples
@example('\ufffe\uffff\ufeff')
def test_yaml_reads_what_was_quoted(text):
    quoted = shown_text.quote_for_yaml(text)
    assert len(quoted.splitlines()) == 1
    assert yaml.safe_load(f'a: {quoted}\nb: [{quoted}]') == {
        'a': shown_text.escape_for_terminal(text),
        'b': [shown_text.escape_for_terminal(text)],
    }
