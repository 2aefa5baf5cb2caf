"""Compares recipes of training by what the demo's model draws.

    python -m benchmarks.recipes --dir /tmp/recipes --keep              # 3 seeds of each, hours
    python -m benchmarks.recipes --dir /tmp/recipes --keep --only demo,adamw

Each run trains on the emoji of `sample_data`, as `make demo` does, on a core of its own, and draws
captions of the skin tones that training has not seen. The steps of a recipe are chosen so that it
takes about the CPU time of the demo; the table has both. With `--keep` the same command continues
after an interruption, and runs that are complete are not repeated.
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

import ml_collections
import numpy as np

from benchmarks import runner
from benchmarks.runner import Figures, Side
from coyo11m_tfds import storage
from coyo11m_tfds.storage import json_digest

STEPS = 2_800

_LAST_PHASE_SHARE = 0.3  # of the steps: while the learning rate of the schedule `wsd` falls

FLAGS = {
    'steps': (STEPS, 'steps of the demo'),
    'num_prompts': (192, 'captions to draw'),
}
COLUMNS = {
    'exact': runner.column('exact', '.1%'),
    'all seeds': runner.all_runs('exact', '.1%'),
    'first five': runner.column('first five', '.1%'),
    'concept': runner.column('concept', '.1%'),
    'tones': runner.column('tones', '.1%'),
    'distance': runner.column('distance', '.1f'),
    'steps': runner.column('steps', '.0f'),
    'loss': runner.column('loss', '.4f'),
    'losses': runner.all_runs('loss', '.4f'),
    'text gain': runner.column('text_gain', '.4f'),
    'CPU s': runner.column('cpu'),
}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Makes the data set, and lets all runs wait for a core; returns what waits for one of them."""
    data = folder / 'emoji'
    # The last that `_build` makes: what an interrupted one left is made again.
    if not (data / 'data').exists():
        shutil.rmtree(data, ignore_errors=True)
        _build(data)
    options = {'steps': flags.steps, 'num_prompts': flags.num_prompts}
    # A run takes a core and gives it back, so that no two runs disturb each other.
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)

    def run(side: Side, seed: int) -> Figures:
        """Returns the figures of a recipe and a seed, from its file if it has been run before."""
        training = dict(side.settings)
        del training['sampler']
        # Recipes that differ in the sampler alone have one workdir, and draw with its weights.
        workdir = data / _name_run(options | training, seed)
        results = data / f'{_name_run(options | side.settings, seed)}.json'
        # One of them trains, and the others wait for it.
        with locks[workdir.name]:
            if results.exists():
                return json.loads(results.read_text())
            paths = {'data_dir': data / 'data', 'workdir': workdir}
            core = cores.get()
            # Whatever happens, such as a full disk: the other runs would wait for ever.
            try:
                figures = runner.run(side, **options, **paths, seed=seed, core=core)
            finally:
                cores.put(core)
            # A run that has failed is repeated by the next command.
            if 'exact' in figures:
                # In one step: the next command takes what is there for complete.
                content = json.dumps(figures).encode()
                storage.open_writable_folder(data).write(results.name, content)
            return figures

    pool = concurrent.futures.ThreadPoolExecutor(cores.qsize())
    # Not after Ctrl-C: a run that has not begun is for another time.
    stack.callback(pool.shutdown, cancel_futures=True)
    # All at once: the turns of the runner then only wait for results.
    runs = collections.defaultdict(collections.deque)
    for side in flags.sides.values():
        for seed in range(flags.repeats):
            runs[side.title].append(pool.submit(run, side, seed))
    return lambda side: runs[side.title].popleft().result()


def _name_run(fields: Mapping[str, Any], seed: int) -> str:
    """Returns the name of the runs of a seed with these options and settings."""
    digest = json_digest.sha256(fields)[:12]
    return f'{digest}-{seed}'


