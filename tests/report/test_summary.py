"""The report of a build: what it says, and that no caption can make the page do anything else."""

import base64
import html.parser
import io
import json
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coyo11m_tfds import schema
from coyo11m_tfds.report import histogram_chart, report_page, shard_statistics, summary
from coyo11m_tfds.report.shard_statistics import CAPTION_EDGES, Preview, ShardStatistics

HOSTILE = [
    '<script>alert(1)</script>',
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    '</summary></details></main><style>*{display:none}</style>',
    '<!-- &lt;b&gt; &#60; ]]> -->',
    'https://example.com/?a=1&b=2',
    '日本語 שלום \u202e\u2028 😀',
]
VOID = {'meta', 'img', 'wbr'}
TAGS = VOID | {
    *('html', 'head', 'title', 'style', 'body', 'main', 'header', 'section', 'div', 'span', 'p'),
    *('h1', 'h2', 'h3', 'dl', 'dt', 'dd', 'table', 'thead', 'tbody', 'tr', 'th', 'td', 'small'),
    *('code', 'figure', 'figcaption', 'details', 'summary', 'svg', 'rect', 'line'),
}


class Page(html.parser.HTMLParser):
    """Reads a page strictly: what is opened must be closed, in order.

    Attributes:
        tags: every tag with its attributes.
        texts: what stands directly in an element, by tag.
    """

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append('')

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f'comment {data!r}')


def make_statistics(
    count: int, seed: int = 0, scale: float = 6, lengths: tuple[int, int] = (100, 600)
) -> ShardStatistics:
    rng = np.random.default_rng(seed)
    statistics = ShardStatistics(text_dim=None)
    latents = scale * rng.standard_normal((count, *schema.LATENTS_SHAPE)) + 1
    captions = [b'x' * length for length in rng.integers(*lengths, count)]
    statistics.add(np.arange(count), captions, latents.astype(np.float32))
    return statistics


def make_previews(captions: list[str]) -> list[Preview]:
    rng = np.random.default_rng(0)
    return [
        Preview(number - 2**62, caption, rng.integers(0, 256, (32, 32, 3), np.uint8))
        for number, caption in enumerate(captions)
    ]


def make_facts(**changes) -> summary.BuildFacts:
    fields = {
        'name': 'coyo11m_tfds/latents/1.0.0',
        'shards': {'train': [(30, 750_000), (31, 760_000)], 'validation': [(9, 220_000)]},
        'dropped': {'no_row': 7, 'no_caption': 6, 'non_finite': 0},
        'dropped_keys': {'no_row': [2006, -5], 'no_caption': [8277]},
        'num_rows': 83,
        'statistics': {'train': make_statistics(61), 'validation': make_statistics(9, seed=1)},
        'previews': make_previews(['A cat.', 'Two dogs on a sofa.']),
        'metadata': {
            schema.META_LATENT_DTYPE: 'float16',
            schema.META_CAPTION_COLUMN: 'caption_llava',
            schema.META_SOURCE_FINGERPRINT: 'c0ffee',
            schema.META_TEXT_ENCODER: 'hf:google/gemma-3-270m',
            schema.META_TEXT_DIM: 640,
        },
    }
    return summary.BuildFacts(**(fields | changes))


def write(facts: summary.BuildFacts, folder: pathlib.Path) -> tuple[dict, Page]:
    """Writes a report; returns what is in its two files."""
    summary.write(facts, folder)
    content = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
    return content, Page((folder / 'report.html').read_bytes().decode())


def visible(page: Page) -> str:
    return '\n'.join(text for tag in page.texts if tag != 'style' for text in page.texts[tag])


