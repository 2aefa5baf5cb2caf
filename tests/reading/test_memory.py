"""What reading takes of the memory: the sum told beforehand against what a process really takes."""

import dataclasses
import json
import os
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import chunk_index, records
from coyo11m_tfds.process import machine
from coyo11m_tfds.reading.batches import MemoryNeed
from tests import children
from tests.reading import small_dataset
from tests.reading.batches import check_memory

RECORDS, SHARDS, TEXT_DIM = 512, 200, 640
NEED = MemoryNeed(
    lanes=16, window=1024, in_flight=256, rows_ready=768, row_nbytes=9481, raw_nbytes=26_000
)


@pytest.fixture(scope='module')
def big(tmp_path_factory) -> pathlib.Path:
    """100,000 records of real size; all shards are one file of 13 MB."""
    path = tmp_path_factory.mktemp('big') / schema.VERSION
    path.mkdir()
    template = small_dataset.template(path, schema.TRAIN)
    names = [template.sharded_filepath(shard_index=n, num_shards=SHARDS) for n in range(SHARDS)]
    with open(names[0], 'wb') as file, records.RecordWriter(file) as writer:
        writer.write(
            {
                schema.KEY: np.arange(RECORDS),
                schema.LATENTS: np.zeros((RECORDS, 3 * schema.LATENT_NBYTES), np.uint8),
                schema.CAPTION: [b'A caption.' * 40] * RECORDS,
                schema.TEXT_EMBEDDING: np.zeros((RECORDS, 2 * TEXT_DIM), np.uint8),
            }
        )
    for name in names[1:]:
        os.link(names[0], name)
    entries = chunk_index.make_entries(writer.chunk_offsets, writer.checksums)
    sizes = [writer.num_bytes] * SHARDS
    chunk_index.write_chunk_index(path, schema.TRAIN, [RECORDS] * SHARDS, [entries] * SHARDS, sizes)
    small_dataset.write_metadata(path, {schema.TRAIN: [RECORDS] * SHARDS}, text_dim=TEXT_DIM)
    return path


_READ = """
import itertools, json
from coyo11m_tfds.process import preparation
preparation.keep_freed_memory()
import input_pipeline

def read(steps, **settings):
    batches = input_pipeline.train_batches(path, engine='chunks', seed=0, **settings)
    for _ in itertools.islice(batches, steps):
        pass

def memory(field):
    lines = open('/proc/self/status').read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

path, settings = json.loads(sys.argv[1])
read(2, batch_size=16, lanes=1, chunk=32, window=32, parallel_reads=1)
before = memory('VmRSS')
open('/proc/self/clear_refs', 'w').write('5')  # forgets the peak
blocks, in_flight = 4, settings['parallel_reads'] * settings['chunk']
block = max(settings['window'], in_flight) * settings['lanes']
read(blocks * block // settings['batch_size'], **settings)
print(memory('VmHWM') - before)
"""


def measure(path: pathlib.Path, settings: dict) -> int:
    """Bytes that a process takes at most for four blocks of batches."""
    with children.python(_READ, json.dumps([str(path), settings])) as child:
        output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    return int(output)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/clear_refs'), reason='needs Linux')
@pytest.mark.parametrize(
    'changes',
    [{}, {'lanes': 32, 'parallel_reads': 8}, {'chunk': 128, 'window': 64, 'parallel_reads': 8}],
)
def test_reading_takes_what_is_told(big, changes):
    settings = {'batch_size': 256, 'chunk': 64, 'lanes': 16, 'window': 1024, 'parallel_reads': 4}
    settings |= changes
    with pytest.raises(ValueError, match='GB of memory on this host') as error:
        check_memory(big, **settings, ram_budget_gb=1e-6)
    told = 1e9 * float(re.search(r'takes ([\d.]+) GB', str(error.value))[1])
    # The sum is told in tenths of a GB, and a busy machine does less at the same time.
    assert 0.75 <= (measure(big, settings) + 5e7) / told <= 1.25


@given(
    need=st.builds(
        MemoryNeed,
        lanes=st.integers(1, 512),
        window=st.integers(1, 10**6),
        in_flight=st.integers(1, 256).map(lambda n: 32 * n),
        rows_ready=st.integers(1, 10**6),
        row_nbytes=st.integers(8000, 20_000),
        raw_nbytes=st.integers(24_000, 50_000),
    ),
    budget_gb=st.floats(0.001, 1000),
    processes=st.integers(1, 8),
)
def test_what_does_not_fit_is_refused_and_what_fits_is_named(need, budget_gb, processes):
    def check(need, budget_gb):
        need.check(budget_gb=budget_gb, processes_on_host=processes)

    if processes * need.num_bytes <= budget_gb * 1e9:
        check(need, budget_gb)
        return
    with pytest.raises(ValueError, match=f'data.window={need.window} in') as error:
        check(need, budget_gb)
    check(need, float(re.search(r'data.ram_budget_gb to ([\d.]+)', str(error.value))[1]))
    named = re.search(r'set data.window to (\d+)', str(error.value))
    if named:
        fits = int(named[1])
        check(dataclasses.replace(need, window=fits), budget_gb)
        with pytest.raises(ValueError):
            check(dataclasses.replace(need, window=fits + 1), budget_gb)
    else:
        with pytest.raises(ValueError):
            check(dataclasses.replace(need, window=need.in_flight), budget_gb)


def test_half_of_what_the_container_has_is_for_all_processes_of_a_host(monkeypatch):
    for processes in (1, 4):
        monkeypatch.setattr(machine, 'usable_memory', lambda n=processes: 2 * n * NEED.num_bytes)
        NEED.check(budget_gb=0, processes_on_host=processes)
        with pytest.raises(ValueError, match=f'in each of {processes + 1} processes takes'):
            NEED.check(budget_gb=0, processes_on_host=processes + 1)


def test_each_process_reads_its_part(tmp_path):
    path = tmp_path / schema.VERSION
    small_dataset.write(path, {schema.TRAIN: (700, 700)})
    settings = dict(batch_size=16, chunk=32, lanes=8, window=64, ram_budget_gb=0.22)
    with pytest.raises(ValueError, match=r'in 8 lanes takes 0\.3 GB.*ram_budget_gb=0\.22'):
        check_memory(path, **settings)
    check_memory(path, **settings, process_count=8)
    check_memory(path, **settings, engine='rows')  # which has no windows
    with pytest.raises(ValueError, match=r'in 1 lanes in each of 8 processes takes 1\.7 GB'):
        check_memory(path, **settings, process_count=8, processes_on_host=8)
