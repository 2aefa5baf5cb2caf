"""What is planned and written, from the source to the files of the data set."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import latent_shards, plan, prepare, schema, shard_writer, sources
from coyo11m_tfds.chunk_index import ChunkIndex
from tests import made_sources


def make_plan(source: pathlib.Path, out: pathlib.Path, **changes) -> plan.Plan:
    out.mkdir(exist_ok=True)
    (out / 'scratch').mkdir()
    arguments = {
        'caption_column': schema.DEFAULT_CAPTION_COLUMN,
        'text_vectors': '',
        'validation_fraction': 0.2,
        'shard_bytes': 150_000,
        'scratch_dir': out / 'scratch',
        'shard_path': lambda split, index, count: str(out / f'{split}-{index}-of-{count}'),
    }
    return plan.make_plan(sources.find(source), **(arguments | changes))


def planned_keys(made: plan.Plan) -> dict[str, list[list[int]]]:
    """Keys of every shard, by split."""
    splits: dict[str, list[list[int]]] = {}
    for task in sorted(made.tasks, key=lambda task: task.index):
        keys = latent_shards.LatentShard(task.latents_path).keys[task.rows]
        splits.setdefault(task.split, []).append(keys.tolist())
    return splits


def joined(shards: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(shards))


def test_the_hash_is_splitmix64():
    """Numbers of the reference implementation: state 1234567, then each state plus the gamma."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % 2**64 for i in range(3)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys = np.array(states, np.uint64).astype(np.int64)
    np.testing.assert_array_equal(plan.unit_hash(keys), [(n >> 11) / 2**53 for n in expected])


@given(st.floats(0, 1), st.integers(-(2**62), 2**62))
def test_the_hash_gives_each_split_its_share(fraction: float, first: int):
    share = (plan.unit_hash(np.arange(first, first + 4000)) < fraction).mean()
    assert share == pytest.approx(fraction, abs=0.05)


def test_every_kept_key_is_planned_once_in_source_order(tmp_path: pathlib.Path):
    files = [range(100, 140), range(40, 0, -1)]
    made = make_plan(made_sources.write_source(tmp_path, files), tmp_path / 'out')
    splits = planned_keys(made)
    is_validation = plan.unit_hash(np.arange(200)) < 0.2
    for split, wanted in ((schema.TRAIN, False), (schema.VALIDATION, True)):
        keys = joined(splits[split])
        assert keys == [key for file in files for key in file if is_validation[key] == wanted]
        assert len(keys) > 5


def test_a_split_does_not_depend_on_files_or_shards(tmp_path: pathlib.Path):
    one = made_sources.write_source(tmp_path / 'one', [range(60)])
    many = made_sources.write_source(tmp_path / 'many', [range(9), range(40, 60), range(9, 40)])
    keys = [
        {split: sorted(joined(shards)) for split, shards in planned_keys(made).items()}
        for made in (
            make_plan(one, tmp_path / 'a'),
            make_plan(many, tmp_path / 'b', shard_bytes=60_000),
        )
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize('shard_bytes', [1, 60_000, 150_000, 10**9])
def test_shards_are_nearly_equal_and_not_too_large(tmp_path: pathlib.Path, shard_bytes: int):
    source = made_sources.write_source(tmp_path, [range(50), range(50, 53)])
    made = make_plan(source, tmp_path / 'out', shard_bytes=shard_bytes, validation_fraction=0)
    by_file: dict[str, list[int]] = {}
    for task in made.tasks:
        by_file.setdefault(task.latents_path, []).append(len(task.rows))
    record = 24576 + 160
    for lengths in by_file.values():
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= max(1, -(-shard_bytes // record))
    sizes = [result.num_bytes for result in prepare.write_shards(made, 1)]
    assert made.num_bytes == pytest.approx(sum(sizes), rel=0.01)


def test_what_is_dropped_is_counted_by_reason(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(20)])
    captions = dict.fromkeys(range(18), 'text') | {2: None, 3: '', 4: ' \n', 99: 'unused'}
    made_sources.write_captions(source, captions)
    # 2 and 19 lack more than one thing and are counted once.
    vectors = {key: np.ones(3) for key in range(25) if key not in (0, 2, 19)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', vectors)

    made = make_plan(source, tmp_path / 'out', text_vectors=str(sidecar))

    assert made.dropped == {'no_row': 2, 'no_caption': 3, 'no_text_vector': 1}
    kept = sorted(key for shards in planned_keys(made).values() for key in joined(shards))
    assert kept == [1, *range(5, 18)]


def test_dropping_more_than_half_is_an_error(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(20)])
    made_sources.write_captions(source, dict.fromkeys(range(10), 'text'))
    make_plan(source, tmp_path / 'half')
    made_sources.write_captions(source, dict.fromkeys(range(9), 'text'))
    with pytest.raises(ValueError, match=r'meta\.parquet: 11 of 20 rows .*no_row: 11'):
        make_plan(source, tmp_path / 'more')


def test_a_limit_keeps_the_first_records_of_each_split(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(30), range(30, 60)])
    everything = planned_keys(make_plan(source, tmp_path / 'all'))
    limited = planned_keys(make_plan(source, tmp_path / 'few', max_examples_per_split=7))
    for split, shards in limited.items():
        assert joined(shards) == joined(everything[split])[:7]


def test_the_number_of_processes_does_not_change_a_byte(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(70), range(70, 100)])
    vectors = {key: np.full(5, key) for key in range(100)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', vectors)
    outcomes = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        made = make_plan(source, out, text_vectors=str(sidecar))
        results = prepare.write_shards(made, workers)
        prepare.write_chunk_indexes(results, out)
        metadata = prepare.make_metadata(made, results, 'caption_llava')
        files = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
        outcomes.append((files, metadata))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) > 10


