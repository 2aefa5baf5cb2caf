"""The notebook that people begin with: what lies in the repository, and that it runs."""

import itertools
import json
import re

import pytest

from tests.checkout import CHECKOUT
from tests.run_notebook import PATH, run_notebook


def read_outputs(notebook: dict) -> list[list[dict]]:
    """The outputs of each cell of code."""
    return [cell['outputs'] for cell in notebook['cells'] if cell['cell_type'] == 'code']


def kinds(notebook: dict) -> list[list[str]]:
    """What the outputs of each cell are: pictures, pages, or text."""
    return [[min(x.get('data', ['text'])) for x in outputs] for outputs in read_outputs(notebook)]


def text_of(output: dict) -> str:
    return ''.join(output.get('text') or output['data']['text/plain'])


def test_it_was_run_as_a_whole_and_is_small():
    content = PATH.read_text('utf-8')
    notebook = json.loads(content)
    assert len(content) < 300_000
    code = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    assert [cell['execution_count'] for cell in code] == list(range(1, len(code) + 1))
    outputs = list(itertools.chain.from_iterable(read_outputs(notebook)))
    assert not [x for x in outputs if x['output_type'] == 'error' or x.get('name') == 'stderr']
    # Neither folders of the machine that ran it, nor bars that a line replaced.
    assert not re.search(r'/(tmp|root|work|mnt)/|\\r', content)
    words = '\n'.join(''.join(cell['source']) for cell in notebook['cells'])
    links = re.findall(r'\]\(([^)#\s]+)', words)
    assert links and all((PATH.parent / link).exists() for link in links)


@pytest.mark.slow
@pytest.mark.filterwarnings('default')  # those of Jupyter
def test_it_runs_in_an_empty_folder(tmp_path, monkeypatch):
    for module in ('ipykernel', 'nbclient'):
        pytest.importorskip(module)
    monkeypatch.setenv('PYTHONPATH', str(CHECKOUT))
    # As where nobody has set what keeps TensorFlow quiet.
    for name in ('TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS'):
        monkeypatch.delenv(name, raising=False)
    notebook = run_notebook(tmp_path)
    assert kinds(notebook) == kinds(json.loads(PATH.read_text('utf-8')))
    outputs = itertools.chain.from_iterable(read_outputs(notebook))
    bars = [x for x in outputs if 'text/html' in x.get('data', ())]
    assert [re.search(r'step \d+ of \d+', text_of(x))[0] for x in bars] == ['step 200 of 200']
    assert 'max="200" value="200"' in bars[0]['data']['text/html']
    grids = sorted(path.name for path in tmp_path.glob('first_steps/run/previews/*'))
    assert grids == [f'step_{step:06}.png' for step in (50, 100, 150, 200)]


@pytest.mark.slow
@pytest.mark.filterwarnings('default')
def test_an_interrupted_cell_saves_and_the_same_cell_resumes(mini_dataset, tmp_path, monkeypatch):
    from tests import runs

    manager = pytest.importorskip('jupyter_client.manager')
    pytest.importorskip('ipykernel')
    monkeypatch.setenv('PYTHONPATH', str(CHECKOUT))
    cell = f"""
from tests import runs
from train_lib import notebook, train
config = runs.small_config({str(mini_dataset)!r}, num_steps=100_000, eval_every=0)
state = train.train_and_evaluate(config, {str(tmp_path / 'run')!r}, hooks=notebook.live_hooks())
print('saved', int(state.step))
"""
    kernel, client = manager.start_new_kernel(kernel_name='python3')
    shown, steps, interrupts = [], [], []

    def note(message: dict) -> None:
        content = message['content']
        shown.append(text_of(content) if {'text', 'data'} & content.keys() else str(content))
        if len(interrupts) == len(steps) and re.search(r'step \d*5 of 100000', shown[-1]):
            interrupts.append(len(shown))
            kernel.interrupt_kernel()
        if found := re.fullmatch(r'saved (\d+)\n', shown[-1]):
            steps.append(int(found[1]))

    try:
        for _ in range(2):
            client.execute_interactive(cell, timeout=300, output_hook=note)
            assert steps and steps[-1] in runs.saved_steps(tmp_path / 'run'), shown
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert len(steps) == 2 and 0 < steps[0] < steps[1], shown
