"""`train_lib.main`, which besides notes the keys of every step that is trained.

    python -m tests.train_lib.train_process FOLDER --config=configs/demo.py --workdir=W

Each process appends a line of JSON for each step to a file of its own in FOLDER: the step, the
first row of the global batch that it holds, and the keys of its rows. With `FAILING=1:5` in the
environment, process 1 cannot read the batch of step 5. With `STALLED=evaluation` an evaluation, or
whatever hook has that name, takes a minute longer, and says so: `stalled evaluation`.
"""

import json
import os
import pathlib
import runpy
import sys
import time
from collections.abc import Iterator

import jax

from coyo11m_tfds import schema
from tests import runs
from train_lib import data, train


def main() -> None:
    """Runs the command in this process."""
    folder = pathlib.Path(sys.argv.pop(1))
    train_batches = data.TrainingData.train_batches

    def noted(self: data.TrainingData, position: dict) -> Iterator[dict[str, jax.Array]]:
        name = f'keys_{jax.process_index()}_of_{jax.process_count()}.jsonl'
        with (folder / name).open('a', buffering=1) as file:
            batches = train_batches(self, position)
            for step, batch in enumerate(batches, position['step'] + 1):
                if os.environ.get('FAILING') == f'{jax.process_index()}:{step}':
                    raise OSError('the disk is gone')
                shards = batch[schema.KEY].addressable_shards
                # A slice of all rows has no start.
                first = min(shard.index[0].start or 0 for shard in shards)
                keys = runs.own_keys(batch).tolist()
                line = json.dumps({'step': step, 'first': first, 'keys': keys})
                # Before the step: a process that is killed in it has begun it.
                file.write(f'{line}\n')
                yield batch

    data.TrainingData.train_batches = noted
    hooks = []
    for hook in train.DEFAULT_HOOKS:
        is_stalled = hook.name == os.environ.get('STALLED')
        hooks.append(_stalled(hook) if is_stalled else hook)
    train.DEFAULT_HOOKS = tuple(hooks)
    runpy.run_module('train_lib.main', run_name='__main__', alter_sys=True)


def _stalled(hook: train.Hook) -> train.Hook:
    """Returns a hook that does the same a minute later."""

    def call(*arguments) -> str | None:
        print('stalled', hook.name, flush=True)
        over = time.monotonic() + 60
        # In short sleeps, between which the main thread handles signals.
        while time.monotonic() < over:
            time.sleep(0.1)
        return hook.call(*arguments)

    return hook._replace(call=call)


if __name__ == '__main__':
    main()
