"""Tests of what checks say, and of checks that fail or hang."""

import os
import threading

from coyo11m_tfds.checks import finding


def test_a_finding_is_one_line():
    said = str(finding.failed('disk', '/data has 2 GB free', 'choose another --data_dir'))
    assert said == 'fail  disk: /data has 2 GB free -> choose another --data_dir'
    assert str(finding.passed('cores', '8')) == 'pass  cores: 8'


def test_errors_are_findings():
    def check():
        raise ValueError('two\nlines')

    assert finding.bounded('x', 5, check) == [finding.failed('x', 'two lines')]

    def broken():
        yield finding.passed('x', 'fine so far')
        raise KeyError('a')

    fine, found = finding.bounded('x', 5, broken)
    assert (fine.text, found.status, found.text) == ('fine so far', 'fail', "KeyError('a')")

    (found,) = finding.bounded('x', 5, lambda: os.listdir('/no/such/file'))
    assert found.text.endswith('/no/such/file: No such file or directory: correct the path.')

    def missing():
        import nonesuch  # noqa: F401

    (found,) = finding.bounded('x', 5, missing)
    assert found.text.startswith('nonesuch is not installed')
    assert "'.[convert,text]'" in found.mend


def test_a_check_that_hangs_fails_in_time():
    end = threading.Event()
    (found,) = finding.bounded('x', 0.05, lambda: [end.wait()])
    end.set()
    assert found.status == 'fail'
    assert 'no answer within 0.05 s' in found.text
    assert '--timeout' in found.mend


def test_a_check_that_takes_long_is_announced(capsys):
    end, said = threading.Event(), []

    def slow():
        assert end.wait(30)
        return [finding.passed('slow', 'at last')]

    def wait():
        while not said:
            said.extend(capsys.readouterr().err.splitlines())
        end.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    (found,) = finding.bounded('slow', 60, slow)
    waiting.join()
    assert (said, found.text) == (['wait  slow: takes at most 60 s'], 'at last')
    assert finding.bounded('quick', 60, lambda: []) == []
    assert not capsys.readouterr().err
