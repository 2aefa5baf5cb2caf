"""The report as one HTML page that needs nothing else: no script, no other file, no network.

    page = report_page.render(report.to_json(facts), facts.previews)

Captions come from the open internet: all text is escaped, and a policy in the page forbids it to
run or to load anything but the pictures that it holds.
"""

import base64
import html
import io
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from coyo11m_tfds import schema
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.report import histogram_chart
from coyo11m_tfds.report.dropped_rows import num_latents
from coyo11m_tfds.report.histogram_chart import Axis
from coyo11m_tfds.report.report_style import STYLE
from coyo11m_tfds.report.shard_statistics import Preview

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_MEANINGS = {
    schema.NO_ROW: 'the key has no row in the Parquet file',
    schema.NO_CAPTION: 'the caption is null or blank',
    schema.NO_TEXT_EMBEDDING: 'the key has no text embedding',
    schema.DUPLICATE_KEY: 'the key was in an earlier row',
    schema.ROWS_DISAGREE: 'its file has unequal numbers of keys and latents',
    schema.NON_FINITE: 'NaN or infinity in latents or text embedding',
    schema.CAPTION_TOO_LONG: f'the caption has more than {schema.MAX_CAPTION_BYTES:,} bytes',
    schema.DUPLICATE_CAPTION: 'a second caption of a key (a row of the Parquet file, not counted '
    'as dropped above)',
}

_EXAMPLES = 5  # keys of each reason
_BEYOND = 0.001  # share of the values that an axis may leave out at each end


def render(content: dict, previews: Sequence[Preview]) -> str:
    """Returns the page.

    Args:
        content: of `report.json`.
        previews: pictures to show with it.
    """
    train = content['splits'][schema.TRAIN]
    sections = [
        _header(content),
        _figures(content),
        f'<div class="columns">{_splits(content)}{_dropped(content)}</div>',
        _previews(previews),
        _captions(train['caption_bytes']),
        _latents(train['latents']),
        _origin(content),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_text(content["name"])}</title>\n<style>{STYLE}</style>\n</head>\n'
        f'<body>\n<main>\n{chr(10).join(sections)}\n</main>\n</body>\n</html>\n'
    )


def _header(content: dict) -> str:
    name = _text(content['name']).replace('/', '/<wbr>')
    return (
        f'<header><p class="over">Conversion report</p><h1>{name}</h1>'
        '<p>What was written, what was left out, and how the data looks.</p></header>'
    )


def _figures(content: dict) -> str:
    captions = content['splits'][schema.TRAIN]['caption_bytes']
    dropped = num_latents({name: entry['rows'] for name, entry in content['dropped'].items()})
    rows = content['source_rows']
    figures = {
        'records': f'{content["records"]:,}',
        'on disk': readable(content['bytes']),
        'shards': f'{content["shards"]:,}',
        'bytes in the median caption': _length(captions, '0.5'),
        f'dropped of {rows:,} rows ({dropped / max(rows, 1):.1%})': f'{dropped:,}',
    }
    cells = [f'<div><dt>{label}</dt><dd>{value}</dd></div>' for label, value in figures.items()]
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _previews(previews: Sequence[Preview]) -> str:
    figures = [
        f'<figure><img src="{_data_uri(preview.rgb)}" alt="" width="32" height="32">'
        f'<figcaption><details><summary dir="auto">{_text(preview.caption)}</summary></details>'
        f'<code>{preview.key}</code></figcaption></figure>'
        for preview in previews
    ]
    return _section(
        'Samples',
        'The middle crop of some records with caption and key. Colours are a linear guess from the '
        'latents, one pixel for each of their positions; the VAE would draw eight times finer.',
        f'<div class="grid">{"".join(figures)}</div>',
    )


def _splits(content: dict) -> str:
    rows = ''.join(
        f'<tr><td>{_text(name)}</td><td>{split["records"]:,}</td><td>{split["shards"]:,}</td>'
        f'<td>{readable(split["bytes"])}</td></tr>'
        for name, split in [*content['splits'].items(), ('total', content)]
    )
    head = '<tr><th>Split</th><th>Records</th><th>Shards</th><th>Size</th></tr>'
    intro = f'Latents lie {schema.IN_PLACE_DOC}.' if 'latents' in content else ''
    return _section('Splits', intro, f'<table><thead>{head}</thead><tbody>{rows}</tbody></table>')


def _dropped(content: dict) -> str:
    rows, others = [], []
    for reason, entry in content['dropped'].items():
        if not entry['rows']:
            others.append(f'<code>{_text(reason)}</code>')
            continue
        keys = ', '.join(f'<code>{key}</code>' for key in entry['example_keys'][:_EXAMPLES])
        examples = f'<small>e.g. {keys}</small>' if keys else ''
        rows.append(
            f'<tr><td><code>{_text(reason)}</code> {_text(_MEANINGS.get(reason, ""))}'
            f'{examples}</td><td>{entry["rows"]:,}</td></tr>'
        )
    head = '<tr><th>Reason</th><th>Rows</th></tr>'
    table = f'<table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>' if rows else ''
    none = f'<p class="note">Looked for, but not found: {", ".join(others)}.</p>' if others else ''
    return _section('Dropped', '', table + none)


