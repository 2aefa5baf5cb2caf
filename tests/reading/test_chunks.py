"""Records that cannot be read: named, or left out without moving anything else; and the counter."""

import itertools
import os
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import chunk_index, stored_dataset
from tests.reading import planned, small_dataset
from tests.reading.damaged import LENGTHS, ORDER, damage, place_of, shard_path, steps_of_an_epoch


def train_batches(path: pathlib.Path, count: int, **changes) -> list[dict[str, np.ndarray]]:
    asked = {**ORDER, 'features': stored_dataset.FEATURES, 'caption_dropout': 0.3, **changes}
    batches = input_pipeline.train_batches(path, **{'engine': 'chunks', **asked})
    return list(itertools.islice(batches, count))


@pytest.mark.parametrize('engine', ['chunks', 'tf_data'])
def test_a_damaged_record_is_named(copy, engine):
    shard, record = place_of(copy, 3, 5)
    damage(copy, shard, record)
    message = rf'{shard_path(copy, shard).name}: record {record} cannot be read: its checksum'
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        train_batches(copy, steps_of_an_epoch(copy), engine=engine)


@pytest.mark.parametrize('policy', ['stop', 'skip'])
def test_a_missing_shard_is_an_error_under_either_policy(copy, policy):
    shard_path(copy, 3).unlink()
    with pytest.raises(FileNotFoundError) as error:
        train_batches(copy, steps_of_an_epoch(copy), on_bad_records=policy)
    assert str(error.value) == f'{shard_path(copy, 3)} is missing: restore it.'


def test_evaluation_does_not_pass_over_a_missing_shard(copy):
    shard_path(copy, 1, schema.VALIDATION).unlink()
    batches = input_pipeline.eval_batches(
        copy, batch_size=8, features=('key',), on_bad_records='skip', engine='chunks'
    )
    with pytest.raises(FileNotFoundError, match='is missing: restore it'):
        list(batches)


@pytest.mark.skipif(os.geteuid() == 0, reason='root may read everything')
def test_a_shard_that_may_not_be_read_is_an_error(copy):
    shard_path(copy, 3).chmod(0)
    with pytest.raises(PermissionError, match='access was refused: let this user read the file'):
        train_batches(copy, steps_of_an_epoch(copy), on_bad_records='skip')


@pytest.mark.parametrize('policy', ['stop', 'skip'])
def test_what_is_no_file_is_an_error(copy, policy):
    shard_path(copy, 3).unlink()
    shard_path(copy, 3).mkdir()
    with pytest.raises(OSError) as error:
        train_batches(copy, steps_of_an_epoch(copy), on_bad_records=policy)
    assert f'{shard_path(copy, 3)}: cannot be read (' in str(error.value)


def test_a_short_shard_is_named(copy):
    whole = shard_path(copy, 2).read_bytes()
    shard_path(copy, 2).write_bytes(whole[:-1])
    message = 'record 96 cannot be read: the file is shorter than its chunk index says'
    with pytest.raises(ValueError, match=message):
        train_batches(copy, 4 * steps_of_an_epoch(copy))


def test_in_evaluation_too(copy):
    damage(copy, 1, 3, split=schema.VALIDATION)
    read = dict(batch_size=8, features=('key',), engine='chunks')
    with pytest.raises(ValueError, match='record 3 cannot be read'):
        list(input_pipeline.eval_batches(copy, **read))
    batches = list(input_pipeline.eval_batches(copy, **read, on_bad_records='skip'))
    mask = np.concatenate([batch['mask'] for batch in batches])
    assert mask.tolist() == [True] * 40 + [False] + [True] * 8 + [False] * 7


def test_a_damaged_record_is_left_out_and_nothing_else_changes(intact, copy, caplog):
    steps = steps_of_an_epoch(intact)
    shard, record = place_of(intact, 3, 5)
    damage(copy, shard, record)
    counter = input_pipeline.ReadCounter()
    expected = train_batches(intact, steps)
    got = train_batches(copy, steps, on_bad_records='skip', counter=counter)
    for step, (batch, whole) in enumerate(zip(got, expected, strict=True)):
        bad = [5] if step == 3 else []
        assert np.flatnonzero(~batch['mask']).tolist() == bad
        for name, values in whole.items():
            np.testing.assert_array_equal(batch[name][batch['mask']], values[batch['mask']])
        assert not batch['latents'][bad].any() and not batch['key'][bad].any()
        assert not batch['text_embedding'][bad].any() and all(
            c == b'' for c in batch['caption'][bad]
        )
    assert counter.read().bad_records >= 1  # of this epoch, and of the next if it was begun
    assert f'record {record} cannot be read' in caplog.text


@pytest.mark.parametrize('kind', ['length', 'zeros', 'short'])
def test_what_is_lost_with_a_record_is_left_out(intact, copy, kind):
    shard = 4
    if kind == 'length':
        damage(copy, shard, 70, at=3)
        lost = range(70, 131)  # up to where the index knows a record again, by reads of a chunk
    elif kind == 'zeros':
        shard_path(copy, shard).write_bytes(bytes(shard_path(copy, shard).stat().st_size))
        lost = range(131)
    else:
        file = shard_path(copy, shard)
        file.write_bytes(file.read_bytes()[:-20_000])
        lost = range(130, 131)
    steps = steps_of_an_epoch(intact)
    plan = planned.of_data(intact, **ORDER)
    got = train_batches(copy, steps, on_bad_records='skip', max_bad_fraction=1)
    expected = train_batches(intact, steps)
    left_out = set()
    for step, (batch, whole) in enumerate(zip(got, expected, strict=True)):
        _, shards, records = plan.batch(step)
        bad = ~batch['mask']
        assert (shards[bad] == shard).all()
        left_out |= set(records[bad].tolist())
        np.testing.assert_array_equal(batch['latents'][~bad], whole['latents'][~bad])
    given = {
        int(r)
        for step in range(steps)
        for _, s, r in zip(*plan.batch(step), strict=True)
        if s == shard
    }
    # Only what is lost is missing, and of a damaged length no more than the rest of its chunk.
    assert left_out == (given & set(lost) if kind != 'length' else left_out & set(range(70, 128)))
    assert left_out


