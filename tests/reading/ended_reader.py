"""A program that reads a data set and ends in one of many ways, as programs of users do.

    python -m tests.reading.ended_reader loop PATH

`loop` reads until a record cannot be read, `to_device` the same on the devices; `raise`, `exit`,
`interrupt`, `interrupt twice` (again while it ends) and `return` end after a batch, with two living
iterators, and `hold` with one on the devices.
"""

import atexit
import signal
import sys

import jax

import input_pipeline

SETTINGS = {'batch_size': 32, 'seed': 5, 'chunk': 32, 'lanes': 4, 'window': 64}

kept = []  # as a notebook or a global variable keeps what it has made


def main(how: str, path: str) -> None:
    """Reads and ends."""
    batches = input_pipeline.train_dataset(path, features=('key', 'latents'), **SETTINGS)
    if how in ('to_device', 'hold'):
        mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
        kept.append(input_pipeline.to_device(batches, sharding))
        if how == 'hold':
            next(kept[0])
            return
        for _ in kept.pop():
            pass
    kept.append(batches.as_numpy_iterator())
    if how == 'loop':
        for _ in kept[0]:
            pass
    kept.append(iter(batches))
    for iterator in kept:
        next(iterator)
    if how == 'raise':
        raise RuntimeError('the step has failed')
    if how == 'exit':
        sys.exit('leaving')
    if how.startswith('interrupt'):
        # A shell that starts the tests in the background has them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if how == 'interrupt twice':
            atexit.register(signal.raise_signal, signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


if __name__ == '__main__':
    main(*sys.argv[1:])