def _captions(captions: dict) -> str:
    quantiles = captions['quantiles']
    if quantiles is None:
        return ''
    edges, counts = captions['edges'], np.array(captions['counts'])
    last = int(np.searchsorted(np.cumsum(counts), (1 - _BEYOND) * counts.sum()))
    drawn = min(last + 1, len(edges) - 1)  # the last bin has no end
    chart = histogram_chart.render(
        counts[:drawn].tolist(),
        Axis(0, edges[drawn], edges[1]),
        line=quantiles['0.5'],
        band=(quantiles['0.05'], quantiles['0.95']),
        unit='bytes',
        things='captions',
    )
    note = 'Bytes, train split. The line is the median; 5% to 95% is shaded.'
    if beyond := int(counts[drawn:].sum()):
        note += f' {beyond:,} captions of {edges[drawn]:,} bytes or more are not drawn.'
    names = ['median' if share == '0.5' else f'{float(share):.0%}' for share in quantiles]
    stats = _stats(zip(names, [_length(captions, share) for share in quantiles], strict=True))
    return _section('Length of captions', note, chart + stats)


def _latents(latents: dict) -> str:
    if latents['mean'] is None:
        return ''
    counts, edges = np.array(latents['counts']), np.array(latents['edges'])
    axis = _common_axis(counts.sum(axis=0), edges)
    first = int(np.searchsorted(edges, axis.start)) + 1
    drawn = counts[:, first : first + axis.end - axis.start]
    figures = []
    for channel, (mean, std) in enumerate(zip(latents['mean'], latents['std'], strict=True)):
        chart = histogram_chart.render(
            drawn[channel].tolist(),
            axis,
            line=mean,
            band=(mean - std, mean + std),
            unit='',
            things='values',
        )
        stats = _stats([('mean', _signed(mean)), ('std', f'{std:.3f}')])
        figures.append(f'<figure><h3>Channel {channel}</h3>{chart}{stats}</figure>')
    beyond = 1 - drawn.sum() / counts.sum()
    return _section(
        'Latents',
        'Raw values of the train split, all crops, not multiplied by the scaling factor of the VAE '
        f'({schema.VAE_SCALING_FACTOR}). The line is the mean; one standard deviation to each side '
        f'is shaded. Bars are of the first records of each shard; {beyond:.2%} of their values lie '
        'outside.',
        f'<div class="channels">{"".join(figures)}</div>',
    )


def _common_axis(counts: np.ndarray, edges: np.ndarray) -> Axis:
    """Leaves out the tails; `counts` begins and ends with what lies beyond the edges."""
    up_to = np.cumsum(counts)
    bins = np.searchsorted(up_to, np.multiply((_BEYOND, 1 - _BEYOND), up_to[-1]))
    low, high = np.clip(bins, 1, len(edges) - 1)  # bin n lies between the edges n - 1 and n
    return Axis(int(edges[low - 1] // 5 * 5), int(-(-edges[high] // 5) * 5), 1)


def _origin(content: dict) -> str:
    entries = {
        'Source fingerprint': content[schema.META_SOURCE_FINGERPRINT],
        'Captions': f'column {content[schema.META_CAPTION_COLUMN]}',
        'Latents': content[schema.META_LATENT_DTYPE],
    }
    if vocabulary := content.get(schema.META_TEXT_VOCABULARY):
        entries['Tokens'] = f'{vocabulary} different ones of {content[schema.META_TEXT_ENCODER]}'
    elif schema.META_TEXT_ENCODER in content:
        dim = content[schema.META_TEXT_DIM]
        entries['Text embeddings'] = f'{dim} numbers of {content[schema.META_TEXT_ENCODER]}'
    items = [f'<dt>{_text(name)}</dt><dd>{_text(value)}</dd>' for name, value in entries.items()]
    return _section('Origin', '', f'<dl class="origin">{"".join(items)}</dl>')


def _section(title: str, note: str, body: str) -> str:
    paragraph = f'<p class="note">{note}</p>' if note else ''
    return f'<section><h2>{title}</h2>{paragraph}{body}</section>'


def _stats(entries: Iterable[tuple[str, str]]) -> str:
    cells = ''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in entries)
    return f'<dl class="stats">{cells}</dl>'


def _data_uri(rgb: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, 'PNG', optimize=True)
    return 'data:image/png;base64,' + base64.b64encode(buffer.getvalue()).decode()


def _text(value: object) -> str:
    """The value as text that no browser takes for HTML."""
    return html.escape(str(value))


def _length(captions: dict, share: str) -> str:
    """A quantile of the lengths of captions."""
    if captions['quantiles'] is None:
        return '0'
    value, end = captions['quantiles'][share], captions['edges'][-1]
    return f'{value:,}' if value < end else f'{end:,}+'


def _signed(value: float) -> str:
    return f'{value:.3f}'.replace('-', '\u2212')
