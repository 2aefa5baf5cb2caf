"""The report of a build: lines for the terminal, `report.json`, and an HTML page.

The same build gives the same bytes of both files. The page needs no script and no other file.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe
import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.process.shown_text import escape_for_html
from coyo11m_tfds.process.sizes import format_bytes, format_count
from coyo11m_tfds.report import statistics as stats
from coyo11m_tfds.report.statistics import DropCounts, Preview, ShardStatistics
from coyo11m_tfds.storage import file_state

JSON_FILE = 'report.json'
PAGE_FILE = 'report.html'

NUM_PREVIEWS = 24
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the lengths of captions

# What `render_page` raises for the content of another file.
DAMAGE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, jinja2.UndefinedError)

_SUMMARY_EXAMPLES = 3  # keys of each reason
_TAIL = 0.001  # share of the values that an axis may leave out at each end
_TICKS = 5
_ORIGIN_FIELDS = (
    schema.META_BUILD,
    schema.META_CAPTION_COLUMN,
    schema.META_LATENT_ROWS,
    schema.META_LATENT_DTYPE,
    schema.META_VAE,
    schema.META_LATENT_SCALE,
    schema.META_MOMENTS,
    schema.META_LICENSE,
    schema.META_CITATION,
    schema.META_TEXT_ENCODER,
    schema.META_TEXT_DIM,
    schema.META_TEXT_VOCABULARY,
    schema.META_SOURCE_FINGERPRINT,
)


def _escape_text(value: Any) -> Any:
    """Escapes the text of an expression; markup of the template stays."""
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return markupsafe.Markup(escape_for_html(value))
    return value


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    # Captions come from the open internet: they must never become elements of the page.
    autoescape=True,
    finalize=_escape_text,
    # A field that a damaged report lacks is an error, not an empty place on the page.
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.filters |= {
    'bytes': format_bytes,
    'minus': lambda number: number.replace('-', '\u2212'),
    'number': lambda number: f'{number:,g}'.replace('-', '\u2212'),
    'thousands': '{:,}'.format,
    'count': format_count,
}
_PAGE = _TEMPLATES.get_template('page.html')


class BuildReport:
    """The report of a build."""

    content: dict[str, Any]  # of `report.json`
    previews: list[Preview]  # of records to show

    def __init__(
        self,
        name: str,
        shards: Mapping[str, Sequence[tuple[int, int]]],  # records and bytes of each, by split
        statistics: Mapping[str, ShardStatistics],
        dropped: DropCounts,
        metadata: Mapping[str, Any],  # of `dataset_info`, with the keys `schema.META_*`
        in_place: bool = False,  # whether the latents stay in the source
    ):
        """Computes the content from what the shards and the dropped rows have been counted as."""
        self._dropped = dropped
        self.previews = _choose_previews(statistics)
        all_shards: list[tuple[int, int]] = []
        splits = {}
        for split, split_shards in shards.items():
            all_shards += split_shards
            splits[split] = _sum_shards(split_shards) | _histograms(statistics[split])
        dropped_rows = {}
        for reason, count in dropped.counts.items():
            examples = dropped.examples.get(reason, [])
            dropped_rows[reason] = {'rows': count, 'example_keys': examples}

        # The order of the entries is that of the lines in the file.
        self.content = {
            'name': name,
            **_sum_shards(all_shards),
            'source_rows': dropped.num_rows,
            'splits': splits,
            'dropped': dropped_rows,
        }
        for field in _ORIGIN_FIELDS:
            if field in metadata:
                self.content[field] = metadata[field]
        if in_place:
            self.content['latents'] = 'in_place'
        self.content['previews'] = [{'key': x.key, 'caption': x.caption} for x in self.previews]

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes `report-ID.json` and `report-ID.html` into an existing local folder.

        Raises an OSError that names the file for a full disk.
        """
        text = json.dumps(self.content, indent=2, ensure_ascii=False, allow_nan=False)
        contents = {JSON_FILE: f'{text}\n', PAGE_FILE: self.page()}
        for name, content in contents.items():
            path = pathlib.Path(folder, self._file_name(name))
            with file_state.naming(path):
                path.write_text(content, encoding='utf-8', newline='\n')

    def summary(self, folder: str, seconds: float) -> str:
        """Returns some lines about written and dropped rows, with examples of bad rows."""
        lines = ['']
        sums = {**self.content['splits'], 'total': self.content}
        for name, sums_of_split in sums.items():
            records = format_count(sums_of_split['records'], 'record')
            shards = format_count(sums_of_split['shards'], 'shard')
            size = format_bytes(sums_of_split['bytes'])
            lines.append(f'{name:10}  {records} in {shards}, {size}')
        lines += self._describe_dropped()
        if 'latents' in self.content:
            lines.append(f'latents     {schema.IN_PLACE_DOC}')
        # A build that has read only a part of its latents says so.
        num_rows = self.content.get(schema.META_LATENT_ROWS)
        if num_rows:
            rows = format_count(num_rows, 'row')
            lines.append(f'            mean and std are those of the middle crops of {rows};')
            lines.append('            python -m coyo11m_tfds.verify adds the checksums of rows')
        lines.append(f'time        {seconds:,.1f} s')
        folder = storage.make_absolute(folder)
        lines.append(f'report      {folder}/{self._file_name(PAGE_FILE)}')
        return '\n'.join(lines)

    def _describe_dropped(self) -> list[str]:
        """Returns lines about dropped rows and repeated captions, and some keys of bad rows."""
        counts = {reason: count for reason, count in self._dropped.counts.items() if count}
        # Rows of the captions file: the sum of dropped rows of latents leaves them out.
        num_repeated = counts.pop(schema.DUPLICATE_CAPTION, 0)
        dropped = f'dropped     {format_count(self._dropped.num_latents, "row")}'
        reasons = ', '.join(f'{reason}: {count:,}' for reason, count in counts.items())
        if reasons:
            dropped += f' ({reasons})'
        lines = [dropped]
        if num_repeated:
            rows = format_count(num_repeated, 'row repeats', 'rows repeat')
            lines.append(f'captions    {rows} a key, the first of each is used')
        for reason in stats.BAD_REASONS:
            keys = self._dropped.examples.get(reason)
            if keys:
                examples = ', '.join(map(str, keys[:_SUMMARY_EXAMPLES]))
                lines.append(f'            {reason}, e.g. key {examples}')
        return lines

    def page(self) -> str:
        """Returns the HTML page."""
        return render_page(self.content, self.previews)

    def _file_name(self, name: str) -> str:
        """Returns the name of a file of this report, with the ID of the build."""
        return schema.of_build(name, self.content.get(schema.META_BUILD, ''))


