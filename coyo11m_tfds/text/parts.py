"""The parts of a sidecar: a pure function of captions, encoder and number of parts.

A part is a range of keys. It appears in its folder only when it is complete, and its metadata hold
everything that decides its contents. So parts need neither locks nor a clean-up: two processes that
make the same part write the same bytes.
"""

import concurrent.futures
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.process import errors, workers
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import keyed_parquet, sidecar
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.stored_file import StoredFile
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.text_encoders import Encoder, OnBatch, Tokenizer, WordsTokenizer

# Enough for batches of like length on several devices, few enough to lose little when a part is
# interrupted: an hour of Gemma-3-270M on a core. 42 MB of 640 numbers each.
PART_CAPTIONS = 32768

_CHECKED_AT_ONCE = 16


class SidecarParts:
    """The parts of a folder."""

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
        self._out, self._captions = out, captions
        self._encoder, self._tokens_only = encoder, tokens_only
        # Keys of all captions, int64 `(n,)`, ascending: here each key is its own place.
        self.keys = captions.places[captions.sizes > 0]
        self.count = -(-len(self.keys) // part_captions)
        header = sidecar.SidecarHeader(
            dim=encoder.max_tokens if tokens_only else cast(Encoder, encoder).dim,
            encoder=encoder.name,
            revision=encoder.revision,
            max_tokens=encoder.max_tokens,
            caption_column=caption_column,
            captions_digest=captions.facts['digest'],
            vocabulary=encoder.vocabulary if tokens_only else 0,
            words=encoder.words if isinstance(encoder, WordsTokenizer) else '',
        )
        self._metadata = header.to_metadata()
        if not tokens_only:
            self._metadata[schema.META_TEXT_POOLING] = cast(Encoder, encoder).pooling
            self._metadata[schema.META_TEXT_DTYPE] = cast(Encoder, encoder).dtype

    def keys_of(self, number: int) -> np.ndarray:
        """Returns the keys of a part, int64 `(n,)`, ascending."""
        bounds = [len(self.keys) * n // self.count for n in (number, number + 1)]
        return self.keys[slice(*bounds)]

    def finished(self) -> dict[int, StoredFile]:
        """Returns the parts in the folder by number."""
        count, files = sidecar.find_parts(self._out)
        if files and count != self.count:
            raise ValueError(
                f'{next(iter(files.values())).path}: is one of {format_count(count, "part")}, but '
                f'these captions make {format_count(self.count, "part")} here. Remove it, '
                'choose another folder, or give part_captions as it was.'
            )
        return files

    def check(self, finished: Mapping[int, StoredFile]) -> None:
        """Checks that this run would make the same finished parts."""

        def check_one(number: int) -> None:
            file = finished[number]
            stored = keyed_parquet.read_schema(file).metadata or {}
            metadata = {key.decode(): value.decode() for key, value in stored.items()}
            expected = self._metadata_of(number)
            errors.check_same_entries(expected, metadata, file.path, 'is what this command makes')

        with concurrent.futures.ThreadPoolExecutor(_CHECKED_AT_ONCE) as threads:
            list(threads.map(check_one, finished))

    def make(self, numbers: Sequence[int], staging: str, on_batch: OnBatch) -> int:
        """Makes and stores parts; returns the largest number of token ids, 0 for embeddings.

        `staging` is a local folder, in a local `out`, for the part that is being written.
        """
        folder = storage.open_folder(self._out, to_write=True)
        path, longest = os.path.join(staging, 'part'), 0
        # The tokens of the next part are made while the model works on this one.
        tokenized = workers.map_ahead(self._tokenize, numbers, num_threads=1, ahead=2)
        with contextlib.closing(tokenized):
            for number, (texts, tokens, rows) in tokenized:
                if self._tokens_only:
                    longest = max(longest, *map(len, tokens))
                    values = text_encoders.pad(tokens, self._encoder.max_tokens)
                    on_batch(len(values), sum(map(len, tokens)))
                else:
                    values = self._encode(texts, tokens, on_batch)
                # Captions that repeat another count as encoded, too.
                on_batch(len(rows) - len(values), 0)
                column = schema.TOKENS if self._tokens_only else schema.PART_EMBEDDING
                keys, metadata = self.keys_of(number), self._metadata_of(number)
                sidecar.write_sidecar(path, keys, values[rows], column, metadata)
                name = sidecar.part_name(number, self.count)
                folder.store(path, name, file_state.compute_state(path).crc32c)
        return longest

    def _tokenize(self, number: int) -> tuple[list[str], Sequence[Sequence[Any]], np.ndarray]:
        """Distinct texts of a part, their tokens, and the index of the text of each caption."""
        index_of_text: dict[bytes, int] = {}
        captions = self._captions.read(self.keys_of(number))
        index = [index_of_text.setdefault(text, len(index_of_text)) for text in captions]
        texts = [text.decode() for text in index_of_text]
        return texts, self._encoder.tokenize(texts), np.array(index, np.int64)

    def _encode(
        self, texts: list[str], tokens: Sequence[Sequence[Any]], on_batch: OnBatch
    ) -> np.ndarray:
        # Numbers that are too large become infinite, which is refused below.
        with np.errstate(over='ignore'):
            embeddings = cast(Encoder, self._encoder).encode_tokens(tokens, on_batch)
            values = embeddings.astype(np.float16)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise ValueError(
                f'{self._encoder.name}: the embedding of the caption {texts[bad[0]][:100]!r} '
                'exceeds the range of float16; use another encoder or leave the caption out.'
            )
        return values

    def _metadata_of(self, number: int) -> dict[str, str]:
        """Everything that decides the contents of a part."""
        return {**self._metadata, schema.META_PART: f'{number} of {self.count}'}
