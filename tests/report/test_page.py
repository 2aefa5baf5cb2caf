"""The report of a build: what it says, and that no caption can make the page do anything else."""

import json
import pathlib
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coyo11m_tfds import schema
from coyo11m_tfds.report.page import BuildReport
from coyo11m_tfds.report.statistics import (
    LATENT_EDGES,
    DropCounts,
    Preview,
    ShardStatistics,
    sum_channels,
)

HOSTILE = [
    '<script>alert(1)</script>',
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    '</summary></details></main><style>*{display:none}</style>',
    '<!-- &lt;b&gt; &#60; ]]> -->',
    'https://example.com/?a=1&b=2',
    '日本語 שלום 😀',
]


def make_statistics(
    count: int,
    seed: int = 0,
    scale: float = 6,
    lengths: tuple[int, int] = (100, 600),
    shape: tuple[int, ...] = schema.LATENTS_SHAPE,
) -> ShardStatistics:
    rng = np.random.default_rng(seed)
    statistics = ShardStatistics(channels=shape[1])
    latents = (scale * rng.standard_normal((count, *shape)) + 1).astype(np.float32)
    captions = [b'x' * length for length in rng.integers(*lengths, count)]
    statistics.add(np.arange(count), captions, latents, sum_channels(latents))
    return statistics


STATISTICS = {'train': make_statistics(61), 'validation': make_statistics(9, seed=1)}
SHARDS = {'train': [(30, 750_000), (31, 760_000)], 'validation': [(9, 220_000)]}
DROPPED = {'no_row': (7, [2006, -5]), 'no_caption': (6, [8277])}
METADATA = {
    schema.META_LATENT_DTYPE: 'float16',
    schema.META_CAPTION_COLUMN: 'caption_llava',
    schema.META_SOURCE_FINGERPRINT: 'c0ffee',
    schema.META_TEXT_ENCODER: 'hf:google/gemma-3-270m',
    schema.META_TEXT_DIM: 640,
}


def make_report(
    shards=SHARDS, statistics=STATISTICS, dropped=DROPPED, num_rows=83, captions=None, **changes
) -> BuildReport:
    """A report of a build; with `captions`, those are the captions of its previews."""
    counted = DropCounts(num_rows, max_bad_fraction=1)
    for reason, (count, keys) in dropped.items():
        counted.add(reason, count, keys)
    statistics = {name: ShardStatistics.from_json(s.to_json()) for name, s in statistics.items()}
    if captions is not None:
        for of_split in statistics.values():
            of_split.previews = []
        png = STATISTICS['train'].previews[0].png
        statistics['train'].previews = [
            Preview(number - 2**62, caption, png) for number, caption in enumerate(captions)
        ]
    fields = {'name': 'coyo11m_tfds/latents/1.0.0', 'metadata': METADATA} | changes
    return BuildReport(shards=shards, statistics=statistics, dropped=counted, **fields)


def parse(report: BuildReport) -> ET.Element:
    """Reads a page strictly: what is opened must be closed, in order."""
    return ET.fromstring(report.page())


def texts_of(page: ET.Element, tag: str) -> list[str]:
    """What stands directly in each element of a tag."""
    return [''.join([x.text or '', *(child.tail or '' for child in x)]) for x in page.iter(tag)]


def visible(page: ET.Element) -> str:
    return '\n'.join(page.find('body').itertext())