def test_the_json_has_all_facts(tmp_path: pathlib.Path):
    facts = make_facts()
    content, _ = write(facts, tmp_path)
    totals = {name: content[name] for name in ('name', 'records', 'shards', 'bytes', 'source_rows')}
    assert totals == {
        'name': 'coyo11m_tfds/latents/1.0.0',
        'records': 70,
        'shards': 3,
        'bytes': 1_730_000,
        'source_rows': 83,
    }
    train = content['splits']['train']
    assert (train['records'], train['shards'], train['bytes']) == (61, 2, 1_510_000)
    mean, std = facts.statistics['train'].latent_moments.mean_and_std()
    assert (train['latents']['mean'], train['latents']['std']) == (mean, std)
    assert train['latents']['edges'] == list(range(-60, 61))
    assert train['latents']['counts'] == facts.statistics['train'].latent_histogram.tolist()
    assert train['caption_bytes']['edges'] == list(range(0, 2049, 16))
    assert train['caption_bytes']['counts'] == facts.statistics['train'].caption_histogram.tolist()
    assert list(train['caption_bytes']['quantiles']) == ['0.05', '0.25', '0.5', '0.75', '0.95']
    assert content['dropped'] == {
        'no_row': {'rows': 7, 'example_keys': [2006, -5]},
        'no_caption': {'rows': 6, 'example_keys': [8277]},
        'non_finite': {'rows': 0, 'example_keys': []},
    }
    assert content['caption_column'] == 'caption_llava'
    assert content['latent_dtype'] == 'float16'
    assert content['text_encoder'] == 'hf:google/gemma-3-270m'
    assert content['text_embedding_dim'] == 640
    assert content['source_fingerprint'] == 'c0ffee'
    assert content['previews'][1] == {'key': 1 - 2**62, 'caption': 'Two dogs on a sofa.'}


def test_the_page_says_what_the_json_says(tmp_path: pathlib.Path):
    facts = make_facts()
    content, page = write(facts, tmp_path)
    text = visible(page)
    assert page.texts['title'][0] == page.texts['h1'][0] == 'coyo11m_tfds/latents/1.0.0'
    for fact in ('1.7 MB', 'dropped of 83 rows (15.7%)', 'caption_llava', 'float16', 'c0ffee'):
        assert fact in text
    assert '640 numbers of hf:google/gemma-3-270m' in text
    assert page.texts['td'] == [
        *['train', '61', '2', '1.5 MB'],
        *['validation', '9', '1', '220.0 kB'],
        *['total', '70', '3', '1.7 MB'],
        *[' the key has no row in the Parquet file', '7'],
        *[' the caption is null or blank', '6'],
    ]
    assert {'no_row', '2006', '-5', 'no_caption', '8277', 'non_finite'} < {*page.texts['code']}
    for value in content['splits']['train']['caption_bytes']['quantiles'].values():
        assert str(value) in page.texts['dd']
    for name in ('mean', 'std'):
        for value in content['splits']['train']['latents'][name]:
            assert f'{value:.3f}'.replace('-', '\u2212') in page.texts['dd']


def test_every_bar_tells_its_count(tmp_path: pathlib.Path):
    content, page = write(make_facts(), tmp_path)
    train = content['splits']['train']
    bars = [title for title in page.texts['title'][1:] if title.endswith('captions')]
    expected = [
        f'{edge:,} to {edge + 16:,} bytes: {count:,} captions'
        for edge, count in zip(
            train['caption_bytes']['edges'], train['caption_bytes']['counts'], strict=True
        )
        if count
    ]
    assert bars == expected
    of_zero = [title for title in page.texts['title'] if title.startswith('0 to 1: ')]
    at_zero = [counts[61] for counts in train['latents']['counts']]
    assert of_zero == [f'0 to 1: {count:,} values' for count in at_zero]


