"""The benchmarks of texts, of joining captions and of reading from far run on little."""

import importlib.util

import pytest

from tests import children
from tests.text.test_text_encoders import save_model, save_tokenizer


def _run(tmp_path, program: str, *arguments: str) -> str:
    flags = f'--dir={tmp_path}/dir', '--repeats=1', *arguments
    ended = children.program(f'benchmarks.{program}', *flags)
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / 'dir').iterdir()) == []
    return ended.stdout


@pytest.mark.slow
def test_texts_are_tokenized_and_embedded(tmp_path):
    folder = tmp_path / 'encoders' / 'minilm'
    save_model(folder, 'bert')
    save_tokenizer(folder, ends=True, pad_token='[PAD]')
    sizes = '--tokens=60', '--minilm=20', '--only=tokens,tokens_map,minilm,minilm_plain'

    printed = _run(tmp_path, 'text', f'--encoders={folder.parent}', *sizes)

    titles = {'token ids: this project | 60', 'MiniLM: this project | 20', 'MiniLM: plain loop'}
    assert all(f'| {title}' in printed for title in titles)
    peer = '`datasets.map`, 2 processes'
    expected = ' | 60' if importlib.util.find_spec('datasets') else ', left out: No module named'
    assert f'token ids: {peer}{expected}' in printed


@pytest.mark.slow
def test_captions_are_joined_and_read(tmp_path):
    printed = _run(tmp_path, 'captions', '--rows=30000', '--shards=3')
    assert '| join | ' in printed and '| open, read some shards | ' in printed


@pytest.mark.slow
def test_batches_are_read_from_far(tmp_path):
    printed = _run(tmp_path, 'remote', '--gb=0.02', '--steps=4')
    assert '| `train_batches` | ' in printed and '| `train_batches`, 100 ms away | ' in printed