def test_the_two_files_have_all_facts_and_the_same_bytes_again(tmp_path):
    report = make_report(captions=['A cat.', 'Two dogs on a sofa.'])
    report.write(tmp_path)
    content = json.loads((tmp_path / 'report.json').read_text(encoding='utf-8'))
    again = make_report(captions=['A cat.', 'Two dogs on a sofa.'])
    assert (tmp_path / 'report.html').read_bytes().decode() == report.page() == again.page()
    facts = {'name': 'coyo11m_tfds/latents/1.0.0', 'records': 70, 'shards': 3, 'bytes': 1_730_000}
    facts |= {'source_rows': 83, 'caption_column': 'caption_llava', 'latent_dtype': 'float16'}
    facts |= {'text_encoder': 'hf:google/gemma-3-270m', 'text_embedding_dim': 640}
    facts |= {'source_fingerprint': 'c0ffee'}
    assert {name: content[name] for name in facts} == facts
    train, made = content['splits']['train'], STATISTICS['train']
    assert (train['records'], train['shards'], train['bytes']) == (61, 2, 1_510_000)
    assert train['latents']['edges'] == LATENT_EDGES.tolist()
    assert train['latents']['counts'] == made.latent_histogram.tolist()
    assert train['caption_bytes']['edges'] == list(range(0, 2049, 8))
    assert sum(train['caption_bytes']['counts']) == 61
    assert content['dropped'] == {
        reason: dict(zip(('rows', 'example_keys'), DROPPED.get(reason, (0, [])), strict=True))
        for reason in schema.DROP_REASONS
    }
    assert content['previews'][1] == {'key': 1 - 2**62, 'caption': 'Two dogs on a sofa.'}


def test_the_page_says_what_the_json_says():
    report = make_report()
    content, page = report.content, parse(report)
    for tag in ('title', 'h1'):
        assert texts_of(page, tag)[0] == 'coyo11m_tfds/latents/1.0.0'
    facts = '1.7 MB', 'dropped of 83 rows (15.7%)', 'caption_llava', 'float16', 'c0ffee'
    for fact in (*facts, '640 numbers of hf:google/gemma-3-270m'):
        assert fact in visible(page)
    assert texts_of(page, 'td') == [
        *['train', '61', '2', '1.5 MB'],
        *['validation', '9', '1', '220.0 kB'],
        *['total', '70', '3', '1.7 MB'],
        *[' the key has no row in the Parquet file', '7'],
        *[' the caption is null or blank', '6'],
    ]
    assert {'no_row', '2006', '-5', 'no_caption', '8277', 'non_finite'} < {*texts_of(page, 'code')}
    train = content['splits']['train']
    numbers = [str(value) for value in train['caption_bytes']['quantiles'].values()]
    numbers += [f'{x:.3f}'.replace('-', '\u2212') for x in train['latents']['mean']]
    numbers += [f'{x:.3f}' for x in train['latents']['std']]
    assert {*numbers} <= {*texts_of(page, 'dd')}
    rights = {schema.META_LICENSE: 'cc0-1.0', schema.META_CITATION: '@misc{a<b>}'}
    page = parse(make_report(metadata=METADATA | rights))
    assert 'cc0-1.0' in texts_of(page, 'dd')
    assert texts_of(page, 'pre') == ['@misc{a<b>}']


def assert_harmless(page: ET.Element) -> None:
    """None of it can run or load anything."""
    for element in page.iter():
        assert element.tag not in ('script', 'link', 'iframe', 'object')
        for name, value in element.attrib.items():
            assert not name.startswith('on')
            assert name not in {'href', 'srcset', 'action', 'data', 'style'}
            assert name != 'src' or value.startswith('data:image/png;base64,')
    [style] = texts_of(page, 'style')
    assert 'url(' not in style and '@import' not in style
    [equivalent] = (x.attrib for x in page.iter('meta') if 'http-equiv' in x.attrib)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert equivalent == {'http-equiv': 'Content-Security-Policy', 'content': policy}


ORDERING = ''.join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
PRINTABLE = st.characters(
    exclude_categories=['Cc', 'Cs', 'Cn', 'Zl', 'Zp'], exclude_characters=ORDERING
)
TEXTS = st.text(PRINTABLE, min_size=1)


