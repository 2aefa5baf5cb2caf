"""Reading ahead: what an interrupt leaves, errors in the place of their items, and the end."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from coyo11m_tfds.reading.batches import Ahead
from tests import children


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
