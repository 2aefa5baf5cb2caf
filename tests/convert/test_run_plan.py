"""What is written, from a plan to the files of the data set."""

import dataclasses
import hashlib
import itertools
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.convert import run_plan, shard_writer
from coyo11m_tfds.dataset.chunk_index import ChunkIndex
from tests import made_sources
from tests.checkout import CHECKOUT
from tests.convert.plans import data_folder, make_plan, planned_keys, write


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def without_ids(folder: pathlib.Path) -> dict[str, bytes]:
    """The files by names without IDs, to compare builds of different plans."""
    ids = [(name, schema.build_of(name)) for name in files_in(folder)]
    return {name.replace(f'-{of}.', '.'): (folder / name).read_bytes() for name, of in ids}


def test_the_number_of_processes_does_not_change_a_byte(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(70), range(70, 100)])
    embeddings = {key: np.full(5, key) for key in range(100)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', embeddings, source)
    outcomes = []
    for workers in (1, 2, 4):
        work = tmp_path / str(workers)
        made = make_plan(source, tmp_path / 'stores', text_embeddings=str(sidecar))
        results = write(made, work, workers)
        run_plan.write_chunk_indexes(results, data_folder(work), made.build)
        dropped = run_plan.count_dropped(made, results)
        metadata = run_plan.make_metadata(made, results, dropped, 'caption_llava')
        outcomes.append((files_in(data_folder(work)), metadata))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0][0]) > 10


def test_sources_of_large_files_keep_their_bytes(tmp_path: pathlib.Path):
    """Those of the first release, in shards of the same names."""
    source = tmp_path / 'source'
    for number, count in enumerate((70, 30)):
        keys = range(100 * number, 100 * number + count)
        values = torch.arange(count * 3 * 4 * 32 * 32).reshape(count, *schema.LATENTS_SHAPE)
        latents = ((values * 7919) % 1021 - 510).to(torch.float16) / 32
        path = made_sources.latents_file(source, number)
        made_sources.write_pt(path, keys, replace={'latents': latents})
    made_sources.write_captions(source, {key: f'Caption of {key}.' for key in range(200)})
    write(make_plan(source, tmp_path / 'stores'), tmp_path / 'work')
    files = without_ids(data_folder(tmp_path / 'work'))
    assert len(files) == 18
    short = {re.sub(r'.*_tfds-(.*).tfrecord-0*(\d+)-of-0*', r'\1-\2-of-', n): n for n in files}
    digest = hashlib.sha256(b''.join(n.encode() + files[short[n]] for n in sorted(short)))
    assert digest.hexdigest() == '61982c199d97ea839f4c430e144b076650e736e4d434883829d15799949c4bc1'


def test_small_files_give_the_same_shards_as_one_file_of_all_their_rows(tmp_path: pathlib.Path):
    keys = range(60)
    latents, embeddings = made_sources.make_latents(60), torch.randn(60, 5)
    latents[[8, 47], 1] = np.inf
    bounds = [0, 1, 8, 9, 30, 47, 48, 60]
    outcomes = []
    for name, borders in {'one': [0, 60], 'many': bounds}.items():
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            tensors = {'latents': latents[start:end], 'embeddings': embeddings[start:end]}
            path = made_sources.latents_file(tmp_path / name, number)
            made_sources.write_pt(path, keys[start:end], replace=tensors)
        made_sources.write_captions(tmp_path / name, {key: f'Caption {key}' for key in keys})
        settings = {'shard_bytes': 10**9, 'text_embeddings': 'pt', 'max_bad_fraction': 0.1}
        made = make_plan(tmp_path / name, tmp_path / 'stores', **settings)
        results = write(made, tmp_path / f'{name} work')
        files = without_ids(data_folder(tmp_path / f'{name} work'))
        results = [dataclasses.replace(result, read=()) for result in results]
        outcomes.append((files, [result.to_json() for result in results]))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) == 2


