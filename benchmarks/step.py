"""Times training steps of this project beside those of the same model in PyTorch.

    python -m benchmarks.step --models=S/2,B/2,L/2,XL/2 --batch_size=256 --out=step.json
    python -m benchmarks.step --models=XL/2 --sides=jax:cudnn:dots,jax:cudnn:full,torch,torch:full

A side is `jax` (`train_lib`'s own step of the default configuration) or `torch`
(`benchmarks.torch_dit`), with options after colons: of jax what computes the attention (`xla`,
`cudnn`) and what is kept for the backward pass (`none`, `dots`, `full`); of torch `full`, which
computes blocks again as well, and `max-autotune` of `torch.compile`. Samples are made up and lie on
the device; one device is used, in bfloat16. Sides take turns, each turn is a process of its own. A
side whose program is not installed is left out, one that fails (for lack of memory, say) is named
below the table, and the exit status is 1 then. Neither TensorFlow nor data are needed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import measure, step_sides
from train_lib import chips

_OPTIONS = {
    'jax': {
        **{name: {'attention': name} for name in ('xla', 'cudnn')},
        **{name: {'remat': name} for name in ('none', 'dots', 'full')},
    },
    'torch': {
        'full': {'remat': 'full'},
        # Without graphs: the optimizer would have to copy the gradients out of theirs.
        'max-autotune': {'mode': 'max-autotune-no-cudagraphs'},
    },
}
_PACKAGES = 'jax', 'jaxlib', 'flax', 'torch', 'triton'

Row = dict[str, Any]


def read_side(text: str) -> tuple[str, dict[str, str]]:
    """`'jax:cudnn:dots'` to the program and its options.

    Raises:
        ValueError: there is no such program, or it has no such option.
    """
    program, *names = text.split(':')
    if program not in _OPTIONS:
        raise ValueError(f'--sides={text}: expected one of {", ".join(_OPTIONS)}, then options')
    options = {}
    for name in names:
        if name not in _OPTIONS[program]:
            raise ValueError(
                f'--sides={text}: {program} has no option {name!r}, expected some of '
                f'{", ".join(_OPTIONS[program])}'
            )
        options |= _OPTIONS[program][name]
    return program, options


def measure_model(jobs: dict[str, step_sides.Job], turns: int) -> list[Row]:
    """Measures the sides of a model in turns.

    Args:
        jobs: by name of the side.
        turns: of each side.

    Returns:
        A row a side: `seconds` a step, the median of `all_seconds`, and what follows from it with
        what `step_sides` says; or, with `missing` or `failed`, why there are none.
    """
    rows: dict[str, list[Row]] = {side: [] for side in jobs}
    for side in measure.turns(list(jobs), turns):
        done = rows[side]
        if any('seconds' not in row for row in done):
            continue  # it would fail again
        # One profile of each side is enough.
        job = dataclasses.replace(jobs[side], profile='') if done else jobs[side]
        done.append(run_turn(job))
    return [{'side': side, **summary(jobs[side], done)} for side, done in rows.items()]


def run_turn(job: step_sides.Job) -> Row:
    """Runs a turn in a process of its own; what that prints goes to this one's stderr."""
    command = [sys.executable, '-m', 'benchmarks.step_sides', json.dumps(dataclasses.asdict(job))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {'failed': f'its process ended with {ended.returncode}'}


def summary(job: step_sides.Job, turns: Sequence[Row]) -> Row:
    """Of the turns of one side."""
    row = {'model': job.model, 'batch_size': job.batch_size, **turns[-1]}
    if 'seconds' not in row:
        return row
    row['all_seconds'] = sorted(turn['seconds'] for turn in turns)
    row['seconds'] = statistics.median(row['all_seconds'])
    row['memory'] = max(turn['memory'] or 0 for turn in turns) or None
    rate = row['flops'] / row['seconds']
    chip = chips.CHIPS.get(row['device'])
    return row | {
        'samples_per_second': job.batch_size / row['seconds'],
        'tflops_per_second': rate / 1e12,
        'mfu': chip and rate / chip.flops,
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as a table for people; below it what could not be measured."""
    lines = [
        '| model | side | samples | ms a step | all turns | samples/s | TFLOP/s | MFU | memory, GB '
        '| device |',
        '| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |',
    ]
    for row in rows:
        if 'seconds' in row:
            fastest, slowest = row['all_seconds'][0], row['all_seconds'][-1]
            lines.append(
                f'| {row["model"]} | {row["side"]} | {row["batch_size"]} '
                f'| {1e3 * row["seconds"]:,.1f} | {1e3 * fastest:,.1f} to {1e3 * slowest:,.1f} '
                f'| {row["samples_per_second"]:,.1f} | {row["tflops_per_second"]:,.3g} '
                f'| {_or_blank(row["mfu"], "{:.1%}")} '
                f'| {_or_blank(row["memory"] and row["memory"] / 1e9, "{:.1f}")} '
                f'| {row["device"]} |'
            )
    for kind, what in (('missing', 'left out'), ('failed', 'failed')):
        lines += [
            f'\n{row["model"]}, {row["side"]}, {what}: {row[kind]}' for row in rows if kind in row
        ]
    return '\n'.join(lines)


def _or_blank(value: float | None, template: str) -> str:
    return '' if value is None else template.format(value)


def make_jobs(args: argparse.Namespace, cache: str) -> list[dict[str, step_sides.Job]]:
    """The jobs of each model, by name of the side.

    Raises:
        ValueError: from `read_side`, or there are neither one nor as many batch sizes as models.
    """
    names, sizes = args.models.split(','), [int(size) for size in args.batch_size.split(',')]
    if len(sizes) not in (1, len(names)):
        raise ValueError(
            f'--batch_size={args.batch_size}: expected one, or one for each of {args.models}'
        )
    sizes = sizes if len(sizes) == len(names) else sizes * len(names)

    def job(side: str, name: str, size: int) -> step_sides.Job:
        program, options = read_side(side)
        profile = ''
        if args.profile and program == 'jax':
            folder = f'{name}-{side}'.replace('/', '-').replace(':', '-')
            profile = str(pathlib.Path(args.profile) / folder)
        return step_sides.Job(program, name, size, options, args.warmup, args.steps, cache, profile)

    sides = args.sides.split(',')
    return [
        {side: job(side, name, size) for side in sides}
        for name, size in zip(names, sizes, strict=True)
    ]


def _installed() -> list[str]:
    return [
        name for name in _PACKAGES if any(True for _ in importlib.metadata.distributions(name=name))
    ]


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', default='S/2,B/2,L/2,XL/2')
    parser.add_argument('--batch_size', default='256', help='of all models, or one for each')
    parser.add_argument('--sides', default='jax,torch', help='such as jax:cudnn:dots,torch:full')
    parser.add_argument('--turns', type=int, default=3, help='of each side')
    parser.add_argument('--steps', type=int, default=20, help='that are timed in a turn')
    parser.add_argument('--warmup', type=int, default=5, help='steps before')
    parser.add_argument('--profile', default='', help='folder for profiles of the sides in JAX')
    parser.add_argument('--out', type=pathlib.Path, help='file for the figures, as JSON')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        try:
            models = make_jobs(args, cache)
        except ValueError as error:
            sys.exit(f'error: {error}')
        rows = []
        for jobs in models:
            print(*{job.model for job in jobs.values()}, file=sys.stderr)
            rows += measure_model(jobs, args.turns)
    machine = measure.describe_machine(pathlib.Path.cwd(), _installed())
    print(f'{machine}\n\n{table(rows)}')
    if args.out:
        args.out.write_text(json.dumps({'machine': machine, 'rows': rows}, indent=2) + '\n')
    sys.exit(any('failed' in row for row in rows) or not any('seconds' in row for row in rows))


if __name__ == '__main__':
    main()
