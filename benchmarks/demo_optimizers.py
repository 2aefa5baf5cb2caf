"""Trains the demo's model by several settings at equal CPU time, and judges what each has learned.

    python -m benchmarks.demo_optimizers --data_dir=demo/data/coyo11m_tfds/words/1.0.0 \\
        --setting='AdamW: optimizer.name="adamw"' --setting='Muon: optimizer.name="muon"' \\
        --steps=300 --seeds=3 --out=trials.jsonl

The machine may be shared, so wall time says nothing: each setting is given as many steps as the CPU
seconds of the first setting's `--steps` pay for, a step of each being measured in turns before. The
loss is that of samples made for it alone, at fixed noise and times; pictures are those that
`train_lib.demo` asks for. Writes a line of JSON for each run.
"""

import argparse
import ast
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from configs import demo
from coyo11m_tfds import latent_rgb, sample_data, schema
from train_lib import (
    caption_encoder,
    demo_scores,
    evaluation,
    previews,
    program,
    sharding,
)
from train_lib.data import TrainingData

_EVAL_SAMPLES = 384
_EVAL_BATCH = 64
_PROMPTS = 64
_TIMED_STEPS = 20  # in each of
_TURNS = 3

Settings = Mapping[str, Mapping[str, Any]]


def read_setting(text: str) -> tuple[str, dict[str, Any]]:
    """`'NAME: field=value field=value'`, values as Python writes them, to name and fields."""
    name, _, fields = text.partition(':')
    pairs = (field.split('=', 1) for field in fields.split())
    return name.strip(), {field: ast.literal_eval(value) for field, value in pairs}


def make_config(data_dir: str, fields: Mapping[str, Any], seed: int) -> ml_collections.ConfigDict:
    """The demo's configuration with some fields set."""
    config = demo.get_config()
    config.update_from_flattened_dict({'data.dir': data_dir, 'seed': seed, **fields})
    return config


class Trial:
    """The demo's model, being trained by one setting."""

    def __init__(self, config: ml_collections.ConfigDict):
        self._mesh = sharding.make_mesh(**config.mesh)
        self._data = TrainingData(config, self._mesh)
        self._program = program.for_data(config, self._mesh, self._data.facts)
        self._encoder = caption_encoder.make(self._data.facts)
        self._batches = self._data.train_batches(0)
        self._state = self._program.init()

    def run(self, num_steps: int) -> float:
        """Trains, and returns the CPU seconds it took, of all threads."""
        start = time.process_time()
        for batch in itertools.islice(self._batches, num_steps):
            self._state, _ = self._program.train_step(self._state, batch)
        jax.block_until_ready(self._state)
        return time.process_time() - start

    def eval_loss(self, samples: list[dict[str, np.ndarray]]) -> float:
        """Of the averaged weights, on batches of `eval_batches`."""
        name = schema.TOKENS if self._data.facts.vocabulary else schema.TEXT_EMBEDDING
        batches = [
            {n: x for n, x in batch.items() if n != schema.CAPTION}
            | {name: self._texts(batch[schema.CAPTION])}
            for batch in samples
        ]
        scalars = evaluation.evaluate(self._program.eval_step, self._state.ema_params, batches)
        return next(value for name, value in scalars.items() if name.endswith('loss'))

    def draw(self, captions: list[str]) -> np.ndarray:
        """Pictures uint8 `(n, 32, 32, 3)` by the averaged weights."""
        text = self._texts(captions)
        drawn = self._program.draw(
            self._state.ema_params, jax.device_put(text, sharding.replicated(self._mesh))
        )
        return latent_rgb.latents_to_rgb(jax.device_get(drawn))

    def _texts(self, captions: Sequence[str]) -> np.ndarray:
        return caption_encoder.texts(self._data.facts, self._encoder, captions)


