"""Configurations by name, wherever the program runs: `--config=demo` for `configs/demo.py`.

    argv = named_configs.resolve(['main.py', '--config=demo'])

A file that exists is taken as it is, and may import those of this package: `from configs import
default`. They lie in `configs/` of a checkout, and in `train_lib/configs/` where it is installed.
"""

import pathlib
import sys
from collections.abc import Sequence

_HERE = pathlib.Path(__file__).parent
_FOLDER = next(path for path in (_HERE / 'configs', _HERE.parent / 'configs') if path.is_dir())


def resolve(arguments: Sequence[str]) -> list[str]:
    """Returns the command line with the path of the configuration in the place of its name.

    Raises:
        SystemExit: there is neither such a file nor such a name; with one line that says so.
    """
    if str(_FOLDER.parent) not in sys.path:
        sys.path.append(str(_FOLDER.parent))  # where `configs` is imported from
    resolved = list(arguments)
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition('=')
        if flag.lstrip('-') != 'config' or not argument.startswith('-'):
            continue
        if equals:
            resolved[number] = f'{flag}={_find(value)}'
        elif number + 1 < len(arguments):
            resolved[number + 1] = _find(arguments[number + 1])
    return resolved


def _find(name: str) -> str:
    path = name.partition(':')[0]  # what follows is for the file
    if pathlib.Path(path).is_file():
        return name
    known = {file.stem: file for file in sorted(_FOLDER.glob('*.py'))}
    stem = path.removeprefix('configs/').removesuffix('.py')
    if stem not in known:
        sys.exit(
            f'error: --config={name}: there is no such file; expected one, or the name of a '
            f'configuration of this package: {", ".join(known)}.'
        )
    return name.replace(path, str(known[stem]), 1)
