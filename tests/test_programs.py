"""Every program: its `--help` is complete, and a wrong command line is answered in one line."""

import os
import pty
import re
import subprocess
import sys

import pytest

import coyo11m_tfds
from tests import children, forked
from tests.checkout import CHECKOUT

# With the flags that each requires.
REQUIRED = {
    'coyo11m_tfds.add_column': ['--data_dir', '--name'],
    'coyo11m_tfds.build': [],
    'coyo11m_tfds.doctor': [],
    'coyo11m_tfds.embed_captions': ['--source', '--out'],
    'coyo11m_tfds.emoji_photos': ['--out'],
    'coyo11m_tfds.encode_images': ['--images', '--vae', '--out'],
    'coyo11m_tfds.mirror': ['source', 'destination'],
    'coyo11m_tfds.sample_data': ['--out'],
    'coyo11m_tfds.show': ['data_dir'],
    'coyo11m_tfds.verify': ['data_dir'],
    'train_lib.tools.check': ['--config'],
    'train_lib.tools.compile': ['--config', '--topology'],
    'train_lib.tools.diagnose': ['--config'],
    'train_lib.demo': ['--workdir'],
    'train_lib.draw': ['--workdir', '--prompts'],
    'train_lib.evaluate': ['--workdir'],
    'train_lib.export': ['--workdir', '--out'],
    'train_lib.main': ['--config', '--workdir'],
}
VALUES = {'--config': 'demo'}
# Also required, as one of several; named when the others are there.
FURTHER = {
    'coyo11m_tfds.add_column': ['--text=x'],
    'coyo11m_tfds.show': ['--vae=x', '--out=x'],
    'train_lib.evaluate': ['--features=x'],
}

# Program, flags that no program can do anything with, and what it says of them.
UNUSABLE = {
    'a text with a column': (
        'coyo11m_tfds.add_column',
        ['--data_dir=d', '--name=n', '--text=x', '--column=y'],
        '--column: expected only with',
    ),
    'a source without a column': (
        'coyo11m_tfds.add_column',
        ['--data_dir=d', '--name=n', '--source=x'],
        '--source: expected --column, or --na',
    ),
    'a table without a column': (
        'coyo11m_tfds.add_column',
        ['--data_dir=d', '--name=n', '--parquet=x'],
        '--parquet: expected with --column',
    ),
    'a build of nothing': (
        'coyo11m_tfds.build',
        ['--manual_dir=x', '--max_examples_per_split=0'],
        '_split=0: expected at least 1',
    ),
    'a plan of shards of nothing': (
        'coyo11m_tfds.doctor',
        ['--build_config={"shard_bytes":0}'],
        'shard_bytes=0: ',
    ),
    'a plan that is no JSON': (
        'coyo11m_tfds.doctor',
        ['--build_config=x'],
        '--build_config=x: is not JSON',
    ),
    'a folder that is not there': (
        'coyo11m_tfds.verify',
        ['no/such/folder'],
        'no/such/folder: there is no such folder',
    ),
    'a folder without a data set': (
        'coyo11m_tfds.verify',
        ['.'],
        r'\.: there is no dataset_info.json',
    ),
    'an empty folder name': ('coyo11m_tfds.verify', [''], "'': expected a local path or gs://"),
    'a data set on the hub': (
        'coyo11m_tfds.verify',
        ['hf://datasets/a/b'],
        'hf://datasets/a/b.*: expected a local path or gs://',
    ),
}


@pytest.fixture(scope='module')
def said() -> dict[tuple[str, str], tuple[int, list[str]]]:
    """The exit status and the lines of each program, by its name and what it was given."""
    commands = []
    for program, required in REQUIRED.items():
        enough = [
            f'{flag}={VALUES.get(flag, "x")}' if flag.startswith('-') else 'x' for flag in required
        ] + FURTHER.get(program, [])
        if required:
            commands.append((program, []))
        commands += [
            (program, ['--help']),
            (program, [*enough, '--nope=1']),
            (program, [*enough, 'stray']),
        ]
    commands += [(program, flags) for program, flags, _ in UNUSABLE.values()]
    commands += [(program, ['--version']) for program in REQUIRED]
    ended = forked.run(commands)
    names = [(program, (arguments or ['nothing'])[-1]) for program, arguments in commands]
    return dict(zip(names, ended, strict=True))