@given(st.lists(TEXTS, min_size=1, max_size=8))
@example(HOSTILE)
def test_any_text_stays_text_everywhere(texts):
    report = make_report(
        name=texts[0],
        shards={'train': [(1, 1)], texts[-1]: [(1, 1)]},
        statistics={'train': STATISTICS['train'], texts[-1]: STATISTICS['validation']},
        metadata={name: texts[i % len(texts)] for i, name in enumerate(METADATA)},
        captions=texts,
    )
    page = parse(report)
    assert_harmless(page)
    assert texts_of(page, 'h1') == texts_of(page, 'title')[:1] == texts[:1]
    assert texts_of(page, 'summary') == texts
    assert [preview['caption'] for preview in report.content['previews']] == texts
    assert all(text in visible(page) for text in texts)


def test_characters_that_are_not_printable_are_named():
    caption = 'a\x00\x1b[31m\u202e\udcff\nb'
    page = parse(make_report(name=caption, captions=[caption]))
    expected = r'a\x00\x1b[31m\u202e\udcff' + '\nb'
    assert texts_of(page, 'h1') == texts_of(page, 'summary') == [expected]


@pytest.mark.parametrize(
    ('scale', 'lengths'),
    [(0, (1, 2)), (1e-3, (500, 501)), (50, (2047, 2050)), (1e4, (3000, 9000)), (1e9, (2, 9000))],
)
def test_odd_data_can_be_drawn(scale, lengths):
    statistics = {'train': make_statistics(20, scale=scale, lengths=lengths)}
    report = make_report(statistics=statistics, shards={'train': [(20, 1)]})
    page = parse(report)
    assert_harmless(page)
    quantiles = report.content['splits']['train']['caption_bytes']['quantiles']
    assert all(min(lengths[0], 2048) <= q < lengths[1] for q in quantiles.values())
    has_note = 'captions of 2,048 bytes or more are not drawn' in visible(page)
    assert has_note == (lengths[1] > 2049)
    for bar in page.iter('rect'):
        assert float(bar.get('width')) >= 0
        assert 0 <= float(bar.get('height')) <= 100


