"""The words of captions, by which the encoder `words` numbers them: 'a:1200 red:412 circle:98'.

A list is one text: the most frequent words of all captions with their counts, the most frequent
first, words of one count in the order of their letters. Word n has the id n, counted from 1. All
other words have the id 0: they are too rare, or longer than `_MAX_LETTERS`.
"""

import collections
import hashlib
import re
from collections.abc import Iterable, Sequence

# Few enough for the metadata of a sidecar's parts, of a data set and of checkpoints: 0.1 MB.
MAX_WORDS = 8191

_MAX_LETTERS = 64  # of a word in the list
_MOST_COUNTED = 1 << 21  # words that are counted at a time: 0.3 GB
_ENTRY = re.compile(rf'\w{{1,{_MAX_LETTERS}}}:[1-9][0-9]{{0,17}}')


def count_words(captions: Iterable[Sequence[str]]) -> str:
    """Returns the list of the most frequent words of captions, at most `MAX_WORDS`.

    A caption is given as its words.
    """
    counts: collections.Counter[str] = collections.Counter()
    for words in captions:
        # A longer one is a link or noise, and no list may hold it.
        counts.update(word for word in words if len(word) <= _MAX_LETTERS)
        # Of captions of millions of different words, the rarest are forgotten in between.
        if len(counts) > _MOST_COUNTED:
            kept_counts = dict(_most_frequent(counts, _MOST_COUNTED // 2))
            counts = collections.Counter(kept_counts)
    return _write_list(counts)


def merge_lists(word_lists: Iterable[str]) -> str:
    """Returns the list of the most frequent words of several lists, whose counts are added up.

    Words that a full list lacks have no count of it. Raises a ValueError if one of them is no list.
    """
    counts: collections.Counter[str] = collections.Counter()
    for word_list in word_lists:
        counts.update(_parse_counts(word_list))
    return _write_list(counts)


def _write_list(counts: collections.Counter[str]) -> str:
    """Returns the list of the most frequent words, at most `MAX_WORDS`."""
    entries = _most_frequent(counts, MAX_WORDS)
    return ' '.join(f'{word}:{count}' for word, count in entries)


def parse(word_list: str) -> list[str]:
    """Returns the words of a list in its order; raises a ValueError if it is none."""
    return list(_parse_counts(word_list))


def _parse_counts(word_list: str) -> dict[str, int]:
    """Returns the words of a list with their counts, in its order; ValueError if it is none."""
    entries = word_list.split(' ') if word_list else []
    counts = {}
    # A list comes out of metadata that others wrote, and its words into messages.
    if all(map(_ENTRY.fullmatch, entries)):
        for entry in entries:
            word, _, count = entry.rpartition(':')
            counts[word] = int(count)
    # There are fewer words than entries if one is repeated, and none if an entry is wrong.
    if len(counts) < len(entries) or len(counts) > MAX_WORDS:
        raise ValueError(
            f'the list of words {word_list[:40]!r}: expected at most {MAX_WORDS:,} different words '
            "with their counts, as 'a:1200 red:412'"
        )
    return counts


def digest(word_list: str) -> str:
    """Returns the revision that names the ids of a list: equal lists number words alike."""
    hex_digest = hashlib.sha256(word_list.encode()).hexdigest()
    return f'2-{hex_digest[:16]}'


def _most_frequent(counts: collections.Counter[str], limit: int) -> list[tuple[str, int]]:
    # Ties in the order of the letters: the list must not depend on the order of the captions.
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]