def test_small_remote_files_are_fetched_once_and_together(gcs, tmp_path: pathlib.Path):
    files = [range(3 * n, 3 * n + 3) for n in range(20)]
    source = made_sources.write_source(tmp_path / 'source', files)
    gcs.upload_folder(source, 'gs://in/coyo')
    settings = {'shard_bytes': 700_000}
    made = make_plan('gs://in/coyo', tmp_path / 'stores', **settings)
    assert len({task.group for task in made.tasks}) == 2
    gcs.clear()
    write(made, tmp_path / 'work')
    reads = [request.path for request in gcs.requests if request.action == 'read']
    assert len(reads) == len(set(reads)) == 20
    write(make_plan(source, tmp_path / 'stores', **settings), tmp_path / 'local')
    assert files_in(data_folder(tmp_path / 'work')) == files_in(data_folder(tmp_path / 'local'))
    assert [path.name for path in (tmp_path / 'work' / 'source').iterdir()] == ['.lock']

    lost = next(task for task in made.tasks if task.split == schema.VALIDATION)
    (data_folder(tmp_path / 'work') / lost.filename).unlink()
    gcs.clear()
    write(made, tmp_path / 'work')
    reads = {request.path for request in gcs.requests if request.action == 'read'}
    assert {f'gs://{path}' for path in reads} == {part.file.path for part in lost.parts}
    assert files_in(data_folder(tmp_path / 'work')) == files_in(data_folder(tmp_path / 'local'))


def test_processes_start_from_a_program_that_knows_nothing_of_them(tmp_path: pathlib.Path):
    """One that finds the package by itself, as `tfds build` does, and has no guarded main part."""
    made_sources.write_source(tmp_path, [range(20)])
    program = tmp_path / 'program.py'
    program.write_text(
        f"""
import sys
sys.path.insert(0, {str(CHECKOUT)!r})
import pathlib
from tests.convert import plans
del sys.path[0]
made = plans.make_plan('.', pathlib.Path('stores'), shard_bytes=100_000)
results = plans.write(made, pathlib.Path('work'), num_workers=2)
print(sum(result.num_records for result in results))
"""
    )
    command = [sys.executable, str(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ('20\n', 0), ended.stderr


def test_a_full_disk_names_the_file(tmp_path: pathlib.Path):
    made = make_plan(made_sources.write_source(tmp_path, [range(20)]), tmp_path / 'stores')
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        shard_writer.write_shard(made.tasks[0], [made.tasks[0].parts[0].file.path], '/dev/full')


def test_what_is_finished_is_not_written_again(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(70), range(70, 100)])
    made = make_plan(source, tmp_path / 'stores')
    first = write(made, tmp_path / 'work')
    data = data_folder(tmp_path / 'work')
    undisturbed = files_in(data)
    names = sorted(undisturbed)
    lost, cut, flipped, recordless, damaged = names[:5]
    (data / lost).unlink()
    (data / cut).write_bytes(undisturbed[cut][:-1])
    middle = len(undisturbed[flipped]) // 2
    content = bytearray(undisturbed[flipped])
    content[middle] ^= 1
    (data / flipped).write_bytes(content)
    records = data / f'building-{made.build}'
    (records / f'{recordless}.json').unlink()
    record = records / f'{damaged}.json'
    record.write_text(record.read_text().replace('"num_records": ', '"num_records": 1'))
    before = {name: (data / name).stat() for name in names[5:]}

    second = write(made, tmp_path / 'work')

    assert files_in(data) == undisturbed
    after = {name: (data / name).stat() for name in names[5:]}
    assert {n: s.st_ino for n, s in after.items()} == {n: s.st_ino for n, s in before.items()}
    assert [result.to_json() for result in second] == [result.to_json() for result in first]


def test_another_plan_writes_other_files(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(70), range(70, 100)])
    first = make_plan(source, tmp_path / 'stores')
    write(first, tmp_path / 'work')
    before = files_in(data_folder(tmp_path / 'work'))
    assert {schema.build_of(name) for name in before} == {first.build}
    made_sources.write_captions(source, {key: f'Other of {key}.' for key in range(100)})
    made = make_plan(source, tmp_path / 'stores')
    assert made.build != first.build
    write(made, tmp_path / 'work')
    write(made, tmp_path / 'afresh')
    after = files_in(data_folder(tmp_path / 'work'))
    assert after == before | files_in(data_folder(tmp_path / 'afresh'))
    assert len(after) == len(before) + len(made.tasks)


