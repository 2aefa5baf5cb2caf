"""What is written, in which order it is read, and what is learned from it stay as they are.

`goldens.json` has digests of the files of four builds, of batches that each engine reads, and the
losses of a short run. A change of a contract changes some of them, in a commit that says which
and why; `python -m tests.test_goldens` prints all as they are now, in the form of the file.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import input_pipeline
from coyo11m_tfds import add_column, embed_captions, schema
from tests import built, made_sources, runs
from tests.checkout import CHECKOUT

ENGINES = ('rows', 'chunks', 'tf_data')
GOLDENS = CHECKOUT / 'tests' / 'goldens.json'
ROWS = (230, 70, 63)  # of the `.pt` files
# Place and time of the source or the build, and what tells people of it.
UNSTABLE = {schema.INFO_FILE, schema.COLUMNS_FILE, schema.METADATA_FILE, schema.CHECKSUMS_FILE}
TOLD = {'report.html', 'report.json'}


def make_source(folder: pathlib.Path) -> pathlib.Path:
    """Latents are multiples of 1/32, so that sums of them are the same on every processor."""
    first = 0
    for number, count in enumerate(ROWS):
        keys = range(first, first + count)
        values = torch.arange(count * 3 * 4 * 32 * 32).reshape(count, *schema.LATENTS_SHAPE)
        latents = ((values * 7919 + number) % 1021 - 510).to(torch.float16) / 32
        path = made_sources.latents_file(folder, number)
        made_sources.write_pt(path, keys, replace={'latents': latents})
        first += count
    colours = 'red', 'green', 'blue', 'yellow'
    captions = {key: f'A {colours[key % 4]} circle, number {key}.' for key in range(first)}
    made_sources.write_captions(folder, captions)
    return folder


def build(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Four data sets of one source: records, latents in place, tokens, and added columns."""
    source = make_source(folder / 'source')
    sidecars = {name: folder / f'{name}.parquet' for name in ('hash', 'words', 'short', 'number')}
    embed_captions.embed(source, 'hash', sidecars['hash'])
    of_short = embed_captions.EmbedSettings(caption_column='caption')
    embed_captions.embed(source, 'hash', sidecars['short'], of_short)
    of_words = embed_captions.EmbedSettings(tokens_only=True, max_tokens=12)
    embed_captions.embed(source, 'words', sidecars['words'], of_words)
    keys = np.arange(sum(ROWS))
    pq.write_table(pa.table({'key': keys, 'score': keys.astype(np.float32)}), sidecars['number'])

    def make(folder_name: str, sidecar: str, **fields: Any) -> pathlib.Path:
        fields = {'shard_bytes': 1_500_000, **fields}
        return built.build(source, sidecars[sidecar], folder / folder_name, **fields)

    data_sets = {
        'records': make('records', 'hash'),
        'in_place': make('in_place', 'hash', latents='in_place'),
        'tokens': make('tokens', 'words', name='words'),
        'columns': make('columns', 'hash'),
    }
    add_column.add(data_sets['columns'], 'short', sidecars['short'])
    add_column.add(data_sets['columns'], 'score', parquet=sidecars['number'], column='score')
    return data_sets


def digest_files(data_set: pathlib.Path) -> dict[str, str]:
    """Digests of the files that nothing but source and settings decides, by name without ID."""
    files = {_without_id(path.name): path for path in sorted(data_set.iterdir())}
    names = sorted(files.keys() - UNSTABLE - TOLD)
    return {name: _digest(files[name].read_bytes()) for name in names}


def _without_id(name: str) -> str:
    # It changes with the version of the package, and with the place of a source in place.
    return name.replace(f'-{schema.build_of(name)}.', '.')


def digest_batches(data_set: pathlib.Path, engine: str, **arguments: Any) -> str:
    """A digest of 40 batches: crops, drops, two texts, an added number, the mask of bad records."""
    batches = input_pipeline.train_batches(
        data_set,
        engine=engine,
        batch_size=16,
        seed=3,
        lanes=4,
        chunk=32,
        window=48,
        caption_dropout=0.3,
        on_bad_records='skip',
        **arguments,
    )
    return _digest_batches(itertools.islice(batches, 40))


def train(data_set: pathlib.Path, workdir: pathlib.Path) -> list[float]:
    """The losses of 20 steps on a CPU."""
    from train_lib import train as train_

    short = {'num_steps': 20, 'eval_every': 0, 'checkpoint_every': 0}
    # The model tiny/16, at the rate of the default configuration.
    model = {'model.width': 0, 'model.depth': 0, 'optimizer.learning_rate': 2e-4}
    config = runs.small_config(data_set, **short, **model)
    train_.train_and_evaluate(config, workdir)
    found = runs.losses(workdir)
    return [found['train/loss', step] for step in range(1, 21)]


def compute(folder: pathlib.Path) -> dict[str, Any]:
    """All goldens as they are now."""
    data_sets = build(folder)
    goldens: dict[str, Any] = {'files': {n: digest_files(path) for n, path in data_sets.items()}}
    features = schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING, schema.CAPTION
    mixed = {'features': (*features, 'score'), 'text': {'': 2, 'short': 1}}
    tokens = {'features': (schema.KEY, schema.LATENTS, schema.TOKENS)}
    asked: dict[str, dict] = {
        'records': {'features': features},
        'in_place': {'features': features},
        'tokens': tokens,
        'columns': mixed,
    }
    goldens['batches'] = {
        f'{name}, {engine}': digest_batches(data_sets[name], engine, **arguments)
        for name, arguments in asked.items()
        for engine in ENGINES
    }
    evaluated = {'batch_size': 16, 'features': features[:3]}
    goldens['evaluation'] = {
        engine: _digest_batches(
            input_pipeline.eval_batches(data_sets['columns'], engine=engine, **evaluated)
        )
        for engine in ENGINES
    }
    goldens['losses'] = train(data_sets['columns'], folder / 'run')
    return goldens


def _digest_batches(batches) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for name, x in sorted(batch.items()):
            content = repr(x.tolist()).encode() if x.dtype == object else x.tobytes()
            digest.update(f'{name} {x.dtype} {x.shape} '.encode() + content)
    return digest.hexdigest()[:16]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.fixture(scope='module')
def now(tmp_path_factory) -> dict[str, Any]:
    return compute(tmp_path_factory.mktemp('goldens'))


@pytest.fixture(scope='module')
def goldens() -> dict[str, Any]:
    return json.loads(GOLDENS.read_text())


@pytest.mark.parametrize('kind', ['files', 'batches', 'evaluation'])
def test_they_are_what_they_were(now, goldens, kind):
    assert now[kind] == goldens[kind]


def test_the_losses_are_what_they_were(now, goldens):
    # Another processor may add up in another order.
    np.testing.assert_allclose(now['losses'], goldens['losses'], rtol=1e-4)


if __name__ == '__main__':
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    # Builds and training print to stdout, too.
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        found = compute(pathlib.Path(scratch))
    print(json.dumps(found, indent=1))
