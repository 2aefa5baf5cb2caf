"""What is planned: which rows go where, what is left out, and what makes a difference."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import schema
from coyo11m_tfds.convert import joined_contents, plan, shard_cuts
from coyo11m_tfds.source import pt_file
from tests import made_sources
from tests.convert.plans import make_plan, planned_keys, write


def joined(shards: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(shards))


def kept_keys(made: plan.BuildPlan) -> list[int]:
    return sorted(key for shards in planned_keys(made).values() for key in joined(shards))


def counts(made: plan.BuildPlan) -> dict[str, int]:
    """Of what is dropped, without zeros."""
    return {reason: count for reason, count in made.dropped.counts.items() if count}


def test_the_hash_is_splitmix64():
    """Numbers of the reference implementation: state 1234567, then each state plus the gamma."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % 2**64 for i in range(3)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys = np.array(states, np.uint64).astype(np.int64)
    np.testing.assert_array_equal(
        joined_contents.unit_hash(keys), [(n >> 11) / 2**53 for n in expected]
    )


def test_every_kept_key_is_planned_once_in_source_order(tmp_path):
    files = [range(100, 140), range(40, 0, -1)]
    made = make_plan(made_sources.write_source(tmp_path, files), tmp_path / 'out')
    splits = planned_keys(made)
    is_validation = joined_contents.unit_hash(np.arange(200)) < 0.2
    for split, wanted in ((schema.TRAIN, False), (schema.VALIDATION, True)):
        keys = joined(splits[split])
        assert keys == [key for file in files for key in file if is_validation[key] == wanted]
        assert len(keys) > 5
    for task in made.tasks:
        inputs = task.inputs.open()
        for segment in task.segments:
            rows = inputs.rows[segment.records]
            in_file = pt_file.PtFile(segment.file.path).keys[rows]
            np.testing.assert_array_equal(in_file, inputs.keys[segment.records])


