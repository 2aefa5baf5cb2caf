"""`tfds build` as users type it: from and to wherever, with the pool or with Beam."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coyo11m_tfds import verify
from tests import children as programs
from tests import made_sources
from tests.checkout import CHECKOUT
from tests.convert.build_kills import (
    children,
    files_of,
    final_folder,
    finished_shards,
    is_running,
    wait_until,
)
from tests.fakes.cloud import fake_gcs, fake_hub

FILES = [range(40), range(40, 60)]
CONFIG = {'name': 'x', 'shard_bytes': 400_000, 'validation_fraction': 0.2}


def tfds_build(
    source: object, out: object, *flags: str, env: dict | None = None, status: int = 0, **fields
) -> str:
    """Builds the config `x`; returns what the command says."""
    config = f'--config={json.dumps(CONFIG | fields)}'
    return end(start(source, out, *flags, config, env=env), status)


# Tests that were started in the background ignore SIGINT, and so would what they start.
AS_IN_A_SHELL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(
    source: object, out: object, *flags: str, env: dict | None = None, cwd: object = CHECKOUT
) -> subprocess.Popen:
    """Starts the command in a process group of its own, as a shell does."""
    command = [
        *(sys.executable, '-c', AS_IN_A_SHELL),
        *(sys.executable, '-m', 'tensorflow_datasets.scripts.cli.main', 'build', 'coyo11m_tfds'),
        *(f'--manual_dir={source}', f'--data_dir={out}', *flags),
    ]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def killed_at_the_end(command: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        command.kill()


def end(command: subprocess.Popen, status: int = 0) -> str:
    """Waits for the end; returns what the command says."""
    with killed_at_the_end(command):
        out, err = command.communicate(timeout=300)
    assert command.returncode == status, err
    assert 'Traceback' not in err
    return out + err


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return made_sources.write_source(tmp_path_factory.mktemp('source'), FILES)


@pytest.fixture(scope='module')
def built(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """Where a local build has put the data set, and what it said."""
    out = tmp_path_factory.mktemp('plain')
    return out, tfds_build(source, out)


@pytest.fixture(scope='module')
def plain(built: tuple) -> dict:
    """The files of a local build."""
    return files_of(final_folder(built[0]))


def test_it_ends_with_where_the_report_and_the_data_set_are(built: tuple):
    out, said = built
    assert 'total       60 records' in said
    assert sorted(path.name for path in out.iterdir()) == ['.coyo11m_tfds', 'coyo11m_tfds']
    lines = [line for line in said.partition('train  ')[2].splitlines() if line]
    page = next(final_folder(out).glob('report-*.html'))
    report = lines.index(f'report      {page}')
    assert lines[report + 1] == f"tfds.builder_from_directory('{final_folder(out)}')"
    train = 'python -m train_lib.main --config=default --workdir=W --config.data.dir='
    assert lines[report + 2] == f'{train}{final_folder(out)}'
    assert 'DatasetInfo' not in said


@pytest.mark.slow
def test_from_a_bucket_to_a_bucket(source, plain, tmp_path):
    with fake_gcs(tmp_path) as gcs:
        gcs.upload_folder(source, 'gs://in/coyo')
        env = gcs.env | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
        tfds_build('gs://in/coyo', 'gs://out/data', env=env)
        gcs.download_folder('gs://out/data', tmp_path / 'copy')
        assert not gcs.errors
    assert files_of(final_folder(tmp_path / 'copy')) == plain


@pytest.mark.slow
def test_from_the_hub(source, plain, tmp_path):
    files = {str(p.relative_to(source)): p for p in source.rglob('*') if p.is_file()}
    with fake_hub(files) as hub:
        tfds_build('hf://datasets/owner/name', tmp_path, env=hub.env)
    assert files_of(final_folder(tmp_path)) == plain


def test_a_bad_command_is_answered_with_one_line_that_shows_a_good_one(source, tmp_path):
    """All in one process, whose main module has what that of `tfds` has."""
    program = """
