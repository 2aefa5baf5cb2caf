"""Compiled programs are kept for later processes, whatever happens to the folder."""

import re

import pytest

from tests import children

# Compiles a step with the cache that its arguments name, as a run does.
_COMPILE = """
import jax, ml_collections
import jax.numpy as jnp
from absl import logging
from train_lib.lifecycle import compiled_programs

logging.set_verbosity(logging.INFO)
cache, workdir, jax_folder = sys.argv[1:]
# Those of the tests.
jax.config.update('jax_compilation_cache_dir', jax_folder or None)
config = ml_collections.ConfigDict({'compilation_cache': cache})
compiled_programs.use_cache(config, workdir)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)

def train_step(x):
    return jnp.sort(x) + 1

lowered = jax.jit(train_step).lower(jnp.arange(8.0))
compiled_programs.compile_step(lowered)
"""
COMPILED = 'the step was not in'
READ = 'the compiled step was read from'


def compile_with(cache, jax_folder='', forked=True):
    """The log of a process that compiles."""
    with children.python(_COMPILE, cache, '/nowhere', jax_folder, forked=forked) as child:
        _, log = child.communicate()
    assert child.returncode == 0, log
    return log


def entries(cache):
    return sorted(cache.rglob('jit_train_step-*-cache'))


def test_a_later_process_reads_what_one_has_compiled(tmp_path, monkeypatch):
    assert COMPILED in compile_with(tmp_path / 'new')
    [entry] = entries(tmp_path / 'new')
    # By another name of the folder.
    monkeypatch.setenv('HOME', str(tmp_path))
    assert re.search(rf'{READ} {entry.parent} in [\d.]+ s', compile_with('~/new'))


def test_the_folder_may_be_in_a_bucket(gcs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in gcs.env.items():
        monkeypatch.setenv(name, value)
    assert f'{COMPILED} gs://programs/run/cpu-' in compile_with('gs://programs/run')
    assert f'{READ} gs://programs/run/cpu-' in compile_with('gs://programs/run')


def test_the_usual_folder_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert COMPILED in compile_with('auto', forked=False)
    [entry] = entries(tmp_path)
    assert entry.parents[1] == tmp_path / 'coyo11m_tfds' / 'compiled'


def test_a_folder_that_jax_has_already_stays(tmp_path):
    assert f'{COMPILED} {tmp_path}/jax:' in compile_with(tmp_path / 'new', tmp_path / 'jax')
    assert entries(tmp_path / 'jax') and not (tmp_path / 'new').exists()


def test_without_a_folder_nothing_is_kept():
    assert 'compiled programs are not kept' in compile_with('')


def test_a_damaged_entry_is_replaced(tmp_path):
    compile_with(tmp_path)
    [entry] = entries(tmp_path)
    content = entry.read_bytes()
    entry.write_bytes(content[: len(content) // 2])
    log = compile_with(tmp_path)
    assert 'Error reading persistent compilation cache entry' in log
    assert 'It is compiled anew.' in log and COMPILED in log
    assert READ in compile_with(tmp_path)


def test_an_entry_whose_writer_was_killed_is_replaced(tmp_path):
    compile_with(tmp_path)
    [entry] = entries(tmp_path)
    entry.write_bytes(entry.read_bytes()[:100])
    # JAX writes the time of use last.
    [time_of_use] = tmp_path.rglob('jit_train_step-*-atime')
    time_of_use.unlink()
    log = compile_with(tmp_path)
    assert COMPILED in log and 'Error' not in log
    assert READ in compile_with(tmp_path)


@pytest.mark.parametrize('folder', ['/proc/compiled', 'file'])
def test_a_folder_that_cannot_be_written_to_costs_only_time(folder, tmp_path):
    (tmp_path / 'file').touch()
    log = compile_with(tmp_path / folder)
    assert log.count('Each start compiles anew') == 1
    assert str(tmp_path / folder) in log and 'Set --config.compilation_cache' in log
    assert 'compiled programs are not kept' in log


def test_two_processes_may_begin_at_once(tmp_path):
    arguments = tmp_path, '/nowhere', ''
    with (
        children.python(_COMPILE, *arguments, forked=True) as first,
        children.python(_COMPILE, *arguments, forked=True) as second,
    ):
        ends = [process.communicate() for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], ends
    assert READ in compile_with(tmp_path)
