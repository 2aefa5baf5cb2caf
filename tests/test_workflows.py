"""The workflows of CI and of releases take nothing that can change behind their backs."""

import re

import pytest

from tests.checkout import CHECKOUT

WORKFLOWS = sorted((CHECKOUT / '.github/workflows').iterdir())


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_few(path):
    text = path.read_text()
    uses = re.findall(r'uses: (.*)', text)
    assert uses
    for action in uses:
        assert re.fullmatch(r'[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+', action), action
    assert text.count('actions/checkout@') == text.count('persist-credentials: false')
    assert re.findall(r'^permissions:\n((?:  .*\n)+)', text, re.M) == ['  contents: read\n']


def test_the_last_job_of_a_release_alone_may_publish_and_runs_no_code_of_ours():
    build, publish = (CHECKOUT / '.github/workflows/release.yml').read_text().split('  publish:\n')
    assert 'id-token' not in build and 'make wheel' in build
    assert 'id-token: write' in publish and 'environment: pypi' in publish
    assert 'run:' not in publish and 'checkout' not in publish


def test_an_agent_reads_one_page():
    assert len((CHECKOUT / 'AGENTS.md').read_text().splitlines()) <= 40