def test_only_the_version_that_planned_a_shard_writes_it(tmp_path: pathlib.Path):
    """As one of several versions among Beam's workers."""
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    made = make_plan(source, tmp_path / 'stores')
    older = 'coyo11m_tfds 0.0.1, records of format 1'
    tasks = tuple(dataclasses.replace(task, writer=older) for task in made.tasks)
    message = f'planned by {older}, but this worker has {made.tasks[0].writer}'
    with pytest.raises(RuntimeError, match=message):
        write(dataclasses.replace(made, tasks=tasks), tmp_path / 'work')
    assert not list(data_folder(tmp_path / 'work').glob('*.tfrecord*'))


@pytest.mark.parametrize(
    ('value', 'num_workers'), [(np.inf, 1), (-np.inf, 1), (np.nan, 1), (np.nan, 2)]
)
def test_what_is_not_finite_is_left_out_and_counted(
    tmp_path: pathlib.Path, value: float, num_workers: int
):
    source = made_sources.write_source(tmp_path / 'source', [range(100), range(100, 150)])
    latents = made_sources.make_latents(50)
    latents[[3, 17], 1, 2, 3, 4] = value
    path = made_sources.latents_file(source, 1)
    made_sources.write_pt(path, range(100, 150), replace={'latents': latents})
    made = make_plan(source, tmp_path / 'stores', max_bad_fraction=0.02, validation_fraction=0)
    results = write(made, tmp_path / 'work', num_workers)
    dropped = run_plan.count_dropped(made, results)
    assert dropped.counts['non_finite'] == 2
    assert dropped.examples['non_finite'] == [103, 117]
    assert sum(result.num_records for result in results) == 148
    again = write(made, tmp_path / 'work')
    assert run_plan.count_dropped(made, again).counts == dropped.counts

    good = made_sources.write_source(tmp_path / 'good', [range(100), range(100, 150)])
    made_sources.write_pt(
        made_sources.latents_file(good, 1),
        [key for key in range(100, 150) if key not in (103, 117)],
        replace={'latents': latents[[i for i in range(50) if i not in (3, 17)]]},
    )
    other = make_plan(good, tmp_path / 'stores', validation_fraction=0, shard_bytes=10**9)
    wanted = make_plan(
        source,
        tmp_path / 'stores',
        validation_fraction=0,
        shard_bytes=10**9,
        max_bad_fraction=0.02,
    )
    expected = write(other, tmp_path / 'good work')
    got = write(wanted, tmp_path / 'bad work')
    data = [data_folder(tmp_path / work) for work in ('bad work', 'good work')]
    assert without_ids(data[0]) == without_ids(data[1])
    np.testing.assert_array_equal(
        [result.statistics.latent_moments[1] for result in got],
        [result.statistics.latent_moments[1] for result in expected],
    )


def test_too_much_that_is_not_finite_stops_the_build(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(100)])
    latents = made_sources.make_latents(100)
    latents[10:13, 0, 0, 0, 0] = np.nan
    path = made_sources.latents_file(source, 0)
    made_sources.write_pt(path, range(100), replace={'latents': latents})
    write(make_plan(source, tmp_path / 'stores', max_bad_fraction=0.03), tmp_path / 'enough')
    made = make_plan(source, tmp_path / 'stores', max_bad_fraction=0.02)
    with pytest.raises(ValueError, match=r'non_finite: 3; e\.g\. key 1[012]\), more than 2\.00%'):
        write(made, tmp_path / 'work')


def test_a_source_of_which_nothing_is_finite_is_refused(tmp_path: pathlib.Path):
    nothing = {'latents': made_sources.make_latents(20) * np.nan}
    source = made_sources.write_source(tmp_path / 'source', [range(20)], replace=nothing)
    made = make_plan(source, tmp_path / 'stores', max_bad_fraction=1)
    with pytest.raises(ValueError, match=r'009\.pt: no record is left for the train split'):
        write(made, tmp_path / 'work')


