"""Shards that are written, from a plan to the results."""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert import driver, local_runner
from coyo11m_tfds.convert.data_folder import FinishedShards
from coyo11m_tfds.dataset import chunk_index
from coyo11m_tfds.process import workers
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source.pt_file import PtFile
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.scratch import Scratch
from tests import children, damages, made_sources
from tests.built import files_of
from tests.checkout import CHECKOUT
from tests.convert.plans import data_folder, make_plan, planned_keys, write


def without_ids(folder: pathlib.Path) -> dict[str, bytes]:
    """The files by names without IDs, to compare builds of different plans."""
    ids = [(name, schema.build_of(name)) for name in files_of(folder)]
    return {name.replace(f'-{of}.', '.'): (folder / name).read_bytes() for name, of in ids}


def test_small_files_give_the_same_shards_as_one_file_of_all_their_rows(tmp_path):
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


def test_small_remote_files_are_fetched_once_and_together(gcs, tmp_path):
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
    assert files_of(data_folder(tmp_path / 'work')) == files_of(data_folder(tmp_path / 'local'))
    assert not any((tmp_path / 'work' / 'source').iterdir())
    lost = next(task for task in made.tasks if task.split == schema.VALIDATION)
    (data_folder(tmp_path / 'work') / lost.filename).unlink()
    gcs.clear()
    write(made, tmp_path / 'work')
    reads = {request.path for request in gcs.requests if request.action == 'read'}
    assert {f'gs://{path}' for path in reads} == {segment.file.path for segment in lost.segments}
    assert files_of(data_folder(tmp_path / 'work')) == files_of(data_folder(tmp_path / 'local'))


