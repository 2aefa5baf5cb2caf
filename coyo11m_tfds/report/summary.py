"""Reports a build: a few lines for the terminal, `report.json`, and a page to look at.

    facts = BuildFacts(name='coyo11m_tfds/latents/1.0.0', ...)
    write(facts, folder)                   # report-ID.json and report-ID.html
    print(summary.summarize(facts, 'OUT/coyo11m_tfds/latents/1.0.0', seconds=12.3))

Their names have the ID of the build. Both files depend on nothing but what was built, so the same
build gives the same bytes.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.report import dropped_rows, report_page
from coyo11m_tfds.report.shard_statistics import (
    CAPTION_EDGES,
    LATENT_EDGES,
    Preview,
    ShardStatistics,
)

JSON_FILE = 'report.json'
PAGE_FILE = 'report.html'

NUM_PREVIEWS = 24
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the lengths of captions

_EXAMPLES_IN_SUMMARY = 3


@dataclasses.dataclass(frozen=True)
class BuildFacts:
    """The facts of a build.

    Attributes:
        name: of the data set, config and version, e.g. 'coyo11m_tfds/latents/1.0.0'.
        shards: `(records, bytes)` of each shard, by split.
        dropped: how many rows of the source were left out, by reason (`schema.DROP_REASONS`).
        dropped_keys: some of their keys, by reason.
        num_rows: rows of the `.pt` files.
        statistics: of the records, by split.
        previews: records to show.
        metadata: that of `dataset_info`, with the keys `schema.META_*`.
        in_place: whether the latents stay in the source.
    """

    name: str
    shards: dict[str, list[tuple[int, int]]]
    dropped: dict[str, int]
    dropped_keys: dict[str, list[int]]
    num_rows: int
    statistics: dict[str, ShardStatistics]
    previews: list[Preview]
    metadata: dict
    in_place: bool = False


def write(facts: BuildFacts, folder: str | os.PathLike[str]) -> None:
    """Writes `report.json` and `report.html` of a build into an existing local folder."""
    folder = pathlib.Path(folder)
    build = facts.metadata.get(schema.META_BUILD, '')
    content = to_json(facts)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + '\n'
    (folder / schema.of_build(JSON_FILE, build)).write_text(text, encoding='utf-8', newline='\n')
    page = report_page.render(content, facts.previews)
    (folder / schema.of_build(PAGE_FILE, build)).write_text(page, encoding='utf-8', newline='\n')


def to_json(facts: BuildFacts) -> dict:
    """Returns the content of `report.json`.

    A histogram has `edges` and `counts`. Counts of the latents are, for each channel, of values
    below the first edge, from each edge to the next, and from the last edge on; those of the
    captions from each edge on.
    """
    shards = [shard for of_split in facts.shards.values() for shard in of_split]
    return {
        'name': facts.name,
        **_totals(shards),
        'source_rows': facts.num_rows,
        'splits': {
            split: _totals(of_split) | _statistics(facts.statistics[split])
            for split, of_split in facts.shards.items()
        },
        'dropped': {
            reason: {'rows': count, 'example_keys': facts.dropped_keys.get(reason, [])}
            for reason, count in facts.dropped.items()
        },
        **{
            name: facts.metadata[name]
            for name in (
                schema.META_BUILD,
                schema.META_CAPTION_COLUMN,
                schema.META_LATENT_DTYPE,
                schema.META_TEXT_ENCODER,
                schema.META_TEXT_DIM,
                schema.META_TEXT_VOCABULARY,
                schema.META_SOURCE_FINGERPRINT,
            )
            if name in facts.metadata
        },
        **({'latents': 'in_place'} if facts.in_place else {}),
        'previews': [
            {'key': preview.key, 'caption': preview.caption} for preview in facts.previews
        ],
    }


def _totals(shards: Sequence[tuple[int, int]]) -> dict:
    return {
        'records': sum(records for records, _ in shards),
        'shards': len(shards),
        'bytes': sum(num_bytes for _, num_bytes in shards),
    }


def _statistics(statistics: ShardStatistics) -> dict:
    has_records = statistics.num_records > 0
    mean, std = statistics.latent_moments.mean_and_std() if has_records else (None, None)
    return {
        'caption_bytes': {
            'quantiles': quantiles(statistics.caption_histogram),
            'edges': CAPTION_EDGES.tolist(),
            'counts': statistics.caption_histogram.tolist(),
        },
        'latents': {
            'mean': mean,
            'std': std,
            'edges': LATENT_EDGES.tolist(),
            'counts': statistics.latent_histogram.tolist(),
        },
    }


def quantiles(caption_histogram: np.ndarray) -> dict[str, int] | None:
    """Returns quantiles of the captions' lengths in bytes, None if there is no caption.

    Lengths are taken as evenly spread within their bin, those in the last bin as its edge.
    """
    up_to = np.cumsum(caption_histogram)
    if not up_to[-1]:
        return None
    ranks = np.multiply(QUANTILES, up_to[-1])
    bins = np.searchsorted(up_to, ranks)
    inside = 1 - (up_to[bins] - ranks) / caption_histogram[bins]
    widths = np.append(np.diff(CAPTION_EDGES), 0)
    values = CAPTION_EDGES[bins] + inside * widths[bins]
    return {f'{share:g}': round(value) for share, value in zip(QUANTILES, values, strict=True)}


def choose_previews(previews: Sequence[Preview], count: int = NUM_PREVIEWS) -> list[Preview]:
    """Chooses at most `count`, evenly spaced."""
    count = min(count, len(previews))
    return [previews[number * len(previews) // count] for number in range(count)]


def summarize(facts: BuildFacts, folder: str, seconds: float) -> str:
    """Says in a few lines what was written, what was dropped and why, with examples of what is
    bad in the source (`dropped_rows.BAD`)."""
    lines = ['']
    for split, shards in facts.shards.items():
        lines.append(_line(split, shards))
    lines.append(_line('total', [shard for shards in facts.shards.values() for shard in shards]))
    counts = {reason: count for reason, count in facts.dropped.items() if count}
    num_rows = dropped_rows.num_latents(counts)
    of_captions = counts.pop(schema.DUPLICATE_CAPTION, 0)
    reasons = ', '.join(f'{reason}: {count:,}' for reason, count in counts.items())
    lines.append(f'dropped     {num_rows:,} rows' + (f' ({reasons})' if reasons else ''))
    if of_captions:
        lines.append(f'captions    {of_captions:,} rows repeat a key, the first of each is used')
    for reason in dropped_rows.BAD:
        if keys := facts.dropped_keys.get(reason):
            examples = ', '.join(map(str, keys[:_EXAMPLES_IN_SUMMARY]))
            lines.append(f'            {reason}, e.g. key {examples}')
    if facts.in_place:
        lines.append(f'latents     {schema.IN_PLACE_DOC}')
    lines.append(f'time        {seconds:,.1f} s')
    folder = folder if '://' in folder else os.path.abspath(folder)
    page = schema.of_build(PAGE_FILE, facts.metadata.get(schema.META_BUILD, ''))
    lines.append(f'report      {folder}/{page}')
    return '\n'.join(lines)


def _line(name: str, shards: Sequence[tuple[int, int]]) -> str:
    totals = _totals(shards)
    return (
        f'{name:10}  {totals["records"]:,} records in {totals["shards"]:,} '
        f'shard{"" if len(shards) == 1 else "s"}, {readable(totals["bytes"])}'
    )