def test_bars_are_as_high_as_their_counts():
    axis = histogram_chart.Axis(start=-8, end=24, step=8)
    chart = histogram_chart.render(
        [5, 0, 20, 10], axis, line=4, band=(-4, 100), unit='m', things='cats'
    )
    page = Page(chart)
    shapes = {
        kind: [
            {name: float(value) for name, value in attributes.items() if name != 'class'}
            for tag, attributes in page.tags
            if tag == kind
        ]
        for kind in ('rect', 'line')
    }
    band, *bars = shapes['rect']
    assert (band['x'], band['width'], band['height']) == (0.5, 3.5, 100)
    assert [bar['height'] for bar in bars] == [25, 100, 50]
    assert [bar['y'] + bar['height'] for bar in bars] == [100, 100, 100]
    assert [int(bar['x']) for bar in bars] == [0, 2, 3]
    assert shapes['line'] == [{'x1': 1.5, 'x2': 1.5, 'y1': 0, 'y2': 100}]
    assert page.texts['title'][0] == '\u22128 to 0 m: 5 cats'
    assert page.texts['p'] == ['20 cats']


@given(st.integers(-1000, 1000), st.integers(1, 100_000))
def test_ticks_are_few_round_and_inside(start: int, length: int):
    axis = histogram_chart.Axis(start, start + length, 1)
    ticks = axis.ticks()
    assert len(ticks) <= 8
    assert all(start <= tick <= start + length for tick in ticks)
    if len(ticks) > 1:
        (step,) = set(np.diff(ticks).tolist())
        assert str(step).rstrip('0') in {'1', '2', '5'}
        assert all(tick % step == 0 for tick in ticks)
    if length >= 10:
        assert len(ticks) >= 2


def test_the_pictures_are_those_of_the_previews(tmp_path: pathlib.Path):
    facts = make_facts()
    _, page = write(facts, tmp_path)
    sources = [attributes['src'] for tag, attributes in page.tags if tag == 'img']
    assert len(sources) == 2
    for source, preview in zip(sources, facts.previews, strict=True):
        kind, _, data = source.partition(',')
        assert kind == 'data:image/png;base64'
        picture = Image.open(io.BytesIO(base64.b64decode(data)))
        np.testing.assert_array_equal(np.asarray(picture), preview.rgb)


def assert_harmless(page: Page) -> None:
    """It is what the page is made of and nothing else, and none of it can run or load anything."""
    assert {tag for tag, _ in page.tags} <= TAGS
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith('on')
            assert name not in {'href', 'srcset', 'action', 'data'}
            assert name != 'src' or value.startswith('data:image/png;base64,')
            assert name != 'style' or re.fullmatch(
                r'left:[\d.]+%;transform:translateX\(-\d+%\)', value
            ), tag
    assert 'url(' not in page.texts['style'][0]
    assert '@import' not in page.texts['style'][0]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    equivalents = [attributes for _, attributes in page.tags if 'http-equiv' in attributes]
    assert equivalents == [{'http-equiv': 'Content-Security-Policy', 'content': policy}]


def test_hostile_text_stays_text_everywhere(tmp_path: pathlib.Path):
    facts = make_facts(
        name=HOSTILE[1],
        previews=make_previews(HOSTILE),
        shards={'train': [(1, 1)], HOSTILE[0]: [(1, 1)]},
        statistics={'train': make_statistics(1), HOSTILE[0]: make_statistics(1)},
        dropped={HOSTILE[0]: 1, HOSTILE[3]: 0},
        dropped_keys={HOSTILE[0]: [1]},
        metadata={
            schema.META_LATENT_DTYPE: HOSTILE[0],
            schema.META_CAPTION_COLUMN: HOSTILE[1],
            schema.META_SOURCE_FINGERPRINT: HOSTILE[3],
            schema.META_TEXT_ENCODER: HOSTILE[4],
            schema.META_TEXT_DIM: 640,
        },
    )
    content, page = write(facts, tmp_path)
    assert_harmless(page)
    assert page.texts['summary'] == HOSTILE
    assert [preview['caption'] for preview in content['previews']] == HOSTILE
    text = visible(page)
    for hostile in HOSTILE:
        assert hostile in text


FEW_STATISTICS = {'train': make_statistics(3), 'validation': make_statistics(2)}


@given(st.lists(st.text(), max_size=4))
def test_any_caption_stays_text(captions: list[str]):
    facts = make_facts(previews=make_previews(captions), statistics=FEW_STATISTICS)
    page = Page(report_page.render(summary.to_json(facts), facts.previews))
    assert_harmless(page)
    assert page.texts.get('summary', []) == captions