@pytest.mark.slow
def test_processes_start_from_a_program_that_knows_nothing_of_them(tmp_path):
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
results = plans.write(made, pathlib.Path('work'), num_workers=3)
print(sum(result.num_records for result in results))
"""
    )
    command = [sys.executable, str(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ('20\n', 0), ended.stderr


def test_two_workers_write_the_bytes_of_one_without_a_process(tmp_path, monkeypatch):
    source = made_sources.write_source(tmp_path / 'source', [range(70), range(70, 100)])
    made = make_plan(source, tmp_path / 'stores')
    first = write(made, tmp_path / 'one')
    monkeypatch.setattr(workers, 'open_pool', None)
    second = write(made, tmp_path / 'two', num_workers=2)
    assert [result.to_json() for result in second] == [result.to_json() for result in first]
    assert files_of(data_folder(tmp_path / 'two')) == files_of(data_folder(tmp_path / 'one'))


def test_a_second_interrupt_leaves_no_thread_waiting(tmp_path):
    """It comes while the end of uploads is awaited after the first."""
    source = made_sources.write_source(tmp_path / 'source', [range(70)])
    made = make_plan(source, tmp_path / 'stores')
    main = threading.main_thread().ident
    storing = []
    uploaded = threading.Event()

    class Uploads(FinishedShards):
        def save(self, *args):
            storing.append(args)
            uploaded.wait(60)

    def awaits(pool: str) -> bool:
        """Whether the main thread waits for the threads of a pool."""
        for frame, _ in traceback.walk_stack(sys._current_frames()[main]):
            if frame.f_code is ThreadPool.__exit__.__code__:
                return frame.f_locals['self']._thread_name_prefix == pool
        return False

    def interrupt_twice() -> None:
        children.wait_until(lambda: len(storing) == 8)
        signal.pthread_kill(main, signal.SIGINT)
        children.wait_until(lambda: awaits('group'))
        signal.pthread_kill(main, signal.SIGINT)
        children.wait_until(lambda: awaits('store'))
        time.sleep(0.05)
        uploaded.set()

    finished = Uploads(storage.open_writable_folder(tmp_path / 'data'), made.build)
    # One more than there are threads that store.
    results = local_runner.write_with_workers(
        made.tasks[:9], finished, None, Scratch(tmp_path), str(tmp_path), num_workers=1
    )
    with ThreadPool(1) as thread:
        interrupts = thread.submit(interrupt_twice)
        with pytest.raises(KeyboardInterrupt):
            next(results)
        interrupts.result()
    names = {'group_0', 'store_0'}
    children.wait_until(lambda: names.isdisjoint(x.name for x in threading.enumerate()), seconds=60)


def test_what_is_finished_is_not_written_again(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(70), range(70, 100)])
    made = make_plan(source, tmp_path / 'stores')
    first = write(made, tmp_path / 'work')
    data = data_folder(tmp_path / 'work')
    undisturbed = files_of(data)
    names = sorted(undisturbed)
    lost, cut, flipped, without_receipt, damaged, of_another_version = names[:6]
    (data / lost).unlink()
    (data / cut).write_bytes(undisturbed[cut][:-1])
    damages.flip(data / flipped, len(undisturbed[flipped]) // 2)
    receipts = data / f'building-{made.build}'
    (receipts / f'{without_receipt}.json').unlink()
    path = receipts / f'{damaged}.json'
    path.write_text(path.read_text().replace('"num_records": ', '"num_records": 1'))
    path = receipts / f'{of_another_version}.json'
    receipt = json_digest.unseal(path.read_bytes())
    receipt['facts']['writer'] = 'coyo11m_tfds 0.0.1, records of format 1'
    path.write_bytes(json_digest.seal(receipt))
    before = {name: (data / name).stat() for name in names[6:]}
    second = write(made, tmp_path / 'work')
    assert files_of(data) == undisturbed
    after = {name: (data / name).stat() for name in names[6:]}
    assert {n: s.st_ino for n, s in after.items()} == {n: s.st_ino for n, s in before.items()}
    assert [result.to_json() for result in second] == [result.to_json() for result in first]


def test_only_the_version_that_planned_a_shard_writes_it(tmp_path):
    """As one of several versions among Beam's workers."""
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    made = make_plan(source, tmp_path / 'stores')
    older = 'coyo11m_tfds 0.0.1, records of format 1'
    tasks = tuple(dataclasses.replace(task, writer=older) for task in made.tasks)
    message = f'planned by {older}, but this worker has {made.tasks[0].writer}'
    with pytest.raises(RuntimeError, match=message):
        write(dataclasses.replace(made, tasks=tasks), tmp_path / 'work')
    assert not list(data_folder(tmp_path / 'work').glob('*.tfrecord*'))


def write_with_bad_rows(source: pathlib.Path, value: float) -> pathlib.Path:
    """A source of 150 rows, two of which, keys 103 and 117, are not finite; a file has a third."""
    made_sources.write_source(source, [range(100), range(100, 150), [150]])
    for number, bad in ((1, [3, 17]), (2, [0])):
        keys = [range(100, 150), [150]][number - 1]
        latents = made_sources.make_latents(len(keys))
        latents[bad, 1, 2, 3, 4] = value
        path = made_sources.latents_file(source, number)
        made_sources.write_pt(path, keys, replace={'latents': latents})
    return source


@pytest.mark.parametrize('value', [-np.inf, np.nan])
def test_what_is_not_finite_is_left_out_and_counted(tmp_path, value):
    source = write_with_bad_rows(tmp_path / 'source', value)
    made = make_plan(source, tmp_path / 'stores', max_bad_fraction=0.02, validation_fraction=0)
    results = write(made, tmp_path / 'work')
    data = data_folder(tmp_path / 'work')
    built = driver.describe_dataset(made, results, str(data))
    assert built.dropped.counts['non_finite'] == built.metadata['dropped']['non_finite'] == 3
    assert built.dropped.examples['non_finite'] == [103, 117, 150]
    index = data / chunk_index.index_file_name(schema.TRAIN, made.build)
    lengths = chunk_index.ChunkIndex.parse(index.read_bytes()).shard_lengths
    assert lengths[-1] == 0 and lengths.sum() == 148
    again = driver.describe_dataset(made, write(made, tmp_path / 'work'), str(data))
    assert again.dropped.counts == built.dropped.counts
    made = make_plan(source, tmp_path / 'stores', max_bad_fraction=0.01)
    with pytest.raises(ValueError, match=r'non_finite: [23]; e\.g\. key 1\d\d\), more than 1\.00%'):
        write(made, tmp_path / 'too much')


