"""Tests of the comparison of versions, on made-up folders of packages."""

import pathlib

import pytest

from coyo11m_tfds.checks import versions


def install(folder: pathlib.Path, name: str, version: str, *requires: str) -> None:
    """Writes the metadata of a package, as pip leaves them."""
    info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir(parents=True)
    lines = ['Metadata-Version: 2.1', f'Name: {name}', f'Version: {version}']
    lines += [f'Requires-Dist: {requirement}' for requirement in requires]
    (info / 'METADATA').write_text('\n'.join(lines) + '\n')


@pytest.fixture
def packages(tmp_path) -> pathlib.Path:
    """This package, with what it needs."""
    install(tmp_path, 'coyo11m_tfds', '0.1.0', 'a>=1', 'torch>=2; extra == "convert"')
    install(tmp_path, 'a', '1.5', 'B_b<3; python_version >= "3.8"', 'c; sys_platform == "nowhere"')
    install(tmp_path, 'b.b', '2.0')
    return tmp_path


def found(folder: pathlib.Path, *extras: str) -> list[tuple[str, str]]:
    return [(f.status, f.text) for f in versions.check_versions(extras, [str(folder)])]


def test_packages_that_fit_pass(packages):
    ((status, text),) = found(packages)
    assert status == 'pass'
    assert text.startswith('3 packages fit each other')


def test_an_extra_that_is_needed_and_not_installed_is_named(packages):
    finding, *others = versions.check_versions(['convert'], [str(packages)])
    assert (finding.status, others) == ('fail', [])
    assert finding.text == 'coyo11m-tfds needs torch>=2, which is not installed'
    assert "'.[convert]'" in finding.mend


def test_a_bad_pair_that_is_declared_is_named_wherever_it_is(packages):
    install(packages / 'other', 'b.b', '3.1')
    folders = [str(packages / 'other'), str(packages)]
    (finding,) = versions.check_versions([], folders)
    assert (finding.status, finding.text) == ('fail', 'a needs B_b<3, but 3.1 is installed')
    assert "pip install 'B_b<3'" in finding.mend


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        (('tensorflow-datasets', '4.9.10'), ('protobuf', '7.34.1')),
        (('jax-cuda12-plugin', '0.10.1'), ('jaxlib', '0.10.2')),
        (('tensorflow', '2.20.0'), ('tensorflow-cpu', '2.21.0')),
    ],
)
def test_a_bad_pair_that_nobody_declares_is_named(packages, first, second):
    install(packages, *first)
    assert [status for status, _ in found(packages)] == ['pass']
    install(packages, *second)
    ((status, text),) = found(packages)
    assert status == 'fail'
    assert text.startswith(f'{" ".join(first)} and {" ".join(second)} do not work together')


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        (('tensorflow-datasets', '4.9.10'), ('protobuf', '6.33.6')),
        (('jax-cuda12-plugin', '0.10.2+cuda'), ('jaxlib', '0.10.2')),
    ],
)
def test_pairs_that_work_pass(packages, first, second):
    install(packages, *first)
    install(packages, *second)
    assert [status for status, _ in found(packages)] == ['pass']


def test_what_is_not_installed_by_pip_is_said(tmp_path):
    ((status, text),) = found(tmp_path)
    assert (status, 'not installed with pip' in text) == ('warn', True)


def test_the_packages_of_these_tests_fit():
    assert [f.status for f in versions.check_versions(['convert', 'text', 'text-jax'])] == ['pass']
