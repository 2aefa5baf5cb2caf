"""Shards written with Apache Beam: what its workers fetch, and where they put it.

Also as `coyo11m_tfds/README.md` tells it, run from the text: a portable runner on this machine
whose workers live in an environment that was made by the documented steps alone.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import children, made_sources, runs
from tests.built import files_of, files_of_any_source
from tests.checkout import CHECKOUT
from tests.convert.build_kills import final_folder, run
from tests.fakes.cloud import fake_gcs

FILES = [range(60), *(range(n, n + 5) for n in range(60, 100, 5))]  # a large one and small ones
CONFIG = {'name': 'x', 'shard_bytes': 400_000, 'validation_fraction': 0.2}
TFDS = [sys.executable, '-m', 'tensorflow_datasets.scripts.cli.main']


def documented_steps() -> list[str]:
    """The blocks of code that tell how to run Beam: environment, workers, build."""
    text = (CHECKOUT / 'coyo11m_tfds' / 'README.md').read_text()
    section = text.partition('### With Apache Beam\n')[2].partition('\n### ')[0]
    return re.findall(r'```\n(.*?)```', section, re.DOTALL)[:3]


def own_environment(home: pathlib.Path) -> dict[str, str]:
    """Nothing of this project or of the tests' own environment, but for the same Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}
    (home / 'tmp').mkdir(parents=True)
    path = f'{sys.base_prefix}/bin:{os.environ["PATH"]}'
    return kept | {'HOME': str(home), 'PATH': path, 'TMPDIR': str(home / 'tmp')}


def arguments_of_tfds(command: str) -> list[str]:
    """What a shell gives to `tfds` in a block of commands."""
    printed = f'tfds() {{ printf "%s\\n" "$@"; }}\n{command}'
    ended = subprocess.run(['bash', '-ec', printed], capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


@contextlib.contextmanager
def service(command: str | list[str], port: int, log: pathlib.Path, **options) -> Iterator[None]:
    """Runs a server in a process group of its own until the block ends."""
    with log.open('w') as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, start_new_session=True, **options
        )
    try:
        limit = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < limit, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(('localhost', port), 1):
                break
            time.sleep(0.1)
        yield
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sign)
                process.wait(30)