def test_a_shard_of_which_nothing_is_left_is_empty(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(40), [40]])
    latents = made_sources.make_latents(1) * np.nan
    path = made_sources.latents_file(source, 1)
    made_sources.write_pt(path, [40], replace={'latents': latents})
    made = make_plan(source, tmp_path / 'stores', validation_fraction=0, max_bad_fraction=0.1)
    results = write(made, tmp_path / 'work')
    run_plan.write_chunk_indexes(results, data_folder(tmp_path / 'work'), made.build)
    index = ChunkIndex.load(data_folder(tmp_path / 'work'), schema.TRAIN, made.build)
    assert index.shard_lengths[-1] == 0
    assert index.shard_lengths.sum() == 40


def test_a_file_that_changes_after_planning_is_noticed(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(40)])
    made = make_plan(source, tmp_path / 'stores')
    path = made_sources.latents_file(source, 0)
    made_sources.write_pt(path, range(39, -1, -1))
    with pytest.raises(ValueError, match=f'{path}: has changed since the build began'):
        write(made, tmp_path / 'work')


def test_a_small_file_that_changes_after_planning_is_named(tmp_path: pathlib.Path):
    files = [range(5 * n, 5 * n + 5) for n in range(4)]
    source = made_sources.write_source(tmp_path / 'source', files)
    made = make_plan(source, tmp_path / 'stores', shard_bytes=10**9)
    path = made_sources.latents_file(source, 2)
    made_sources.write_pt(path, range(14, 9, -1))
    with pytest.raises(ValueError, match=f'{path}: has changed since the build began'):
        write(made, tmp_path / 'work')
    assert not list(data_folder(tmp_path / 'work').glob('building-*/*train*'))


def test_the_chunk_index_points_at_the_records(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path, [range(700)])
    made = make_plan(source, tmp_path / 'out', shard_bytes=10_000_000)
    data = data_folder(tmp_path / 'work')
    run_plan.write_chunk_indexes(write(made, tmp_path / 'work'), data, made.build)

    index = ChunkIndex.load(data, schema.TRAIN, made.build)
    train = sorted((t for t in made.tasks if t.split == schema.TRAIN), key=lambda t: t.index)
    assert index.shard_lengths.tolist() == [len(task.inputs.open().rows) for task in train]
    for shard, task in enumerate(train):
        whole = (data / task.filename).read_bytes()
        records = list(tf.data.TFRecordDataset(str(data / task.filename)).as_numpy_iterator())
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
    embeddings = {key: rng.normal(3, 2, 5).astype(np.float16) for key in range(64)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', embeddings, source)
    made = make_plan(source, tmp_path / 'out', text_embeddings=str(sidecar))
    results = write(made, tmp_path / 'work')
    dropped = run_plan.count_dropped(made, results)
    metadata = run_plan.make_metadata(made, results, dropped, 'caption_llava')

    train = [key for shard in planned_keys(made)[schema.TRAIN] for key in shard]
    files = [torch.load(made_sources.latents_file(source, n), weights_only=True) for n in (0, 1)]
    latents = torch.cat([file['latents'] for file in files]).double().numpy()[train]
    text = np.stack([embeddings[key] for key in train]).astype(np.float64)
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
    assert metadata['dropped'] == dict.fromkeys(schema.DROP_REASONS, 0)


@pytest.mark.parametrize('value', ['0', 'many', '-1', '1.5'])
def test_a_bad_number_of_processes_in_the_environment_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, value: str
):
    made = make_plan(made_sources.write_source(tmp_path, [range(5)]), tmp_path / 'out')
    monkeypatch.setenv('COYO11M_NUM_PROC', value)
    with pytest.raises(ValueError, match=f'COYO11M_NUM_PROC={value}: expected'):
        write(made, tmp_path / 'work', num_workers=0)
    assert not list(data_folder(tmp_path / 'work').glob('*.tfrecord*'))