def test_the_same_facts_give_the_same_bytes(tmp_path: pathlib.Path):
    files = []
    for name in 'ab':
        folder = tmp_path / name
        folder.mkdir()
        summary.write(make_facts(), folder)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    assert files[0].keys() == {'report.json', 'report.html'}


@pytest.mark.parametrize('scale', [0, 1e-3, 1, 50, 1e4])
@pytest.mark.parametrize('lengths', [(1, 2), (500, 501), (2047, 2050), (3000, 9000)])
def test_odd_data_can_be_drawn(tmp_path: pathlib.Path, scale: float, lengths: tuple[int, int]):
    statistics = {'train': make_statistics(20, scale=scale, lengths=lengths)}
    content, page = write(make_facts(statistics=statistics, shards={'train': [(20, 1)]}), tmp_path)
    assert_harmless(page)
    quantiles = content['splits']['train']['caption_bytes']['quantiles']
    assert all(min(lengths[0] // 16 * 16, 2048) <= q <= lengths[1] + 16 for q in quantiles.values())
    shown = 'captions of 2,048 bytes or more are not drawn' in visible(page)
    assert shown == (lengths[1] > 2049)
    for tag, attributes in page.tags:
        if tag == 'rect':
            assert float(attributes['width']) >= 0
            assert 0 <= float(attributes['height']) <= 100


def test_latents_that_all_lie_beyond_the_edges_can_be_drawn(tmp_path: pathlib.Path):
    for value in (-1e4, 1e4):
        statistics = ShardStatistics(None)
        latents = np.full((2, *schema.LATENTS_SHAPE), value, np.float32)
        statistics.add(np.arange(2), [b'x', b'y'], latents)
        facts = make_facts(statistics={'train': statistics}, shards={'train': [(2, 1)]})
        _, page = write(facts, tmp_path)
        assert '100.00% of their values lie outside' in visible(page)


def test_a_split_without_records_is_no_error(tmp_path: pathlib.Path):
    """All its samples may have been dropped because they were not finite."""
    nothing = ShardStatistics(None)
    facts = make_facts(
        statistics={'train': nothing, 'validation': nothing},
        shards={'train': [(0, 0)], 'validation': [(0, 0)]},
        previews=[],
        num_rows=0,
        dropped={},
    )
    content, page = write(facts, tmp_path)
    assert content['splits']['validation']['latents']['mean'] is None
    assert content['splits']['validation']['caption_bytes']['quantiles'] is None
    assert 'Length of captions' not in page.texts['h2']


@given(st.lists(st.integers(1, 2047), min_size=1, max_size=60))
def test_quantiles_are_right_to_the_width_of_a_bin(lengths: list[int]):
    counts = np.bincount(np.array(lengths) // 16, minlength=len(CAPTION_EDGES))
    values = summary.quantiles(counts)
    for share, value in zip((0.05, 0.25, 0.5, 0.75, 0.95), values.values(), strict=True):
        exact = np.quantile(lengths, share, method='inverted_cdf')
        assert exact // 16 * 16 <= value <= exact // 16 * 16 + 16


def test_captions_beyond_the_last_edge_have_the_edge_as_their_length():
    counts = np.zeros(len(CAPTION_EDGES), np.int64)
    counts[-1], counts[0] = 9, 1
    values = summary.quantiles(counts)
    assert values == {'0.05': 8, '0.25': 2048, '0.5': 2048, '0.75': 2048, '0.95': 2048}


@given(st.integers(0, 500), st.integers(1, 30))
def test_previews_are_evenly_spaced(available: int, count: int):
    previews = [Preview(key, '', np.zeros((32, 32, 3), np.uint8)) for key in range(available)]
    chosen = [preview.key for preview in summary.choose_previews(previews, count)]
    assert len(chosen) == min(available, count)
    if chosen:
        assert chosen[0] == 0
        gaps = np.diff([*chosen, available])
        assert gaps.min() >= 1
        assert gaps.max() - gaps.min() <= 1


def test_at_most_24_previews_are_chosen():
    assert len(summary.choose_previews(make_previews(['x'] * 100))) == 24


def test_the_summary_tells_what_was_written_and_dropped():
    assert summary.summarize(make_facts(), 'gs://b/x/1.0.0', seconds=12.34).splitlines() == [
        '',
        'train       61 records in 2 shards, 1.5 MB',
        'validation  9 records in 1 shard, 220.0 kB',
        'total       70 records in 3 shards, 1.7 MB',
        'dropped     13 rows (no_row: 7, no_caption: 6)',
        'time        12.3 s',
        'report      gs://b/x/1.0.0/report.html',
    ]


def test_latents_in_place_are_said_to_be_out_of_reach_of_tfds(tmp_path):
    facts = make_facts(in_place=True)
    assert 'tfds.load does not' in summary.summarize(facts, 'gs://b/x/1.0.0', seconds=1)
    content, page = write(facts, tmp_path)
    assert content['latents'] == 'in_place'
    assert 'tfds.load does not' in visible(page)
    assert 'tfds.load' not in summary.summarize(make_facts(), 'gs://b/x/1.0.0', seconds=1)


def test_the_summary_names_keys_of_what_is_bad():
    facts = make_facts(
        shards={'train': [(5007, 128 * 10**6)] * 2400},
        dropped={'no_row': 2, 'repeated_key': 1234, 'non_finite': 1, 'rows_disagree': 0},
        dropped_keys={'no_row': [1, 2], 'repeated_key': [7, 8, 9, 10], 'non_finite': [-3]},
    )
    assert summary.summarize(facts, 'out/x', seconds=0).splitlines()[1:] == [
        'train       12,016,800 records in 2,400 shards, 307.2 GB',
        'total       12,016,800 records in 2,400 shards, 307.2 GB',
        'dropped     1,237 rows (no_row: 2, repeated_key: 1,234, non_finite: 1)',
        '            repeated_key, e.g. key 7, 8, 9',
        '            non_finite, e.g. key -3',
        'time        0.0 s',
        f'report      {pathlib.Path.cwd()}/out/x/report.html',
    ]


def test_rows_of_the_captions_file_are_not_taken_for_rows_of_the_source(tmp_path):
    counts = {'no_row': 7, 'no_caption': 6, 'repeated_caption': 3}
    facts = make_facts(dropped=counts, dropped_keys={'repeated_caption': [5]})
    lines = summary.summarize(facts, '', seconds=1).splitlines()
    assert 'dropped     13 rows (no_row: 7, no_caption: 6)' in lines
    assert 'captions    3 rows repeat a key, the first of each is used' in lines
    summary.write(facts, tmp_path)
    assert 'dropped of 83 rows (15.7%)' in (tmp_path / summary.PAGE_FILE).read_text()


def test_nothing_dropped_is_said_too():
    facts = make_facts(dropped=dict.fromkeys(schema.DROP_REASONS, 0), dropped_keys={})
    assert 'dropped     0 rows' in summary.summarize(facts, '', seconds=1).splitlines()


def test_the_statistics_of_shards_make_a_report(tmp_path: pathlib.Path):
    """As a build does: from JSON, joined."""
    parts = [make_statistics(20, seed) for seed in range(3)]
    back = [ShardStatistics.from_json(json.loads(json.dumps(p.to_json()))) for p in parts]
    facts = make_facts(
        statistics={'train': shard_statistics.join(back)},
        shards={'train': [(20, 500_000)] * 3},
        previews=summary.choose_previews([p for part in back for p in part.previews]),
    )
    content, _ = write(facts, tmp_path)
    assert sum(content['splits']['train']['caption_bytes']['counts']) == 60
    assert [preview['key'] for preview in content['previews']] == [0, 1, 2, 3, 4, 5] * 3
