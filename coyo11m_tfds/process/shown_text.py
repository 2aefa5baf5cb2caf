"""Names and texts of others, such as captions, made safe for the medium that shows them.

A name of a file may hold the codes with which a terminal changes its title or moves its cursor, and
a caption may hold markup. Each medium has one function, which leaves printable text of any language
as it is.
"""

import json
import re

# Control characters, those that end a line or reverse the order of what follows, and halves of
# surrogate pairs, which no encoding can write. Marks and joiners of ordinary text are not among
# them.
_NOT_PRINTABLE = '\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff'
_ESCAPED = re.compile(f'[{_NOT_PRINTABLE}]')
# Within a line. An underscore between letters marks nothing.
_MARKDOWN = re.compile(r'[&<>"\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])')
_HTML = str.maketrans({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&#34;', "'": '&#39;'})


def escape_for_terminal(text: object) -> str:
    r"""Returns a text in one line that controls no terminal: an escape code as `\x1b`."""
    return _ESCAPED.sub(lambda match: match[0].encode('unicode_escape').decode(), str(text))


def escape_for_html(text: object) -> str:
    """Returns a text for an element or a quoted attribute of HTML; line feeds and tabs stay."""
    return _escape_lines(str(text)).translate(_HTML)


def escape_for_markdown(text: object) -> str:
    """Returns a text for a place within a line of Markdown, such as a cell of a table."""
    # Entities, because not all that read Markdown know the same characters after a backslash.
    return _MARKDOWN.sub(lambda match: f'&#{ord(match[0])};', escape_for_terminal(text))


def quote_in_markdown(text: object, language: str = '') -> str:
    """Returns a text as a block of Markdown that shows its lines as they are."""
    text = _escape_lines(str(text))
    # A block begins with at least three, and ends only at as many as it began with.
    rows = re.findall('`+', text)
    longest = max(map(len, rows), default=0)
    fence = '`' * max(3, longest + 1)
    return f'{fence}{language}\n{text}\n{fence}'


def quote_for_yaml(text: object) -> str:
    """Returns a text as a scalar of YAML, in one line."""
    quoted = json.dumps(escape_for_terminal(text), ensure_ascii=False)
    # YAML has neither of these characters.
    return quoted.replace('\ufffe', r'\ufffe').replace('\uffff', r'\uffff')


def _escape_lines(text: str) -> str:
    """Escapes all but line feeds and tabs."""
    return re.sub(r'[^\n\t]+', lambda match: escape_for_terminal(match[0]), text)