def _build(folder: pathlib.Path) -> None:
    """Makes a data set of emoji and token ids, as `make demo` does."""
    source = folder / 'source'
    tokens = source / 'words'
    config = {'name': 'words', 'text_embeddings': str(tokens), 'shard_bytes': 2**24}

    def run(program: str, *arguments: str) -> None:
        """Runs a program of the package with its flags."""
        subprocess.run([sys.executable, '-m', f'coyo11m_tfds.{program}', *arguments], check=True)

    run('sample_data', f'--out={source}')
    run(
        'embed_captions',
        f'--source={source}',
        f'--out={tokens}',
        '--encoder=words',
        '--tokens_only',
        '--max_tokens=16',
    )
    run(
        'build',
        f'--manual_dir={source}',
        f'--data_dir={folder}',
        f'--config={json.dumps(config)}',
    )
    # Last, and in one step: `prepare` takes this folder for a complete data set.
    (folder / 'coyo11m_tfds' / 'words' / '1.0.0').rename(folder / 'data')


def train(
    *,
    fields: Mapping[str, Any],
    share: float,
    last_phase: Mapping[str, Any],
    sampler: Mapping[str, Any],
    steps: int,
    num_prompts: int,
    data_dir: str,
    workdir: str,
    seed: int,
    core: int,
) -> Figures:
    """Trains the demo's model with changed fields, and draws held-out captions.

    Args:
        fields: Changed fields of the configuration.
        share: Share of the demo's steps.
        last_phase: Fields that change once more, for the last 30% of the steps.
        sampler: Changed settings of the sampler.
        steps: Steps of the demo.
        num_prompts: Captions to draw.
        data_dir: Folder of the data set.
        workdir: Folder of the run, which continues if it has been interrupted.
        seed: Seed of the run.
        core: Core on which it runs.

    Returns:
        The shares of right drawings, the last evaluation, the steps and the CPU seconds.
    """
    # Before the imports, whose threads keep the cores that they begin with.
    os.sched_setaffinity(0, {core})
    from configs import demo
    from train_lib import train as training

    config = demo.get_config()
    config.data.dir = data_dir
    config.seed = seed
    config.num_steps = round(steps * share)
    # The demo's share, whatever the number of steps is.
    config.optimizer.warmup_steps = config.num_steps // 12
    # The last step alone.
    config.eval_every = config.num_steps
    config.preview_every = 0
    config.update_from_flattened_dict(fields)

    # A first phase cannot continue a run that was interrupted in the last one.
    if last_phase:
        shutil.rmtree(workdir, ignore_errors=True)
    is_new = not pathlib.Path(workdir).exists()
    meter = runner.Meter()
    if last_phase:
        training.train_and_evaluate(_first_phase(config), workdir)
        config.update_from_flattened_dict(last_phase)
    changed_between = ['num_steps', 'optimizer.schedule', *last_phase]
    training.train_and_evaluate(config, workdir, accept_changes=changed_between)
    # Of a run that was continued it would say too little.
    cpu = meter.read()['cpu'] if is_new else None

    scores = _draw_held_out(workdir, sampler, num_prompts)
    steps_and_cpu = {'steps': config.num_steps, 'cpu': cpu}
    return scores | _last_evaluation(workdir) | steps_and_cpu


