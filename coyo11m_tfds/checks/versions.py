"""Checks that the installed packages fit each other, by what they declare and what is known.

    versions.check_versions(['convert', 'text'])
    # [Finding('versions', 'pass', '143 packages fit each other; ...')]

Nothing is imported: versions and requirements are read from the packages' metadata.
"""

import dataclasses
import importlib.metadata
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from coyo11m_tfds.checks import finding
from coyo11m_tfds.checks.finding import Finding

PACKAGE = 'coyo11m_tfds'
INSTALL = "pip install -c constraints.txt -e '.{extras}'"

# In a checkout, the versions that are tested.
_TESTED = pathlib.Path(__file__).parents[2] / 'constraints.txt'


@dataclasses.dataclass(frozen=True)
class BadPair:
    """Two packages that both install, but do not work together, and do not say so themselves.

    Attributes:
        first, second: requirements, such as 'protobuf>=7'. With `same` set they are bad if their
            versions differ, else if both match.
        why: what happens.
        same: whether they must have one version.
    """

    first: str
    second: str
    why: str
    same: bool = False


KNOWN_BAD = (
    BadPair(
        'tensorflow-datasets<=4.9.10',
        'protobuf>=7',
        'TFDS calls FieldDescriptor.label, which protobuf 7 has removed',
    ),
    BadPair(
        'jax-cuda12-plugin',
        'jaxlib',
        'a plugin of another version is left out with a warning, or crashes',
        same=True,
    ),
    BadPair(
        'jax-cuda12-pjrt',
        'jaxlib',
        'a plugin of another version is left out with a warning, or crashes',
        same=True,
    ),
    BadPair('tensorflow', 'tensorflow-cpu', 'both install the same files', same=True),
)


def check_versions(
    extras: Collection[str] = (),
    path: Sequence[str] | None = None,
) -> list[Finding]:
    """Compares all installed packages that this one needs.

    Args:
        extras: of this package, that are needed.
        path: folders to look for packages in; those of this process by default.
    """
    install = INSTALL.format(extras=f'[{",".join(extras)}]' if extras else '')
    there = _installed(path)
    if canonicalize_name(PACKAGE) not in there:
        text = f'{PACKAGE} is not installed with pip, so that nothing tells what it needs'
        return [finding.warned('versions', text, install)]
    needed, faults = _walk(there, extras)
    findings = [
        finding.failed('versions', fault, _upgrade(wanted, install)) for wanted, fault in faults
    ]
    for pair in KNOWN_BAD:
        if _is_bad(pair, there):
            first, second = (_named(there, text) for text in (pair.first, pair.second))
            wanted = f'the same version of both: {pair.second}' if pair.same else 'another pair'
            text = f'{first} and {second} do not work together ({pair.why}); expected {wanted}'
            findings.append(finding.failed('versions', text, install))
    if findings:
        return findings
    return [finding.passed('versions', f'{len(needed)} packages fit each other{_tested(there)}')]


def _installed(path: Sequence[str] | None) -> dict[str, importlib.metadata.Distribution]:
    """All packages by canonical name; of two with one name the one that is imported."""
    found: dict[str, importlib.metadata.Distribution] = {}
    distributions = importlib.metadata.distributions
    for package in distributions() if path is None else distributions(path=list(path)):
        if name := package.metadata['Name']:
            found.setdefault(canonicalize_name(name), package)
    return found


def _walk(
    there: dict[str, importlib.metadata.Distribution], extras: Collection[str]
) -> tuple[set[str], list[tuple[Requirement, str]]]:
    """Follows requirements from this package on; the packages it needs, and what is not met."""
    todo = [(canonicalize_name(PACKAGE), frozenset(extras))]
    seen, faults = set(todo), {}
    while todo:
        name, wanted = todo.pop()
        for requirement in _requirements(there[name], wanted):
            of = canonicalize_name(requirement.name)
            fault = _fault(requirement, there.get(of))
            if fault:
                faults[str(requirement)] = (requirement, f'{name} needs {fault}')
            elif (key := (of, frozenset(requirement.extras))) not in seen:
                seen.add(key)
                todo.append(key)
    return {name for name, _ in seen}, list(faults.values())


def _requirements(
    package: importlib.metadata.Distribution, extras: Collection[str]
) -> Iterator[Requirement]:
    """Requirements of a package on this machine, with some of its extras."""
    for text in package.requires or ():
        try:
            requirement = Requirement(text)
            marker = requirement.marker
            # An extra that is named in another way than it is declared is the same.
            if marker and not any(marker.evaluate({'extra': extra}) for extra in ('', *extras)):
                continue
        except (InvalidRequirement, UndefinedEnvironmentName):
            continue
        yield requirement


def _fault(requirement: Requirement, package: importlib.metadata.Distribution | None) -> str:
    wanted = f'{requirement.name}{requirement.specifier}'
    if package is None:
        return f'{wanted}, which is not installed'
    if requirement.specifier.contains(package.version, prereleases=True):
        return ''
    return f'{wanted}, but {package.version} is installed'


def _is_bad(pair: BadPair, there: dict[str, importlib.metadata.Distribution]) -> bool:
    found = []
    for text in (pair.first, pair.second):
        requirement = Requirement(text)
        package = there.get(canonicalize_name(requirement.name))
        if not package or not requirement.specifier.contains(package.version, prereleases=True):
            return False
        found.append(package.version)
    return not pair.same or _release(found[0]) != _release(found[1])


def _release(version: str) -> str:
    """The version without what a builder has appended to it, such as '+cpu'."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def _named(there: dict[str, importlib.metadata.Distribution], text: str) -> str:
    name = Requirement(text).name
    return f'{name} {there[canonicalize_name(name)].version}'


def _upgrade(requirement: Requirement, install: str) -> str:
    """How to get what a requirement asks for: a direct pin where `install` may not bring it."""
    return f"{install}, or pip install '{requirement.name}{requirement.specifier}'"


def _tested(there: dict[str, importlib.metadata.Distribution]) -> str:
    """Of a checkout, how many packages have another version than the one that is tested."""
    if not _TESTED.is_file():
        return ''
    pins = re.findall(r'^([\w.-]+)==(\S+)$', _TESTED.read_text(), re.MULTILINE)
    tested = {canonicalize_name(name): version for name, version in pins}
    others = [
        f'{name} {there[name].version}, tested {version}'
        for name, version in tested.items()
        if name in there and _release(there[name].version) != version
    ]
    if not others:
        return ' and have the tested versions'
    more = f' and {len(others) - 3} more' if len(others) > 3 else ''
    return f'; not the tested version: {", ".join(others[:3])}{more}'
