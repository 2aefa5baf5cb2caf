"""The rules that name what holds the input back: tables of numbers."""

import dataclasses

import pytest

from train_lib import limits

# A run whose input is fast enough and whose settings break no rule.
FINE = limits.Facts(
    engine='chunks',
    batch_size=256,
    lanes=16,
    num_hosts=1,
    chunk=64,
    window=1024,
    parallel_reads=4,
    num_cores=8,
    is_remote=False,
    shard_bytes=128e6,
    num_shards=8,
    built_shard_bytes=None,
    sample_bytes=10_000,
    request_seconds=0.001,
    chunk_seconds=0.003,
    chunk_bytes=1.7e6,
    step_seconds=0.1,
    batch_seconds=0.005,
    together_seconds=0.101,
    first_batch_seconds=1,
    cpu_share=0.3,
    resident_bytes=2e9,
    available_bytes=16e9,
)
# What makes it wait for data.
SLOW = {'batch_seconds': 0.2, 'together_seconds': 0.2}


def test_a_step_bound_run_is_told_that_there_is_nothing_to_gain():
    [line] = limits.verdicts(FINE)

    assert line.startswith('Step-bound: a step takes 100.0 ms alone and 101.0 ms')
    assert line.endswith('gains nothing.')


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (
            SLOW,
            'Input-bound: a batch takes 200.0 ms, a step 100.0 ms; together 200.0 ms, of w',
        ),
        ({'batch_seconds': 0.09, 'together_seconds': 0.15}, 'Both: a step takes 100.0 ms and a'),
        ({'batch_seconds': 0.2, 'together_seconds': 0.104}, 'Step-bound'),
        # A batch of 1.9 ms cannot be what a step of a second waits for.
        (
            {'step_seconds': 1.174, 'batch_seconds': 0.0019, 'together_seconds': 1.3},
            'Step-bound: a step takes 1,174.0 ms alone and 1,300.0 ms with the pipeline, whose',
        ),
    ],
)
def test_the_first_line_names_the_limit(changes: dict, words: str):
    facts = dataclasses.replace(FINE, **changes)

    assert limits.verdicts(facts)[0].startswith(words)


@pytest.mark.parametrize(
    ('changes', 'words', 'field'),
    [
        (SLOW, 'cores are 30% busy', 'Set data.parallel_reads=8 (now 4)'),
        (SLOW | {'cpu_share': 0.95}, '8 cores 95% busy at 1,280 samples/s', 'No setting helps'),
        (
            SLOW | {'is_remote': True, 'request_seconds': 0.09, 'chunk_seconds': 0.12},
            'of 120 ms for a chunk of 1.7 MB, 90 ms are',
            'Set data.chunk=128 (now 64)',
        ),
        ({'shard_bytes': 16e6}, 'the median is 16 MB, outside 67 to 268', 'shard_bytes=134217728'),
        ({'shard_bytes': 300e6}, 'the median is 300 MB', 'shard_bytes=134217728'),
        (
            {'available_bytes': 1.3e9},
            'windows take about 328 MB of 1,300 available',
            'Set data.window=512 (now 1024)',
        ),
        ({'first_batch_seconds': 11}, 'the first batch took 11 s', 'Set data.window=512'),
        (
            {'batch_size': 4096, 'num_hosts': 4},
            'each gives 256 records to a batch of 4096',
            'Set data.lanes=128 (now 16), and data.window=128',
        ),
    ],
)
def test_a_broken_rule_gives_its_figure_and_the_field_to_set(changes: dict, words: str, field: str):
    lines = limits.verdicts(dataclasses.replace(FINE, **changes))

    [line] = [line for line in lines[1:] if words in line]
    assert field in line


@pytest.mark.parametrize(
    'changes',
    [
        {'is_remote': True, 'cpu_share': 0.9},
        {'is_remote': True, 'request_seconds': 0.05, 'chunk_seconds': 0.12, 'cpu_share': 0.9},
        # The storage is here, so that latency does not matter.
        {'request_seconds': 0.1, 'chunk_seconds': 0.1, 'cpu_share': 0.9},
    ],
)
def test_rules_for_remote_storage_keep_still_where_they_do_not_hold(changes: dict):
    lines = limits.verdicts(dataclasses.replace(FINE, **SLOW, **changes))

    assert [line.split(':')[0] for line in lines] == ['Input-bound', 'CPU-bound']


@pytest.mark.parametrize(
    'changes',
    [
        {'shard_bytes': 40e6, 'built_shard_bytes': 134217728},
        {'shard_bytes': 9e6, 'num_shards': 1},  # there is no more to fill a shard with
        {'step_seconds': 1.174, 'batch_seconds': 0.0019, 'together_seconds': 1.3, 'cpu_share': 0.9},
    ],
)
def test_no_advice_is_given_that_changes_nothing(changes: dict):
    [line] = limits.verdicts(dataclasses.replace(FINE, **changes))

    assert line.startswith('Step-bound')


def test_lanes_stay_as_they_are_where_no_number_of_them_would_do():
    prime = dataclasses.replace(FINE, batch_size=257, lanes=1)

    assert 'data.lanes=257' in limits.more_lanes(prime)
    assert limits.more_lanes(dataclasses.replace(prime, num_hosts=3)) is None


def test_windows_of_no_more_than_is_read_at_once_get_no_smaller():
    small = dataclasses.replace(FINE, window=256, first_batch_seconds=99)

    assert limits.smaller_window(small) is None
    assert dataclasses.replace(small, window=100).window_bytes == 2 * 16 * 300 * 10_000


ROWS = {'engine': 'rows', 'num_cores': 4}


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'cpu_share': 0.24}, 'CPU-bound: rows are gathered by one thread, which is busy at 1,280'),
        ({'cpu_share': 0.05}, 'Disk-bound: rows come at 1,280 samples/s, for which 0.20 of a core'),
    ],
)
def test_rows_are_told_about_their_thread_and_their_disk_alone(changes: dict, words: str):
    slow = {**SLOW, 'first_batch_seconds': 99, 'available_bytes': 1e6, **ROWS, **changes}
    facts = dataclasses.replace(FINE, **slow)
    first, *others = limits.verdicts(facts)
    assert first.startswith('Input-bound')
    assert len(others) == 1 and others[0].startswith(words)


def test_more_lanes_of_rows_take_no_memory():
    facts = dataclasses.replace(FINE, batch_size=1024, **ROWS)
    [_, line] = limits.verdicts(facts)
    assert 'Set data.lanes=32 (now 16); it is another order' in line
