"""Data that several test files share, made once a session from made-up pictures."""

import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable

import hypothesis
import pytest

from coyo11m_tfds import embed_captions, sample_data
from coyo11m_tfds.process import command_line
from tests import built
from tests.checkout import COCO_SAMPLE
from tests.fakes.cloud import bucket, gcs, hub, place  # noqa: F401, fixtures

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tests compile more than they compute: with these flags in a quarter of the time.
os.environ.setdefault(
    'XLA_FLAGS', '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_MAX_SIZE', '1000000000'
)  # so that JAX locks the folder

# How long one example takes depends on what else runs on the machine.
hypothesis.settings.register_profile('no_deadline', deadline=None)
hypothesis.settings.load_profile('no_deadline')


def pytest_configure(config: pytest.Config) -> None:
    """Has all tests of a session, and the programs that they start, share what JAX compiles."""
    if 'JAX_COMPILATION_CACHE_DIR' in os.environ:  # as where the first of several processes made it
        return
    folder = tempfile.TemporaryDirectory(prefix='compiled-')
    config.add_cleanup(folder.cleanup)
    os.environ.update(JAX_COMPILATION_CACHE_DIR=folder.name)


@pytest.fixture(scope='session')
def sample_source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A source of 1,200 made-up samples in three `.pt` files; tests must not change it."""
    folder = tmp_path_factory.mktemp('source')
    sample_data.make_sample(folder, num_samples=1200, num_files=3)
    return folder


@pytest.fixture(scope='session')
def hash_sidecar(
    sample_source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """Text embeddings of `sample_source`, made by the `hash` encoder."""
    path = tmp_path_factory.mktemp('sidecar') / 'hash.parquet'
    embed_captions.embed(sample_source, 'hash', path)
    return path


@pytest.fixture(scope='session')
def mini_dataset(
    sample_source: pathlib.Path,
    hash_sidecar: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """The folder of a built data set: text embeddings, a dozen train shards of unequal lengths
    (none a multiple of 32, except by chance), a tenth of the records in `validation`."""
    folder = built.build(sample_source, hash_sidecar, tmp_path_factory.mktemp('data'))
    return built.with_known_id(folder)


@pytest.fixture(scope='session')
def coco_sample() -> pathlib.Path:
    """The small real sample beside the checkout; skips where it is absent."""
    if not COCO_SAMPLE.is_dir():
        pytest.skip(f'{COCO_SAMPLE} is absent')
    return COCO_SAMPLE


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
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
