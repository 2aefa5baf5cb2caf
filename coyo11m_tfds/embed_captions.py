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
from typing import cast

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.convert.build_settings import add_caption_flags
from coyo11m_tfds.process import command_line, errors
from coyo11m_tfds.process import job as ranks
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import sidecar, source_folder
from coyo11m_tfds.source.captions import CaptionFiles, check_unique_captions, join_texts
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage import stored_file
from coyo11m_tfds.storage.scratch import Scratch, check_out, scratch_folder
from coyo11m_tfds.text import parts, text_encoders
from coyo11m_tfds.text.text_encoders import (
    DEFAULT_MAX_TOKENS,
    Encoder,
    Tokenizer,
    WordsTokenizer,
)

_CAPTIONS_AT_ONCE = 32768


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
        if 0 < self.longest < self.dim and not self.num_truncated:
            advice = (
                f'; the longest has {format_count(self.longest, "token")}, so that '
                f'--max_tokens={self.longest} keeps all of them in '
                f'{self.longest / self.dim:.0%} of the room'
            )
        return (
            f'{format_count(self.num_captions, "caption")} encoded by {self.encoder}, '
            f'{format_count(self.dim, "number")} each '
            f'({self.num_captions / self.seconds:.0f} captions/s){kept}; '
            f'{format_count(self.num_skipped, "null, blank, too long or unreadable one")} and '
            f'{format_count(self.num_duplicates, "duplicate")} skipped, '
            f'{self.num_truncated} truncated{advice}'
            f'{ranks.describe_missing_parts(self.missing_parts)}'
        )


def embed(
    source_dir: str | os.PathLike[str],
    encoder: str | Encoder,
    out: str | os.PathLike[str],
    caption_column: str = schema.DEFAULT_CAPTION_COLUMN,
    *,
    drop_duplicates: bool = False,
    tokens_only: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    batch_tokens: int | None = None,
    share: tuple[int, int] = (0, 1),
    part_captions: int = parts.PART_CAPTIONS,
    scratch_dir: str | os.PathLike[str] = '',
    captions: str = '',
    key_column: str = '',
    latents_from: str = '',
) -> EmbeddingReport:
    """Encodes the captions of a source, except those of existing parts, and writes the sidecar.

    It first sorts the captions by key on disk, in a hidden folder of the size of the captions, and
    so needs only 100 bytes of memory a row. Hashed words and token ids are equal on all machines;
    embeddings of a model are equal on equal devices.

    Args:
        source_dir: Folder of the source, local, on `gs://` or on `hf://`; without latents if the
            captions are in Parquet files.
        encoder: A specification for `text_encoders.make_encoder` or, with `tokens_only`, for
            `text_encoders.make_tokenizer`; or an encoder.
        out: A folder, local or on `gs://`.
        caption_column, captions, key_column: As in the config of a build.
        drop_duplicates: Whether to take the first of several rows with one key; else they are an
            error.
        max_tokens: Length to which captions are cut, in tokens; not for `hash`.
        batch_tokens: See `text_encoders.make_encoder`.
        share: `(i, n)` to make only the parts i, i + n, i + 2n, ...
        part_captions: Largest number of captions in a part. Another number needs another folder.
        scratch_dir: Local folder for the captions; '': a folder in `out` or, if that is remote, in
            the user's cache.
        latents_from: As in the config of a build, for captions next to the latents of a source that
            needs it there.
    """
    out = os.fspath(out).rstrip('/')
    source = os.fspath(source_dir).rstrip('/')
    # Whatever can be refused at once is refused before captions are fetched.
    files = source_folder.find_captions(source, captions).values()
    tables = CaptionFiles.choose(files, key_column, caption_column)
    latents = None if files else source_folder.find_source(source)
    ranks.check_share(share)
    check_out(out)
    errors.at_least(1).check('part_captions', part_captions)
    model: Tokenizer
    if not isinstance(encoder, str):
        model = encoder
    elif tokens_only:
        spec, words = _find_words(encoder)
        model = text_encoders.make_tokenizer(spec, max_tokens, words)
    else:
        model = text_encoders.make_encoder(encoder, max_tokens, batch_tokens)
    with scratch_folder(out, scratch_dir) as folder:
        by_key, caption_column = os.path.join(folder, 'captions'), tables.caption_column
        if latents:
            options = schema.parse_latents_from(latents_from, key_column)
            caption_column = _sort_captions_of_latents(
                latents, caption_column, options, folder, by_key
            )
        else:
            source = stored_file.common_path(tables.files)
            tables.join(by_key, Scratch(os.path.join(folder, 'source')))
        values = KeyedValues(by_key)
        if not drop_duplicates:
            check_unique_captions(values, source)
        if isinstance(model, WordsTokenizer) and not model.words:
            # Every process counts the words of all captions, so all number them alike.
            words = text_encoders.list_words(_read_captions(values))
            model = WordsTokenizer(max_tokens, words)
        sidecar_parts = parts.SidecarParts(
            out, values, model, caption_column, part_captions, tokens_only
        )
        if not sidecar_parts.count:
            raise ValueError(
                f'{source}: all captions ({len(values.places)}) are null, blank, too long or '
                'unreadable; nothing to encode.'
            )
        start = time.perf_counter()
        # All parts of the folder have to be of one making, also those of other processes.
        finished = sidecar_parts.finished()
        sidecar_parts.check(finished)
        numbers = range(sidecar_parts.count)[share[0] :: share[1]]
        missing = [number for number in numbers if number not in finished]
        num_captions, num_all = (
            sum(len(sidecar_parts.keys_of(number)) for number in x) for x in (missing, numbers)
        )
        logging.info('parts to make: %d', len(missing))
        with Progress('Embedding', num_all, 'captions') as progress:
            if num_all > num_captions:
                progress.skip(num_all - num_captions)
            longest = sidecar_parts.make(
                missing,
                folder,
                on_batch=lambda count, num_tokens: progress.add(count, tokens=num_tokens),
            )
        # Listed again: meanwhile other processes have made parts.
        missing = sorted({*range(sidecar_parts.count)} - sidecar_parts.finished().keys())
    return EmbeddingReport(
        num_captions=num_captions,
        num_kept=num_all - num_captions,
        num_skipped=len(values.places) - len(sidecar_parts.keys),
        num_duplicates=values.facts['duplicates'],
        num_truncated=model.truncated,
        longest=longest,
        missing_parts=tuple(sidecar.part_name(number, sidecar_parts.count) for number in missing),
        encoder=model.name,
        dim=model.max_tokens if tokens_only else cast(Encoder, model).dim,
        seconds=time.perf_counter() - start,
    )


