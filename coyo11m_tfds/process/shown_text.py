"""Names and texts of others, such as captions, made safe for the medium that shows them.

A name of a file may hold the codes with which a terminal changes its title or moves its cursor, and
a caption may hold markup. Each medium has one function, which leaves printable text of any language
as it is.
"""

import re

# Control characters, those that end a line or reverse the order of what follows, and halves of
# surrogate pairs, which no encoding can write. Marks and joiners of ordinary text are not among
# them.
_NOT_PRINTABLE = '\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff'
_ESCAPED = re.compile(f'[{_NOT_PRINTABLE}]')


def escape_for_terminal(text: object) -> str:
    r"""Returns a text in one line that controls no terminal: an escape code as `\x1b`."""
    return _ESCAPED.sub(lambda match: match[0].encode('unicode_escape').decode(), str(text))
