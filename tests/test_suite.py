"""pytest looks into every folder of tests."""

import fnmatch

from tests.checkout import CHECKOUT


def test_no_folder_of_tests_is_left_out(pytestconfig):
    patterns = pytestconfig.getini('norecursedirs')
    folders = {path.parent.name for path in (CHECKOUT / 'tests').rglob('test_*.py')}
    assert 'convert' in folders
    assert not [name for name in folders if any(fnmatch.fnmatch(name, p) for p in patterns)]
