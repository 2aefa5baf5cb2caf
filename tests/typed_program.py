"""A program over all functions of `input_pipeline`, which `mypy --strict` accepts."""

import jax
import numpy as np

import input_pipeline
from input_pipeline import Batch, Batches, ReadCounter, to_device


def keys_of(batches: Batches) -> list[int]:
    batch: Batch = next(batches)
    keys: list[int] = batch['key'].tolist()
    return keys


def main(path: str, sharding: jax.sharding.Sharding) -> None:
    input_pipeline.prepare_process()
    counter = ReadCounter()
    with input_pipeline.train_batches(path, batch_size=8, seed=0, counter=counter) as batches:
        print(keys_of(batches), batches.step, batches.spec['key'].dtype, counter.read().num_bytes)
        batches.set_state(batches.get_state())
        batches.check_memory(ram_budget_gb=1.5)
    for arrays in input_pipeline.train_arrays(path, sharding, batch_size=8, seed=0, ahead=1):
        print(arrays['latents'].shape)
    process, count = input_pipeline.process_share(sharding)
    held_out = input_pipeline.eval_batches(
        path, batch_size=8, process_index=process, process_count=count
    )
    for array in to_device(held_out, sharding):
        print(array[input_pipeline.MASK], input_pipeline.key_words(np.arange(3)))
    mix: input_pipeline.Mix = [{'dir': path, 'weight': 2, 'where': 'key > 0'}]
    sources = input_pipeline.open_mix(mix)
    plan = input_pipeline.train_plan(sources, batch_size=8, seed=0, lanes=4, stride=2)
    print(plan.engine, plan.cursor.after(3).state())
    print(input_pipeline.mix_stats(sources, '').latent_mean, plan.steps_per_epoch)
    input_pipeline.planned_batches(plan, start=plan.cursor.state()).close()
    stored = input_pipeline.open_data(path)
    stats: input_pipeline.DatasetStats = stored.stats()
    input_pipeline.train_dataset(stored, batch_size=8, seed=stats.num_tokens, window=32)
    input_pipeline.eval_dataset(stored, batch_size=8, features=('key', input_pipeline.CROP))