def eval_batches() -> list[dict[str, np.ndarray]]:
    """Samples that no training data has: other places and sizes of the same combinations."""
    import pandas as pd
    import torch

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        sample_data.make_sample(folder, num_samples=2 * _EVAL_SAMPLES, num_files=1, seed=1)
        (file,) = (folder / schema.LATENTS_FOLDER).iterdir()
        stored = torch.load(file, weights_only=True)
        captions = pd.read_parquet(folder / schema.CAPTIONS_FILE)[schema.DEFAULT_CAPTION_COLUMN]
    captions = captions[captions.fillna('').str.strip() != '']
    keys = stored[schema.PT_KEYS].numpy()
    rows = np.flatnonzero(np.isin(keys, captions.index))[:_EVAL_SAMPLES]
    keys = keys[rows]
    samples = {
        'latents': stored[schema.PT_LATENTS][rows, 1].numpy(),
        schema.CAPTION: captions[keys].to_numpy(),
        'key': np.stack([keys & 0xFFFFFFFF, keys >> 32], -1).astype(np.uint32),
        'mask': np.ones(len(keys), bool),
    }
    starts = range(0, len(keys), _EVAL_BATCH)
    return [{n: x[start : start + _EVAL_BATCH] for n, x in samples.items()} for start in starts]


def seconds_a_step(data_dir: str, settings: Settings) -> dict[str, float]:
    """CPU seconds of one step of each setting: the median of several turns."""
    trials = {n: Trial(make_config(data_dir, fields, 0)) for n, fields in settings.items()}
    for trial in trials.values():
        trial.run(2)  # compiles
    turns = [{n: t.run(_TIMED_STEPS) for n, t in trials.items()} for _ in range(_TURNS)]
    return {n: statistics.median(turn[n] for turn in turns) / _TIMED_STEPS for n in settings}


def run_one(data_dir, fields, seed, num_steps, batches, picture) -> dict[str, Any]:
    """Trains for `num_steps` with the schedule compressed to them, and judges."""
    whole = make_config(data_dir, fields, seed)
    warmup = max(1, round(num_steps * whole.optimizer.warmup_steps / whole.num_steps))
    fields = fields | {'num_steps': num_steps, 'optimizer.warmup_steps': warmup}
    trial = Trial(make_config(data_dir, fields, seed))
    seconds = trial.run(num_steps)
    captions, scenes = zip(*sample_data.held_out_prompts(_PROMPTS), strict=True)
    pictures = trial.draw(list(captions))
    previews.write_png(picture, previews.make_grid([pictures], captions))
    scores = demo_scores.judge(pictures, scenes)
    return {
        'seed': seed, 'steps': num_steps, 'cpu_s': round(seconds, 1),
        'loss': trial.eval_loss(batches), **scores._asdict(),
    }  # fmt: skip


def main() -> None:
    """Reads the command line, trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data_dir', required=True)
    parser.add_argument('--setting', action='append', required=True, help='NAME: field=value ...')
    parser.add_argument('--steps', type=int, default=300, help='of the first setting')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--first_seed', type=int, default=0)
    parser.add_argument('--cpu_s', type=json.loads, help='of a step, by name; measured by default')
    parser.add_argument('--out', required=True, help='JSON lines; pictures are put beside it')
    args = parser.parse_args()
    settings = dict(map(read_setting, args.setting))
    costs = args.cpu_s or seconds_a_step(args.data_dir, settings)
    print('CPU seconds a step:', json.dumps(costs), flush=True)
    out, batches = pathlib.Path(args.out), eval_batches()
    whole = args.steps * next(iter(costs.values()))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for seed, name in itertools.product(seeds, settings):
        picture = out.with_name(f'{out.stem}-{name.replace(" ", "_")}-{seed}.png')
        num_steps = round(whole / costs[name])
        row = run_one(args.data_dir, settings[name], seed, num_steps, batches, picture)
        line = json.dumps({'setting': name, 'fields': settings[name], **row})
        print(line, flush=True)
        with out.open('a') as file:
            file.write(line + '\n')


if __name__ == '__main__':
    main()
