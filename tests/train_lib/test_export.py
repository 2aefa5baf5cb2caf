"""An exported model draws in PyTorch what it draws here."""

import dataclasses
import hashlib
import html
import json
import math
import os
import re
import runpy
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
from coyo11m_tfds.pictures import latent_rgb
from tests import children, runs, small_vae
from tests.train_lib.learning.test_models import randomized
from train_lib import draw, export
from train_lib.learning import models
from train_lib.learning.dit import flatten_weights
from train_lib.learning.word_vectors import Words
from train_lib.lifecycle import checkpoint
from train_lib.results import model_card, previews, torch_reference

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
    check_other_texts_are_refused(weights, config, torch.tensor(example['noise']), texts)
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


def check_other_texts_are_refused(weights, config, noise, texts) -> None:
    if isinstance(texts, tuple):
        expected = rf'hidden states, a pair of float \(n, T, {DIM}\) and bool \(n, T\)'
        states, present = texts
        others = states, (states[..., :-1], present), (states, present.float()), (states, present.T)
        others += (states[0], present), (states.int(), present), (states, present, present)
    elif texts.is_floating_point():
        expected = rf'embeddings, float \(n, {DIM}\)'
        others = texts[:, :-1], texts[0], texts[None], texts.int(), (texts, texts)
    else:
        expected = r'token ids, integers \(n, T\) from -1 to 29'
        others = texts[0], texts[None], texts.float(), texts > 3
        for other in texts + 30, texts - 30:
            given = f'from {other.min()} to {other.max()}'
            with pytest.raises(ValueError, match=f'^text: expected {expected}, not {given}$'):
                torch_reference.draw(weights, config, noise, other)
    for other in others:
        kinds = ' and '.join(
            f'{str(x.dtype).removeprefix("torch.")} {tuple(x.shape)}'
            for x in (other if isinstance(other, tuple) else (other,))
        )
        with pytest.raises(
            ValueError, match=f'^text: expected {expected}, not {re.escape(kinds)}$'
        ):
            torch_reference.draw(weights, config, noise, other)
    with pytest.raises(ValueError, match=r'^text: expected a tensor or, .* not list$'):
        torch_reference.draw(weights, config, noise, [texts])
    with pytest.raises(ValueError, match=r'^text: expected 1, one for each noise, not [2-9]$'):
        torch_reference.draw(weights, config, noise[:1], texts)
    for other in noise[0], noise[..., :3], noise[:, :-1], noise.int():
        with pytest.raises(
            ValueError, match=r'^noise: expected float \(n, H, W, 4\), with H and W'
        ):
            torch_reference.draw(weights, config, other, texts)


def test_a_run_is_exported_and_its_page_runs_alone(small_run, tmp_path):
    out = tmp_path / 'exported'
    flags = f'--workdir={small_run[0]}', f'--out={out}'
    ended = children.program('train_lib.export', *flags, forked=True)
    assert ended.stdout == f'exported: {out}\n', ended.stderr
    folder = shutil.move(out, tmp_path / 'elsewhere')
    code = 'import sys; sys.modules["jax"] = sys.modules["train_lib"] = None; '
    code += f'import runpy; sys.argv = ["", "{folder}/transformer"]; '
    [program] = (folder / 'transformer').glob('reference_*.py')
    # Else exports of two versions would share code in a process with diffusers.
    assert program.stem == f'reference_{hashlib.sha256(program.read_bytes()).hexdigest()[:8]}'
    code += f'runpy.run_path("{program}", run_name="__main__")'
    output = subprocess.check_output([sys.executable, '-c', code], text=True)
    assert float(output.split()[-3]) < 1e-4
    weights = safetensors.numpy.load_file(folder / 'transformer' / 'model.safetensors')
    assert weights['conditioning.crops.weight'].any(axis=0).tolist() == [True, True]


