"""Command lines of the programs: `--help` from the docstring, errors in one line.

    parser = command_line.Parser('coyo11m_tfds.verify', __doc__)
    parser.add_argument('data_dir', help='folder of a built data set')
    flags = parser.parse_args()
    command_line.show_log()

The programs of `train_lib` use absl's flags, as ml_collections requires, and share `advice`.
"""

import argparse
import logging
import re
import shutil
import textwrap
from typing import NoReturn

import absl.logging


class Parser(argparse.ArgumentParser):
    """A parser whose errors end the program with `error: ...` in one line, and status 2."""

    def __init__(self, program: str, doc: str):
        """Takes the name of the module that is run, and its docstring with an indented command."""
        width = min(shutil.get_terminal_size().columns, 100) - 1
        wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        parts = doc.strip().split('\n\n')
        super().__init__(
            prog=f'python -m {program}',
            usage='%(prog)s [--FLAG=VALUE ...]',  # the description shows whole commands
            description='\n\n'.join(
                part if part.startswith(' ') else wrap.fill(part) for part in parts
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process with an error and advice; argparse calls this."""
        self.exit(2, f'error: {message}; {advice(self.prog, self.description)}\n')


def advice(program: str, doc: str | None) -> str:
    """Returns advice: the first command in `doc` that begins with `program`."""
    found = re.search(rf'^ {{4}}({re.escape(program)} (?:.*\\\n)*.*)', doc or '', re.MULTILINE)
    if not found:
        return 'see --help'
    return f'expected e.g. `{" ".join(found[1].replace(chr(92), " ").split())}`, see --help'


def show_log() -> None:
    """Shows the log of the program, such as its progress, in lines with the time of day."""
    form, date = '%(asctime)s %(levelname)s %(message)s', '%H:%M:%S'
    logging.basicConfig(format=form, datefmt=date)
    # Its handler takes the place of this one where absl parses the flags.
    absl.logging.get_absl_handler().setFormatter(logging.Formatter(form, date))
    absl.logging.set_verbosity(absl.logging.INFO)