import json, sys
from tensorflow_datasets.scripts.cli.main import launch_cli
_, commands, out = sys.argv
for flags in json.loads(commands):
    sys.argv = ['tfds', 'build', 'coyo11m_tfds', f'--data_dir={out}', *flags]
    try:
        launch_cli()
    except Exception:
        sys.excepthook(*sys.exc_info())
"""
    manual_dir = f'--manual_dir={source}'
    flags = {
        "config 'gemma' is not predefined, as latents is": [manual_dir, '--config=gemma'],
        "{'name': 'x'} is not JSON": [manual_dir, "--config={'name': 'x'}"],
        "config has an unknown field 'text'": [manual_dir, '--config={"name": "x", "text": "pt"}'],
        '--manual_dir is missing': [],
    }
    command = [sys.executable, '-c', program, json.dumps([*flags.values()]), str(tmp_path / 'out')]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert 'Traceback' not in ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith('error: ')]
    for error, said in zip(errors, flags, strict=True):
        assert error.startswith(f'error: {said}')
        assert 'text_embeddings' in error or 'latents-3crop/*.pt' in error


def test_the_own_command_builds_from_any_folder_and_says_only_what_matters(source, plain, tmp_path):
    out, folder = tmp_path / 'out', tmp_path / 'empty'
    folder.mkdir()
    flags = [f'--manual_dir={source}', f'--data_dir={out}', f'--config={json.dumps(CONFIG)}']
    command = [sys.executable, '-m', 'coyo11m_tfds.build', *flags]
    env = os.environ | {'PYTHONPATH': str(CHECKOUT)}
    quiet = {'TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS'}
    env = {name: value for name, value in env.items() if name not in quiet}
    ended = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert all(line.startswith('INFO[') for line in ended.stderr.splitlines()), ended.stderr
    assert files_of(final_folder(out)) == plain


@pytest.mark.parametrize('missing', ['apache_beam', 'torch'])
def test_a_package_that_is_missing_is_named_with_what_brings_it(missing, source, tmp_path):
    program = """
        import runpy
        sys.modules[sys.argv.pop(1)] = None
        runpy.run_module('coyo11m_tfds.build', run_name='__main__')
    """
    flags = [f'--manual_dir={source}', f'--data_dir={tmp_path / "out"}']
    with programs.python(program, missing, *flags) as child:
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert re.fullmatch(f'error: {missing} is not installed: pip install .*convert.*\n', errors)
    assert not (tmp_path / 'out').exists()


def test_ctrl_c_is_one_line_and_the_same_command_resumes(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(600), range(600, 1200)])
    out = tmp_path / 'out'
    final = final_folder(out)
    flag = f'--config={json.dumps(CONFIG | {"num_workers": 2})}'
    command = start(source, out, flag)
    with killed_at_the_end(command):
        wait_until(lambda: finished_shards(final) > 2)
        workers = children(command)
        os.killpg(command.pid, signal.SIGINT)
        said = end(command, status=-signal.SIGINT)
    assert said.splitlines()[-1].startswith('Interrupted: what is finished is kept')
    wait_until(lambda: not any(map(is_running, workers)), 10)
    assert not (final / 'dataset_info.json').exists()
    finished = finished_shards(final)

    said = end(start(source, out, flag))
    assert 'total       1,200 records' in said
    found = re.findall(r'(\d+) of \d+ shards are finished already', said)
    assert found == [str(finished)]
    assert verify.verify(final).faults == []


@pytest.mark.slow
def test_with_beam_options(source, plain, tmp_path):
    options = 'runner=DirectRunner,direct_running_mode=multi_processing,direct_num_workers=2'
    said = tfds_build(source, tmp_path, f'--beam_pipeline_options={options}')
    assert 'Starting the pipeline with' in said
    assert files_of(final_folder(tmp_path)) == plain
