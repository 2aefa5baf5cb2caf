"""Compares recipes of training by what the demo's model draws.

    python -m benchmarks.recipes --dir /tmp/recipes --keep              # 3 seeds of each, hours
    python -m benchmarks.recipes --dir /tmp/recipes --keep --scene one --only baseline,adamw

Each run trains as long as the demo, on a core of its own, and draws captions of combinations that
the data leave out. The first command trains on pictures of two objects, which leave more to learn
than those of the demo. With `--keep` the same command continues after an interruption, and runs
that are complete are not repeated. Shares are of pictures that show what their captions say.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from benchmarks import runner
from benchmarks.runner import Figures, Side
from coyo11m_tfds.storage import json_digest

_PREVIEW = 'preview.'  # fields of the sampler, which training does not depend on

FLAGS = {
    'scene': ('two', 'scenes of `sample_data`'),
    'num_samples': (16_384, 'samples of the data set'),
    'steps': (2_100, 'steps of training'),
    'num_prompts': (192, 'captions to draw'),
}
COLUMNS = {
    'all right': runner.column('all', '.1%'),
    'all seeds': runner.all_runs('all', '.1%'),
    **{name: runner.column(name, '.1%') for name in ('colours', 'shape', 'size', 'relation')},
    'loss': runner.column('loss', '.4f'),
    'losses': runner.all_runs('loss', '.4f'),
    'text gain': runner.column('text_gain', '.4f'),
    'CPU s': runner.column('cpu'),
}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Makes the data set; then all runs are waiting for a core."""
    data = folder / f'{flags.scene}-{flags.num_samples}'
    # The last that `_build` makes: what an interrupted one left is made again.
    if not (data / 'data').exists():
        shutil.rmtree(data, ignore_errors=True)
        _build(data, flags.scene, flags.num_samples)
    options = {name: getattr(flags, name) for name in ('scene', 'steps', 'num_prompts')}
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)

    def run(side: Side, seed: int) -> Figures:
        changes = side.settings['changes']
        training = {name: x for name, x in changes.items() if not name.startswith(_PREVIEW)}
        workdir = data / f'{json_digest.sha256(options | training)[:12]}-{seed}'
        results = data / f'{json_digest.sha256(options | changes)[:12]}-{seed}.json'
        # Recipes that differ in the sampler alone draw with the weights of the first one.
        with locks[workdir.name]:
            if not results.exists():
                core = cores.get()
                paths = {'data_dir': data / 'data', 'workdir': workdir}
                figures = runner.run(side, **options, **paths, seed=seed, core=core)
                cores.put(core)
                if 'all' in figures:
                    results.write_text(json.dumps(figures))
                return figures
            return json.loads(results.read_text())

    pool = concurrent.futures.ThreadPoolExecutor(cores.qsize())
    # Not after Ctrl-C: a run that has not begun is for another time.
    stack.callback(pool.shutdown, cancel_futures=True)
    runs = {
        name: collections.deque(pool.submit(run, side, seed) for seed in range(flags.repeats))
        for name, side in flags.sides.items()
    }
    names = {side.title: name for name, side in flags.sides.items()}
    return lambda side: runs[names[side.title]].popleft().result()


def _build(folder: pathlib.Path, scene: str, num_samples: int) -> None:
    """Makes a data set of made-up pictures and token ids, as `make demo` does."""
    source, tokens = folder / 'source', folder / 'source' / 'words'
    config = {'name': 'words', 'text_embeddings': str(tokens), 'shard_bytes': 2**24}
    for program, *arguments in (
        ('sample_data', f'--out={source}', f'--scene={scene}', f'--num_samples={num_samples}'),
        (
            'embed_captions',
            *(f'--source={source}', f'--out={tokens}'),
            *('--encoder=words', '--tokens_only', '--max_tokens=24'),
        ),
        (
            'build',
            *(f'--manual_dir={source}', f'--data_dir={folder}', f'--config={json.dumps(config)}'),
        ),
    ):
        subprocess.run([sys.executable, '-m', f'coyo11m_tfds.{program}', *arguments], check=True)
    (folder / 'coyo11m_tfds' / 'words' / '1.0.0').rename(folder / 'data')


