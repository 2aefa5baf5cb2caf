"""What all small training runs share."""

import pytest

from tests import runs


@pytest.fixture(scope='session', autouse=True)
def env(tmp_path_factory: pytest.TempPathFactory):
    """The environment of runs that are processes; all runs share what they compile."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith('popen-'):  # of one of several workers
        folder = folder.parent
    with runs.shared_compilations(folder / 'compiled') as env:
        yield env
