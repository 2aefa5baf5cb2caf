"""Data that several test files share, made once a session from made-up pictures."""

import contextlib
import gc
import os
import pathlib
import shlex
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Generator
from typing import Any

import hypothesis
import pytest

from coyo11m_tfds import embed_captions, sample_data, schema
from coyo11m_tfds.process import command_line, stop_signals
from tests import built, children, fork_server, xla_flags
from tests.checkout import CHECKOUT, COCO_SAMPLE
from tests.fakes.cloud import bucket, gcs, hub, place  # noqa: F401, fixtures

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# As in the Makefile. A program that is forked has what the server of forks began with, so nothing
# may set them later, as `input_pipeline` would.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
# Tests compile more than they compute: with these flags in a fifth of the time.
if 'XLA_FLAGS' not in os.environ:
    os.environ['XLA_FLAGS'] = xla_flags.join_known(
        xla_backend_optimization_level=0,
        xla_cpu_use_fusion_emitters='false',
        xla_cpu_parallel_codegen_split_count=1,
    )
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_MAX_SIZE', '1000000000'
)  # so that JAX locks the folder

# Tests make models of transformers in processes that have TensorFlow, too: see `preparation`.
sys.modules['triton'] = None  # type: ignore[assignment]

# A shell that runs the tests in the background has them ignore Ctrl-C, `nohup` a closed terminal,
# and so would the programs that they start.
for ignored in {*stop_signals.STOP_SIGNALS} - {*stop_signals.find_heeded()}:
    if ignored == signal.SIGINT:
        signal.signal(ignored, signal.default_int_handler)
    else:
        signal.signal(ignored, signal.SIG_DFL)

# What libraries have made when they are imported, a million objects, is not looked through again
# and again for garbage: see `pytest_collection_finish`.
gc.disable()

# How long one example takes depends on what else runs on the machine.
hypothesis.settings.register_profile('no_deadline', deadline=None)
hypothesis.settings.load_profile('no_deadline')


def pytest_configure(config: pytest.Config) -> None:
    """Has all tests of a session, and their programs, share what JAX compiles and one server.

    The first of several processes has made both.
    """
    session = contextlib.ExitStack()
    config.add_cleanup(session.close)
    if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
        folder = session.enter_context(tempfile.TemporaryDirectory(prefix='compiled-'))
        os.environ.update(JAX_COMPILATION_CACHE_DIR=folder)
    if 'FORKS' not in os.environ:
        os.environ.update(FORKS=session.enter_context(fork_server.start()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Has the processes of pytest-xdist be forks: each would import the large libraries anew."""
    for spec in specs:
        spec.python = shlex.join(children.interpreter(forked=True))


def pytest_collection_finish() -> None:
    """Begins to collect the garbage of tests, which have all been imported."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves two kinds of tests to the front: those that need no data set, and those that train.

    The results of the first come at once. The second take longest: if they came last, one process
    would train while the others had nothing to do.
    """
    items.sort(key=_find_turn)


def _find_turn(item: pytest.Item) -> int:
    """Returns the place of a test among the others: a smaller number comes first."""
    folders = item.path.relative_to(CHECKOUT).parts
    if 'dataset' in folders or 'process' in folders:
        return 0
    if 'train_lib' in folders:
        return 1
    return 2


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes what a test has logged: pytest-xdist sends UTF-8, and some names are none."""
    report = yield
    report.sections = [
        (title, text.encode(errors='backslashreplace').decode()) for title, text in report.sections
    ]
    return report


@pytest.fixture(scope='session')
def sample_source(tmp_path_factory) -> pathlib.Path:
    """A source of 1,200 made-up samples in three `.pt` files; tests must not change it."""
    folder = tmp_path_factory.mktemp('source')
    sample_data.make_sample(folder, num_samples=1200, num_files=3)
    return folder


@pytest.fixture(scope='session')
def hash_sidecar(sample_source, tmp_path_factory) -> pathlib.Path:
    """Text embeddings of `sample_source`, made by the `hash` encoder."""
    path = tmp_path_factory.mktemp('sidecar') / 'hash.parquet'
    embed_captions.embed(sample_source, 'hash', path)
    return path


@pytest.fixture(scope='session')
def mini_dataset(sample_source, hash_sidecar, tmp_path_factory) -> pathlib.Path:
    """The folder of a built data set: text embeddings, a dozen train shards of unequal lengths
    (none a multiple of 32, except by chance), a tenth of the records in `validation`."""
    folder = built.build(sample_source, hash_sidecar, tmp_path_factory.mktemp('data'))
    return built.with_known_id(folder)


@pytest.fixture
def copy(mini_dataset, tmp_path) -> pathlib.Path:
    """A copy of `mini_dataset` that a test may change or damage."""
    return shutil.copytree(mini_dataset, tmp_path / schema.NAME / 'hash' / schema.VERSION)


@pytest.fixture(scope='session')
def small_run(mini_dataset, tmp_path_factory) -> tuple[pathlib.Path, Any]:
    """The workdir of a run of 4 steps with checkpoints of 2 and 4, and its last state.

    Tests must not change it. The data set that it was trained on is gone.
    """
    import jax

    from tests import runs

    folder = tmp_path_factory.mktemp('run')
    data = shutil.copytree(mini_dataset, folder / schema.NAME / 'hash' / schema.VERSION)
    changes = {'num_steps': 4, 'eval_every': 0, 'checkpoint_every': 2, 'preview.guidance': 3.0}
    state = runs.train(data, folder / 'workdir', **changes)
    shutil.rmtree(data)
    return folder / 'workdir', jax.device_get(state)


@pytest.fixture(scope='session')
def coco_sample() -> pathlib.Path:
    """The small real sample beside the checkout; skips where it is absent."""
    if not COCO_SAMPLE.is_dir():
        pytest.skip(f'{COCO_SAMPLE} is absent')
    return COCO_SAMPLE


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """`command(verify, '--fast', folder)` runs a program in this process.

    Returns its exit status, and what it printed as output and as errors, without its log.
    """
    monkeypatch.setattr(command_line, 'show_log', lambda: None)

    def run(program: types.ModuleType, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, 'argv', [program.__name__, *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            program.main()
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run
