"""`make` looks at Python first, and makes an unusable `.venv` anew."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.checkout import CHECKOUT

# A Python that says which version it is, and whose environments are copies of itself.
PYTHON = """#!/bin/sh
case "$*" in
*urlopen*) exit {unreachable} ;;
-c*) echo {version} ;;
--version) ;;
'-m venv --clear .venv') rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*'pip install'*) echo "$*" >> pip.log; exit {status} ;;
*) exit 9 ;;
esac
"""


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    for name in ('Makefile', 'setup.py', 'constraints.txt'):
        shutil.copy(CHECKOUT / name, tmp_path)
    return tmp_path


def make(
    folder: pathlib.Path, target: str, version: str, *options: str, status=0, unreachable=0
) -> subprocess.CompletedProcess:
    python = folder / f'python-{version}'
    python.write_text(PYTHON.format(version=version, status=status, unreachable=unreachable))
    python.chmod(0o755)
    env = {name: x for name, x in os.environ.items() if not name.startswith('MAKE')}
    # Those of a make that runs the tests.
    for name in ('VENV', 'CONSTRAINTS', 'TORCH_INDEX'):
        env.pop(name, None)
    command = ['make', f'PYTHON={python}', *options, target]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_another_python_is_refused_in_one_line_and_leaves_nothing(folder):
    ended = make(folder, 'demo', '3.10')
    assert ended.returncode
    error, _ = ended.stderr.splitlines()  # and that of make
    assert error.startswith('error: ') and error.endswith(
        'is Python 3.10, expected 3.11 to 3.13: make PYTHON=python3.12'
    )
    assert not (folder / '.venv').exists()


def test_an_unusable_environment_is_made_anew_and_a_good_one_is_kept(folder):
    mark = folder / '.venv' / 'mark'
    assert make(folder, 'install', '3.11', status=1).returncode  # as without a network
    mark.touch()
    assert make(folder, 'install', '3.11').returncode == 0
    assert not mark.exists()
    mark.touch()
    os.utime(folder / 'setup.py')  # a new requirement
    assert make(folder, 'install', '3.11').returncode == 0
    assert mark.exists()
    assert make(folder, 'install', '3.13').returncode == 0
    assert not mark.exists()
    mark.touch()
    (folder / '.venv' / 'bin' / 'python').unlink()  # as a link to a Python that is removed
    assert make(folder, 'install', '3.13').returncode == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ('options', 'unreachable', 'index'),
    [
        ([], 0, 'https://download.pytorch.org/whl/cpu'),
        (['TORCH_INDEX=https://mirror/cpu'], 0, 'https://mirror/cpu'),
        ([], 1, ''),
        (['TORCH_INDEX='], 0, ''),
    ],
)
def test_torch_comes_from_an_index_of_builds_for_cpus_that_can_be_reached(
    folder, options, unreachable, index
):
    ended = make(folder, 'install', '3.11', *options, unreachable=unreachable)
    assert ended.returncode == 0, ended.stderr
    *first, last = (folder / 'pip.log').read_text().splitlines()
    assert last.endswith('--editable .[convert,text,test]') and '--index-url' not in last
    assert len(first) == bool(index)
    if index:
        assert first[0].endswith(
            f'--constraint constraints.txt --no-deps --index-url {index} torch'
        )
    assert ('from the package index' in ended.stdout) == bool(unreachable)


def test_the_readme_takes_torch_from_the_same_index():
    [index] = re.findall(r'^TORCH_INDEX \?= (\S+)$', (CHECKOUT / 'Makefile').read_text(), re.M)
    command = f'pip install -c constraints.txt --no-deps --index-url {index} torch\n'
    assert command in (CHECKOUT / 'README.md').read_text('utf-8')


def test_every_requirement_of_a_build_and_the_tests_has_a_lower_bound_that_is_tested(folder):
    assert make(folder, '.lowest.txt', '3.11').returncode == 0
    lowest, pinned = (
        {x.name.replace('_', '-'): x.specifier for x in map(Requirement, lines)}
        for lines in (
            (folder / '.lowest.txt').read_text().splitlines(),
            [x for x in (folder / 'constraints.txt').read_text().splitlines() if x[0] != '#'],
        )
    )
    for name in ('jax', 'optax', 'protobuf', 'google-crc32c', 'etils', 'pandas', 'hypothesis'):
        [low], [pin] = lowest[name], pinned[name]
        assert low.operator == '==' and Version(low.version) <= Version(pin.version)
    assert lowest['torch'] == pinned['torch']
