"""Carries out a plan: writes the shards with a process per core, then index and metadata.

    plan = make_plan(...)
    results = write_shards(plan, num_workers=0)
    write_chunk_indexes(results, data_dir)
    metadata = make_metadata(plan, results, caption_column)

What is written does not depend on the number of processes: a shard is a function of its task, and
results are joined in the order of the shards. One core does 25,000 records (640 MB) a second,
statistics and checksums included, if the disk can.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pathlib
import shutil
import sys
import types
from collections.abc import Iterator, Sequence

from coyo11m_tfds import chunk_index, moments, report, schema
from coyo11m_tfds.plan import Plan
from coyo11m_tfds.shard_writer import ShardResult, ShardTask, init_worker, write_shard

WORKERS_VARIABLE = 'COYO11M_NUM_PROC'

# A process takes about 1.5 s to start; for less work than this it is not worth it.
_BYTES_WORTH_A_WORKER = 500_000_000


def write_shards(plan: Plan, num_workers: int = 0) -> list[ShardResult]:
    """Writes all shards of a plan.

    Args:
        plan: what to write.
        num_workers: number of processes; 0 takes the environment variable `COYO11M_NUM_PROC`, else
            as many as there are cores and the amount of work is worth.

    Returns:
        The results in the order train, validation, and by shard index.

    Raises:
        ValueError: the source holds numbers that are not finite; the variable is no number.
        OSError: there is not enough space on the disk.
        RuntimeError: a process died.
    """
    _check_space(plan)
    workers = min(_choose_workers(num_workers, plan.num_bytes), len(plan.tasks))
    write = _write_here if workers == 1 else _write_in_pool
    results = []
    with report.Progress(plan.num_bytes, len(plan.tasks)) as progress:
        for result in write(plan.tasks, workers):
            results.append(result)
            progress.add(result.num_bytes)
    return sorted(results, key=lambda result: (result.split, result.index))


def write_chunk_indexes(results: Sequence[ShardResult], data_dir: str | os.PathLike[str]) -> None:
    """Writes the chunk index of every split that has shards."""
    for split, of_split in by_split(results).items():
        chunk_index.save(
            data_dir,
            split,
            shard_lengths=[result.num_records for result in of_split],
            offsets=[result.chunk_offsets for result in of_split],
            shard_sizes=[result.num_bytes for result in of_split],
        )


def make_metadata(plan: Plan, results: Sequence[ShardResult], caption_column: str) -> dict:
    """Returns the metadata of `dataset_info`, with the keys `schema.META_*`; statistics are those
    of the train split."""
    train = by_split(results)[schema.TRAIN]
    mean, std = moments.join([result.latent_moments for result in train]).mean_and_std()
    metadata = {
        schema.META_LATENT_MEAN: mean,
        schema.META_LATENT_STD: std,
        schema.META_LATENT_DTYPE: plan.latent_dtype,
        schema.META_CAPTION_COLUMN: caption_column,
        schema.META_DROPPED: plan.dropped,
        schema.META_SOURCE_FINGERPRINT: plan.source_fingerprint,
    }
    if plan.text_vectors:
        mean, std = moments.join([result.text_moments for result in train]).mean_and_std()
        metadata |= {
            schema.META_TEXT_MEAN: mean,
            schema.META_TEXT_STD: std,
            schema.META_TEXT_ENCODER: plan.text_vectors.encoder,
            schema.META_TEXT_DIM: plan.text_vectors.dim,
        }
    return metadata


def by_split(results: Sequence[ShardResult]) -> dict[str, list[ShardResult]]:
    """Groups results by split, keeping their order."""
    splits: dict[str, list[ShardResult]] = {}
    for result in results:
        splits.setdefault(result.split, []).append(result)
    return splits


def _check_space(plan: Plan) -> None:
    folder = os.path.dirname(plan.tasks[0].path)
    if '://' in folder:  # a bucket has no end
        return
    free = shutil.disk_usage(folder).free
    if free < plan.num_bytes:
        raise OSError(
            f'{folder}: has {free / 1e9:.1f} GB free, but the data set takes '
            f'{plan.num_bytes / 1e9:.1f} GB. Free some space or choose another --data_dir.'
        )


def _choose_workers(num_workers: int, num_bytes: int) -> int:
    if num_workers:
        return num_workers
    variable = os.environ.get(WORKERS_VARIABLE)
    if variable:
        if not variable.isdecimal() or int(variable) == 0:
            raise ValueError(f'{WORKERS_VARIABLE}={variable}: expected a number from 1 up.')
        return int(variable)
    return min(len(os.sched_getaffinity(0)), 1 + num_bytes // _BYTES_WORTH_A_WORKER)


def _write_here(tasks: Sequence[ShardTask], workers: int) -> Iterator[ShardResult]:
    del workers
    return map(write_shard, tasks)


def _write_in_pool(tasks: Sequence[ShardTask], workers: int) -> Iterator[ShardResult]:
    """Yields results as they come; after an error no further task is begun."""
    # Forking a process that runs TensorFlow's threads can hang; spawned ones begin afresh.
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(workers, context, init_worker) as pool:
        try:
            with _clean_start():
                futures = [pool.submit(write_shard, task) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise RuntimeError(
                'A worker process died, most likely because memory ran out. Try fewer of them: '
                f'num_workers in the config, or {WORKERS_VARIABLE} in the environment.'
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _clean_start() -> Iterator[None]:
    """Within it, processes are spawned that can import this package and import nothing else.

    A spawned process imports the program's main module: that of `tfds` takes 4 s and 700 MB, that
    of a script without `if __name__ == '__main__':` starts the work again. The workers need
    neither. But they need the folder of the package, which `tfds build` finds in a checkout itself.
    """
    root = str(pathlib.Path(__file__).parents[1])
    main, path = sys.modules['__main__'], sys.path
    sys.modules['__main__'] = types.ModuleType('__main__')
    sys.path = path if root in path else [*path, root]
    try:
        yield
    finally:
        sys.modules['__main__'], sys.path = main, path