def test_a_split_without_records_is_no_error():
    """All its samples may have been dropped because they were not finite."""
    nothing = {name: ShardStatistics() for name in SHARDS}
    shards = {name: [(0, 0)] for name in SHARDS}
    report = make_report(shards=shards, statistics=nothing, num_rows=0, dropped={})
    assert report.content['splits']['validation']['latents']['mean'] is None
    assert report.content['splits']['validation']['caption_bytes']['quantiles'] is None
    assert 'Length of captions' not in texts_of(parse(report), 'h2')


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_quantiles_are_exact(lengths):
    statistics = ShardStatistics()
    captions = [b'x' * length for length in lengths]
    latents = np.zeros((len(lengths), *schema.LATENTS_SHAPE), np.float32)[..., :1, :1]
    statistics.add(np.arange(len(lengths)), captions, latents, sum_channels(latents))
    report = make_report(statistics={'train': statistics}, shards={'train': [(len(lengths), 1)]})
    values = report.content['splits']['train']['caption_bytes']['quantiles']
    for percent, value in zip((5, 25, 50, 75, 95), values.values(), strict=True):
        exact = sorted(lengths)[-(-len(lengths) * percent // 100) - 1]
        assert value == min(exact, 2048)


@pytest.mark.parametrize(
    ('scale', 'lengths', 'shape'),
    [(1, (1, 4), (1, 32, 8, 8)), (0.2, (30, 62), (1, 16, 8, 8)), (2, (9, 300), (1, 4, 32, 32))],
)
def test_histograms_have_bars_enough_at_any_scale(scale, lengths, shape):
    statistics = make_statistics(200, scale=scale, lengths=lengths, shape=shape)
    report = make_report(statistics={'train': statistics}, shards={'train': [(200, 1)]})
    page = parse(report)
    assert '0.13025' not in visible(page)  # the factor of one VAE
    bars = [bar for bar in page.iter('rect') if bar.get('width') == '0.9']
    ticks, *_ = (x for x in page.iter('div') if x.get('class') == 'ticks')
    assert all(tick.text.replace(',', '').isdecimal() for tick in ticks)
    assert len(bars) >= 20 * shape[1] + min(lengths[1] - lengths[0], 20)
    captions = report.content['splits']['train']['caption_bytes']['counts']
    assert np.count_nonzero(captions) >= min(lengths[1] - lengths[0], 20)
    counts = report.content['splits']['train']['latents']['counts']
    assert np.sum(counts, axis=1).tolist() == [64 * 64 * (shape[-1] // 8) ** 2] * shape[1]


@pytest.mark.parametrize(
    ('channels', 'metadata', 'sentence'),
    [
        (4, {}, 'It takes them for raw latents of SDXL, because no VAE is named.'),
        (4, {'vae': 'a<b'}, 'of SDXL, because the scale of a<b is not known.'),
        (
            4,
            {'vae': 'x/taesd', 'latent_scale': [1.0, 0.0]},
            'scaled already, as those of x/taesd',
        ),
        (
            4,
            {'vae': 'kl', 'latent_scale': [0.2, 0.0]},
            'times 0.2, which is the scale of kl',
        ),
        (1, {}, 'first principal component of its own 1-channel latents as colours'),
        (2, {}, 'first 2 principal components of its own 2-channel latents as colours'),
        (
            16,
            {'vae': 'flux', 'latent_scale': [0.3611, 0.1159]},
            '3 principal components of its own',
        ),
    ],
)
def test_what_the_pictures_show_is_said(channels, metadata, sentence):
    statistics = make_statistics(9, shape=(1, channels, 8, 8))
    report = make_report(
        statistics={'train': statistics}, shards={'train': [(9, 1)]}, metadata=METADATA | metadata
    )
    text = visible(parse(report))
    assert sentence in text
    assert ('A linear map' in text) == (channels == 4)


@pytest.mark.parametrize('available', [0, 1, 23, 24, 25, 100])
def test_at_most_24_previews_are_chosen_evenly_spaced(available):
    chosen = [p.key + 2**62 for p in make_report(captions=['x'] * available).previews]
    assert len(chosen) == min(available, 24)
    if chosen:
        gaps = np.diff([*chosen, available])
        assert chosen[0] == 0 and gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


def test_latents_in_place_are_said_to_be_out_of_reach_of_tfds():
    report = make_report(in_place=True)
    assert report.content['latents'] == 'in_place'
    for text in (report.summary('gs://b/x/1.0.0', seconds=1), visible(parse(report))):
        assert 'tfds.load does not' in text
    assert 'tfds.load' not in make_report().summary('gs://b/x/1.0.0', seconds=1)


def test_the_summary_names_keys_of_what_is_bad():
    dropped = {'no_row': (2, [1, 2]), 'repeated_key': (1234, [7, 8, 9, 10])}
    dropped |= {'non_finite': (1, [-3]), 'repeated_caption': (3, [5])}
    report = make_report(shards={'train': [(5007, 128 * 10**6)] * 2400}, dropped=dropped)
    assert report.summary('out/x', seconds=0).splitlines()[1:] == [
        'train       12,016,800 records in 2,400 shards, 307.2 GB',
        'total       12,016,800 records in 2,400 shards, 307.2 GB',
        # Rows of the captions file are not taken for rows of the source.
        'dropped     1,237 rows (no_row: 2, repeated_key: 1,234, non_finite: 1)',
        'captions    3 rows repeat a key, the first of each is used',
        '            repeated_key, e.g. key 7, 8, 9',
        '            non_finite, e.g. key -3',
        '            repeated_caption, e.g. key 5',
        'time        0.0 s',
        f'report      {pathlib.Path.cwd()}/out/x/report.html',
    ]
    assert 'dropped of 83 rows' in report.page()
    assert 'dropped     0 rows' in make_report(dropped={}).summary('', seconds=1).splitlines()