def _find_words(encoder: str) -> tuple[str, str]:
    """The encoder, and for `words:SIDECAR` the list of words of that sidecar."""
    spec, colon, place = encoder.partition(':')
    if spec != schema.WORDS or not colon:
        return encoder, ''
    first, *_ = sidecar.find_sidecar_files(place)
    with scratch_folder(os.getcwd(), '') as folder, Scratch(folder).hold(first) as path:
        words = sidecar.describe_values(path)['header'].get('words', '')
    if not words:
        raise ValueError(f'{place}: holds no list of words, expected a sidecar of --encoder=words')
    return spec, words


def _read_captions(values: KeyedValues) -> Iterator[str]:
    """Yields all captions in the order of their keys."""
    places = values.places[values.sizes > 0]
    for start in range(0, len(places), _CAPTIONS_AT_ONCE):
        for text in values.read(places[start : start + _CAPTIONS_AT_ONCE]):
            yield text.decode()


def _sort_captions_of_latents(
    source: source_folder.SourceFolder,
    column: str,
    latents: schema.LatentsFrom,
    folder: str,
    by_key: str,
) -> str:
    """Sorts the captions next to the latents by key; returns their column."""
    from coyo11m_tfds.source import source_latents  # needs torch

    heads = os.path.join(folder, 'heads')
    os.mkdir(heads)
    options = source_latents.SourceOptions(
        latents=latents, captions=column, no_captions=source.no_captions, drop_bad=True
    )
    texts = source_latents.SourceLatents.read(source.latent_files, heads, options).texts
    join_texts({source.root: texts.captions}, texts.COLUMN, by_key)
    return texts.caption_column


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.embed_captions', __doc__)
    add = parser.add_argument
    add('--source', required=True, help='folder of the source, local, gs:// or hf://')
    add('--out', required=True, help='folder to fill, local or gs://')
    hint = 'hash (the default), hf:NAME or jax:NAME, where NAME is a folder or a name on the hub; '
    hint += (
        'with --tokens_only not hash, but also words, or words:SIDECAR with the words of another'
    )
    add('--encoder', default='hash', help=hint)
    add_caption_flags(parser)
    add('--drop_duplicates', action='store_true', help='take the first row of a repeated key')
    add('--tokens_only', action='store_true', help='write token ids instead of embeddings')
    hint = 'length to which captions are cut, in tokens (%(default)s); not for hash'
    add('--max_tokens', type=int, default=DEFAULT_MAX_TOKENS, help=hint)
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
        part, source = options.pop('part'), options.pop('source')
        report = embed(source, share=part or ranks.index_and_count(), **options)
        command_line.print_lines(f'{report}: {options["out"]}')


if __name__ == '__main__':
    main()
