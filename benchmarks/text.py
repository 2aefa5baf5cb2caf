"""Times tokenizing and embedding captions, beside what else is used for it, in one run.

    COYO11M_ENCODERS=/encoders python -m benchmarks.text --dir /tmp/text

The encoders are the real ones that `tests/text/fetch_encoders.py` fetches. All sides get the same
captions, of 10 to 250 tokens of MiniLM, in the same random order; a side is a process of its own,
and they take turns. Times count from when the model is loaded to when the last result is there: on
the disk for this project, whose time includes finding equal captions and writing, and for
`datasets.map`; in memory for the others. CPU seconds are of all processes of the side, loading the
model included. A peer that is not installed is named and left out; `pip install datasets
sentence-transformers` in the environment of this project brings both.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import measure
from coyo11m_tfds import embed_captions, schema
from coyo11m_tfds.text import text_encoders

TOKENS = 10, 250
BATCH = 32  # captions of a plain loop's batch
MODULES = {
    'datasets.map, 2 processes': 'datasets',
    'sentence-transformers': 'sentence_transformers',
}
SEED = 0

# Each is a token of its own.
_WORDS = (
    'a the of and in on with two small large red blue green man woman dog cat horse standing '
    'sitting riding beside photograph kitchen mountain umbrella wooden background sunlight '
    'foreground building restaurant skateboard refrigerator colorful surrounded vegetables'
)

# What a side returns: seconds, and what it knows of padding as a share of all it computed.
Timed = tuple[float, float | None]


def main() -> None:
    """Runs the sides, each in a process of its own, and prints two tables."""
    flags = parse_flags()
    folder = pathlib.Path(flags.dir)
    if flags.side:
        task, _, side = flags.side.partition('/')
        before = measure.cpu_seconds()
        seconds, padding = SIDES[task][side](folder, flags)
        cpu = measure.cpu_seconds() - before
        print(json.dumps({'seconds': seconds, 'padding': padding, 'cpu': cpu}))
        return
    folder.mkdir(parents=True, exist_ok=True)
    for task, model, count in (
        ('tokenizing', 'minilm', flags.tokenized),
        ('embedding', 'minilm', flags.embedded),
        ('embedding', 'gemma', flags.embedded_by_gemma),
    ):
        if not count:
            continue
        num_tokens = make_source(folder, count, flags)
        print(f'\n{task}, {model}: {count:,} captions of {num_tokens / count:.0f} tokens\n')
        print_table(num_tokens, count, run_sides(task, model, flags))


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add('--dir', required=True, help='local folder for captions and results')
    add('--encoders', default=os.environ.get('COYO11M_ENCODERS', ''), help='folder of real models')
    add('--model', default='minilm', help='folder in it')
    add('--tokenized', type=int, default=100_000, help='captions to tokenize (%(default)s)')
    add('--embedded', type=int, default=2_000, help='captions for MiniLM (%(default)s)')
    add('--embedded_by_gemma', type=int, default=200, help='captions for Gemma (%(default)s)')
    add('--repeats', type=int, default=3, help='runs of each side (%(default)s)')
    add('--side', help=argparse.SUPPRESS)
    return parser.parse_args()


def make_source(folder: pathlib.Path, count: int, flags: argparse.Namespace) -> int:
    """Writes the captions; returns how many tokens they have."""
    tokenizer = text_encoders.make_tokenizer(f'hf:{flags.encoders}/minilm')
    random_, words = random.Random(SEED), _WORDS.split()
    captions = [
        # With a start and an end.
        ' '.join(random_.choices(words, k=random_.randint(*TOKENS) - 2))
        for _ in range(count)
    ]
    table = pa.table({schema.PARQUET_KEY: range(count), schema.DEFAULT_CAPTION_COLUMN: captions})
    pq.write_table(table, folder / schema.CAPTIONS_FILE)
    return sum(map(len, tokenizer.tokenize(captions)))


def run_sides(task: str, model: str, flags: argparse.Namespace) -> dict[str, list[dict]]:
    """Runs every side of a task `repeats` times, taking turns."""
    results: dict[str, list[dict]] = {}
    sides = choose_sides(task, model)
    for _ in range(flags.repeats):
        for side in sides:
            command = [sys.executable, '-m', 'benchmarks.text', *sys.argv[1:]]
            command += ['--side', f'{task}/{side}', '--model', model]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode:
                sys.exit(f'{side} ended with {ended.returncode}:\n{ended.stderr[-2000:]}')
            results.setdefault(side, []).append(json.loads(ended.stdout.splitlines()[-1]))
    return results


def choose_sides(task: str, model: str) -> list[str]:
    """Returns the sides that can run here, and prints why the others cannot."""
    sides = []
    for side in SIDES[task]:
        if side in MODULES and (error := import_error(MODULES[side])):
            print(f'left out: {side}: {error}', flush=True)
        elif ('JAX' in side and model != 'gemma') or (
            side == 'sentence-transformers' and model == 'gemma'
        ):
            print(f'left out: {side}: cannot load {model}', flush=True)
        else:
            sides.append(side)
    return sides


def import_error(module: str) -> str:
    """Why a peer cannot be imported; '' if it can."""
    ended = subprocess.run(
        [sys.executable, '-c', f'import {module}'], capture_output=True, text=True
    )
    return ended.stderr.splitlines()[-1] if ended.returncode else ''


def print_table(num_tokens: int, count: int, results: dict[str, list[dict]]) -> None:
    """Prints the median of each side."""
    print('| side | captions/s | all runs | tokens/s | padding | CPU s per 1,000 captions |')
    print('| --- | ---: | ---: | ---: | ---: | ---: |')
    for side, runs in results.items():
        seconds = [run['seconds'] for run in runs]
        median = statistics.median(seconds)
        padding = '' if runs[0]['padding'] is None else f'{runs[0]["padding"]:.1%}'
        cpu = statistics.median(run['cpu'] for run in runs)
        print(
            f'| {side} | {count / median:,.0f} | {count / max(seconds):,.0f} to '
            f'{count / min(seconds):,.0f} | {num_tokens / median:,.0f} | {padding} | '
            f'{1000 * cpu / count:,.2f} |'
        )


# --- The sides ------------------------------------------------------------------------------


def read_captions(folder: pathlib.Path) -> list[str]:
    column = schema.DEFAULT_CAPTION_COLUMN
    return pq.read_table(folder / schema.CAPTIONS_FILE).column(column).to_pylist()


def _ours(folder: pathlib.Path, encoder, num_workers: int, **options) -> Timed:
    out = folder / f'ours-{os.getpid()}'
    report = embed_captions.embed(folder, encoder, out, num_workers=num_workers, **options)
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    return report.seconds, report.padding


def tokenize_ours(folder: pathlib.Path, flags: argparse.Namespace) -> Timed:
    spec = f'hf:{flags.encoders}/{flags.model}'
    return _ours(folder, spec, 1, tokens_only=True, max_tokens=256)


def tokenize_with_datasets(folder: pathlib.Path, flags: argparse.Namespace) -> Timed:
    import datasets

    tokenizer = _load_tokenizer(flags)
    data = datasets.Dataset.from_dict({'caption': read_captions(folder)})
    start = time.perf_counter()
    data.map(
        lambda rows: tokenizer(rows['caption'], truncation=True, max_length=256),
        batched=True,
        num_proc=2,
        load_from_cache_file=False,
        cache_file_name=str(folder / 'mapped.arrow'),
    )
    return time.perf_counter() - start, None


def tokenize_plainly(folder: pathlib.Path, flags: argparse.Namespace) -> Timed:
    tokenizer = _load_tokenizer(flags)
    captions = read_captions(folder)
    start = time.perf_counter()
    for caption in captions:
        tokenizer(caption, truncation=True, max_length=256)
    return time.perf_counter() - start, None


def embed_ours(folder: pathlib.Path, flags: argparse.Namespace, runner: str = 'hf') -> Timed:
    encoder = text_encoders.make_encoder(f'{runner}:{flags.encoders}/{flags.model}')
    return _ours(folder, encoder, 1)


def embed_with_jax(folder: pathlib.Path, flags: argparse.Namespace) -> Timed:
    return embed_ours(folder, flags, 'jax')


def embed_plainly(folder: pathlib.Path, flags: argparse.Namespace, batch: int = BATCH) -> Timed:
    """A loop of ten lines: captions in their order, padded to the longest of a batch."""
    import torch

    encoder = text_encoders.make_encoder(f'hf:{flags.encoders}/{flags.model}')
    model, tokenizer = encoder._model, encoder._tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    captions = read_captions(folder)
    start = time.perf_counter()
    tokens = slots = 0
    results = []
    with torch.inference_mode():
        for texts in _batches(captions, batch):
            inputs = tokenizer(
                texts,
                return_tensors='pt',
                padding=True,
                truncation=True,
                max_length=encoder.max_tokens,
            )
            mask = inputs['attention_mask']
            states = model(input_ids=inputs['input_ids'], attention_mask=mask).last_hidden_state
            sums = (states * mask[..., None]).sum(dim=1)
            results.append((sums / mask.sum(dim=1, keepdim=True)).numpy())
            tokens, slots = tokens + int(mask.sum()), slots + mask.numel()
    assert np.isfinite(np.concatenate(results)).all()
    return time.perf_counter() - start, 1 - tokens / slots


def embed_one_by_one(folder: pathlib.Path, flags: argparse.Namespace) -> Timed:
    return embed_plainly(folder, flags, 1)


def embed_with_sentence_transformers(folder: pathlib.Path, flags: argparse.Namespace) -> Timed:
    from sentence_transformers import SentenceTransformer, models

    body = models.Transformer(f'{flags.encoders}/{flags.model}', max_seq_length=512)
    model = SentenceTransformer(
        modules=[body, models.Pooling(body.get_word_embedding_dimension(), 'mean')]
    )
    captions = read_captions(folder)
    start = time.perf_counter()
    model.encode(captions, batch_size=BATCH)
    return time.perf_counter() - start, None


def _load_tokenizer(flags: argparse.Namespace):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(f'{flags.encoders}/{flags.model}')


def _batches(captions: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(captions), size):
        yield captions[start : start + size]


SIDES: dict[str, dict[str, Callable[[pathlib.Path, argparse.Namespace], Timed]]] = {
    'tokenizing': {
        'this project': tokenize_ours,
        'datasets.map, 2 processes': tokenize_with_datasets,
        'plain calls': tokenize_plainly,
    },
    'embedding': {
        'this project, torch': embed_ours,
        'this project, JAX': embed_with_jax,
        f'plain loop, batches of {BATCH}': embed_plainly,
        'plain loop, one by one': embed_one_by_one,
        'sentence-transformers': embed_with_sentence_transformers,
    },
}


if __name__ == '__main__':
    main()
