"""What `train_batches`, `eval_batches` and `train_arrays` give: place, content, share, end."""

import contextlib
import copy as copying
import functools
import gc
import inspect
import itertools
import json
import pathlib
import pickle
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.process import threads
from coyo11m_tfds.reading.batches import Ahead
from coyo11m_tfds.sampling.mixture import BatchShares, Cursor, Position
from tests import children, runs
from tests.reading.batches import assert_same
from tests.reading.damaged import LENGTHS, ORDER

ALL = stored_dataset.FEATURES
ENGINES = ['rows', 'chunks', 'tf_data']


def take(batches, count: int) -> list[dict]:
    return list(itertools.islice(batches, count))


def one_device() -> jax.sharding.Sharding:
    mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))


def test_what_reads_in_this_process_says_why_it_cannot_be_sent_to_another(intact):
    """As to the workers of torch's DataLoader that are spawned."""
    asked = dict(batch_size=16, features=[schema.KEY])
    unpicklable = [
        input_pipeline.eval_batches(intact, **asked),
        input_pipeline.train_batches(intact, **ORDER | asked),
        input_pipeline.to_device(iter([]), one_device()),
        input_pipeline.train_plan(intact, **ORDER | asked),
        input_pipeline.ReadCounter(),
    ]
    for thing in unpicklable:
        for copy in (pickle.dumps, copying.copy):
            with pytest.raises(TypeError, match=r'pickled or copied, .* in each process'):
                copy(thing)


# --- Where they are ----------------------------------------------------------------------------


@pytest.mark.parametrize('engine', ENGINES)
def test_an_evaluation_continues_where_its_state_was_taken(intact, engine):
    asked = dict(batch_size=16, engine=engine, features=ALL)
    expected = take(input_pipeline.eval_batches(intact, **asked), 9)
    batches = input_pipeline.eval_batches(intact, **asked)
    assert batches.steps_per_epoch == len(expected) == 4
    take(batches, 1)
    state = batches.get_state()
    assert len(list(batches)) == 3
    batches.set_state(state)
    assert batches.step == 1
    assert_same(list(batches), expected[1:])


def test_a_state_of_another_order_is_refused(intact):
    state = input_pipeline.train_batches(intact, **ORDER).get_state()
    other = input_pipeline.train_batches(intact, **ORDER | {'seed': 6})
    with pytest.raises(ValueError, match=r'is not a state of these batches.*same data set'):
        other.set_state(state)


NO_SAMPLES = {
    'a negative number': -1,
    'a text': '7',
    'nothing': None,
    'a number with a point': 1.0,
    'a truth': True,
}


@pytest.mark.parametrize('samples', NO_SAMPLES.values(), ids=NO_SAMPLES)
def test_a_state_of_samples_that_cannot_be_is_refused(intact, samples):
    batches = input_pipeline.train_batches(intact, **ORDER)
    state = batches.get_state()
    (source,) = state['samples']
    for wrong in ({}, state | {'samples': samples}, state | {'samples': {source: samples}}):
        with pytest.raises(ValueError, match='is not a state'):
            batches.set_state(wrong)


def test_a_block_closes_them_and_counts_the_steps_of_an_epoch(intact):
    with input_pipeline.train_batches(intact, **ORDER) as batches:
        next(batches)
        assert batches.steps_per_epoch == 362 // 4 / 4
    assert next(batches, None) is None


# --- What is in them ---------------------------------------------------------------------------


@pytest.mark.parametrize('engine', ENGINES)
def test_the_specification_is_that_of_the_batches(intact, engine):
    asked = dict(ORDER, engine=engine, process_count=2, features=ALL, on_bad_records='skip')
    batches = input_pipeline.train_batches(intact, **asked, caption_dropout=0.1)
    held_out = input_pipeline.eval_batches(intact, batch_size=16, engine=engine, features=ALL)
    for some in (batches, held_out):
        expected = {name: (x.shape, x.dtype) for name, x in next(some).items()}
        assert dict(some.spec) == expected
    assert batches.spec['latents'].shape == (8, *schema.LATENT_SHAPE)
    lines = repr(batches).splitlines()
    assert lines[0] == f"Batches of {intact}, split 'train', read by {engine!r}"
    assert lines[1] == '  at step 1, 22.5 steps an epoch, process 0 of 2'
    assert 'latents float16 (8, 4, 32, 32), ' in lines[2]
    assert repr(held_out).startswith(f"Batches of {intact}, split 'validation', read by {engine!r}")