def build(arguments: list[str], env: dict[str, str]) -> str:
    ended = subprocess.run(
        [*TFDS, *arguments, f'--config={json.dumps(CONFIG)}'],
        cwd=CHECKOUT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_the_steps_are_documented():
    install, start_workers, command = documented_steps()
    assert 'pip install' in install and '--service_port=50000' in start_workers
    for part in ('gs://BUCKET/coyo11m', 'gs://BUCKET/tfds', '8099', '50000', '\\\n'):
        assert part in command
    kind, *_, options = arguments_of_tfds(command)
    assert kind == 'build' and options.endswith('=EXTERNAL,environment_config=localhost:50000')


def not_of_the_project(folder: str, names: list[str]) -> set[str]:
    made_here = shutil.ignore_patterns('.*', '__pycache__', '*.egg-info')(folder, names)
    return made_here | ({'build', 'demo', 'tests'} if folder == str(CHECKOUT) else set())


@pytest.fixture
def home(tmp_path) -> Iterator[pathlib.Path]:
    """The workers' home; the environment in it has 4 GB."""
    yield tmp_path / 'home'
    shutil.rmtree(tmp_path / 'home')


@pytest.mark.slow
def test_the_documented_steps_end_in_the_same_bytes(home, tmp_path):
    install, start_workers, command = documented_steps()
    env = own_environment(home)
    copy = tmp_path / 'checkout'
    shutil.copytree(CHECKOUT, copy, ignore=not_of_the_project)
    subprocess.run(['bash', '-ec', install], cwd=copy, env=env, check=True, timeout=1800)
    shutil.rmtree(copy)
    source = made_sources.write_source(tmp_path / 'source', FILES)
    local = tmp_path / 'local'
    plain = ['build', 'coyo11m_tfds', f'--manual_dir={source}', f'--data_dir={local}']
    build(plain, dict(os.environ))
    workers, jobs = runs.free_port(), runs.free_port()
    start_workers = f'. ~/worker/bin/activate\nexec {start_workers}'.replace('50000', str(workers))
    job_service = 'apache_beam.runners.portability.local_job_service_main'
    for old, new in {
        'gs://BUCKET/coyo11m': 'gs://in/coyo',
        'gs://BUCKET/tfds': 'gs://out/data',
        '8099': str(jobs),
        '50000': str(workers),
        '\\\n': '',
    }.items():
        assert old in command
        command = command.replace(old, new)
    logs = tmp_path / 'workers.log', tmp_path / 'jobs.log'
    with (
        fake_gcs(tmp_path) as gcs,
        service(['bash', '-ec', start_workers], workers, logs[0], cwd=home, env=env | gcs.env),
        service([sys.executable, '-m', job_service, f'--port={jobs}'], jobs, logs[1]),
    ):
        gcs.upload_folder(source, 'gs://in/coyo')
        submitter = os.environ | gcs.env | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
        said = build(arguments_of_tfds(command), submitter)
        gcs.download_folder('gs://out/data', tmp_path / 'copy')
    assert 'Starting the pipeline with' in said
    assert 'Starting worker with command' in logs[0].read_text()
    copy = files_of_any_source(final_folder(tmp_path / 'copy'))
    assert copy == files_of_any_source(final_folder(local))
    cache = home / '.cache' / 'coyo11m_tfds'  # of the workers' user
    assert cache.is_dir() and not [path for path in cache.rglob('*') if path.is_file()]


PLAN = {'shard_bytes': 1_000_000, 'validation_fraction': 0.2}
ROWS = 200  # in a file, 5 MB: six shards, and little of it in the head that planning reads
NUM_FILES = 6

# With the flags of Beam after the others.
PROGRAM = """
import json, sys
from absl import logging
from apache_beam.options.pipeline_options import PipelineOptions
from coyo11m_tfds.convert import driver
from coyo11m_tfds.convert.build_settings import BuildSettings
from tests.convert import build_program
source, final, settings, *flags = sys.argv[1:]
settings, options = BuildSettings(**json.loads(settings)), PipelineOptions(flags)
if __name__ == '__main__':
    logging.set_verbosity(logging.INFO)
    driver.build(final, source, settings, build_program.write_info, beam_options=options)
"""


@pytest.mark.slow
def test_every_file_is_fetched_once_by_several_workers(tmp_path):
    files = [range(ROWS * n, ROWS * (n + 1)) for n in range(NUM_FILES)]
    source = made_sources.write_source(tmp_path / 'source', files)
    sizes = [path.stat().st_size for path in source.rglob('*.pt')]
    run(source, final_folder(tmp_path / 'plain'), settings=PLAN)
    (tmp_path / 'program.py').write_text(PROGRAM)
    final = final_folder(tmp_path / 'out')
    command = [sys.executable, str(tmp_path / 'program.py'), 'gs://in/coyo', str(final)]
    flags = 'runner=DirectRunner', 'direct_running_mode=multi_processing', 'direct_num_workers=3'
    command += [json.dumps(PLAN), *(f'--{flag}' for flag in flags)]
    paths = {'PYTHONPATH': str(CHECKOUT), 'XDG_CACHE_HOME': str(tmp_path / 'cache')}
    with fake_gcs(tmp_path) as gcs:
        gcs.upload_folder(source, 'gs://in/coyo')
        env = os.environ | gcs.env | paths
        subprocess.run(command, env=env, check=True, timeout=240)
        reads = [r.range for r in gcs.requests if r.action == 'read' and r.path.endswith('.pt')]
    asked_for = sum(last - first + 1 for first, last in reads)
    assert asked_for <= 1.1 * sum(sizes)
    assert files_of(final) == files_of(final_folder(tmp_path / 'plain'))
    cache = tmp_path / 'cache' / 'coyo11m_tfds'
    assert cache.is_dir() and not [path for path in cache.rglob('*') if path.is_file()]


@pytest.mark.slow
def test_dask_uses_all_workers_and_does_without_one_that_is_killed(tmp_path):
    distributed = pytest.importorskip('distributed')
    files = [range(ROWS * n, ROWS * (n + 1)) for n in range(4 * NUM_FILES)]
    source = made_sources.write_source(tmp_path / 'source', files)
    run(source, final_folder(tmp_path / 'plain'), settings=PLAN)
    final, port = final_folder(tmp_path / 'out'), runs.free_port()
    dask = [sys.executable, '-m', 'distributed.cli.dask_scheduler', '--no-dashboard']
    worker = [sys.executable, '-m', 'distributed.cli.dask_worker', f'tcp://127.0.0.1:{port}']
    env = os.environ | {'PYTHONPATH': str(CHECKOUT)}
    with contextlib.ExitStack() as stack:
        address = [f'--port={port}', '--host=127.0.0.1']
        stack.enter_context(service([*dask, *address], port, tmp_path / 'scheduler', env=env))
        workers = []
        for _ in range(4):
            options = ['--no-dashboard', '--no-nanny', '--nthreads=1']
            workers.append(subprocess.Popen([*worker, *options], cwd=tmp_path, env=env))
            stack.callback(workers[-1].wait)
            stack.callback(workers[-1].kill)
        flags = '--runner=DaskRunner', f'--dask_client_address=tcp://127.0.0.1:{port}'
        command = [sys.executable, '-c', PROGRAM, str(source), str(final), json.dumps(PLAN), *flags]
        build = subprocess.Popen(command, cwd=CHECKOUT, env=env, stderr=subprocess.PIPE, text=True)
        stack.callback(build.kill)
        children.wait_until(lambda: list(final.glob('building-*/*.tfrecord*.json')), seconds=400)
        workers[0].kill()
        _, errors = build.communicate(timeout=400)
        with distributed.Client(f'tcp://127.0.0.1:{port}') as client:
            done = client.run(lambda dask_worker: dask_worker.state.executed_count)
    assert build.returncode == 0, errors
    assert len(done) == 3 and all(done.values()), done
    assert files_of(final) == files_of(final_folder(tmp_path / 'plain'))
    count = len(list(final.glob('*.tfrecord*')))
    assert f'Writing shards: 100%, {count} of {count} shards' in errors
