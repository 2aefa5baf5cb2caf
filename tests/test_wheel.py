"""The wheel alone, in a fresh environment and an empty folder, does what the checkout does."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from tests import made_sources
from tests.checkout import CHECKOUT

pytestmark = pytest.mark.slow
PARTS = ('coyo11m_tfds', 'train_lib', 'configs', 'input_pipeline.py', 'setup.py', 'pyproject.toml')


@pytest.fixture(scope='module')
def installed(tmp_path_factory) -> pathlib.Path:
    """The Python of an environment with the wheel, and with the packages that are here."""
    folder = tmp_path_factory.mktemp('wheel')
    (folder / 'tree').mkdir()
    for part in (*PARTS, 'README.md', 'LICENSE'):
        copy = shutil.copytree if (CHECKOUT / part).is_dir() else shutil.copy
        copy(CHECKOUT / part, folder / 'tree' / part)
    build = 'import setuptools.build_meta as b; print(b.build_wheel(".."))'
    run(sys.executable, '-c', build, cwd=folder / 'tree')
    [wheel] = folder.glob('*.whl')
    venv.create(folder / 'env')
    [packages] = folder.glob('env/lib/python*/site-packages')
    shutil.unpack_archive(wheel, packages, 'zip')
    # A path in a `.pth` is searched, but `.pth` files in it, such as a checkout's, are not read.
    paths = {sysconfig.get_path('purelib'), *(p for p in sys.path if p.endswith('-packages'))}
    (packages / 'others.pth').write_text('\n'.join(paths))
    return folder / 'env' / 'bin' / 'python'


def run(*command: object, cwd: object, status: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    ended = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_files_of_the_packages_are_in_the_wheel(installed, tmp_path):
    program = """
import pathlib, coyo11m_tfds, input_pipeline, train_lib
for file in (coyo11m_tfds.__file__, input_pipeline.__file__, train_lib.__file__):
    print(pathlib.Path(file).is_relative_to(pathlib.Path(__import__('sys').prefix)))
folder = pathlib.Path(train_lib.__file__).parent
print(sorted(path.name for path in folder.glob('fonts/*')))
print(sorted(path.name for path in folder.glob('configs/de*')))
from coyo11m_tfds.pictures import emoji
print(len(emoji.read_pictures()) == len(emoji.read_emoji()) > 0)
print(sorted(path.name for path in emoji.FOLDER.iterdir()))
"""
    said = run(installed, '-c', program, cwd=tmp_path).splitlines()
    assert said[:3] == ['True'] * 3
    assert said[3:] == [
        "['DejaVuSans.ttf', 'LICENSE']",
        "['default.py', 'demo.py']",
        'True',
        "['LICENSE', 'emoji.tsv', 'emoji.webp']",
    ]


def test_type_checkers_know_its_types(installed, tmp_path):
    shutil.copy(CHECKOUT / 'tests' / 'typed_program.py', tmp_path)
    check = sys.executable, '-m', 'mypy', '--strict', '--python-executable', installed
    run(*check, 'typed_program.py', cwd=tmp_path)
    wrong = "import input_pipeline as i\ni.train_arrays('d', i.MASK, batchsize=8)\n"
    (tmp_path / 'wrong.py').write_text(wrong)
    output = run(*check, 'wrong.py', cwd=tmp_path, status=1)
    assert 'Unexpected keyword argument "batchsize" for "train_arrays"' in output
    assert 'expected "Sharding"' in output


def test_it_builds_a_data_set(installed, tmp_path):
    made_sources.write_source(tmp_path / 'source', [range(40)])
    (tmp_path / 'empty').mkdir()
    said = run(
        *(installed, '-m', 'tensorflow_datasets.scripts.cli.main', 'build', 'coyo11m_tfds'),
        *('-i', 'coyo11m_tfds', f'--manual_dir={tmp_path / "source"}', '--data_dir=../out'),
        cwd=tmp_path / 'empty',
    )
    assert 'total       40 records' in said
    assert list(tmp_path.glob('out/coyo11m_tfds/latents/1.0.0/*.tfrecord*'))