def train(
    *,
    changes: Mapping[str, Any],
    scene: str,
    steps: int,
    num_prompts: int,
    data_dir: str,
    workdir: str,
    seed: int,
    core: int,
) -> Figures:
    """Trains the demo's model with changed fields, and draws held-out captions."""
    os.sched_setaffinity(0, {core})
    from configs import demo
    from coyo11m_tfds import sample_data
    from train_lib import draw
    from train_lib import train as training

    is_new = not pathlib.Path(workdir).exists()
    meter, config = runner.Meter(), demo.get_config()
    config.data.dir, config.seed, config.num_steps = data_dir, seed, steps
    config.optimizer.warmup_steps = steps // 12
    config.eval_every = steps
    config.preview_every = 0
    sampler = {name: x for name, x in changes.items() if name.startswith(_PREVIEW)}
    config.update_from_flattened_dict({n: x for n, x in changes.items() if n not in sampler})
    training.train_and_evaluate(config, workdir)
    # Of a run that was continued it would say too little.
    cpu = meter.read()['cpu'] if is_new else None
    captions, scenes = zip(*sample_data.held_out_prompts(num_prompts, scene=scene), strict=True)
    settings = {name.removeprefix(_PREVIEW): x for name, x in sampler.items()}
    pictures = draw.Artist(workdir, **settings).draw(captions)
    scores = sample_data.WORLDS[scene].score_pictures(pictures, scenes)
    shares = {name: float(x.mean()) for name, x in scores.items()}
    # The last one is that of all together.
    shares['all'] = shares.popitem()[1]
    return shares | _last_evaluation(workdir) | {'cpu': cpu}


def _last_evaluation(workdir: str) -> Figures:
    """The last loss and gain by texts that TensorBoard got."""
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    events = event_accumulator.EventAccumulator(workdir, {event_accumulator.TENSORS: 0}).Reload()
    # A handful of records has no other texts to gain by.
    return {
        name: float(tensor_util.make_ndarray(events.Tensors(f'eval/{name}')[-1].tensor_proto))
        for name in ('loss', 'text_gain')
        if f'eval/{name}' in events.Tags()['tensors']
    }


def _recipe(title: str, **changes: Any) -> Side:
    """A side; `__` in a name stands for a dot."""
    fields = {name.replace('__', '.'): x for name, x in changes.items()}
    return Side(title, train, {'changes': fields})


SIDES = {
    'baseline': _recipe('the demo'),
    'velocity': _recipe('velocity predicted', model__prediction='velocity'),
    'mean_1': _recipe("mean of the times' logits 1", flow__logit_mean=1.0),
    'mean_2': _recipe("mean of the times' logits 2", flow__logit_mean=2.0),
    'adamw': _recipe('AdamW instead of Muon', optimizer__name='adamw'),
    'decay_0': _recipe('no weight decay', optimizer__weight_decay=0.0),
    'b2_95': _recipe('b2 of 0.95', optimizer__b2=0.95),
    'warm_up': _recipe('warm-up of 525 steps', optimizer__warmup_steps=525),
    'average_995': _recipe('average over 200 steps', ema_decay=0.995),
    'average_998': _recipe('average over 500 steps', ema_decay=0.998),
    'shift_1': _recipe('no time shift', preview__time_shift=1.0),
    'shift_2': _recipe("sampler's time shift of 2", preview__time_shift=2.0),
    'shift_5': _recipe("sampler's time shift of 5", preview__time_shift=5.0),
    'guidance_2': _recipe('guidance of 2', preview__guidance=2.0),
    'guidance_5': _recipe('guidance of 5', preview__guidance=5.0),
    'interval': _recipe('guidance between 0.2 and 0.9', preview__guidance_low=0.2,
                        preview__guidance_high=0.9),
    'heun': _recipe("Heun's method, 12 steps", preview__sampler='heun', preview__num_steps=12),
}  # fmt: skip

if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, COLUMNS, FLAGS, prepare))
