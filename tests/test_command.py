"""`tfds build` as users type it: from and to wherever, with the pool or with Beam."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import coyo11m_tfds.build
from coyo11m_tfds import schema
from coyo11m_tfds.process import machine
from tests import children, made_sources
from tests.built import build, files_of_any_source
from tests.checkout import CHECKOUT
from tests.convert.build_kills import final_folder
from tests.fakes.cloud import fake_hub

FILES = [range(40), range(40, 60)]
CONFIG = {'name': 'x', 'shard_bytes': 400_000, 'validation_fraction': 0.2}


# Tests that were started in the background ignore SIGINT, and so would what they start.
AS_IN_A_SHELL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    return made_sources.write_source(tmp_path_factory.mktemp('source'), FILES)


# The main module of the process has what that of `tfds` has.
SEVERAL = """
import json, os, sys
from tensorflow_datasets.scripts.cli.main import launch_cli
for flags in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv = ['tfds', 'build', 'coyo11m_tfds', *flags]
        launch_cli()  # it ends the process
    os.waitpid(child, 0)
"""
BAD = {
    "config 'gemma' is not predefined; predefined: latents": ['--config=gemma'],
    "{'name': 'x'} is not JSON": ["--config={'name': 'x'}"],
    "config has an unknown field 'text'": ['--config={"name": "x", "text": "pt"}'],
    'leave out --num_processes; set num_workers': ['--num_processes=2'],
    '--manual_dir is missing': None,
}


@pytest.fixture(scope='module')
def built(source, tmp_path_factory) -> tuple:
    """The folder of a local build, and what bad commands and then the build said.

    All are forked from one process, because TensorFlow takes seconds to start.
    """
    out, manual_dir = tmp_path_factory.mktemp('plain one'), f'--manual_dir={source}'
    commands = [[manual_dir, *flags] if flags else [] for flags in BAD.values()]
    commands = [[f'--data_dir={tmp_path_factory.mktemp("bad")}', *flags] for flags in commands]
    config = f'--config={json.dumps(CONFIG)}'
    for place in (manual_dir, f'{manual_dir}-misspelt'):
        commands.append([f'--data_dir={out}', place, config])
    embeddings = {key: np.full(5, key) for key in range(60)}
    sidecar = made_sources.write_sidecar(out.with_name('a.parquet'), embeddings, source)
    config = f'--config={json.dumps(CONFIG | {"text_embeddings": str(sidecar)})}'
    commands.append([f'--data_dir={tmp_path_factory.mktemp("text")}', manual_dir, config])
    command = [*children.interpreter(forked=True), '-c', SEVERAL, json.dumps(commands)]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and 'Traceback' not in ended.stderr, ended.stderr
    return out, ended.stdout, ended.stderr


def test_it_ends_with_where_the_report_and_the_data_set_are(built, source):
    out, said, _ = built
    assert 'total       60 records' in said
    assert sorted(path.name for path in out.iterdir()) == ['.coyo11m_tfds', 'coyo11m_tfds']
    lines = [line for line in said.partition('train  ')[2].splitlines() if line]
    page = next(final_folder(out).glob('report-*.html'))
    report = lines.index(f'report      {page}')
    flags = f"--manual_dir={source} '--data_dir={out}' --encoder=words"
    again = f'python -m coyo11m_tfds.build {flags}'
    train = 'python -m train_lib.main --config=small --workdir=W'
    assert lines[report + 1 : report + 5] == [
        f"tfds.builder_from_directory('{final_folder(out)}')",
        f'To train on captions, first build again: {again}',
        'Without captions:',
        f"{train} '--config.data.dir={final_folder(out)}'",
    ]
    assert 'DatasetInfo' not in said
    config = 'default' if machine.accelerators() else 'small'
    builder, train = [line for line in said.splitlines() if line][-2:]  # with text
    assert builder.startswith('tfds.builder_from_directory(')
    assert train.startswith(f'python -m train_lib.main --config={config} --workdir=W ')


@pytest.mark.slow
def test_from_the_hub(source, built, tmp_path):
    files = {str(p.relative_to(source)): p for p in source.rglob('*') if p.is_file()}
    flags = '--manual_dir=hf://datasets/owner/name', f'--data_dir={tmp_path}'
    tfds = 'tensorflow_datasets.scripts.cli.main', 'build', 'coyo11m_tfds'
    with fake_hub(files) as hub:
        ended = children.program(*tfds, *flags, f'--config={json.dumps(CONFIG)}', **hub.env)
    assert ended.returncode == 0 and 'Traceback' not in ended.stderr, ended.stderr
    here, there = files_of_any_source(final_folder(built[0])), final_folder(tmp_path)
    assert files_of_any_source(there) == here


def test_a_bad_command_is_answered_with_one_line_that_shows_a_good_one(built):
    errors = [line for line in built[2].splitlines() if line.startswith('error: ')]
    assert 'misspelt is not a folder' in errors.pop()
    for error, said in zip(errors, BAD, strict=True):
        assert error.startswith(f'error: {said}')
        assert re.search(r'text_embeddings|num_workers|latents-3crop/\*\.pt', error)


@pytest.mark.parametrize(
    'number', [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_the_own_command_says_only_what_matters_and_is_resumed_after_a_signal(
    source, built, tmp_path, number
):
    """From any folder, and with the captions under another name."""
    out, folder = tmp_path / 'out', tmp_path / 'empty'
    folder.mkdir()
    source = shutil.copytree(source, tmp_path / 'source')
    (source / schema.CAPTIONS_FILE).rename(source / 'texts.parquet')
    flags = [f'--manual_dir={source}', f'--data_dir={out}', f'--config={json.dumps(CONFIG)}']
    flags.append('--captions=texts.parquet')
    quiet = {'TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS'}
    env = {name: value for name, value in os.environ.items() if name not in quiet}
    env |= {'PYTHONPATH': str(CHECKOUT), 'COYO11M_NUM_PROC': '3'}
    # In a process group of its own, as a shell does.
    line = sys.executable, '-c', AS_IN_A_SHELL, sys.executable, '-m', 'coyo11m_tfds.build', *flags
    options = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    command = subprocess.Popen(line, cwd=folder, env=env, start_new_session=True, **options)
    # Its workers take a second or two to start.
    final = final_folder(out)
    children.wait_until(
        lambda: list(final.glob('building-*/settings.json')) and children.of(command.pid)
    )
    workers = children.of(command.pid)
    os.killpg(command.pid, number)
    _, errors = command.communicate(timeout=300)
    lines = errors.splitlines()
    if number == signal.SIGINT:
        assert lines.pop().startswith('Interrupted: what is finished is kept')
        assert command.returncode == 130, errors
    else:
        assert command.returncode == 128 + number, errors
    style = r'\d\d:\d\d:\d\d (WARNING: )?\S'
    assert lines and all(re.match(style, line) for line in lines), errors
    assert not list(final.glob('.staging/*'))
    children.wait_for_end(workers)
    assert not (final / 'dataset_info.json').exists()
    build(source, '', out, **CONFIG, captions='texts.parquet')
    assert files_of_any_source(final) == files_of_any_source(final_folder(built[0]))


NO_FOLDERS = {
    'a source on another storage': (
        'GS://bucket/source',
        '',
        'GS://bucket/source: expected a local path, gs://bucket/',
    ),
    'a source with one slash': ('gs:/bucket/source', '', 'gs:/bucket/source: expected two slashes'),
    'a source with two slashes inside': (
        'gs://b//source/',
        '',
        'gs://b//source/: has several slashes in a row, which TFDS takes',
    ),
    'a data set with three slashes inside': (
        '',
        'gs://b/a///x',
        'gs://b/a///x: has several slashes in a row, which TFDS takes for ',
    ),
    'a data set on another storage': (
        '',
        's3://bucket/out',
        's3://bucket/out: expected a local path, gs://bucket/',
    ),
    'a data set on the hub': (
        '',
        'hf://datasets/owner/name',
        'hf://datasets/owner/name: expected a local path or gs',
    ),
    'a data set in no bucket': ('', 'gs://', 'gs://: expected a local path or gs://bucket/folder.'),
    'a data set in a bucket that is not there': (
        '',
        'gs://no-such-bucket/out',
        'gs://no-such-bucket: there is no such bucket.',
    ),
}


@pytest.mark.parametrize(('source', 'out', 'message'), NO_FOLDERS.values(), ids=NO_FOLDERS)
def test_folders_that_cannot_be_are_refused_in_one_line(source, out, message, gcs, command):
    place = [f'--manual_dir={source}'] if source else []
    place += [f'--data_dir={out}'] if out else []
    status, said, error = command(coyo11m_tfds.build, *place)
    assert (status, said) == (1, '')
    assert error.startswith(f'error: {message}') and error.count('\n') == 1


@pytest.mark.slow
def test_a_bucket_that_tensorflow_may_not_read_is_told_of_in_one_line(source, gcs):
    gcs.requester_pays.add('bucket')
    flags = f'--manual_dir={source}', '--data_dir=gs://bucket/out'
    done = children.program(
        'coyo11m_tfds.build', *flags, **gcs.env, GOOGLE_CLOUD_QUOTA_PROJECT='payer'
    )
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith('error: ') and 'gs://bucket/out/coyo11m_tfds/latents' in last
    assert 'Set GCS_ADDITIONAL_REQUEST_HEADER=' in last


def test_a_package_that_is_missing_is_named_with_what_brings_it(source, tmp_path):
    missing = 'apache_beam'
    program = """
        import runpy
        sys.modules[sys.argv.pop(1)] = None
        runpy.run_module('coyo11m_tfds.build', run_name='__main__')
    """
    flags = [f'--manual_dir={source}', f'--data_dir={tmp_path / "out"}']
    with children.python(program, missing, *flags) as child:
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert re.fullmatch(f'error: {missing} is not installed: pip install .*convert.*\n', errors)
    assert not (tmp_path / 'out').exists()
