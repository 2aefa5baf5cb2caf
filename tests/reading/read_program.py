"""Reads training batches as a program does, and tells what it did.

    {"path": "gs://bucket/d/1.0.0", "steps": 20, "settle": false, "settings": {"batch_size": 32}}

comes on the standard input. A JSON of the keys of all batches, what the counter says, the most
chunks that were in flight when a batch came, and the seconds (also of processor time) that the
second half of the batches took goes to the standard output. With "settle" it waits at the end until
nothing is read ahead any more.
"""

import itertools
import json
import sys
import time

import input_pipeline


def main() -> None:
    """Reads what the standard input asks for."""
    asked = json.load(sys.stdin)
    settings = asked['settings']
    counter = input_pipeline.ReadCounter()
    batches = input_pipeline.train_batches(
        asked['path'], engine='chunks', counter=counter, **settings
    )
    keys, most_in_flight, start, cpu_start = [], 0, 0.0, 0.0
    for step, batch in enumerate(itertools.islice(batches, asked['steps'])):
        keys.append(batch['key'].tolist())
        most_in_flight = max(most_in_flight, counter.read().chunks_in_flight)
        if step == asked['steps'] // 2 - 1:
            start, cpu_start = time.monotonic(), time.process_time()
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    if asked.get('settle'):
        _wait_until_idle(counter)
    found = {'keys': keys, 'seconds': seconds, 'cpu_seconds': cpu_seconds}
    found |= {'most_in_flight': most_in_flight, 'with_tensorflow': 'tensorflow' in sys.modules}
    json.dump(found | {'counts': counter.read()}, sys.stdout)


def _wait_until_idle(counter) -> None:
    """Waits until nothing has been read for two seconds."""
    before, looks = None, 0
    while looks < 4:
        time.sleep(0.5)
        now = counter.read()
        looks = looks + 1 if now == before and not now.chunks_in_flight else 0
        before = now


if __name__ == '__main__':
    main()
