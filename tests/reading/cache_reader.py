"""Reads an epoch with a cache in a process of its own, for tests that kill it or fill its disk."""

import itertools
import json
import os
import sys

import numpy as np

import input_pipeline


def digests(data: object, steps: int, **options) -> list[float]:
    """A number for each of the first batches, which tells the keys and the latents."""
    with input_pipeline.train_batches(data, features=('key', 'latents'), **options) as batches:
        return [_digest(batch) for batch in itertools.islice(batches, steps)]


def _digest(batch: input_pipeline.Batch) -> float:
    places = np.arange(1, len(batch['key']) + 1)
    latents = batch['latents'].astype(np.float64).sum(axis=(1, 2, 3))
    return float((batch['key'] % 1009 * places).sum() + (latents * places).sum())


def run(out: str, env: dict[str, str], data: str, steps: int, options: dict) -> None:
    """Writes the numbers into a file, in a forked process."""
    os.environ.update(env)
    result = digests(data, steps, **options)
    with open(out, 'w') as file:
        json.dump(result, file)
    # The threads of the fork server are not here.
    os._exit(0)


if __name__ == '__main__':
    print(json.dumps(digests(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))))
