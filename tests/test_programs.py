"""Every program: its `--help` is complete, and a wrong command line is answered in one line."""

import re

import pytest

from tests import forked

# With the flags that each requires.
REQUIRED = {
    'coyo11m_tfds.add_column': ['--data_dir', '--name'],
    'coyo11m_tfds.build': [],
    'coyo11m_tfds.doctor': [],
    'coyo11m_tfds.embed_captions': ['--source', '--out'],
    'coyo11m_tfds.encode_images': ['--images', '--vae', '--out'],
    'coyo11m_tfds.mirror': ['source', 'destination'],
    'coyo11m_tfds.sample_data': ['--out'],
    'coyo11m_tfds.show': ['data_dir'],
    'coyo11m_tfds.verify': ['data_dir'],
    'train_lib.tools.compile': ['--config', '--topology'],
    'train_lib.demo': ['--workdir'],
    'train_lib.draw': ['--workdir', '--prompts'],
    'train_lib.evaluate': ['--workdir'],
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
UNUSABLE = [
    (f'coyo11m_tfds.{program}', flags.split(' '), words)
    for program, flags, words in (
        ('add_column', '--data_dir=d --name=n --text=x --column=y', '--column: expected only with'),
        ('add_column', '--data_dir=d --name=n --source=x', '--source: expected --column, or --na'),
        ('add_column', '--data_dir=d --name=n --parquet=x', '--parquet: expected with --column'),
        ('build', '--manual_dir=x --max_examples_per_split=0', '_split=0: expected at least 1'),
        ('doctor', '--build_config={"shard_bytes":0}', 'shard_bytes=0: '),
        ('doctor', '--build_config=x', '--build_config=x: is not JSON'),
        ('verify', 'no/such/folder', 'no/such/folder: there is no such folder'),
        ('verify', '.', r'\.: there is no dataset_info.json'),
        ('verify', '', "'': expected a local path or gs://"),
        ('verify', 'hf://datasets/a/b', 'hf://datasets/a/b.*: expected a local path or gs://'),
    )
]


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
    commands += [(program, flags) for program, flags, _ in UNUSABLE]
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


@pytest.mark.parametrize(('program', 'flags', 'words'), UNUSABLE)
def test_what_is_unusable_is_one_line_and_status_2(program, flags, words, said):
    status, lines = said[program, flags[-1]]
    assert (status, len(lines)) == (2, 1), lines
    assert re.match(f'error: .*{words}', lines[0])


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