@pytest.mark.parametrize('program', [name for name, required in REQUIRED.items() if required])
def test_what_is_missing_is_one_line_with_a_whole_command(program, said):
    status, lines = said[program, 'nothing']
    assert status in (1, 2)
    assert len(lines) == 1, lines
    assert re.match('error: .*(missing|required): ', lines[0])
    for flag in REQUIRED[program]:
        assert flag in lines[0].partition('python -m')[0]
    assert f'python -m {program} ' in lines[0]
    assert '--help' in lines[0]


@pytest.mark.parametrize('program', REQUIRED)
@pytest.mark.parametrize('wrong', ['--nope=1', 'stray'])
def test_what_is_wrong_is_one_line_that_names_it(program, wrong, said):
    status, lines = said[program, wrong]
    assert status in (1, 2)
    assert len(lines) == 1, lines
    assert re.match(f'error: .*{wrong.strip("-").partition("=")[0]}', lines[0])
    assert '--help' in lines[0]


@pytest.mark.parametrize(('program', 'flags', 'words'), UNUSABLE.values(), ids=UNUSABLE)
def test_what_is_unusable_is_one_line_and_status_2(program, flags, words, said):
    status, lines = said[program, flags[-1]]
    assert (status, len(lines)) == (2, 1), lines
    assert re.match(f'error: .*{words}', lines[0])


@pytest.mark.parametrize('program', REQUIRED)
def test_version_needs_no_other_flag(program, said):
    assert said[program, '--version'] == (0, [f'coyo11m_tfds {coyo11m_tfds.__version__}'])


@pytest.mark.parametrize('program', REQUIRED)
def test_help_shows_a_command_and_all_flags(program, said):
    status, lines = said[program, '--help']
    assert status == 0
    text = '\n'.join(lines)
    assert f'    python -m {program} ' in text
    for flag in REQUIRED[program]:
        assert re.search(rf'^ +{flag}\b', text, re.MULTILINE)
    if program.startswith('train_lib'):
        assert '--[no]verbose' in text


@pytest.mark.parametrize('program', REQUIRED)
def test_help_fits_a_terminal_of_80_columns(program, said):
    _, lines = said[program, '--help']
    assert [line for line in lines if len(line) > 79] == []


def test_a_package_lists_its_programs():
    lines = []
    for package in ('coyo11m_tfds', 'train_lib'):
        ended = children.program(package)
        assert (ended.returncode, ended.stderr) == (0, '')
        lines += ended.stdout.splitlines()
    purposes = dict(re.findall(r'^(\S+\.\S+) {2,}(\S.*)$', '\n'.join(lines), re.MULTILINE))
    assert sorted(purposes) == sorted(REQUIRED)
    assert max(map(len, lines)) < 98
    assert all(re.fullmatch(r'[A-Z][a-z]+s .*[^.]', purpose) for purpose in purposes.values())


# In the place of a library that takes seconds to import.
_SLOW = "import sys; sys.exit('imports a library')"
BEFORE_IMPORTS = {
    'train_lib.tools.check': ['--config=small'],
    'coyo11m_tfds.build': ['--manual_dir=x'],
}


@pytest.mark.parametrize('program', BEFORE_IMPORTS)
def test_a_program_says_that_it_starts_before_it_imports_what_takes_seconds(program, tmp_path):
    for name in ('jax', 'tensorflow', 'tensorflow_datasets'):
        (tmp_path / f'{name}.py').write_text(_SLOW)
    path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    ended = children.program(program, *BEFORE_IMPORTS[program], PYTHONPATH=path)
    first, *rest = ended.stderr.splitlines()
    assert re.fullmatch(rf'\d\d:\d\d:\d\d {program} starts \.\.\.', first)
    assert rest == ['imports a library'], ended.stderr


def test_on_a_terminal_it_says_so_before_any_import(tmp_path):
    """Also a program that needs JAX to define its flags."""
    (tmp_path / 'jax.py').write_text(_SLOW)
    path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    reader, terminal = pty.openpty()
    command = sys.executable, '-m', 'train_lib.draw', '--workdir=x', '--prompts=y'
    subprocess.run(command, cwd=CHECKOUT, stderr=terminal, env=os.environ | {'PYTHONPATH': path})
    os.close(terminal)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    first, *rest = shown.splitlines()
    assert re.fullmatch(r'\d\d:\d\d:\d\d train_lib\.draw starts \.\.\.', first)
    assert rest == ['imports a library']