@pytest.mark.parametrize('shard_bytes', [1, 60_000, 150_000, 10**9])
def test_shards_are_nearly_equal_and_not_too_large(tmp_path, shard_bytes):
    source = made_sources.write_source(tmp_path, [range(50), range(50, 53)])
    made = make_plan(source, tmp_path / 'out', shard_bytes=shard_bytes, validation_fraction=0)
    by_group: dict[int, list[int]] = {}
    for task in made.tasks:
        by_group.setdefault(task.group, []).append(len(task.inputs.open().rows))
    record = 24576 + 160
    assert len(by_group) == (1 if shard_bytes > 53 * record else 2)
    for lengths in by_group.values():
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= max(1, -(-shard_bytes // record))
    sizes = [result.num_bytes for result in write(made, tmp_path / 'work')]
    assert made.num_bytes == pytest.approx(sum(sizes), rel=0.01)
    assert made.num_bytes == sum(task.num_bytes for task in made.tasks)


@given(
    st.lists(st.integers(0, 2000), max_size=60).map(lambda sizes: np.array([0, *sizes])),
    st.integers(1, 1000),
)
def test_small_files_are_grouped_and_large_ones_are_alone(sizes, shard_bytes):
    groups = shard_cuts.group_files(sizes, shard_bytes)
    assert joined([list(group) for group in groups]) == list(range(len(sizes)))
    for files in groups:
        small = sizes[files] <= shard_bytes
        assert small.all() or len(files) == 1
        if not small.all():
            continue
        total = sizes[files].sum()
        assert total <= 2 * shard_bytes
        if 2 * total < shard_bytes:  # only where no small file is beside it
            assert files.start == 0 or sizes[files.start - 1] > shard_bytes
            assert files.stop == len(sizes) or sizes[files.stop] > shard_bytes


def test_large_files_of_which_little_is_kept_are_not_fetched_together(tmp_path):
    """As in a trial of few validation records, which are spread over many files."""
    files = [range(100 * n, 100 * n + 100) for n in range(4)]
    source = made_sources.write_source(tmp_path / 'source', files)
    settings = {'validation_fraction': 0.01, 'limit': 3, 'shard_bytes': 600_000}
    made = make_plan(source, tmp_path / 'out', **settings)
    assert len({segment.file for task in made.tasks for segment in task.segments}) > 2
    assert {len(task.segments) for task in made.tasks} == {1}


def test_what_is_dropped_is_counted_by_reason(tmp_path):
    source = made_sources.write_source(tmp_path, [range(20)])
    captions = dict.fromkeys(range(18), 'text') | {2: None, 3: '', 4: ' \n', 99: 'unused'}
    made_sources.write_captions(source, captions)
    # 2 and 19 lack more than one thing and are counted once.
    embeddings = {key: np.ones(3) for key in range(25) if key not in (0, 2, 19)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', embeddings, source)
    made = make_plan(source, tmp_path / 'out', text_embeddings=str(sidecar))
    assert counts(made) == {'no_row': 2, 'no_caption': 3, 'no_text_vector': 1}
    assert made.dropped.examples == {
        'no_row': [18, 19],
        'no_caption': [2, 3, 4],
        'no_text_vector': [0],
    }
    assert kept_keys(made) == [1, *range(5, 18)]


def test_dropping_more_than_half_is_an_error(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    made_sources.write_captions(source, dict.fromkeys(range(10), 'text'))
    make_plan(source, tmp_path / 'half')
    made_sources.write_captions(source, dict.fromkeys(range(9), 'text'))
    with pytest.raises(ValueError, match=r'meta\.parquet: 11 of 20 rows .*no_row: 11'):
        make_plan(source, tmp_path / 'more')


def test_of_duplicate_keys_the_first_row_is_kept(tmp_path):
    files = [[*range(100), 7], [200, 50, *range(201, 300)]]
    source = made_sources.write_source(tmp_path / 'source', files)
    made = make_plan(source, tmp_path / 'out', max_bad_fraction=0.02)
    assert counts(made) == {'repeated_key': 2}
    assert made.dropped.examples == {'repeated_key': [7, 50]}
    assert kept_keys(made) == [*range(100), *range(200, 300)]
    with pytest.raises(ValueError, match=r'row 1 has key 50, and so has .*row 50;'):
        made_sources.write_pt(made_sources.latents_file(source, 0), range(100))
        make_plan(source, tmp_path / 'stop', bad_data='stop')


def test_a_file_whose_tensors_disagree_is_left_out(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(90), range(90, 100)])
    short = {'latents': made_sources.make_latents(9)}
    made_sources.write_pt(made_sources.latents_file(source, 1), range(90, 100), replace=short)
    made = make_plan(source, tmp_path / 'out', max_bad_fraction=0.1)
    assert counts(made) == {'rows_disagree': 10}
    assert made.dropped.num_rows == 100
    assert kept_keys(made) == [*range(90)]
    with pytest.raises(ValueError, match=r'shape \(9, 3, 4, 32, 32\)'):
        make_plan(source, tmp_path / 'stop', bad_data='stop')
    with pytest.raises(ValueError, match=r'000010-000019\.pt: 10 of 100 .*rows_disagree: 10; e'):
        make_plan(source, tmp_path / 'more', max_bad_fraction=0.09)


def test_captions_that_are_too_long_are_bad(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    limit = schema.MAX_CAPTION_BYTES
    texts = dict.fromkeys(range(20), 'text') | {5: 'a' * limit, 7: 'a' * (limit + 1)}
    made_sources.write_captions(source, texts | {99: 'b' * 160 * limit})  # 10 MB
    made = make_plan(source, tmp_path / 'out', max_bad_fraction=0.05)
    assert counts(made) == {'caption_too_long': 1}
    assert made.dropped.examples == {'caption_too_long': [7]}
    assert kept_keys(made) == [key for key in range(20) if key != 7]
    with pytest.raises(
        ValueError, match=r'meta\.parquet: the caption of key 7 has more than 65,536'
    ):
        make_plan(source, tmp_path / 'stop', bad_data='stop')
    made_sources.write_captions(source, dict.fromkeys(range(20), 'a' * (limit + 1)))
    with pytest.raises(ValueError, match=r'meta\.parquet: 20 of 20 .*caption_too_long: 20; e'):
        make_plan(source, tmp_path / 'all')


def test_a_caption_row_whose_key_came_before_is_not_used(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(200)])
    rows = [(key, f'Caption of {key}.') for key in range(200)] + [(5, 'another')]
    keys, captions = zip(*rows, strict=True)
    pq.write_table(
        pa.table({'key': pa.array(keys), 'caption_llava': pa.array(captions)}),
        source / schema.CAPTIONS_FILE,
    )
    made = make_plan(source, tmp_path / 'out')
    assert counts(made) == {'repeated_caption': 1}
    inputs = [task.inputs.open() for task in made.tasks]
    texts = {k: t for i in inputs for k, t in zip(i.keys, i.captions, strict=True)}
    assert texts[5] == b'Caption of 5.'
    with pytest.raises(ValueError, match='1 row repeats the key of another'):
        make_plan(source, tmp_path / 'stop', bad_data='stop')


def test_rows_of_captions_that_repeat_keys_are_a_share_of_these(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(2)])

    def make_plan_with(name: str, count: int) -> plan.BuildPlan:
        keys = [*range(100), *range(10, 10 + count)]
        captions = [f'Caption {number}.' for number in range(len(keys))]
        table = pa.table({'key': keys, 'caption_llava': captions})
        pq.write_table(table, source / schema.CAPTIONS_FILE)
        return make_plan(source, tmp_path / name)

    assert counts(make_plan_with('few', 1)) == {'repeated_caption': 1}
    with pytest.raises(ValueError, match=r'meta\.parquet: 70 of 170 rows of captions are bad \(re'):
        make_plan_with('many', 70)


SIDECARS = {
    'not there': ('nothing', r'text_embeddings: .*nothing.*there is no such folder'),
    'of other captions': (
        'x.parquet',
        "those of column 'caption', but caption_column is",
    ),
}


@pytest.mark.parametrize(('name', 'message'), SIDECARS.values(), ids=SIDECARS)
def test_a_sidecar_that_does_not_fit_is_noticed_before_the_source_is_read(tmp_path, name, message):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    made_sources.latents_file(source, 0).write_bytes(b'damaged')
    vectors = dict.fromkeys(range(20), np.ones(3))
    made_sources.write_sidecar(tmp_path / 'x.parquet', vectors, caption_column='caption')
    with pytest.raises(ValueError, match=message):
        make_plan(source, tmp_path / 'out', text_embeddings=str(tmp_path / name))


def test_a_source_without_rows_is_refused(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [[], []])
    made_sources.write_captions(source, {1: 'text'})
    with pytest.raises(ValueError, match=r'000000-000009\.pt: has no rows, nor has any other of'):
        make_plan(source, tmp_path / 'out', text_embeddings='pt')


def test_the_fingerprint_tells_sources_apart(tmp_path):
    def fingerprint(name: str, replace: dict | None = None) -> str:
        source = made_sources.write_source(tmp_path / name, [range(10)], replace=replace)
        return make_plan(source, tmp_path / f'{name}-out').source_fingerprint

    assert fingerprint('a') == fingerprint('b')
    latents = made_sources.make_latents(10, seed=sum(range(10)))
    latents[9, 2, 3, 31, 31] += 1
    assert fingerprint('c', {'latents': latents}) != fingerprint('a2')
    source = made_sources.write_source(tmp_path / 'd', [range(10)])
    made_sources.write_captions(source, {key: f'Caption  of {key}.' for key in range(10)})
    assert make_plan(source, tmp_path / 'd-out').source_fingerprint != fingerprint('a3')


def test_a_task_s_fingerprint_changes_with_all_that_changes_its_bytes(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(40), range(40, 60)])
    embeddings = {key: np.full(5, key) for key in range(60)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', embeddings, source)

    def fingerprints(name: str, **settings) -> list[str]:
        return [task.fingerprint for task in make_plan(source, tmp_path / name, **settings).tasks]

    first = fingerprints('a')
    assert len(set(first)) == len(first)
    assert fingerprints('b') == first
    for name, settings in {
        'embeddings': {'text_embeddings': str(sidecar)},
        'column': {'caption_column': 'caption'},
        'policy': {'bad_data': 'stop'},
        'sizes': {'shard_bytes': 100_000},
    }.items():
        assert not set(fingerprints(name, **settings)) & set(first), name
    made_sources.write_pt(made_sources.latents_file(source, 1), range(59, 39, -1))
    changed = fingerprints('file')
    same = [a == b for a, b in zip(first, changed, strict=True)]
    assert any(same)
    assert not all(same)