def test_an_interrupted_export_is_no_export_and_is_made_again(small_run, tmp_path, monkeypatch):
    workdir, out = small_run[0], tmp_path / 'out'
    export.export(workdir, out)
    files = {path: path.read_bytes() for path in out.rglob('*.*')}
    last_file = out / 'transformer' / 'config.json'

    # The old one stays until all of the new one has been made.
    with monkeypatch.context() as context:
        context.setattr(export, 'draw_example', lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export.export(f'{workdir}@2', out)
    assert {path: path.read_bytes() for path in out.rglob('*.*')} == files
    (out / 'README.md').unlink()
    (out / 'README.md').mkdir()
    with pytest.raises(IsADirectoryError):
        export.export(f'{workdir}@2', out)
    assert not last_file.exists()
    (out / 'README.md').rmdir()
    (out / 'pipeline_00000000.py').write_text('of another version')
    export.export(workdir, out)
    assert {path: path.read_bytes() for path in out.rglob('*.*')} == files
    export.export(workdir, out, average=False)
    weights = last_file.with_name('model.safetensors')
    assert weights.read_bytes() != files[weights]


def test_the_card_tells_of_data_recipe_metrics_and_previews(small_run, tmp_path):
    workdir = shutil.copytree(small_run[0], tmp_path / 'run')
    (workdir / 'previews').mkdir()
    pictures = {step: b'\x89PNG\r\n\x1a\n of %d' % step for step in (1, 3, 9)}
    for step, content in pictures.items():
        previews.path_of_step(workdir, step).write_bytes(content)
    # Pictures and files of other forms, as of other programs.
    previews.path_of_step(workdir, 4).write_bytes(b'')
    (workdir / 'previews' / 'step_000004_seed=1.png').write_bytes(pictures[9])
    (workdir / 'evaluation' / 'step_000004_x.json').mkdir(parents=True)
    settings = dict.fromkeys(('image_encoder', 'data_set', 'vae', 'seed'), 'x')
    for name, average in ('mean', True), ('last', False):
        result = {'num_pictures': 5000, 'cmmd': 0.123, 'clip_score': 21.5}
        result['settings'] = settings | {'average': average, 'preview': {'guidance': f'of {name}'}}
        path = workdir / 'evaluation' / f'step_000004_{name}.json'
        path.write_text(json.dumps(result))
    others = ['{}', '[]', '{"settings": {}}', '{"cmmd": "1", "settings": {"preview": {}}}', '\xff']
    for number, content in enumerate([*others, '[' * 100_000]):
        path.with_name(f'step_000004_{number}.json').write_bytes(content.encode('latin-1'))
    saved = checkpoint.open_run(workdir)
    facts = DatasetStats.from_json(saved.description.facts)

    def make_card(name='circles', vae_of_pictures='my-vae', data='me/circles', **fields):
        options = {'average': True, 'num_weights': 1234, 'datasets': [data]}
        changed = dataclasses.replace(facts, **fields)
        return model_card.make_card(saved, changed, name=name, vae=vae_of_pictures, **options)

    def card(**fields) -> str:
        return make_card(**fields)['README.md'].decode()

    text = card(license='cc0-1.0', citation='@misc{a}')
    head = ['library_name: "diffusers"', 'pipeline_tag: "text-to-image"', 'license: "cc0-1.0"']
    head = ['---', *head, 'datasets: ["me/circles"]', '---', '', '# circles', '']
    assert text.startswith('\n'.join(head))
    for part in (
        *('1,234 weights', 'average of the weights at step 4', '![Previews](previews.png)'),
        *("from_pretrained('circles', trust", '```bibtex\n@misc{a}\n```', '| license | cc0-1.0 |'),
        *('| texts | hash 1 |', '/hash/1.0.0 train ', '| batch_size | 8 |', '| cmmd | 0.123 |'),
        *('| num_pictures | 5,000 |', '| guidance | of mean |', '| pictures | decoded by my-vae |'),
        'model at step 3.',
    ):
        assert part in text
    assert 'of last' not in text and 'frechet' not in text
    assert '| encoder |' not in text
    saved.description.config['encoder'] = 'jax:/none/models/mine'
    assert '| encoder | jax:mine |' in card()
    assert make_card()['previews.png'] == pictures[3]
    assert '| license | not recorded: ' in card(license='')
    assert '| model.text | pooled |' in card()
    assert '| model.text | sequence |' in card(vocabulary=30)
    shutil.rmtree(workdir / 'previews')
    text = card(license='My own: "free"')
    assert 'license: "other"\nlicense_name: "My own: \\"free\\""\n' in text
    assert 'Previews' not in text and [*make_card()] == ['README.md']
    # What others wrote adds nothing to the page, whatever it looks like.
    hostile = '<img src=x onerror=alert(1)>|`a`\n---\n![b](c)\x1b[31m 日本'
    names = dict.fromkeys(('name', 'vae_of_pictures', 'data'), hostile)
    names |= {'license': hostile, 'vae': hostile, 'text_encoder': hostile}
    text = card(**names, citation=f'```\n{hostile}')
    head, *rest = text.removeprefix('---\n').split('\n---\n', 1)
    shown = hostile.replace('\n', r'\n').replace('\x1b', r'\x1b')
    front_matter = yaml.safe_load(head)
    assert (front_matter['license_name'], front_matter['datasets']) == (shown, [shown])
    page = markdown_it.MarkdownIt('commonmark').enable('table').render(rest[0])
    tags = 'h1 h2 p pre code table thead tbody tr th td'
    assert set(re.findall(r'<(\w+)', page)) == {*tags.split()}
    assert page.count(html.escape(shown, quote=False)) == 6
    lines = '\n'.join(['```', *shown.split(r'\n')])
    assert html.escape(lines, quote=False) in page
    assert '\x1b' not in text


def test_an_export_tells_no_place_of_this_machine(mini_dataset, tmp_path, monkeypatch):
    small_vae.make(tmp_path / 'my-vae')
    monkeypatch.chdir(tmp_path)
    changes = {'num_steps': 2, 'eval_every': 0, 'checkpoint_every': 0, 'preview.vae': 'my-vae'}
    runs.train(os.path.relpath(mini_dataset), tmp_path / 'first', **changes)
    runs.train(mini_dataset, tmp_path / 'second', init_from='first@2', **changes)
    monkeypatch.chdir('/')
    scale = [3.0, 0.25]
    read = DatasetStats.from_json
    monkeypatch.setattr(DatasetStats, 'from_json', lambda x: read({**x, 'latent_scale': scale}))
    export.export(tmp_path / 'second', tmp_path / 'out')
    config = json.loads((tmp_path / 'out' / 'transformer' / 'config.json').read_text())
    painting = config['painting']
    assert (config['preview']['vae'], painting['local_vae']) == ('', 'my-vae')
    # The pictures of an export, and of a drawing, take the recorded scale.
    latents = np.random.default_rng(0).normal(size=(2, 4, 8, 8))
    expected = latent_rgb.latents_to_rgb(latents, scale)
    colours = np.einsum('nchw,cr->nhwr', latents, painting['rgb']) + painting['rgb_bias']
    levels = (np.clip(colours, -1, 1) + 1) * 127.5
    assert painting['scale'] == scale and np.abs(levels - expected).max() < 0.51
    drawn = draw.Artist(tmp_path / 'second', vae='').paint(latents)
    np.testing.assert_array_equal(drawn, expected)
    card = (tmp_path / 'out' / 'README.md').read_text()
    assert '| pictures | decoded by my-vae |' in card and '| init_from | first@2 |' in card
    for path in (tmp_path / 'out').rglob('*.*'):
        assert str(tmp_path).encode() not in path.read_bytes()
    assert draw.Artist(tmp_path / 'second').data_dir == str(mini_dataset)
    assert draw.Artist(tmp_path / 'first').data_dir == str(mini_dataset)


@pytest.mark.parametrize(
    ('name', 'value', 'expected'),
    [
        *[('num_steps', value, 'a whole number of at least 1') for value in (0, 4.5, True, '20')],
        *[('guidance', value, 'a finite number') for value in (math.nan, math.inf, '3', False)],
        *[('guidance_low', value, 'from 0 to 1') for value in (-0.1, 2)],
        ('guidance_low', 0.9, 'less than guidance_high=0.8'),
        ('time_shift', 0, 'more than 0'),
        ('sampler', 'heum', "'euler' or 'heun'"),
    ],
)
def test_the_page_of_pytorch_refuses_settings_that_no_run_has(name, value, expected):
    preview = PREVIEW | {'sampler': 'euler', name: value}
    config = {'data': {}, 'preview': preview}
    with pytest.raises(ValueError, match=f'^{name}={re.escape(repr(value))}: expected {expected}$'):
        torch_reference.draw({}, config, None, None)
    transformer = torch_reference.Transformer({}, config)
    with pytest.raises(ValueError, match=r'^guidence: expected one of num_steps'):
        transformer(None, None, guidence=2.0)


def test_the_page_of_pytorch_says_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [''])
    with pytest.raises(SystemExit):
        runpy.run_path(torch_reference.__file__, run_name='__main__')
    assert 'usage: torch_reference.py [-h] FOLDER\n' in capsys.readouterr().err


def test_a_vae_of_other_latents_is_refused(small_run, tmp_path):
    vae = small_vae.make(tmp_path / 'vae', channels=16)
    with pytest.raises(ValueError, match='decodes latents of 16 channels, expected 4'):
        export.export(small_run[0], tmp_path / 'out', vae=str(vae))
    assert not (tmp_path / 'out').exists()


def test_a_folder_of_something_else_is_left_alone(small_run, tmp_path):
    (tmp_path / 'thesis.tex').write_text('x')
    with pytest.raises(ValueError, match=r'holds thesis\.tex: expected a new folder'):
        export.export(small_run[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']
