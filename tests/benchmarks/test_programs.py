"""The benchmark of reading from far runs on little."""

import pytest

from tests import children


def _run(tmp_path, program: str, *arguments: str) -> str:
    flags = f'--dir={tmp_path}/dir', '--repeats=1', *arguments
    ended = children.program(f'benchmarks.{program}', *flags)
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / 'dir').iterdir()) == []
    return ended.stdout


@pytest.mark.slow
def test_batches_are_read_from_far(tmp_path):
    printed = _run(tmp_path, 'remote', '--gb=0.02', '--steps=4')
    assert '| `train_batches` | ' in printed and '| `train_batches`, 100 ms away | ' in printed
