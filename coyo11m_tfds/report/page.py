"""The report of a build: lines for the terminal, `report.json`, and an HTML page.

The same build always gives the same bytes of both files. The page needs no script, no other file
and no network. Captions come from the open internet, so all text is escaped, and a policy in the
page forbids it to run code or to load anything except its own pictures.
"""

import html
import json
import os
import pathlib
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.report import statistics as stats
from coyo11m_tfds.report.statistics import Dropped, Preview, ShardStatistics

JSON_FILE = 'report.json'
PAGE_FILE = 'report.html'

NUM_PREVIEWS = 24
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the lengths of captions

_TEMPLATE = pathlib.Path(__file__).with_name('page.html')
_EXAMPLES, _EXAMPLES_IN_SUMMARY = 5, 3  # keys of each reason
_BEYOND = 0.001  # share of the values that an axis may leave out at each end
_TICKS = 5
_LINEAR = (
    'The middle crop of some records, with caption and key. A linear map turns latents into '
    'colours, one pixel for each position; <code>python -m coyo11m_tfds.show</code> writes this '
    'page with pictures that a VAE decodes.'
)
_TOLD = (
    schema.META_BUILD,
    schema.META_CAPTION_COLUMN,
    schema.META_LATENT_DTYPE,
    schema.META_VAE,
    schema.META_TEXT_ENCODER,
    schema.META_TEXT_DIM,
    schema.META_TEXT_VOCABULARY,
    schema.META_SOURCE_FINGERPRINT,
)