def render_page(content: Mapping[str, Any], previews: Sequence[Preview], vae: str = '') -> str:
    """Returns the page of the content of `report.json`; '' for `vae` is the map of `latent_rgb`.

    Raises one of `DAMAGE_ERRORS` for content that is not that of a report.
    """
    train = content['splits'][schema.TRAIN]
    counts = {reason: entry['rows'] for reason, entry in content['dropped'].items()}
    return _PAGE.render(
        content=content,
        num_dropped=stats.count_dropped_latents(counts),
        meanings=schema.DROP_REASONS,
        in_place=schema.IN_PLACE_DOC,
        previews=previews,
        vae=vae,
        colours='' if vae else _describe_colours(content),
        captions=_caption_lengths(train['caption_bytes']),
        latents=_latent_values(train['latents']),
    )


def _choose_previews(statistics: Mapping[str, ShardStatistics]) -> list[Preview]:
    """Returns some previews, evenly spaced over those of all shards."""
    candidates = []
    for split in statistics.values():
        candidates += split.previews
    count = min(NUM_PREVIEWS, len(candidates))
    previews = []
    for number in range(count):
        place = number * len(candidates) // count
        previews.append(candidates[place])
    return previews


def _describe_colours(content: Mapping[str, Any]) -> str:
    """Returns what the map of `latent_rgb` does to the latents of this data set."""
    channels = len(content['splits'][schema.TRAIN]['latents']['counts'])
    # The linear map is for latents of four channels.
    if channels != len(schema.RGB_FACTORS):
        # As many as there are colours.
        count = min(channels, 3)
        components = 'principal component'
        if count != 1:
            components = f'{count} principal components'
        return (
            f'Each picture shows the first {components} of its own {channels}-channel '
            'latents as colours, one pixel for each position: shapes are those of the image, '
            'colours are not.'
        )
    text = (
        'A linear map, fitted to the VAE of SDXL, turns latents into colours, one pixel for each '
        'position; those of other families of VAEs get wrong colours. '
    )
    name = content.get(schema.META_VAE, '')
    scale = content.get(schema.META_LATENT_SCALE)
    if not scale:
        reason = 'no VAE is named'
        if name:
            reason = f'the scale of {name} is not known'
        return f'{text}It takes them for raw latents of SDXL, because {reason}.'
    factor, shift = scale
    if (factor, shift) == (1, 0):
        return f'{text}The latents are scaled already, as those of {name} are.'
    minus = f' minus {shift:g}' if shift else ''
    return f'{text}It is given the latents{minus} times {factor:g}, which is the scale of {name}.'