def _first_phase(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the configuration of the steps before the last phase."""
    first = config.copy_and_resolve_references()
    first.num_steps = round(config.num_steps * (1 - _LAST_PHASE_SHARE))
    # The learning rate falls in the last phase.
    first.optimizer.schedule = 'constant'
    first.eval_every = 0
    return first


def _draw_held_out(workdir: str, sampler: Mapping[str, Any], num_prompts: int) -> Figures:
    """Draws captions with held-out skin tones, and returns the shares of right drawings."""
    from coyo11m_tfds.pictures import emoji
    from train_lib import demo, draw
    from train_lib.results import judge

    held_out = emoji.find_part(emoji.HELD_OUT_TONE)
    own = np.array(held_out[:num_prompts])
    all_emoji = emoji.read_emoji()
    captions = [all_emoji[number].caption for number in own]
    pictures = draw.Artist(workdir, **sampler).draw(captions)
    verdicts = demo.make_judge().compare(judge.mean_areas(pictures), own)
    scores = demo.list_columns(verdicts, own)
    return {name: float(values.mean()) for name, values in scores.items()}


def _last_evaluation(workdir: str) -> Figures:
    """Returns the last loss and gain by texts that TensorBoard got."""
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    events = event_accumulator.EventAccumulator(workdir, {event_accumulator.TENSORS: 0})
    events.Reload()
    figures = {}
    for name in ('loss', 'text_gain'):
        # A handful of records has no other texts to gain by.
        if f'eval/{name}' in events.Tags()['tensors']:
            last = events.Tensors(f'eval/{name}')[-1]
            figures[name] = float(tensor_util.make_ndarray(last.tensor_proto))
    return figures


def _recipe(
    title: str,
    *,
    share: float = 1.0,
    last_phase: Mapping[str, Any] | None = None,
    sampler: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Side:
    """Returns a side, see `train`; in a name of `fields`, `__` stands for a dot."""
    dotted = {name.replace('__', '.'): value for name, value in fields.items()}
    settings = {
        'fields': dotted,
        'share': share,
        'last_phase': last_phase or {},
        'sampler': sampler or {},
    }
    return Side(title, train, settings)


SIDES = {
    'demo': _recipe('the demo'),
    'velocity': _recipe('velocity predicted', model__prediction='velocity'),
    'mean_0': _recipe("mean of the times' logits 0", flow__logit_mean=0.0),
    'mean_1': _recipe("mean of the times' logits 1", flow__logit_mean=1.0),
    'mean_15': _recipe("mean of the times' logits 1.5", flow__logit_mean=1.5),
    'mean_2': _recipe("mean of the times' logits 2", flow__logit_mean=2.0),
    'mean_3': _recipe("mean of the times' logits 3", flow__logit_mean=3.0),
    'last_05': _recipe("mean of the times' logits 0.5 in the last 30%",
                       last_phase={'flow.logit_mean': 0.5}),
    'last_15': _recipe("mean of the times' logits 1.5 in the last 30%",
                       last_phase={'flow.logit_mean': 1.5}),
    'adamw': _recipe('AdamW instead of Muon', optimizer__name='adamw', share=1.28),
    'pooled': _recipe('the mean of the words alone', model__text='pooled'),
    'patch_1': _recipe('patches of 1', model__patch_size=1, share=0.02),
    'patch_2': _recipe('patches of 2', model__patch_size=2, share=0.25),
    'velocity_2': _recipe('velocity predicted, patches of 2', model__prediction='velocity',
                          model__patch_size=2, share=0.25),
    'depth_3': _recipe('3 blocks', model__depth=3, share=1.3),
    'depth_6': _recipe('6 blocks', model__depth=6, share=0.7),
    'depth_9': _recipe('9 blocks', model__depth=9, model__unroll=9, share=0.5),
    'width_128': _recipe('width 128', model__width=128, model__num_heads=4, share=0.57),
    'width_192': _recipe('width 192, 3 blocks', model__width=192, model__depth=3, share=0.43),
    'batch_16': _recipe('batches of 16', batch_size=16, share=1.6),
    'batch_64': _recipe('batches of 64', batch_size=64, share=0.52),
    'dropout_10': _recipe('captions dropped in 10%', data__caption_dropout=0.1),
    'average_995': _recipe('average over 200 steps', ema_decay=0.995),
    'guidance_1': _recipe('no guidance', sampler={'guidance': 1.0}),
    'guidance_2': _recipe('guidance of 2', sampler={'guidance': 2.0}),
    'guidance_5': _recipe('guidance of 5', sampler={'guidance': 5.0}),
    'low_0': _recipe('guidance at all times', sampler={'guidance_low': 0.0}),
    'low_6': _recipe('guidance above the time 0.6', sampler={'guidance_low': 0.6}),
    'shift_1': _recipe('no time shift', sampler={'time_shift': 1.0}),
    'shift_3': _recipe("sampler's time shift of 3", sampler={'time_shift': 3.0}),
    'shift_10': _recipe("sampler's time shift of 10", sampler={'time_shift': 10.0}),
    'shift_50': _recipe("sampler's time shift of 50", sampler={'time_shift': 50.0}),
    'heun': _recipe("Heun's method, 12 steps", sampler={'sampler': 'heun', 'num_steps': 12}),
}  # fmt: skip

if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, COLUMNS, FLAGS, prepare))