FACES = [
    input_pipeline.train_batches,
    input_pipeline.eval_batches,
    input_pipeline.train_dataset,
    input_pipeline.eval_dataset,
    input_pipeline.train_arrays,
]


def test_help_and_editors_see_the_arguments_by_name():
    for face in FACES:
        share = {'sharding': one_device()} if face is input_pipeline.train_arrays else {}
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'strat_step'"):
            face('d', **share, batch_size=16, strat_step=3)
        parameters = inspect.signature(face).parameters
        assert parameters['chunk'].default == 64
        assert ('seed' in parameters) == face.__name__.startswith('train')


WRONG = {
    'an engine that is none': (
        dict(engine='lines'),
        "'lines': expected 'auto' or 'rows' or 'chunks' or 'tf_data'",
    ),
    'a look at checksums that is none': (
        dict(verify='twice'),
        "verify='twice': expected 'once' or 'always' or 'never'",
    ),
    'rows of a part of a split': (
        dict(split='train[:50%]', engine='rows'),
        'needs local files, .* and a chunk index',
    ),
    'a policy that is none': (
        dict(on_bad_records='drop'),
        "on_bad_records='drop': expected 'stop' or 'skip'",
    ),
    'more bad records than there are': (
        dict(max_bad_fraction=1.5),
        'max_bad_fraction=1.5: expected from 0 to 1',
    ),
    'a share of bad records that is no number': (
        dict(max_bad_fraction=float('nan')),
        'max_bad_fraction=nan: expected from 0 to 1',
    ),
    'a stride of nothing': (dict(stride=0), 'stride=0: expected at least 1'),
    'a chunk that is no multiple of 32': (
        dict(chunk=48),
        'chunk=48: expected a multiple of 32, .*; chunk=64 works',
    ),
    'no reads': (
        dict(engine='chunks', parallel_reads=0),
        'parallel_reads=0: expected at least 1',
    ),
    'lanes that do not divide the batch': (
        dict(lanes=3),
        'lanes=3 by 1 process equally; .*lanes=2 works',
    ),
    'processes that do not divide the lanes': (
        dict(process_count=3),
        'batch_size=15 with lanes=3 works',
    ),
    'a process after the last': (
        dict(process_count=2, process_index=2),
        r'process_index=2 is not in \[0, 2\)',
    ),
    'a batch that lanes do not divide': (
        dict(batch_size=7),
        '=7: cannot be shared with lanes=4',
    ),
    'a batch of nothing': (dict(batch_size=0), '=0: cannot be shared with lanes=4'),
    'a negative batch': (dict(batch_size=-4), '=-4: cannot be shared with lanes=4'),
    'a feature that is not there': (
        dict(features=('key', 'tags')),
        "no feature 'tags'; there are",
    ),
    'no features': (
        dict(features=()),
        r"features=\(\) names no feature; features=\('key',\) works",
    ),
    'a split that is not there': (
        dict(split='test'),
        r"has no split 'test', only \['train', 'validation'\]",
    ),
    'more captions dropped than there are': (
        dict(caption_dropout=1.5),
        'caption_dropout=1.5: expected from 0 to 1',
    ),
    'a step before the first': (dict(start_step=-1), 'start_step=-1: expected at least 0'),
    'a batch size with a point': (
        dict(batch_size=16.0),
        'batch_size=16.0: expected a whole number',
    ),
    'a seed that is a text': (dict(seed='5'), "seed='5': expected a whole number"),
    'no step': (dict(start_step=None), 'start_step=None: expected a whole number'),
    'one name as features': (
        dict(features='latents'),
        "features='latents': expected a sequence of names, such as",
    ),
    'a number as features': (dict(features=5), 'features=5: expected a sequence of names'),
    'a dict as data': (
        dict(data={'dir': 'd'}),
        r"data=.'dir': 'd'.: expected the folder of a data set, or for a",
    ),
    'a number as data': (dict(data=3), 'data=3: expected the folder of a data set'),
    'a number as text': (dict(text=5), 'text=5: expected a string, or a dict of weights'),
    'no engine': (dict(engine=None), 'engine=None: expected a string'),
    'a text as the dropout': (
        dict(caption_dropout='0.1'),
        "caption_dropout='0.1': expected a number",
    ),
    'no stages': (dict(stages=None), 'stages=None: expected a sequence of dicts'),
    'one stage that is no list': (
        dict(stages={'from': 3}),
        r"stages=.'from': 3.: expected a sequence of dicts",
    ),
    'a number as the state': (dict(start=3), '3 is not a state of these batches'),
    'a state without samples by name': (
        dict(start={'step': 3, 'samples': [1]}),
        'is not a state of these batches',
    ),
}


