"""The parts of a sidecar: a pure function of captions, encoder and number of parts.

A part is a range of keys. It appears in its folder only when it is complete, and its metadata hold
everything that decides its contents. So parts need neither locks nor a clean-up: two processes that
make the same part write the same bytes.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.process import errors, workers
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source import keyed_parquet, sidecar
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.stored_file import StoredFile
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.protocols import Encoder, OnBatch, Tokenizer
from coyo11m_tfds.text.text_encoders import WordsTokenizer

# Enough for batches of like length on several devices, few enough to lose little when a part is
# interrupted: an hour of Gemma-3-270M on a core. 42 MB of 640 numbers each.
PART_CAPTIONS = 32768

_CHECKED_AT_ONCE = 16
_ORIGIN = 'is what this command makes'  # of what is expected of finished parts


class _TokenizedPart(NamedTuple):
    """The captions of a part, of which equal ones are encoded once."""

    texts: list[str]  # distinct captions
    tokens: Sequence[Sequence[Any]]  # of each text
    text_numbers: np.ndarray  # the text of each caption, int64 `(n,)`


def check_encoder(out: str, encoder: Tokenizer) -> None:
    """Raises a ValueError if the parts in a folder are of another encoder; needs no captions."""
    _, finished = sidecar.find_parts(out)
    if not finished:
        return
    expected = {schema.META_TEXT_ENCODER: encoder.name}
    # That of words is known when those of all captions are counted.
    if not isinstance(encoder, WordsTokenizer):
        expected[schema.META_TEXT_REVISION] = encoder.revision
    # One part stands for all, which are compared later.
    file = next(iter(finished.values()))
    metadata = _read_metadata(file)
    stored = {entry: metadata.get(entry) for entry in expected}
    errors.check_same_entries(expected, stored, file.path, _ORIGIN)


def _read_metadata(file: StoredFile) -> dict[str, str]:
    """Returns the metadata of a part."""
    metadata = {}
    # Those of others need not be UTF-8.
    for key, value in (keyed_parquet.read_schema(file).metadata or {}).items():
        metadata[foreign_text.decode_utf8(key)] = foreign_text.decode_utf8(value)
    return metadata


class SidecarParts:
    """The parts of a folder, of which this process makes some."""

    def __init__(
        self,
        out: str,
        captions: KeyedValues,
        encoder: Encoder | Tokenizer,
        caption_column: str,
        part_captions: int = PART_CAPTIONS,
        tokens_only: bool = False,
    ):
        """Takes the `captions.join_texts` of all keys; does not touch the folder `out`.

        `encoder` may be a tokenizer with `tokens_only`. A part has at most `part_captions`.
        """
        self._out = out
        self._captions = captions
        self._encoder = encoder
        self._tokens_only = tokens_only
        # Keys of all captions, int64 `(n,)`, ascending: here each key is its own place.
        self.keys = captions.places[captions.sizes > 0]
        self.count = -(-len(self.keys) // part_captions)  # rounded up
        # Width of an embedding, or number of token ids of a caption.
        self.dim = encoder.max_tokens if tokens_only else cast(Encoder, encoder).dim
        header = sidecar.SidecarHeader(
            dim=self.dim,
            encoder=encoder.name,
            revision=encoder.revision,
            max_tokens=encoder.max_tokens,
            caption_column=caption_column,
            captions_digest=captions.facts['digest'],
            vocabulary=encoder.vocabulary if tokens_only else 0,
            words=encoder.words if isinstance(encoder, WordsTokenizer) else '',
        )
        self._metadata = header.to_metadata()
        # Token ids depend on neither.
        if not tokens_only:
            self._metadata[schema.META_TEXT_POOLING] = cast(Encoder, encoder).pooling
            self._metadata[schema.META_TEXT_DTYPE] = cast(Encoder, encoder).dtype

    def keys_of(self, number: int) -> np.ndarray:
        """Returns the keys of a part, int64 `(n,)`, ascending."""
        # Parts differ by one key at most: no last one is small.
        start = len(self.keys) * number // self.count
        end = len(self.keys) * (number + 1) // self.count
        return self.keys[start:end]

    def finished(self) -> dict[int, StoredFile]:
        """Returns the parts in the folder by number; ValueError for another number of parts."""
        count, files = sidecar.find_parts(self._out)
        if files and count != self.count:
            first_file = next(iter(files.values()))
            raise ValueError(
                f'{first_file.path}: is one of {format_count(count, "part")}, but '
                f'these captions make {format_count(self.count, "part")} here. Remove it, '
                'choose another folder, or give part_captions as it was.'
            )
        return files

    def check(self, finished: Mapping[int, StoredFile]) -> None:
        """Raises a ValueError for a finished part that this run would make otherwise."""

        def check_one(number: int) -> None:
            """Compares the metadata of a part with those that this run would write."""
            file = finished[number]
            metadata = _read_metadata(file)
            expected = self._metadata_of(number)
            errors.check_same_entries(expected, metadata, file.path, _ORIGIN)

        with ThreadPool(_CHECKED_AT_ONCE) as threads:
            # A list, because errors are raised where results are taken.
            list(threads.map(check_one, finished))

    def make(self, numbers: Sequence[int], staging: str, on_batch: OnBatch) -> int:
        """Makes and stores parts; returns the largest number of token ids, 0 for embeddings.

        `staging` is a local folder, in a local `out`, for the part that is being written. Raises a
        ValueError for embeddings that float16 cannot hold, and an OSError for a full disk.
        """
        folder = storage.open_writable_folder(self._out)
        longest = 0
        # The tokens of the next part are made while the model works on this one.
        tokenized_parts = workers.map_ahead(self._tokenize, numbers, num_threads=1, ahead=2)
        with contextlib.closing(tokenized_parts):
            for number, part in tokenized_parts:
                if self._tokens_only:
                    lengths = [len(ids) for ids in part.tokens]
                    longest = max(longest, *lengths)
                    values = text_encoders.pad(part.tokens, self._encoder.max_tokens)
                    on_batch(len(values), sum(lengths))
                else:
                    values = self._encode(part, on_batch)
                # Captions that repeat another count as encoded, too.
                on_batch(len(part.text_numbers) - len(values), 0)
                self._store(number, values[part.text_numbers], folder, staging)
        return longest

    def _tokenize(self, number: int) -> _TokenizedPart:
        """Reads the captions of a part, and returns the tokens of the different ones."""
        number_of_text: dict[bytes, int] = {}
        text_numbers = []
        for caption in self._captions.read(self.keys_of(number)):
            # The next number, unless the text has one already.
            text_number = number_of_text.setdefault(caption, len(number_of_text))
            text_numbers.append(text_number)
        texts = [text.decode() for text in number_of_text]
        tokens = self._encoder.tokenize(texts)
        return _TokenizedPart(texts, tokens, np.array(text_numbers, np.int64))

    def _encode(self, part: _TokenizedPart, on_batch: OnBatch) -> np.ndarray:
        """Returns the embeddings of a part's texts, float16 `(texts, dim)`."""
        # Numbers that are too large become infinite, which is refused below.
        with np.errstate(over='ignore'):
            embeddings = cast(Encoder, self._encoder).encode_tokens(part.tokens, on_batch)
            values = embeddings.astype(np.float16)
        are_finite = np.isfinite(values).all(axis=1)
        bad_texts = np.flatnonzero(~are_finite)
        if len(bad_texts):
            text = part.texts[bad_texts[0]]
            raise ValueError(
                f'{self._encoder.name}: the embedding of the caption {text[:100]!r} '
                'exceeds the range of float16; use another encoder or leave the caption out.'
            )
        return values

    def _store(self, number: int, values: np.ndarray, folder: WritableFolder, staging: str) -> None:
        """Stores a part with the values of its captions, in the order of their keys."""
        path = os.path.join(staging, 'part')
        column = schema.TOKENS if self._tokens_only else schema.PART_EMBEDDING
        keys = self.keys_of(number)
        sidecar.write_sidecar(path, keys, values, column, self._metadata_of(number))
        name = sidecar.part_name(number, self.count)
        state = file_state.compute_state(path)
        # Stored whole: in the folder, a part is complete or not there.
        folder.store(path, name, state.crc32c)

    def _metadata_of(self, number: int) -> dict[str, str]:
        """Returns everything that decides the contents of a part."""
        return {**self._metadata, schema.META_PART: f'{number} of {self.count}'}
