"""The programs of the project, which `python -m` runs: their list, and the first line of each.

Both packages import this module before anything else, so it imports little.
"""

import functools
import pathlib
import sys
import time

_PACKAGES = 'coyo11m_tfds', 'train_lib'
# With these a program only prints something and ends.
_QUESTIONS = '-h', '--help', '--helpshort', '--helpfull', '--version'


def announce_on_terminal() -> None:
    """Calls `announce_start` where a person waits for a program whose package is imported now."""
    # This is what `python -m` calls a program while it imports the package.
    is_starting = sys.argv[:1] == ['-m']
    if is_starting and sys.stderr and sys.stderr.isatty():
        announce_start()


@functools.cache
def announce_start() -> None:
    """Prints, once, that the program starts; prints nothing for programs of others.

    Call it before imports that take seconds, and on a disk of a network a minute.
    """
    program = _running_program()
    if program and not set(_QUESTIONS) & set(sys.argv):
        sys.stderr.write(f'{time.strftime("%H:%M:%S")} {program} starts ...\n')


def _running_program() -> str:
    """Returns the module of this project that `python -m` runs; '' for other programs."""
    words = sys.orig_argv
    if '-m' not in words[:-1]:
        return ''
    name = words[words.index('-m') + 1]
    package, dot, _ = name.partition('.')
    # A package alone only lists its programs.
    is_program = package in _PACKAGES and dot
    return name if is_program else ''


def runs_tfds() -> bool:
    """Returns whether the program is TFDS' own command, `tfds`."""
    return hasattr(sys.modules['__main__'], 'launch_cli')


def runs_build() -> bool:
    """Returns whether the program only builds: `tfds`, or `python -m coyo11m_tfds.build`."""
    return runs_tfds() or _running_program() == 'coyo11m_tfds.build'


def describe_programs(package: str) -> list[str]:
    """Returns a line for each program of a package of this project: its name and purpose."""
    # Here, because both packages import this module first: only a list of programs needs it.
    import ast

    folder = pathlib.Path(__file__).parents[2] / package
    purposes = {}
    for path in sorted(folder.rglob('*.py')):
        module = path.relative_to(folder.parent).with_suffix('')
        name = '.'.join(module.parts)
        # Not imported: some would take seconds.
        tree = ast.parse(path.read_text(encoding='utf-8'))
        doc = ast.get_docstring(tree) or ''
        # Other modules show no command of their own.
        if f'\n    python -m {name}' in doc:
            first_sentence, _, _ = doc.splitlines()[0].partition('. ')
            purposes[name] = first_sentence.removesuffix('.')
    width = max(map(len, purposes))
    return [f'{name:{width}}  {purpose}' for name, purpose in purposes.items()]
