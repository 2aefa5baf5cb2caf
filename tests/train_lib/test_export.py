"""An exported model draws in PyTorch what it draws here."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys

import markdown_it
import numpy as np
import pytest
import safetensors.numpy
import torch
import yaml
from torch.utils import flop_counter

from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from tests import children
from tests.train_lib.test_models import randomized
from train_lib import checkpoint, export, model_card, models, torch_reference
from train_lib.models.dit import Words, flatten_weights

PREVIEW = {'guidance': 3.0, 'guidance_low': 0.4, 'guidance_high': 0.8}
PREVIEW |= {'num_steps': 6, 'time_shift': 2.0}
SIDE, DIM = 8, 12


@pytest.mark.parametrize(
    ('kind', 'text', 'sampler', 'prediction'),
    [
        ('embedding', 'pooled', 'euler', 'latents'),
        ('states', 'sequence', 'heun', 'velocity'),
        pytest.param('tokens', 'pooled', 'heun', 'velocity', marks=pytest.mark.slow),
        pytest.param('tokens', 'sequence', 'euler', 'velocity', marks=pytest.mark.slow),
    ],
)
def test_the_page_of_pytorch_draws_the_same_latents(tmp_path, kind, text, sampler, prediction):
    vocabulary = 0 if kind == 'embedding' else 30
    sizes = {'width': 64, 'depth': 2, 'unroll': 1, 'vocabulary': vocabulary, 'crops': 3}
    model = models.make_model('tiny/2', text=text, prediction=prediction, dtype='float32', **sizes)
    random = np.random.default_rng(1)
    stats = [random.uniform(0.5, 2, size).astype(np.float32) for size in (4, 4, DIM, DIM)]
    stats[3][:3] = 0  # features that never vary
    facts = DatasetStats(*stats, (3, 4, SIDE, SIDE), vocabulary=vocabulary)
    text_inputs = {
        'embedding': np.zeros((1, DIM), np.float32),
        'tokens': np.zeros((1, 5), np.int32),
        'states': Words(np.zeros((1, 5, DIM), np.float32), np.ones((1, 5), bool)),
    }[kind]
    zeros = np.zeros((1, SIDE, SIDE, 4), np.float32), np.zeros(1, np.float32)
    params = randomized(model, *zeros, text_inputs)['params']
    preview = PREVIEW | {'sampler': sampler}
    example = export.draw_example(model, params, facts, preview)

    names = 'width', 'depth', 'num_heads', 'patch_size', 'text', 'prediction'
    fields = {name: getattr(model, name) for name in names}
    config = {'model': fields, 'preview': preview, 'data': facts.to_json()}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    safetensors.numpy.save_file(flatten_weights(params), tmp_path / 'model.safetensors')
    texts = torch.tensor(example['text'])
    if kind == 'states':
        texts = texts, torch.tensor(example['present']).bool()
    with torch.inference_mode():
        weights, config = torch_reference.load(tmp_path)
        drawn = torch_reference.draw(weights, config, torch.tensor(example['noise']), texts)
    # Tensors of two devices in one operation are an error.
    elsewhere = torch_reference.Transformer.from_pretrained(tmp_path).to('meta')
    on_meta = tuple(x.to('meta') for x in texts) if kind == 'states' else texts.to('meta')
    noise_on_meta = torch.tensor(example['noise']).to('meta')

    def count_flops(**changes):
        with flop_counter.FlopCounterMode(display=False) as counter:
            assert elsewhere(noise_on_meta, on_meta, **changes).device.type == 'meta'
        return counter.get_total_flops()

    with_guidance = count_flops(guidance_low=0.0, guidance_high=1.0)
    assert count_flops(guidance=1.0) == with_guidance / 2 < count_flops() < with_guidance
    assert example['latents'].std() > 0.1
    np.testing.assert_allclose(drawn.numpy(), example['latents'], atol=1e-4 * drawn.std().item())


def test_a_run_is_exported_and_its_page_runs_alone(small_run, tmp_path):
    out = tmp_path / 'exported'
    ended = children.program('train_lib.export', f'--workdir={small_run[0]}', f'--out={out}')
    assert ended.stdout == f'exported: {out}\n', ended.stderr
    folder = shutil.move(out, tmp_path / 'elsewhere')
    code = 'import sys; sys.modules["jax"] = sys.modules["train_lib"] = None; '
    code += f'import runpy; sys.argv = ["", "{folder}/transformer"]; '
    code += f'runpy.run_path("{folder}/transformer/reference.py", run_name="__main__")'
    output = subprocess.check_output([sys.executable, '-c', code], text=True)
    assert float(output.split()[-3]) < 1e-4
    weights = safetensors.numpy.load_file(folder / 'transformer' / 'model.safetensors')
    assert weights['conditioning.crops.weight'].any(axis=0).tolist() == [True, True]


def test_an_interrupted_export_is_no_export_and_is_made_again(small_run, tmp_path, monkeypatch):
    workdir, out = small_run[0], tmp_path / 'out'
    export.export(workdir, out)
    files = {path: path.read_bytes() for path in out.rglob('*.*')}
    last_file = out / 'transformer' / 'config.json'
    with monkeypatch.context() as context:
        context.setattr(export, 'draw_example', lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export.export(f'{workdir}@2', out)
    assert not last_file.exists()
    export.export(workdir, out)
    assert {path: path.read_bytes() for path in out.rglob('*.*')} == files
    export.export(workdir, out, average=False)
    weights = last_file.with_name('model.safetensors')
    assert weights.read_bytes() != files[weights]


def test_the_card_tells_of_data_recipe_metrics_and_previews(small_run, tmp_path):
    workdir, out = shutil.copytree(small_run[0], tmp_path / 'run'), tmp_path / 'circles'
    out.mkdir()
    (workdir / 'previews').mkdir()
    (workdir / 'previews' / 'step_000004.png').write_bytes(b'PNG')
    (workdir / 'evaluation').mkdir()
    settings = dict.fromkeys(('image_encoder', 'data_set', 'vae', 'seed'), 'x')
    for name, average in ('mean', True), ('last', False):
        result = {'num_pictures': 5000, 'cmmd': 0.123, 'clip_score': 21.5}
        result['settings'] = settings | {'average': average, 'preview': {'guidance': f'of {name}'}}
        path = workdir / 'evaluation' / f'step_000004_{name}.json'
        path.write_text(json.dumps(result))
    saved = checkpoint.open_run(workdir)
    facts = DatasetStats.from_json(saved.description.facts)

    def card(**fields) -> str:
        options = {'average': True, 'num_weights': 1234, 'datasets': ['me/circles']}
        model_card.write_card(out, saved, dataclasses.replace(facts, **fields), **options)
        return (out / 'README.md').read_text()

    text = card(license='cc0-1.0', citation='@misc{a}')
    head = ['library_name: "diffusers"', 'pipeline_tag: "text-to-image"', 'license: "cc0-1.0"']
    head = ['---', *head, 'datasets: ["me/circles"]', '---', '', '# circles', '']
    assert text.startswith('\n'.join(head))
    for part in (
        *('1,234 weights', 'average of the weights at step 4', '![Previews](previews.png)'),
        *("from_pretrained('circles', trust", '```bibtex\n@misc{a}\n```', '| license | cc0-1.0 |'),
        *('| texts | hash 1 |', '/hash/1.0.0 train ', '| batch_size | 8 |', '| cmmd | 0.123 |'),
        *('| num_pictures | 5,000 |', '| guidance | of mean |'),
    ):
        assert part in text
    assert 'of last' not in text and 'frechet' not in text
    assert (out / 'previews.png').read_bytes() == b'PNG'
    (workdir / 'previews' / 'step_000004.png').unlink()
    text = card(license='My own: "free"')
    assert 'license: "other"\nlicense_name: "My own: \\"free\\""\n' in text
    assert 'Previews' not in text and not (out / 'previews.png').exists()
    # What others wrote adds nothing to the page, whatever it looks like.
    hostile = '<img src=x onerror=alert(1)>|`a`\n---\n![b](c)\x1b[31m 日本'
    text = card(license=hostile, vae=hostile, text_encoder=hostile, citation=f'```\n{hostile}')
    head, *rest = text.removeprefix('---\n').split('\n---\n', 1)
    shown = hostile.replace('\n', r'\n').replace('\x1b', r'\x1b')
    assert yaml.safe_load(head)['license_name'] == shown
    page = markdown_it.MarkdownIt('commonmark').enable('table').render(rest[0])
    tags = 'h1 h2 p pre code table thead tbody tr th td'
    assert set(re.findall(r'<(\w+)', page)) == {*tags.split()}
    assert page.count(html.escape(shown, quote=False)) == 3
    lines = '\n'.join(['```', *shown.split(r'\n')])
    assert html.escape(lines, quote=False) in page
    assert '\x1b' not in text


def test_a_folder_of_something_else_is_left_alone(small_run, tmp_path):
    (tmp_path / 'thesis.tex').write_text('x')
    with pytest.raises(ValueError, match=r'holds thesis\.tex: expected a new folder'):
        export.export(small_run[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']
