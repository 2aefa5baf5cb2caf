"""Encodes captions into embeddings or token ids, for a build.

    python -m coyo11m_tfds.embed_captions --source SOURCE \\
        --encoder jax:Qwen/Qwen3-0.6B --out gs://BUCKET/qwen
    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT \\
        --config='{"name": "qwen", "text_embeddings": "gs://BUCKET/qwen"}'

OUT is a folder, local or on gs://, that receives parts `part-00000-of-00700.parquet`. A part has
the columns `key` (int64, ascending, unique) and `embedding` (FixedSizeList<float16>[D]) or, with
`--tokens_only`, `tokens` (FixedSizeList<int32>[max_tokens], padded with -1).

The same command resumes an interrupted run: it keeps existing parts, and refuses parts of another
encoder or of other captions. Several processes, on one machine or on many, share the work in a job
of `torchrun`, `srun` or `mpirun`, or with `--part 0/4` to `--part 3/4`; those of a machine take its
GPUs in turn. If one ends early, the same command makes the missing parts.

Captions that are null, blank, no UTF-8 or longer than 65,536 bytes get no row. SOURCE may be local,
on gs:// or on hf://.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import add_caption_flags
from coyo11m_tfds.dataset import word_list
from coyo11m_tfds.process import arguments, command_line, errors
from coyo11m_tfds.process import job as ranks
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import sidecar, source_folder
from coyo11m_tfds.source.captions import CaptionFiles, check_unique_captions, join_texts
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage import stored_file
from coyo11m_tfds.storage.scratch import Scratch, check_out, scratch_folder, user_cache
from coyo11m_tfds.text import parts, text_encoders
from coyo11m_tfds.text.parts import SidecarParts
from coyo11m_tfds.text.protocols import Encoder, Tokenizer
from coyo11m_tfds.text.text_encoders import DEFAULT_MAX_TOKENS, WordsTokenizer

_CAPTIONS_AT_ONCE = 32768  # read from the sorted ones: some MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedSettings:
    """Which captions are encoded, and how; a ValueError for a value of another type or of nothing.

    Attributes:
        caption_column, captions, key_column: As in the config of a build.
        latents_from: As in the config of a build, for captions next to the latents of a source that
            needs it there.
        by_columns: Whether to fetch only the columns of keys and captions of large remote files,
            which no checksum of the storage covers.
        drop_duplicates: Whether to take the first of several rows with one key; else they are an
            error.
        tokens_only: Whether to write token ids instead of embeddings.
        max_tokens: Length to which captions are cut, in tokens; not for `hash`. None: 512 or, for
            `words`, as many as the longest caption has, at most 512.
        batch_tokens: See `text_encoders.make_encoder`.
        part_captions: Largest number of captions in a part. Another number needs another folder.
        scratch_dir: Local folder for the captions; '': a folder in the output or, if that is
            remote, in the user's cache.
    """

    caption_column: str = schema.DEFAULT_CAPTION_COLUMN
    captions: str = ''
    key_column: str = ''
    latents_from: str = ''
    by_columns: bool = False
    drop_duplicates: bool = False
    tokens_only: bool = False
    max_tokens: int | None = None
    batch_tokens: int | None = None
    part_captions: int = parts.PART_CAPTIONS
    scratch_dir: str | os.PathLike[str] = ''

    def __post_init__(self):
        # Before the rules, which compare numbers.
        arguments.convert_fields(self)
        positive = errors.at_least(1)
        positive.check('part_captions', self.part_captions)
        if self.batch_tokens is not None:
            positive.check('batch_tokens', self.batch_tokens)


@dataclasses.dataclass(frozen=True)
class EmbeddingReport:
    """The outcome of `embed`."""

    num_captions: int  # that this run encoded
    num_kept: int  # captions in parts that existed before
    num_skipped: int  # rows without a caption (null, blank, too long or no UTF-8)
    num_duplicates: int  # rows left out because an earlier row has their key
    num_truncated: int  # captions that this run cut to the length limit
    longest: int  # most token ids of a caption of this run; 0 for embeddings
    missing_parts: tuple[str, ...]  # names of the parts that other processes have to make
    encoder: str
    dim: int  # width of an embedding, or number of token ids of a caption
    seconds: float  # for encoding and writing, without sorting captions

    def __str__(self) -> str:
        kept = ''
        if self.num_kept:
            kept = f', {format_count(self.num_kept, "was", "were")} there already'
        advice = ''
        # Token ids are padded to one length, which takes room.
        if 0 < self.longest < self.dim and not self.num_truncated:
            advice = (
                f'; the longest has {format_count(self.longest, "token")}, so that '
                f'--max_tokens={self.longest} keeps all of them in '
                f'{self.longest / self.dim:.0%} of the room'
            )
        skipped = format_count(self.num_skipped, 'null, blank, too long or unreadable one')
        return (
            f'{format_count(self.num_captions, "caption")} encoded by {self.encoder}, '
            f'{format_count(self.dim, "number")} each '
            f'({self.num_captions / self.seconds:.0f} captions/s){kept}; '
            f'{skipped} and {format_count(self.num_duplicates, "duplicate")} skipped, '
            f'{self.num_truncated} truncated{advice}'
            f'{ranks.describe_missing_parts(self.missing_parts)}'
        )


def embed(
    source_dir: str | os.PathLike[str],
    encoder: str | Encoder,
    out: str | os.PathLike[str],
    settings: EmbedSettings | None = None,
    *,
    share: tuple[int, int] = (0, 1),
) -> EmbeddingReport:
    """Encodes the captions of a source, except those of existing parts, and writes the sidecar.

    It first sorts the captions by key on disk, in a hidden folder of the size of the captions, and
    so needs only 100 bytes of memory a row. Hashed words and token ids are equal on all machines;
    embeddings of a model are equal on equal devices.

    Args:
        source_dir: Folder of the source, local, on `gs://` or on `hf://`; without latents if the
            captions are in Parquet files.
        encoder: A specification for `text_encoders.make_encoder` or, for token ids, for
            `text_encoders.make_tokenizer`; or an encoder.
        out: A folder, local or on `gs://`.
        settings: By default those of `EmbedSettings`.
        share: `(i, n)` to make only the parts i, i + n, i + 2n, ...

    Raises:
        ValueError: A wrong argument, repeated keys, no caption to encode, or parts in `out` of
            another encoding or of other captions.
        OSError: A folder cannot be read or written.
    """
    settings = settings or EmbedSettings()
    out = storage.expand_home(out).rstrip('/')
    # Whatever can be refused at once is refused before captions are fetched.
    ranks.check_share(share)
    check_out(out, settings.scratch_dir)
    source = _SourceCaptions(storage.expand_home(source_dir).rstrip('/'), settings)
    # An encoder takes seconds to load, captions minutes to fetch.
    model = _make_model(encoder, settings)
    parts.check_encoder(out, model)
    with scratch_folder(out, settings.scratch_dir) as folder:
        captions = source.sort_by_key(folder)
        if not settings.drop_duplicates:
            check_unique_captions(captions, source.place)
        if isinstance(model, WordsTokenizer):
            model = _fit_words(model, captions, settings)
        # After the words are counted, because every part records the list.
        sidecar_parts = SidecarParts(
            out,
            captions,
            model,
            source.caption_column,
            settings.part_captions,
            settings.tokens_only,
        )
        if not sidecar_parts.count:
            raise ValueError(
                f'{source.place}: all captions ({len(captions.places)}) are null, blank, too long '
                'or unreadable; nothing to encode.'
            )
        # Encoding alone: the time of sorting says nothing about the encoder.
        start = time.perf_counter()
        made = _make_parts(sidecar_parts, share, folder)
        # Listed again: meanwhile other processes have made parts.
        finished = sidecar_parts.finished()
        missing_parts = []
        for number in range(sidecar_parts.count):
            if number not in finished:
                missing_parts.append(sidecar.part_name(number, sidecar_parts.count))
    return EmbeddingReport(
        num_captions=made.num_captions,
        num_kept=made.num_kept,
        num_skipped=len(captions.places) - len(sidecar_parts.keys),
        num_duplicates=captions.facts['duplicates'],
        num_truncated=model.truncated,
        longest=made.longest,
        missing_parts=tuple(missing_parts),
        encoder=model.name,
        dim=sidecar_parts.dim,
        seconds=time.perf_counter() - start,
    )


class _SourceCaptions:
    """The captions of a source, in Parquet files or next to its latents."""

    place: str  # for messages: the folder of the source, or of the files
    caption_column: str

    def __init__(self, source_dir: str, settings: EmbedSettings):
        """Finds the captions and reads schemas; ValueError for a source without such captions."""
        files = source_folder.find_captions(source_dir, settings.captions).values()
        self._by_columns = settings.by_columns
        self._files = CaptionFiles.choose(files, settings.key_column, settings.caption_column)
        self.caption_column = self._files.caption_column
        # Without files of captions, they are in the files of latents.
        self._latents: source_folder.SourceFolder | None = None
        if files:
            self.place = stored_file.common_path(self._files.files)
        else:
            self.place = source_dir
            self._latents = source_folder.find_source(source_dir)
            self._latents_from = schema.parse_latents_from(
                settings.latents_from, settings.key_column
            )

    def sort_by_key(self, folder: str) -> KeyedValues:
        """Returns the captions sorted by key, in sub-folders of a local folder."""
        by_key = os.path.join(folder, 'captions')
        if self._latents:
            self._sort_texts_of_latents(self._latents, folder, by_key)
        else:
            downloads = Scratch(os.path.join(folder, 'source'))
            self._files.join(by_key, downloads, by_columns=self._by_columns)
        return KeyedValues(by_key)

    def _sort_texts_of_latents(
        self, source: source_folder.SourceFolder, folder: str, by_key: str
    ) -> None:
        """Reads the captions that lie with latents, and sorts them by key into `by_key`."""
        # Here, because it needs torch, and captions in Parquet files do not.
        from coyo11m_tfds.source import source_latents

        heads = os.path.join(folder, 'heads')
        os.mkdir(heads)
        options = source_latents.SourceOptions(
            latents=self._latents_from,
            captions=self.caption_column,
            no_captions=source.no_captions,
            drop_bad=True,
        )
        texts = source_latents.SourceLatents.read(source.latent_files, heads, options).texts
        join_texts({source.root: texts.captions}, texts.COLUMN, by_key)
        self.caption_column = texts.caption_column


def _make_model(encoder: str | Encoder, settings: EmbedSettings) -> Tokenizer:
    """Returns the encoder or, for token ids, the tokenizer that a specification names."""
    if not isinstance(encoder, str):
        return encoder
    # Of `words`, the longest caption decides later, see `_fit_words`.
    max_tokens = settings.max_tokens
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    if not settings.tokens_only:
        return text_encoders.make_encoder(encoder, max_tokens, settings.batch_tokens)
    if encoder == schema.LABELS:
        raise ValueError(
            f'the encoder {encoder!r} makes no sidecar: a build makes its tokens, with '
            f'"text_embeddings": "{schema.LABELS}" in the config.'
        )
    spec, words = _find_words(encoder, settings)
    return text_encoders.make_tokenizer(spec, max_tokens, words)


def _fit_words(
    model: WordsTokenizer, captions: KeyedValues, settings: EmbedSettings
) -> WordsTokenizer:
    """Returns a tokenizer with a list of words, and with room for the longest caption."""
    has_length = settings.max_tokens is not None
    # Nothing is left to find out, so the captions need not be read.
    if model.words and has_length:
        return model
    # Every process counts the words of all captions, so all number them alike.
    words, longest = text_encoders.measure_words(_read_captions(captions))
    max_tokens = model.max_tokens
    if not has_length:
        # A model computes something for each place that is only padding, too.
        max_tokens = min(max(1, longest), max_tokens)
    return WordsTokenizer(max_tokens, model.words or words)


def _find_words(encoder: str, settings: EmbedSettings) -> tuple[str, str]:
    """Returns the encoder, and for `words:SIDECAR,words:SIDECAR` the list of their words."""
    spec, colon, places = encoder.partition(':')
    if spec != schema.WORDS or not colon:
        return encoder, ''
    # Not at each comma, which a path may hold.
    lists = [_read_words(place, settings) for place in places.split(f',{schema.WORDS}:')]
    return spec, word_list.merge_lists(lists)


def _read_words(place: str, settings: EmbedSettings) -> str:
    """Returns the list of words of a sidecar; raises a ValueError if it has none."""
    # Every part has the list of all words.
    first, *_ = sidecar.find_sidecar_files(place)
    # A remote part is fetched for it.
    scratch = Scratch(settings.scratch_dir or user_cache(schema.NAME, 'words'))
    with scratch.hold(first) as path:
        header = sidecar.describe_values(path)['header']
    words = header.get('words', '')
    if not words:
        raise ValueError(f'{place}: holds no list of words, expected a sidecar of --encoder=words')
    return words


def _read_captions(captions: KeyedValues) -> Iterator[str]:
    """Yields all captions in the order of their keys."""
    # What has no bytes is null, blank or unreadable, and is not encoded either.
    has_caption = captions.sizes > 0
    keys = captions.places[has_caption]
    for start in range(0, len(keys), _CAPTIONS_AT_ONCE):
        keys_of_slice = keys[start : start + _CAPTIONS_AT_ONCE]
        for text in captions.read(keys_of_slice):
            yield text.decode()


class _MadeParts(NamedTuple):
    """What a process has made of its share of the parts."""

    num_captions: int  # in parts that were made
    num_kept: int  # in parts that existed before
    longest: int  # most token ids of a caption; 0 for embeddings


def _make_parts(sidecar_parts: SidecarParts, share: tuple[int, int], staging: str) -> _MadeParts:
    """Makes the parts of a share that are missing; `staging` is a local folder."""
    # All parts of the folder have to be of one making, also those of other processes.
    finished = sidecar_parts.finished()
    sidecar_parts.check(finished)
    missing = []
    num_captions = 0
    num_kept = 0
    index, count = share
    for number in range(index, sidecar_parts.count, count):
        num_captions_of_part = len(sidecar_parts.keys_of(number))
        if number in finished:
            num_kept += num_captions_of_part
        else:
            missing.append(number)
            num_captions += num_captions_of_part
    logging.info('parts to make: %d', len(missing))
    # Of this share alone: what other processes make is not waited for.
    with Progress('Embedding', num_captions + num_kept, 'captions') as progress:
        if num_kept:
            progress.skip(num_kept)

        def count_batch(num_captions: int, num_tokens: int) -> None:
            """Counts a batch that has been encoded."""
            progress.add(num_captions, tokens=num_tokens)

        longest = sidecar_parts.make(missing, staging, count_batch)
    return _MadeParts(num_captions, num_kept, longest)


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.embed_captions', __doc__)
    add = parser.add_argument
    add('--source', required=True, help='folder of the source, local, gs:// or hf://')
    add('--out', required=True, help='folder to fill, local or gs://')
    hint = (
        'hash (the default), hf:NAME or jax:NAME, where NAME is a folder or a name on the hub; '
        'with --tokens_only not hash, but also words, words:SIDECAR with the words of another, or '
        'words:A,words:B with those of several'
    )
    add('--encoder', default='hash', help=hint)
    add_caption_flags(parser)
    hint = 'fetch only the columns of keys and captions of remote files'
    add('--by_columns', action='store_true', help=hint)
    add('--drop_duplicates', action='store_true', help='take the first row of a repeated key')
    add('--tokens_only', action='store_true', help='write token ids instead of embeddings')
    hint = (
        f'length to which captions are cut, in tokens ({DEFAULT_MAX_TOKENS}; of words as many as '
        'the longest caption has); not for hash'
    )
    add('--max_tokens', type=int, help=hint)
    hint = 'most tokens in a forward pass, by default chosen for the device; fewer take less memory'
    add('--batch_tokens', type=int, help=hint)
    ranks.add_share_flag(parser)
    hint = 'most captions of a part (%(default)s)'
    add('--part_captions', type=int, default=parts.PART_CAPTIONS, help=hint)
    add('--scratch_dir', default='', help='local folder for temporary files (in a local OUT)')
    add('--latents_from', default='', help='latents to read, as in the config of a build')
    options = vars(parser.parse_args())
    command_line.show_log()
    with command_line.ends_in_one_line('the same command resumes it'):
        share = options.pop('part') or ranks.index_and_count()
        source = options.pop('source')
        encoder = options.pop('encoder')
        out = options.pop('out')
        # What is left has the names of the fields.
        report = embed(source, encoder, out, EmbedSettings(**options), share=share)
        command_line.print_lines(f'{report}: {out}')


if __name__ == '__main__':
    main()
