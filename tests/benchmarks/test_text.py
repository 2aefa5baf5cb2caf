"""The benchmark of tokenizing and embedding runs and prints its tables."""

import importlib.util
import subprocess
import sys

import pytest

from benchmarks import text
from tests.checkout import CHECKOUT
from tests.text.test_text_encoders import save_model, save_tokenizer


@pytest.mark.slow
def test_it_prints_a_table_of_each_task(tmp_path):
    folder = tmp_path / 'encoders' / 'minilm'
    save_model(folder, 'bert')
    save_tokenizer(folder, ends=True, pad_token='[PAD]')
    command = [
        *(sys.executable, '-m', 'benchmarks.text', '--dir', str(tmp_path / 'dir')),
        *('--encoders', str(folder.parent), '--repeats', '1'),
        *('--tokenized', '60', '--embedded', '20', '--embedded_by_gemma', '0'),
    ]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert 'tokenizing, minilm: 60 captions' in ended.stdout
    assert 'embedding, minilm: 20 captions' in ended.stdout
    for side in ('this project, torch', 'plain loop, batches of 32', 'plain calls'):
        assert f'| {side} |' in ended.stdout
    assert 'left out: this project, JAX: cannot load minilm' in ended.stdout
    for side, module in text.MODULES.items():
        if not importlib.util.find_spec(module):
            assert (
                f"left out: {side}: ModuleNotFoundError: No module named '{module}'" in ended.stdout
            )
    assert list((tmp_path / 'dir').glob('ours*')) == []
