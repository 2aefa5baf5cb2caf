"""Set-up and error lines that all programs of this package share.

    if __name__ == '__main__':
        flags.DEFINE_string('workdir', None, 'Folder of the run.')
        process.run(main, required=['workdir'])

    with process.errors_in_one_line():
        workdirs.check_writable(workdir)
    process.prepare()

Not part of the library modules, so that importing them changes nothing. Importing this one does not
import TensorFlow, which reads its environment once.
"""

import collections
import contextlib
import difflib
import functools
import logging as standard_logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags, logging

import input_pipeline
from coyo11m_tfds.process import command_line, ending
from train_lib import named_configs, settings

CONFIG_HELP = (
    'Configuration of the run: a file, or the name of one of this package, such as demo; '
    '--config.FIELD=VALUE changes a field.'
)

# Not their parent folder: a virtual environment may lie in it.
_OWN_CODE = tuple(
    str(pathlib.Path(__file__).parents[1] / name)
    for name in ('coyo11m_tfds', 'train_lib', 'input_pipeline.py')
)

flags.DEFINE_bool('verbose', False, 'Log all that libraries say, and tracebacks of errors.')


def run(main: Callable[[], None], required: Sequence[str]) -> None:
    """Parses the command line of the program that was started, and calls `main`.

    `--config` may be the name of a configuration. A wrong command line ends the process with
    `error: ...` in one line and status 1.

    Args:
        main: reads `flags.FLAGS`.
        required: flags that must be given.
    """
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS['verbose'])  # for --help
    parse = functools.partial(_parse_flags, required=required)
    try:
        app.run(lambda argv: main(), flags_parser=parse)
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        sys.stdout.flush()
        with os.fdopen(os.dup(sys.stderr.fileno()), 'w') as stderr:
            # The last line: threads of libraries may complain until the process has ended.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            print(end.code, file=stderr)
        os._exit(1)


def _parse_flags(argv: Sequence[str], required: Sequence[str]) -> list[str]:
    argv = named_configs.resolve(argv)
    with errors_in_one_line((flags.Error, OSError, ValueError, TypeError)):
        try:
            _, *stray = flags.FLAGS(argv)
            if stray:
                raise flags.Error(f'unexpected arguments: {" ".join(stray)}')
            if 'config' in flags.FLAGS and flags.FLAGS['config'].present:
                _ = flags.FLAGS.config.seed  # a file that cannot be loaded is told on first use
            missing = [f'--{name}' for name in required if flags.FLAGS[name].value in (None, '')]
            if missing:
                raise flags.Error(f'missing: {", ".join(missing)}')
        except flags.Error as error:
            if 'Error whilst parsing config file' in str(error):
                raise ValueError(_wrong_config(argv, error)) from error
            program = sys.modules['__main__']
            name = program.__spec__.name if program.__spec__ else ''
            advice = command_line.advice(f'python -m {name}', program.__doc__)
            raise ValueError(f'{error}; {advice}') from error
        except (OSError, KeyError, AttributeError) as error:
            raise ValueError(_wrong_config(argv, error)) from error
        except SystemExit:
            sys.exit()  # absl shows the help, and ends with 1
    return argv[:1]


def _wrong_config(argv: Sequence[str], error: Exception) -> str:
    path, fields = '', []
    for argument in argv:
        if found := re.match(r'--?config=(.*)', argument):
            path = found[1]
        elif found := re.match(r'--?config\.([\w.]+)', argument):
            fields.append(found[1])
    if isinstance(error, OSError):
        return f'--config={path}: {error}'
    trace = ''.join(traceback.format_exception(error))  # of flags, it quotes that of the file
    frames = re.findall(r'^ +File "(.*)", line (\d+)', trace, re.MULTILINE)
    own = [line for file, line in frames if file == path.partition(':')[0]]
    where = f'--config={path}, line {own[-1]}' if own else f'--config={path}'
    is_of_a_field = isinstance(error, (KeyError, AttributeError))
    if not (is_of_a_field and frames[-1][0].endswith('config_dict.py')):
        *_, said = re.findall(r'^\w+: .*', trace, re.MULTILINE)
        return f'{where}: {said}'
    # It begins with the name, in quotes of all kinds, unless it is that of a new field.
    found = re.search(r'Key "(\w+)"', str(error)) or re.search(r'(\w+)', str(error))
    missing = found[1] if found else ''
    unknown = [field for field in fields if missing in field.split('.')]
    if unknown and not own:
        where = f'--config.{unknown[0]}'
    similar = re.search(r'Did you mean "(\w+)"', str(error))
    likely = similar[1] if similar else _likely_field(unknown[0] if unknown else missing)
    advice = f'; did you mean {likely!r}?' if likely else ''
    return f'{where}: there is no field {missing!r}{advice}'