@pytest.mark.parametrize(('changes', 'message'), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(intact, changes, message):
    faces = [functools.partial(input_pipeline.train_batches, engine=engine) for engine in ENGINES]
    faces.append(functools.partial(input_pipeline.train_arrays, sharding=one_device()))
    for face in (*faces, input_pipeline.train_dataset):
        with pytest.raises(ValueError, match=message) as refused:
            face(**{'data': intact, **ORDER, **changes})
        assert '\n' not in str(refused.value)


def test_a_mesh_is_no_sharding(intact):
    mesh = one_device().mesh
    with pytest.raises(ValueError, match=r'sharding=Mesh.*: expected a jax.sharding.Sharding'):
        input_pipeline.train_arrays(intact, mesh, **ORDER)


def test_numbers_of_numpy_and_iterables_are_taken(intact):
    expected = input_pipeline.train_batches(intact, **ORDER, features=('key', 'crop'))
    numbers = {name: np.int64(x) if isinstance(x, int) else x for name, x in ORDER.items()}
    with input_pipeline.train_batches(
        intact, **numbers, features=(name for name in ('key', 'crop')), stages=iter(())
    ) as batches:
        assert_same([next(batches) for _ in range(3)], [next(expected) for _ in range(3)])
        state = batches.get_state()
        assert json.loads(json.dumps(state)) == expected.get_state()
    samples = {digest: np.int64(x) for digest, x in state['samples'].items()}
    expected.set_state({'step': np.int32(3), 'samples': samples})
    assert expected.get_state() == state
    mix = ({'dir': intact, 'seed': np.uint8(ORDER['seed']), 'weight': 0.3} for _ in range(1))
    assert input_pipeline.train_batches(mix, **numbers, start=state).get_state() == state


# --- While they are read -----------------------------------------------------------------------


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Interrupts the main thread all the time, where it is in `Ahead.__next__`."""

    def interrupt(number: int, frame) -> None:
        while frame:
            if frame.f_code is Ahead.__next__.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    def send() -> None:
        while not over.wait(0.0002):
            signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    before, over = signal.signal(signal.SIGINT, interrupt), threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize('pause', [0.0, 0.0005], ids=['fast', 'slow'])
def test_an_interrupt_loses_no_item(pause):
    def items() -> Iterator[int]:
        for number in range(4000):
            time.sleep(pause if number % 10 == 0 else 0)
            yield number

    numbers, count, got = Ahead(items(), 2), 0, []
    with interrupts():
        while len(got) < 4000:
            try:
                got.extend(itertools.islice(numbers, 4000 - len(got)))
            except KeyboardInterrupt:
                count += 1
    assert got == list(range(4000))
    assert count > 20
    assert next(numbers, None) is None


def test_an_error_is_raised_again_by_those_who_ask_again():
    def items() -> Iterator[int]:
        yield 1
        raise OSError('the disk is gone')

    numbers = Ahead(items(), 2)
    assert next(numbers) == 1
    for _ in range(2):
        with pytest.raises(OSError, match='the disk is gone'):
            next(numbers)
    numbers.close()
    assert next(numbers, None) is None


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
def test_a_program_ends_in_silence_while_it_reads(intact, engine):
    program = """
        import input_pipeline
        order = dict(batch_size=16, seed=5, chunk=64, lanes=4, window=24)
        batches = input_pipeline.train_batches(sys.argv[1], engine=sys.argv[2], **order)
        next(batches)
    """
    with children.python(program, intact, engine) as child:
        output, errors = child.communicate(timeout=60)
    assert (child.returncode, output, errors) == (0, '', '')


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
@pytest.mark.parametrize('place', ['host', 'device'])
@pytest.mark.parametrize('end', ['drop', 'close'])
def test_dropping_or_closing_the_batches_ends_their_threads(intact, engine, place, end):
    before = threading.enumerate()
    batches = input_pipeline.train_batches(intact, engine=engine, **ORDER)
    state = batches.get_state()
    if place == 'device':
        batches = input_pipeline.to_device(batches, one_device())
    first = next(batches)['crop']
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert len(threads) == 1 + (place == 'device') if engine == 'rows' else len(threads) > 2
    if end == 'drop':
        del batches
    else:
        batches.close()
        batches.close()
        assert next(batches, None) is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if end == 'close':
        batches.set_state(state)
        np.testing.assert_array_equal(next(batches)['crop'], first)
        batches.close()


def test_whoever_closes_arrays_does_not_wait_for_the_host():
    begun = threading.Event()

    def read(_):
        yield {}
        begun.set()
        threads.pause(600)

    before = threading.enumerate()
    cursor = Cursor(Position(0, (0,)), BatchShares(1), ('',))
    arrays = input_pipeline.to_device(
        input_pipeline.Batches(read, cursor, {}, 1.0, (0, 1), 1, ''), one_device()
    )
    next(arrays)
    begun.wait(60)
    arrays.close()
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(30)
            assert not thread.is_alive()


def test_the_end_of_an_iterator_keeps_nothing_of_who_read_it():
    """From Python 3.12 on the frames of an error keep the frames that called them."""
    numbers = Ahead(iter(range(3)), 2)

    def read() -> weakref.ref:
        others = Ahead(iter(range(3)), 2)
        assert list(numbers) == [0, 1, 2]
        return weakref.ref(others)

    assert read()() is None


def test_tensorflow_keeps_no_files_of_data_sets_that_are_gone(copy):
    def count_mapped() -> int:
        gc.collect()
        return pathlib.Path('/proc/self/maps').read_text().count(f'{copy}/')

    asked = dict(engine='tf_data', features=('key',))
    for _ in range(3):
        assert len(list(input_pipeline.eval_batches(copy, batch_size=16, **asked))) == 4
    data = input_pipeline.train_dataset(copy, **ORDER, features=('key',)).take(2)
    batches = data.as_numpy_iterator()
    next(batches)
    del data
    assert count_mapped() > 0  # it sees them
    assert len(next(batches)['key']) == 16
    del batches
    # Those of the last, whose threads may just be ending.
    assert count_mapped() <= len(LENGTHS[schema.TRAIN])


@pytest.mark.parametrize('has_begun', [False, True])
def test_batches_are_refused_by_name_in_a_forked_process(intact, has_begun):
    program = """
        import os, signal, warnings
        import input_pipeline
        warnings.simplefilter('ignore', DeprecationWarning)  # of forks with threads
        order = dict(batch_size=16, seed=5, chunk=64, lanes=4, window=24)
        batches = input_pipeline.train_batches(sys.argv[1], **order)
        for _ in range(int(sys.argv[2])):
            next(batches)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            print(batches.step, len(next(batches)['key']))
        else:
            signal.alarm(30)
            try:
                next(batches)
            except RuntimeError as error:
                print(error, flush=True)
    """
    with children.python(program, intact, int(has_begun)) as child:
        output, errors = child.communicate(timeout=60)
    refusal, parent = output.splitlines()
    assert re.fullmatch(r'process \d+ was forked from \d+, .* make the iterator in the .*', refusal)
    assert parent == f'{int(has_begun)} 16' and not errors


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
def test_a_batch_that_is_kept_keeps_no_others_alive(intact, engine):
    order = dict(batch_size=16, seed=0, lanes=2, chunk=32, window=32)
    batch = next(input_pipeline.train_batches(intact, engine=engine, **order))
    for name, x in batch.items():
        assert x.base is None or x.base.nbytes == x.nbytes, name


# --- On the devices ----------------------------------------------------------------------------


def test_arrays_are_the_batches_of_the_host_and_know_their_place(intact):
    expected = take(input_pipeline.train_batches(intact, **ORDER), 20)
    arrays = input_pipeline.train_arrays(intact, one_device(), **ORDER, start_step=2)
    assert arrays.spec['key'] == ((16, 2), np.uint32)
    got = take(arrays, 5)
    assert {name: (x.shape, x.dtype) for name, x in got[0].items()} == arrays.spec
    for mine, theirs in zip(got, expected[2:], strict=False):
        np.testing.assert_array_equal(mine['latents'], theirs['latents'])
    assert arrays.step == 7
    state = arrays.get_state()
    later = [np.asarray(batch['latents']) for batch in take(arrays, 4)]
    for place in (state, state):
        arrays.set_state(place)
        for mine, theirs, first in zip(take(arrays, 4), expected[7:], later, strict=False):
            np.testing.assert_array_equal(mine['latents'], theirs['latents'])
            np.testing.assert_array_equal(mine['latents'], first)
    host = input_pipeline.train_batches(intact, **ORDER)
    host.set_state(state)
    assert_same(take(host, 3), expected[7:10])
    arrays.close()


def test_devices_get_what_the_host_read(intact):
    asked = dict(features=ALL, caption_dropout=0.5)
    batches = input_pipeline.train_dataset(intact, **ORDER, **asked)
    with input_pipeline.to_device(batches, one_device()) as sent:
        for batch in batches.take(4).as_numpy_iterator():
            arrived = next(sent)
            assert arrived.keys() == batch.keys() - {'caption'}
            words = np.asarray(arrived['key']).tolist()
            assert words == input_pipeline.key_words(batch['key']).tolist()
            for name in ('latents', 'text_embedding', 'drop_text'):
                assert arrived[name].dtype == batch[name].dtype
                np.testing.assert_array_equal(arrived[name], batch[name])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_key_words_are_low_and_high(keys):
    words = input_pipeline.key_words(np.array(keys, np.int64))
    assert words.dtype == np.uint32 and words.shape == (len(keys), 2)
    assert [int(low) | int(high) << 32 for low, high in words] == [k % 2**64 for k in keys]


def test_batches_are_sent_ahead_but_not_without_limit():
    def host_batches():
        for i in range(20):
            made.append(i)
            yield {'x': np.full(2, i, np.int32)}

    made, arrived = [], []
    for batch in input_pipeline.to_device(host_batches(), one_device(), ahead=2):
        arrived.append(int(batch['x'][0]))
        assert len(made) <= len(arrived) + 2
    assert arrived == made == list(range(20))
    with pytest.raises(ValueError, match='ahead=0 must be at least 1'):
        input_pipeline.to_device(host_batches(), one_device(), ahead=0)


def test_numbers_that_devices_would_change_are_refused_by_name(intact):
    for dtype in ('int64', 'float64'):
        batch = {'key': np.arange(2), 'taken_at': np.full(2, 1_700_000_000_063, dtype)}
        with pytest.raises(ValueError, match=f"'taken_at' is {dtype}, which devices would hold as"):
            next(input_pipeline.to_device([batch], one_device()))
    batches = input_pipeline.train_batches(intact, **ORDER)
    batches.spec['taken_at'] = input_pipeline.ArraySpec((16,), np.dtype(np.int64))
    with pytest.raises(ValueError, match="'taken_at' is int64"):  # before anything is read
        input_pipeline.to_device(batches, one_device())
    for dtype in ('int8', 'uint32', 'float16', 'bfloat16', 'float32', 'bool'):
        x = np.array([0, 1, 127], jax.numpy.dtype(dtype))
        [batch] = input_pipeline.to_device([{'x': x}], one_device())
        assert batch['x'].dtype == x.dtype
        np.testing.assert_array_equal(batch['x'], x)


def test_the_part_of_another_process_is_refused(intact):
    batches = input_pipeline.train_batches(intact, **ORDER, process_index=1, process_count=2)
    with pytest.raises(ValueError, match=r'process_index=1 with process_count=2 is not the share'):
        input_pipeline.to_device(batches, one_device())


def test_on_two_hosts_arrays_hold_each_record_once(intact, tmp_path):
    program = """
        import json, os
        os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
        import jax, numpy as np
        import input_pipeline
        path, port, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
        jax.config.update('jax_platforms', 'cpu')
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
        jax.distributed.initialize(f'127.0.0.1:{port}', 2, number)
        spec = jax.sharding.PartitionSpec
        mesh = jax.make_mesh((4,), ('data',))
        rows = jax.sharding.NamedSharding(mesh, spec('data'))
        copied = jax.sharding.NamedSharding(mesh, spec())
        order = dict(batch_size=16, seed=5, chunk=64, lanes=4, window=24)
        refused = ''
        try:
            input_pipeline.to_device(input_pipeline.train_batches(path, **order), rows)
        except ValueError as error:
            refused = str(error)
        arrays = input_pipeline.train_arrays(path, rows, **order)
        keys = [int(np.asarray(x.data)[0, 0]) for x in next(arrays)['key'].addressable_shards]
        shape = arrays.spec['latents'].shape
        shares = input_pipeline.process_share(rows), input_pipeline.process_share(copied)
        print(json.dumps([refused, keys, shape, shares]))
    """
    port = runs.free_port()
    with (
        children.python(program, intact, port, 0) as first,
        children.python(program, intact, port, 1) as second,
    ):
        found = [child.communicate(timeout=120) for child in (first, second)]
    parts = [json.loads(output) for output, _ in found]
    low = next(input_pipeline.train_batches(intact, **ORDER))['key'] & 0xFFFFFFFF
    assert parts[0][1] + parts[1][1] == low[::4].tolist(), found
    for number, (refused, _, shape, shares) in enumerate(parts):
        assert 'process_index=0 with process_count=1 is not the share' in refused
        assert shape == [16, *schema.LATENT_SHAPE]
        assert shares == [[number, 2], [0, 1]]