def test_a_source_of_which_nothing_is_finite_is_refused(tmp_path):
    nothing = {'latents': made_sources.make_latents(20) * np.nan}
    source = made_sources.write_source(tmp_path / 'source', [range(20)], replace=nothing)
    made = make_plan(source, tmp_path / 'stores', max_bad_fraction=1)
    with pytest.raises(ValueError, match=r'009\.pt: no record is left for the train split'):
        write(made, tmp_path / 'work')


def test_a_file_that_changes_after_planning_is_named(tmp_path):
    files = [range(5 * n, 5 * n + 5) for n in range(4)]
    source = made_sources.write_source(tmp_path / 'source', files)
    made = make_plan(source, tmp_path / 'stores', shard_bytes=10**9)
    path = made_sources.latents_file(source, 2)
    made_sources.write_pt(path, range(14, 9, -1))
    with pytest.raises(ValueError, match=f'{path}: has changed since the build began'):
        write(made, tmp_path / 'work')
    assert not list(data_folder(tmp_path / 'work').glob('building-*/*train*'))


@pytest.mark.parametrize('latents', ['records', 'in_place'])
@pytest.mark.parametrize('chunk', [0, 1], ids=['of rows to come', 'of rows that were read'])
def test_a_file_that_is_rewritten_after_its_check_gives_no_shard(
    tmp_path, monkeypatch, latents, chunk
):
    source = made_sources.write_source(tmp_path / 'source', [range(160)])
    path = made_sources.latents_file(source, 0)
    whole, time = path.read_bytes(), path.stat().st_mtime_ns
    begin = whole.index(bytes(PtFile(path).latents(range(100, 120))[0]))
    reads = itertools.count()

    def rewrite_and_read(file: PtFile, rows: np.ndarray, original=PtFile.latents):
        if next(reads) == chunk:
            with path.open('r+b') as opened:
                opened.seek(begin)
                opened.write(whole[:20] * 24_576)
        return original(file, rows)

    settings = {'validation_fraction': 0, 'shard_bytes': 10**9, 'latents': latents}
    made = make_plan(source, tmp_path / 'stores', **settings)
    with monkeypatch.context() as patch:
        patch.setattr(PtFile, 'latents', rewrite_and_read)
        with pytest.raises(ValueError, match=f'{path}: has changed since the build began'):
            write(made, tmp_path / 'work')
    assert next(reads) == 2
    assert not list(data_folder(tmp_path / 'work').glob('**/*train*'))
    path.write_bytes(whole)
    os.utime(path, ns=(time, time))
    again = make_plan(source, tmp_path / 'stores', **settings)
    assert again.build == made.build
    assert [x.num_records for x in write(again, tmp_path / 'work')] == [160]
    write(again, tmp_path / 'once')
    assert files_of(data_folder(tmp_path / 'work')) == files_of(data_folder(tmp_path / 'once'))


def test_statistics_are_those_of_the_train_split(tmp_path):
    source = made_sources.write_source(tmp_path, [range(30), range(30, 64)], dtype='bfloat16')
    rng = np.random.default_rng(0)
    embeddings = {key: rng.normal(3, 2, 5).astype(np.float16) for key in range(64)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', embeddings, source)
    made = make_plan(source, tmp_path / 'out', text_embeddings=str(sidecar))
    metadata = driver.describe_dataset(made, write(made, tmp_path / 'work'), str(tmp_path)).metadata
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
