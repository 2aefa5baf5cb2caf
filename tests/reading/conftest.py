"""Data sets that several test files of reading share."""

import pathlib
import shutil

import pytest

from tests.reading import small_dataset
from tests.reading.damaged import LENGTHS


@pytest.fixture(scope='module')
def intact(tmp_path_factory) -> pathlib.Path:
    """A data set of `LENGTHS`; tests must not change it."""
    path = tmp_path_factory.mktemp('intact') / '1.0.0'
    small_dataset.write(path, LENGTHS)
    return path


@pytest.fixture
def copy(intact, tmp_path) -> pathlib.Path:
    """A data set that a test may damage."""
    return pathlib.Path(shutil.copytree(intact, tmp_path / '1.0.0'))