class BuildReport:
    """The report of a build.

    Args:
        name: Data set, config and version.
        shards: Records and bytes of each shard, by split.
        metadata: Metadata of `dataset_info`, with the keys `schema.META_*`.
        in_place: Whether the latents stay in the source.

    Attributes:
        content: Content of `report.json`; the counts of its histograms are as in `ShardStatistics`.
        previews: Records to show, evenly spaced.
    """

    def __init__(
        self,
        name: str,
        shards: Mapping[str, Sequence[tuple[int, int]]],
        statistics: Mapping[str, ShardStatistics],
        dropped: Dropped,
        metadata: Mapping[str, Any],
        in_place: bool = False,
    ):
        found = [preview for of_split in statistics.values() for preview in of_split.previews]
        count = min(NUM_PREVIEWS, len(found))
        self.previews = [found[number * len(found) // count] for number in range(count)]
        self._dropped = dropped
        self.content = {
            'name': name,
            **_totals([shard for of_split in shards.values() for shard in of_split]),
            'source_rows': dropped.num_rows,
            'splits': {
                split: _totals(of_split) | _histograms(statistics[split])
                for split, of_split in shards.items()
            },
            'dropped': {
                reason: {'rows': count, 'example_keys': dropped.examples.get(reason, [])}
                for reason, count in dropped.counts.items()
            },
            **{name: metadata[name] for name in _TOLD if name in metadata},
            **({'latents': 'in_place'} if in_place else {}),
            'previews': [{'key': each.key, 'caption': each.caption} for each in self.previews],
        }

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes `report-ID.json` and `report-ID.html` into an existing local folder."""
        text = json.dumps(self.content, indent=2, ensure_ascii=False, allow_nan=False) + '\n'
        for name, written in (JSON_FILE, text), (PAGE_FILE, self.page()):
            path = pathlib.Path(folder, self._of_build(name))
            path.write_text(written, encoding='utf-8', newline='\n')

    def summary(self, folder: str, seconds: float) -> str:
        """Returns some lines about written and dropped rows, with examples of bad rows."""
        lines = ['']
        for name, split in [*self.content['splits'].items(), ('total', self.content)]:
            plural = '' if split['shards'] == 1 else 's'
            lines.append(
                f'{name:10}  {split["records"]:,} records in {split["shards"]:,} shard{plural}, '
                f'{readable(split["bytes"])}'
            )
        counts = {reason: count for reason, count in self._dropped.counts.items() if count}
        repeated = counts.pop(schema.DUPLICATE_CAPTION, 0)
        reasons = ', '.join(f'{reason}: {count:,}' for reason, count in counts.items())
        lines.append(
            f'dropped     {self._dropped.num_latents:,} rows' + (f' ({reasons})' if reasons else '')
        )
        if repeated:
            lines.append(f'captions    {repeated:,} rows repeat a key, the first of each is used')
        for reason in stats.BAD:
            if keys := self._dropped.examples.get(reason):
                examples = ', '.join(map(str, keys[:_EXAMPLES_IN_SUMMARY]))
                lines.append(f'            {reason}, e.g. key {examples}')
        if 'latents' in self.content:
            lines.append(f'latents     {schema.IN_PLACE_DOC}')
        lines.append(f'time        {seconds:,.1f} s')
        folder = folder if '://' in folder else os.path.abspath(folder)
        return '\n'.join([*lines, f'report      {folder}/{self._of_build(PAGE_FILE)}'])

    def page(self) -> str:
        """Returns the HTML page."""
        return render_page(self.content, self.previews, _LINEAR)

    def _of_build(self, name: str) -> str:
        return schema.of_build(name, self.content.get(schema.META_BUILD, ''))


def render_page(content: Mapping[str, Any], previews: Sequence[Preview], note: str) -> str:
    """Returns the HTML page of a report.

    Args:
        content: Content of `report.json`.
        previews: Records to show.
        note: What their pictures show, in HTML.
    """
    train, dropped = content['splits'][schema.TRAIN], content['dropped']
    lost = stats.lost_latents({reason: entry['rows'] for reason, entry in dropped.items()})
    of = content['source_rows']
    lengths = train['caption_bytes']
    figures = {
        'records': f'{content["records"]:,}',
        'on disk': readable(content['bytes']),
        'shards': f'{content["shards"]:,}',
        'bytes in the median caption': _lengths(lengths).get('median', '0'),
        f'dropped of {of:,} rows ({lost / max(of, 1):.1%})': f'{lost:,}',
    }
    splits = [
        [_text(name), f'{of["records"]:,}', f'{of["shards"]:,}', readable(of['bytes'])]
        for name, of in [*content['splits'].items(), ('total', content)]
    ]
    return string.Template(_TEMPLATE.read_text(encoding='utf-8')).substitute(
        name=_text(content['name']),
        figures=_definitions('figures', figures),
        splits=_table(['Split', 'Records', 'Shards', 'Size'], splits),
        dropped=_dropped(dropped),
        note=note,
        samples=''.join(map(_figure, previews)),
        captions=_captions(lengths),
        latents=_latents(train['latents']),
        origin=_definitions('stats', _origin(content)),
    )


def quantiles(caption_histogram: np.ndarray) -> dict[str, int] | None:
    """Returns quantiles of the captions' lengths in bytes; None without captions.

    A quantile is the least length that at least its share of the captions does not exceed, or
    `stats.LONG_CAPTION` if that is less.
    """
    up_to = np.cumsum(caption_histogram)
    if not up_to[-1]:
        return None
    ranks = [-(-int(up_to[-1]) * round(100 * share) // 100) for share in QUANTILES]
    values = np.searchsorted(up_to, ranks).tolist()
    return {f'{share:g}': value for share, value in zip(QUANTILES, values, strict=True)}


def _binned(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges and counts of bins for a drawing, narrow where captions are short."""
    last = int(np.searchsorted(np.cumsum(lengths), (1 - _BEYOND) * lengths.sum()))
    edges = np.arange(0, len(lengths), min(16, 1 << max(0, last.bit_length() - 7)))
    return edges, np.add.reduceat(lengths, edges)


def _totals(shards: Sequence[tuple[int, int]]) -> dict[str, int]:
    records, sizes = (sum(shard[i] for shard in shards) for i in (0, 1))
    return {'records': records, 'shards': len(shards), 'bytes': sizes}


def _histograms(made: ShardStatistics) -> dict[str, Any]:
    mean, std = stats.mean_and_std(made.latent_moments) if made.num_records else (None, None)
    lengths, values = made.caption_histogram, made.latent_histogram
    edges, counts = _binned(lengths)
    captions = {'quantiles': quantiles(lengths), 'edges': edges.tolist()}
    latents = {'mean': mean, 'std': std, 'edges': stats.LATENT_EDGES.tolist()}
    return {
        'caption_bytes': captions | {'counts': counts.tolist()},
        'latents': latents | {'counts': values.tolist()},
    }


def _origin(content: Mapping[str, Any]) -> dict[str, str]:
    """What the data were made of, for the page."""
    latents, encoder = content[schema.META_LATENT_DTYPE], content.get(schema.META_TEXT_ENCODER)
    vocabulary, dim = map(content.get, (schema.META_TEXT_VOCABULARY, schema.META_TEXT_DIM))
    origin = {
        'Source fingerprint': content[schema.META_SOURCE_FINGERPRINT],
        'Captions': f'column {content[schema.META_CAPTION_COLUMN]}',
        'Latents': latents + (f', {schema.IN_PLACE_DOC}' if 'latents' in content else ''),
        'VAE': content.get(schema.META_VAE),
        'Tokens': vocabulary and f'{vocabulary} different ones of {encoder}',
        'Text embeddings': dim and f'{dim} numbers of {encoder}',
    }
    return {name: value for name, value in origin.items() if value}


def _dropped(dropped: Mapping[str, Mapping[str, Any]]) -> str:
    rows, others = [], []
    for reason, entry in dropped.items():
        if not entry['rows']:
            others.append(f'<code>{_text(reason)}</code>')
            continue
        keys = ', '.join(f'<code>{key}</code>' for key in entry['example_keys'][:_EXAMPLES])
        meaning = _text(schema.DROP_REASONS.get(reason, ''))
        words = f'<code>{_text(reason)}</code> {meaning}<small>e.g. {keys}</small>'
        rows.append([words, f'{entry["rows"]:,}'])
    table = _table(['Reason', 'Rows'], rows) if rows else ''
    none = f'<p class="note">Looked for, but not found: {", ".join(others)}.</p>' if others else ''
    return table + none


def _figure(preview: Preview) -> str:
    return (
        f'<figure><img src="data:image/png;base64,{preview.png}" alt="" width="32" height="32">'
        f'<figcaption><details><summary dir="auto">{_text(preview.caption)}</summary></details>'
        f'<code>{preview.key}</code></figcaption></figure>'
    )


def _captions(captions: Mapping[str, Any]) -> str:
    if captions['quantiles'] is None:
        return ''
    edges, counts = captions['edges'], np.array(captions['counts'])
    last = int(np.searchsorted(np.cumsum(counts), (1 - _BEYOND) * counts.sum()))
    drawn = min(last + 1, len(edges) - 1)  # the last bin has no end
    marks = [captions['quantiles'][share] for share in ('0.05', '0.5', '0.95')]
    chart = _histogram(counts[:drawn], 0, edges[1], marks, 'captions')
    note = 'Bytes, train split. The line is the median; 5% to 95% is shaded.'
    if beyond := int(counts[drawn:].sum()):
        note += f' {beyond:,} captions of {edges[drawn]:,} bytes or more are not drawn.'
    return _section('Length of captions', note, chart + _definitions('stats', _lengths(captions)))


def _lengths(captions: Mapping[str, Any]) -> dict[str, str]:
    """Quantiles of the lengths of captions in words, by their names."""
    end = captions['edges'][-1]
    return {
        'median' if share == '0.5' else f'{float(share):.0%}': (
            f'{value:,}' if value < end else f'{end:,}+'
        )
        for share, value in (captions['quantiles'] or {}).items()
    }


def _latents(latents: Mapping[str, Any]) -> str:
    if latents['mean'] is None:
        return ''
    counts, edges = np.array(latents['counts']), np.array(latents['edges'])
    # One axis for all channels, without the tails; its ends are multiples of what ticks divide.
    up_to, grid = np.cumsum(counts.sum(axis=0)), _TICKS - 1
    bins = np.searchsorted(up_to, np.multiply((_BEYOND, 1 - _BEYOND), up_to[-1]))
    low, high = np.clip(bins, 1, len(edges) - 1)  # bin n lies between the edges n - 1 and n
    step = np.diff(edges[low - 1 : high + 1]).max()
    start, end = np.floor(edges[low - 1] / step / grid), np.ceil(edges[high] / step / grid)
    bars = step * grid * start + step * np.arange(grid * (end - start))
    inside = counts[:, 1 : 1 + np.searchsorted(edges, bars[-1] + step)]
    drawn = np.add.reduceat(inside, np.searchsorted(edges, bars), axis=1)
    figures = []
    for channel, (mean, std) in enumerate(zip(latents['mean'], latents['std'], strict=True)):
        chart = _histogram(drawn[channel], bars[0], step, (mean - std, mean, mean + std), 'values')
        figures.append(
            f'<figure><h3>Channel {channel}</h3>{chart}'
            + _definitions('stats', {'mean': _minus(f'{mean:.3f}'), 'std': f'{std:.3f}'})
            + '</figure>'
        )
    return _section(
        'Latents',
        'Raw values of the train split, all crops, not multiplied by the scaling factor of the '
        'VAE. The line is the mean; one standard deviation to each side is shaded. Bars are of the '
        f'first records of each shard; {1 - drawn.sum() / counts.sum():.2%} of their values lie '
        'outside.',
        f'<div class="channels">{"".join(figures)}</div>',
    )


def _histogram(
    counts: np.ndarray, start: float, step: float, marks: Sequence[float], things: str
) -> str:
    """Draws bars for bins of width `step`, a line at `marks[1]`, a band from `[0]` to `[2]`."""
    low, line, high = np.clip((np.array(marks) - start) / step, 0, len(counts))
    bars = []
    for number in np.flatnonzero(counts).tolist():
        count, left = counts[number], start + number * step
        height = 100 * count / counts.max()
        words = f'{_minus(f"{left:,g} to {left + step:,g}")}: {count:,} {things}'
        bars.append(
            f'<rect x="{number + 0.05:.2f}" y="{100 - height:.2f}" width="0.9" '
            f'height="{height:.2f}"><title>{words}</title></rect>'
        )
    values = np.linspace(start, start + step * len(counts), _TICKS)
    ticks = ''.join(f'<span>{_minus(f"{value:,g}")}</span>' for value in values)
    return (
        f'<div class="chart"><p>{counts.max():,} {things}</p>'
        f'<svg viewBox="0 0 {len(counts)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Histogram of {things}">'
        f'<rect class="band" x="{low:.3f}" y="0" width="{high - low:.3f}" height="100"/>'
        f'{"".join(bars)}<line x1="{line:.3f}" x2="{line:.3f}" y1="0" y2="100"/></svg>'
        f'<div class="ticks">{ticks}</div></div>'
    )


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{body}</section>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML."""
    cells = [''.join(f'<td>{cell}</td>' for cell in row) for row in rows]
    body = ''.join(f'<tr>{row}</tr>' for row in cells)
    names = ''.join(f'<th>{name}</th>' for name in head)
    return f'<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'


def _definitions(kind: str, entries: Mapping[str, str]) -> str:
    pairs = (
        f'<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>'
        for name, value in entries.items()
    )
    return f'<dl class="{kind}">{"".join(pairs)}</dl>'


def _text(value: object) -> str:
    """The value as text that no browser takes for HTML."""
    return html.escape(str(value))


def _minus(number: str) -> str:
    return number.replace('-', '\u2212')