def _quantiles(caption_histogram: np.ndarray) -> dict[str, int] | None:
    """Returns quantiles of the captions' lengths in bytes; None without captions."""
    # A quantile is the least length that at least its share of the captions does not exceed, or
    # `stats.LONG_CAPTION` if that is less.
    if not caption_histogram.any():
        return None
    lengths = np.arange(len(caption_histogram))
    values = np.quantile(lengths, QUANTILES, weights=caption_histogram, method='inverted_cdf')
    quantiles = {}
    for share, value in zip(QUANTILES, values.tolist(), strict=True):
        quantiles[f'{share:g}'] = value
    return quantiles


def _sum_shards(shards: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Returns the number of records, shards and bytes, from records and bytes of each shard."""
    num_records = 0
    num_bytes = 0
    for shard_records, shard_bytes in shards:
        num_records += shard_records
        num_bytes += shard_bytes
    return {'records': num_records, 'shards': len(shards), 'bytes': num_bytes}


def _histograms(split: ShardStatistics) -> dict[str, Any]:
    """Returns the lengths of captions and the values of latents, as plain values."""
    lengths = split.caption_histogram
    mean = std = None
    if split.num_read:
        mean, std = stats.mean_and_std(split.latent_moments)
    # Bins are narrow where all captions are short, so that their drawing has bars enough.
    num_shown = (1 - _TAIL) * lengths.sum()
    longest = int(np.searchsorted(np.cumsum(lengths), num_shown))
    # A power of two from 1 to 16 that makes 64 to 128 bars, of captions below 2 KB.
    width = min(16, 1 << max(0, longest.bit_length() - 7))
    edges = np.arange(0, len(lengths), width)
    return {
        'caption_bytes': {
            'quantiles': _quantiles(lengths),
            'edges': edges.tolist(),
            'counts': np.add.reduceat(lengths, edges).tolist(),
        },
        'latents': {
            'mean': mean,
            'std': std,
            'edges': stats.LATENT_EDGES.tolist(),
            'counts': split.latent_histogram.tolist(),
        },
    }


def _caption_lengths(captions: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the quantiles and the chart of captions' lengths; None without captions."""
    lengths = captions['quantiles']
    edges = captions['edges']
    counts = np.array(captions['counts'])
    if lengths is None:
        return None
    quantiles = {}
    for share, length in lengths.items():
        name = 'median' if share == '0.5' else f'{float(share):.0%}'
        # Longer ones are counted together.
        if length < edges[-1]:
            quantiles[name] = f'{length:,}'
        else:
            quantiles[name] = f'{edges[-1]:,}+'
    # The bin with which the chart has all but the longest captions.
    num_shown = (1 - _TAIL) * counts.sum()
    last_bin = int(np.searchsorted(np.cumsum(counts), num_shown))
    # The last bin of all has no end, and each tick is the beginning of a bin: a whole number of
    # bytes.
    num_gaps = _TICKS - 1
    bins_a_gap = math.ceil((last_bin + 1) / num_gaps)
    num_bins = min(bins_a_gap * num_gaps, len(edges) - 1)
    marks = [lengths[share] for share in ('0.05', '0.5', '0.95')]
    return {
        'quantiles': quantiles,
        'chart': _chart(counts[:num_bins], 0, edges[1], marks, 'captions'),
        'end': edges[num_bins],
        'num_beyond': int(counts[num_bins:].sum()),
    }


def _latent_values(latents: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns mean, deviation and chart of each channel; None without records."""
    if latents['mean'] is None:
        return None
    counts = np.array(latents['counts'])  # (channels, bins)
    edges = np.array(latents['edges'])
    # One axis for all channels, without the tails.
    cumulative = np.cumsum(counts.sum(axis=0))
    bounds = np.multiply((_TAIL, 1 - _TAIL), cumulative[-1])
    bins = np.searchsorted(cumulative, bounds)
    low, high = np.clip(bins, 1, len(edges) - 1)  # bin n lies between the edges n - 1 and n
    # Bars as wide as the widest of these bins, and ends that are multiples of what ticks divide.
    step = np.diff(edges[low - 1 : high + 1]).max()
    num_gaps = _TICKS - 1
    start = np.floor(edges[low - 1] / step / num_gaps)
    end = np.ceil(edges[high] / step / num_gaps)
    bars = step * num_gaps * start + step * np.arange(num_gaps * (end - start))
    # The counts from the first bar to the end of the last one, added up to bars. Before the counts
    # between edges comes that of what lies below the first.
    last_edge = np.searchsorted(edges, bars[-1] + step)
    on_axis = counts[:, 1 : 1 + last_edge]
    bar_counts = np.add.reduceat(on_axis, np.searchsorted(edges, bars), axis=1)
    channels = []
    for channel, mean, std in zip(bar_counts, latents['mean'], latents['std'], strict=True):
        marks = (mean - std, mean, mean + std)
        chart = _chart(channel, bars[0], step, marks, 'values')
        channels.append({'mean': mean, 'std': std, 'chart': chart})
    share_on_axis = bar_counts.sum() / counts.sum()
    return {'outside': 1 - share_on_axis, 'channels': channels}


def _chart(
    counts: np.ndarray, start: float, step: float, marks: Sequence[float], unit: str
) -> dict[str, Any]:
    """Returns what the page draws: bars, a line at `marks[1]`, a band from `[0]` to `[2]`."""
    # Along the axis, the unit is a bin of width `step`; heights are percentages of the highest bar.
    peak = counts.max()
    bars = []
    for number in np.flatnonzero(counts).tolist():
        bar = {
            'bin': number,
            'height': 100 * counts[number] / peak,
            'start': start + number * step,
            'end': start + (number + 1) * step,
            'count': counts[number],
        }
        bars.append(bar)
    places = (np.array(marks) - start) / step
    end = start + step * len(counts)
    return {
        'unit': unit,
        'num_bins': len(counts),
        'peak': peak,
        'bars': bars,
        # What lies beyond the axis is drawn at its end.
        'marks': np.clip(places, 0, len(counts)).tolist(),
        'ticks': np.linspace(start, end, _TICKS).tolist(),
    }