def test_each_shard_is_reported_once(copy, caplog):
    for shard in (0, 3):
        shard_path(copy, shard).write_bytes(b'')
    counter = input_pipeline.ReadCounter()
    batches = train_batches(
        copy,
        3 * steps_of_an_epoch(copy),
        on_bad_records='skip',
        max_bad_fraction=1,
        counter=counter,
    )
    assert sum((~batch['mask']).sum() for batch in batches) > 200
    reports = [r for r in caplog.records if 'It is left out' in r.getMessage()]
    assert len(reports) == 2
    assert counter.read().bad_records >= sum((~batch['mask']).sum() for batch in batches)


# --- How many may be bad -----------------------------------------------------------------------


def test_more_bad_records_than_are_allowed_stop_it(copy):
    for shard in range(len(LENGTHS[schema.TRAIN])):
        shard_path(copy, shard).write_bytes(b'')
    with pytest.raises(ValueError) as error:
        train_batches(copy, 60, on_bad_records='skip')
    message = str(error.value)
    assert re.search(r'[0-9]+ of 362 records are bad, more than max_bad_fraction=0.001', message)
    assert 'python -m coyo11m_tfds.verify' in message


@pytest.mark.parametrize(('fraction', 'stops'), [(70.5 / 362, False), (69.5 / 362, True)])
def test_a_bad_record_counts_once_in_all_epochs(copy, fraction, stops):
    shard_path(copy, 0).write_bytes(b'')  # 70 records
    read = dict(on_bad_records='skip', max_bad_fraction=fraction)
    steps = 4 * steps_of_an_epoch(copy)
    if stops:
        with pytest.raises(ValueError, match='70 of 362 records are bad'):
            train_batches(copy, steps, **read)
    else:
        assert sum((~batch['mask']).sum() for batch in train_batches(copy, steps, **read)) > 140


def test_a_few_bad_records_never_stop_it(copy):
    damage(copy, 4, 0, at=3)  # with a length all of its chunk is lost, 64 records
    train_batches(copy, 3 * steps_of_an_epoch(copy), on_bad_records='skip', max_bad_fraction=0)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'on_bad_records': 'ignore'}, "on_bad_records='ignore' is none of 'stop', 'skip'"),
        ({'max_bad_fraction': 1.5}, r'max_bad_fraction=1.5 is not in \[0, 1\]'),
        ({'max_bad_fraction': float('nan')}, 'max_bad_fraction=nan is not in'),
    ],
)
def test_settings_that_make_no_sense_are_refused(intact, changes, message):
    with pytest.raises(ValueError, match=message):
        train_batches(intact, 1, **changes)


def test_reading_intact_data_warns_of_nothing(intact, caplog):
    train_batches(intact, 2 * steps_of_an_epoch(intact))
    assert not caplog.records


def test_intact_data_are_the_same_under_both_policies(intact):
    stop, skip = (train_batches(intact, 9, on_bad_records=p) for p in ('stop', 'skip'))
    for expected, batch in zip(stop, skip, strict=True):
        assert batch.pop('mask').all()
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)


def test_the_counter_counts_what_is_read(intact):
    counter = input_pipeline.ReadCounter()
    batches = input_pipeline.eval_batches(
        intact, batch_size=49, chunk=32, features=('key',), counter=counter, engine='chunks'
    )
    assert len(list(batches)) == 1
    size = sum(shard_path(intact, s, schema.VALIDATION).stat().st_size for s in range(2))
    assert counter.read() == (size, 3, 0, 0)


def test_one_counter_serves_several_data_sets(intact):
    counter = input_pipeline.ReadCounter()
    for _ in range(2):
        asked = dict(batch_size=7, chunk=32, counter=counter, engine='chunks')
        list(input_pipeline.eval_batches(intact, **asked))
    assert counter.read().num_chunks == 6


@pytest.mark.parametrize('num_shards', [12, 100_000])
def test_paths_of_shards_are_those_of_tfds(tmp_path, num_shards):
    path = tmp_path / schema.NAME / '00000-of-00012' / '1.0.0'
    path.mkdir(parents=True)
    template = small_dataset.template(path, schema.TRAIN)
    # Shards without records. TFDS wants to see one file.
    template.sharded_filepath(shard_index=0, num_shards=num_shards).touch()
    chunk_index.save(path, schema.TRAIN, [0] * num_shards, [[]] * num_shards, [0] * num_shards)
    small_dataset.write_metadata(path, {schema.TRAIN: [0] * num_shards})
    opened = input_pipeline.open_data(path).split(schema.TRAIN)
    for shard in (0, 7, num_shards - 1):
        expected = template.sharded_filepath(shard_index=shard, num_shards=num_shards)
        assert opened.file(shard) == str(expected)
