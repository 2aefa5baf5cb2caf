"""Times tokenizing and embedding captions, beside other programs, in one run.

    COYO11M_ENCODERS=/encoders python -m benchmarks.text --dir /tmp/text

The encoders are the real ones that `tests/text/fetch_encoders.py` fetches. All sides of a model get
the same captions, of 10 to 250 tokens of MiniLM, in the same random order. Times count from when
the model is loaded to when the last result is there: on the disk for this project, whose time
includes finding equal captions and writing, and for `datasets.map`; in memory for the others.
"""

import functools
import os
import pathlib
import random
import shutil
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import runner
from benchmarks.runner import Figures, Side
from coyo11m_tfds import schema

_TOKENS = 10, 250
_MAX_TOKENS = 256
_BATCH = 32  # captions of a plain loop's batch

# Each is a token of its own.
_WORDS = """
    a the of and in on with two small large red blue green man woman dog cat horse standing
    sitting riding beside photograph kitchen mountain umbrella wooden background sunlight
    foreground building restaurant skateboard refrigerator colorful surrounded vegetables
"""

FLAGS = {
    'encoders': (os.environ.get('COYO11M_ENCODERS', ''), 'folder of real models'),
    'tokens': (100_000, 'captions to tokenize'),
    'minilm': (800, 'captions for MiniLM'),
    'gemma': (80, 'captions for Gemma'),
}
_COLUMNS = {
    'captions': runner.column('captions'),
    'captions/s': runner.column('rate', ',.1f'),
    'all runs': runner.all_runs('rate', ',.1f'),
    'CPU ms a caption': runner.column('cpu_per_sample', ',.2f', 1e3),
    'padding': runner.column('padding', '.1%'),
}


def begin(flags, folder: pathlib.Path, stack) -> runner.Once:
    """Makes the captions of each model."""

    def once(side: Side) -> Figures:
        count = getattr(flags, side.settings['captions'])
        source = folder / f'captions-{count}'
        if not source.exists():
            source.mkdir()
            _write_captions(source, count)
        model = pathlib.Path(flags.encoders, side.settings['model']).absolute()
        return runner.run(side, source=source, captions=count, model=model)

    return once


def _write_captions(folder: pathlib.Path, count: int) -> None:
    choose, words = random.Random(0), _WORDS.split()
    lengths = [choose.randint(*_TOKENS) - 2 for _ in range(count)]  # with a start and an end
    captions = [' '.join(choose.choices(words, k=length)) for length in lengths]
    table = pa.table({schema.PARQUET_KEY: range(count), schema.DEFAULT_CAPTION_COLUMN: captions})
    pq.write_table(table, folder / schema.CAPTIONS_FILE)


def _read_captions(source: str) -> list[str]:
    column = schema.DEFAULT_CAPTION_COLUMN
    return pq.read_table(pathlib.Path(source, schema.CAPTIONS_FILE)).column(column).to_pylist()


# --- The sides -----------------------------------------------------------------------------------


def ours(*, source: str, captions: int, model: str, runner_name: str = 'hf', **options) -> Figures:
    """This project; tokens alone with `tokens_only`."""
    from coyo11m_tfds import embed_captions
    from coyo11m_tfds.text import text_encoders

    name = f'{runner_name}:{model}'
    encoder = name if options else text_encoders.make_encoder(name)
    out = pathlib.Path(source, f'ours-{os.getpid()}')
    meter = runner.Meter()
    report = embed_captions.embed(pathlib.Path(source), encoder, out, **options)
    found = meter.rate(captions)
    shutil.rmtree(out)
    return found | {'captions': captions, 'padding': report.padding}


def _tokenizer(model: str) -> Any:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    limit = transformers.AutoConfig.from_pretrained(model).max_position_embeddings
    return functools.partial(tokenizer, truncation=True, max_length=min(limit, _MAX_TOKENS))


def datasets_map(*, source: str, captions: int, model: str) -> Figures:
    """HF datasets."""
    import datasets

    tokenize, texts = _tokenizer(model), _read_captions(source)
    meter = runner.Meter()
    datasets.Dataset.from_dict({'caption': texts}).map(
        lambda rows: tokenize(rows['caption']),
        batched=True,
        num_proc=2,
        load_from_cache_file=False,
        cache_file_name=str(pathlib.Path(source, 'mapped.arrow')),
    )
    return {**meter.rate(captions), 'captions': captions}


def embed_plainly(*, source: str, captions: int, model: str) -> Figures:
    """A loop of ten lines: captions in their order, padded to the longest of a batch."""
    import torch
    import transformers

    tokenize, texts = _tokenizer(model), _read_captions(source)
    network = transformers.AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    tokens = slots = 0
    results = []
    meter = runner.Meter()
    with torch.inference_mode():
        for start in range(0, len(texts), _BATCH):
            inputs = tokenize(texts[start : start + _BATCH], return_tensors='pt', padding=True)
            mask = inputs['attention_mask']
            states = network(input_ids=inputs['input_ids'], attention_mask=mask).last_hidden_state
            sums = (states * mask[..., None]).sum(dim=1)
            results.append((sums / mask.sum(dim=1, keepdim=True)).numpy())
            tokens, slots = tokens + int(mask.sum()), slots + mask.numel()
    assert np.isfinite(np.concatenate(results)).all()
    return {**meter.rate(captions), 'captions': captions, 'padding': 1 - tokens / slots}


def _side(title: str, function: Any, captions: str, model: str = 'minilm', **options: Any) -> Side:
    settings = {'captions': captions, 'model': model, **options}
    return Side(title, function, settings, ours=function is ours)


_IDS = {'tokens_only': True, 'max_tokens': _MAX_TOKENS}
SIDES = {
    'tokens': _side('token ids: this project', ours, 'tokens', **_IDS),
    'tokens_map': _side('token ids: `datasets.map`, 2 processes', datasets_map, 'tokens'),
    'minilm': _side('MiniLM: this project', ours, 'minilm'),
    'minilm_plain': _side('MiniLM: plain loop, batches of 32', embed_plainly, 'minilm'),
    'gemma': _side('Gemma: this project, torch', ours, 'gemma', 'gemma'),
    'gemma_jax': _side('Gemma: this project, JAX', ours, 'gemma', 'gemma', runner_name='jax'),
    'gemma_plain': _side('Gemma: plain loop, batches of 32', embed_plainly, 'gemma', 'gemma'),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, _COLUMNS, FLAGS, begin))