def test_processes_start_from_a_program_that_knows_nothing_of_them(tmp_path: pathlib.Path):
    """One that finds the package by itself, as `tfds build` does, and has no guarded main part."""
    made_sources.write_source(tmp_path, [range(20)])
    program = tmp_path / 'program.py'
    program.write_text(
        f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})
from coyo11m_tfds import plan, prepare, sources
del sys.path[0]
made = plan.make_plan(
    sources.find('.'), caption_column='caption_llava', text_vectors='', validation_fraction=0.2,
    shard_bytes=100_000, scratch_dir='scratch', shard_path=lambda *name: f'out/{{name}}')
print(sum(result.num_records for result in prepare.write_shards(made, num_workers=2)))
"""
    )
    for name in ('scratch', 'out'):
        (tmp_path / name).mkdir()
    command = [sys.executable, str(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ('20\n', 0), ended.stderr


def test_the_chunk_index_points_at_the_records(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(700)])
    made = make_plan(source, tmp_path / 'out', shard_bytes=10_000_000)
    results = prepare.write_shards(made, 1)
    prepare.write_chunk_indexes(results, tmp_path / 'out')

    index = ChunkIndex.load(tmp_path / 'out', schema.TRAIN)
    train = sorted((t for t in made.tasks if t.split == schema.TRAIN), key=lambda t: t.index)
    assert index.shard_lengths.tolist() == [len(task.rows) for task in train]
    for shard, task in enumerate(train):
        whole = pathlib.Path(task.path).read_bytes()
        records = list(tf.data.TFRecordDataset(task.path).as_numpy_iterator())
        assert len(records) == index.shard_lengths[shard] > shard_writer.ROWS_AT_ONCE
        for first in range(0, len(records), 32):
            offset, nbytes = index.byte_range(shard, first, min(32, len(records) - first))
            piece = tmp_path / 'piece'
            piece.write_bytes(whole[offset : offset + nbytes])
            read = list(tf.data.TFRecordDataset(str(piece)).as_numpy_iterator())
            assert read == records[first : first + 32]


def test_statistics_are_those_of_the_train_split(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(30), range(30, 64)], dtype='bfloat16')
    rng = np.random.default_rng(0)
    vectors = {key: rng.normal(3, 2, 5).astype(np.float16) for key in range(64)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', vectors)
    made = make_plan(source, tmp_path / 'out', text_vectors=str(sidecar))
    metadata = prepare.make_metadata(made, prepare.write_shards(made, 1), 'caption_llava')

    train = joined(planned_keys(made)[schema.TRAIN])
    files = [torch.load(made_sources.latents_file(source, n), weights_only=True) for n in (0, 1)]
    latents = torch.cat([file['latents'] for file in files]).double().numpy()[train]
    text = np.stack([vectors[key] for key in train]).astype(np.float64)
    for name, expected in {
        'latent_mean': latents.mean(axis=(0, 1, 3, 4)),
        'latent_std': latents.std(axis=(0, 1, 3, 4)),
        'text_embedding_mean': text.mean(axis=0),
        'text_embedding_std': text.std(axis=0),
    }.items():
        np.testing.assert_allclose(metadata[name], expected, rtol=1e-6)
    assert metadata['text_encoder'] == 'made-up'
    assert metadata['text_embedding_dim'] == 5
    assert metadata['latent_dtype'] == 'bfloat16'
    assert metadata['caption_column'] == 'caption_llava'
    assert metadata['dropped'] == {'no_row': 0, 'no_caption': 0, 'no_text_vector': 0}


def test_the_fingerprint_tells_sources_apart(tmp_path: pathlib.Path):
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


@pytest.mark.parametrize('value', ['0', 'many', '-1', '1.5'])
def test_a_bad_number_of_processes_in_the_environment_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, value: str
):
    made = make_plan(made_sources.write_source(tmp_path, [range(5)]), tmp_path / 'out')
    monkeypatch.setenv('COYO11M_NUM_PROC', value)
    with pytest.raises(ValueError, match=f'COYO11M_NUM_PROC={value}: expected'):
        prepare.write_shards(made)
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['scratch']