def _likely_field(given: str) -> str:
    """The field of any block whose own name is most like that of a given one; '' if none is."""
    from configs import default  # which `named_configs.resolve` has made known

    names = settings.flatten(default.get_config().to_dict())
    by_end = collections.defaultdict(list)
    for name in names:
        by_end[name.rpartition('.')[2]].append(name)
    for end in difflib.get_close_matches(given.rpartition('.')[2], by_end, n=1):
        return difflib.get_close_matches(given, by_end[end], n=1, cutoff=0)[0]
    return ''


def prepare() -> None:
    """Keeps TensorFlow off the accelerator and the log readable.

    Call it before TensorFlow is imported, which otherwise logs its settings.
    """
    if not _is_verbose():
        handler = logging.get_absl_handler()
        handler.addFilter(_is_worth_reading)
        handler.setFormatter(_Lines())
        sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook)
        input_pipeline.quiet_tensorflow()
    import tensorflow as tf

    # TensorFlow only reads records: the accelerator's memory is for JAX.
    tf.config.set_visible_devices([], 'GPU')


@contextlib.contextmanager
def errors_in_one_line(
    kinds: tuple[type[Exception], ...] = (ValueError, OSError),
) -> Iterator[None]:
    """Ends the process with `error: ...` and status 1 for errors that say what the user can mend.

    The default `kinds` do where settings are checked and files are opened. With `--verbose` the
    traceback precedes the line.
    """
    try:
        yield
    except kinds as error:
        if _is_verbose():
            logging.info('Where the error comes from:', exc_info=True)
        sys.exit(f'error: {_as_flags(" ".join(ending.describe(error).split()))}')


def _as_flags(message: str) -> str:
    """Names settings as they are typed: `--config.data.lanes=2` where the reader says `lanes=2`."""
    if 'config' not in flags.FLAGS:
        return message
    from configs import default  # which `named_configs.resolve` has made known

    names = settings.flatten(default.get_config().to_dict())
    full = {name.removeprefix('data.'): name for name in names} | {name: name for name in names}
    fields = '|'.join(map(re.escape, full))
    return re.sub(rf'(?<![\w.-])({fields})=', lambda found: f'--config.{full[found[1]]}=', message)


def _is_verbose() -> bool:
    # Programs that do not parse flags call `prepare`, too.
    return flags.FLAGS.is_parsed() and flags.FLAGS.verbose


def _unraisable(report: Callable[[Any], Any], error: Any) -> None:
    """Reports all but what follows from an error of a checkpoint, once for each of its arrays."""
    if str(error.exc_value) != 'Event loop is closed':
        report(error)


class _Lines(standard_logging.Formatter):
    """The time of day and the message; the level where it is a warning or worse.

    Libraries log errors before they raise them, so their tracebacks are left out.
    """

    def format(self, record: standard_logging.LogRecord) -> str:
        level = '' if record.levelno <= standard_logging.INFO else f'{record.levelname}: '
        if not record.pathname.startswith(_OWN_CODE):
            record.exc_info = record.exc_text = None
        return f'{self.formatTime(record, "%H:%M:%S")} {level}{super().format(record)}'


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """Messages of libraries about their work are not; their warnings are."""
    return record.levelno > standard_logging.INFO or record.pathname.startswith(_OWN_CODE)
