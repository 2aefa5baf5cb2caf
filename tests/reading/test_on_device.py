"""Sending batches to devices: ahead, without limit neither in memory nor in time."""

import signal
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.reading import to_device
from tests.reading import small_dataset


def one_device() -> jax.sharding.Sharding:
    mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))


def test_devices_get_what_the_host_read(tmp_path):
    path = tmp_path / '1.0.0'
    small_dataset.write(path, {schema.TRAIN: (70, 97)})
    batches = input_pipeline.train_dataset(
        path, batch_size=8, seed=0, lanes=2, features=stored_dataset.FEATURES, caption_dropout=0.5
    )
    sent = to_device.to_device(batches, one_device())
    for batch in batches.take(4).as_numpy_iterator():
        arrived = next(sent)
        assert arrived.keys() == batch.keys() - {'caption'}
        assert all(isinstance(x, jax.Array) for x in arrived.values())
        for name in ('latents', 'text_embedding', 'drop_text'):
            assert arrived[name].dtype == batch[name].dtype
            np.testing.assert_array_equal(arrived[name], batch[name])
        words = np.asarray(arrived['key']).astype(np.uint64)
        keys = (words[:, 0] | words[:, 1] << np.uint64(32)).astype(np.int64)
        np.testing.assert_array_equal(keys, batch['key'])
    sent.close()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_key_words_are_low_and_high(keys):
    words = to_device.key_words(np.array(keys, np.int64))
    assert words.dtype == np.uint32 and words.shape == (len(keys), 2)
    assert [int(low) | int(high) << 32 for low, high in words] == [k % 2**64 for k in keys]


@pytest.mark.parametrize('ahead', [1, 2, 5])
def test_batches_are_sent_ahead_but_not_without_limit(ahead):
    made = []

    def host_batches():
        for i in range(20):
            made.append(i)
            yield {'x': np.full(2, i, np.int32)}

    arrived = []
    for batch in to_device.to_device(host_batches(), one_device(), ahead=ahead):
        arrived.append(int(batch['x'][0]))
        assert len(made) <= len(arrived) + ahead
    assert arrived == made == list(range(20))


def test_nothing_ahead_is_refused():
    with pytest.raises(ValueError, match='ahead=0 must be at least 1'):
        to_device.to_device([{'x': np.zeros(2, np.float32)}], one_device(), ahead=0)


def test_an_error_while_reading_reaches_the_loop():
    def host_batches():
        yield {'x': np.zeros(2, np.float32)}
        raise OSError('the disk is gone')

    sent = to_device.to_device(host_batches(), one_device())
    next(sent)
    with pytest.raises(OSError, match='the disk is gone'):
        next(sent)


def test_closing_stops_the_thread():
    def host_batches():
        while True:
            yield {'x': np.zeros(2, np.float32)}

    before = threading.enumerate()  # an error that another test keeps may keep its iterator, too
    sent = to_device.to_device(host_batches(), one_device())
    next(sent)
    started = [thread for thread in threading.enumerate() if thread not in before]
    threads = [thread for thread in started if thread.name.startswith('to_device')]
    assert threads
    sent.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize('dtype', ['int64', 'uint64', 'float64', 'complex128'])
def test_numbers_that_devices_would_change_are_refused_by_name(dtype):
    batch = {'key': np.arange(2), 'taken_at': np.full(2, 1_700_000_000_063, dtype)}
    with pytest.raises(ValueError, match=f"'taken_at' is {dtype}, which devices would hold as"):
        next(to_device.to_device([batch], one_device()))


@pytest.mark.parametrize('dtype', ['int8', 'uint32', 'float16', 'bfloat16', 'float32', 'bool'])
def test_numbers_of_up_to_32_bits_arrive_as_they_are(dtype):
    x = np.array([0, 1, 127], jax.numpy.dtype(dtype))
    [batch] = to_device.to_device([{'x': x}], one_device())
    assert batch['x'].dtype == x.dtype
    np.testing.assert_array_equal(batch['x'], x)


def test_a_loop_that_was_interrupted_goes_on_with_the_next_batch():
    def host_batches():
        for i in range(6):
            started.set()
            may_go_on.wait()
            yield {'x': np.full(2, i, np.int32)}

    started, may_go_on, arrived = threading.Event(), threading.Event(), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = to_device.to_device(host_batches(), one_device())
    main = threading.get_ident()
    interrupt = threading.Thread(
        target=lambda: (started.wait(), signal.pthread_kill(main, signal.SIGINT))
    )
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        arrived += [int(batch['x'][0]) for batch in sent]
    signal.signal(signal.SIGINT, before)
    interrupt.join()
    may_go_on.set()
    arrived += [int(batch['x'][0]) for batch in sent]
    assert arrived == list(range(6))
