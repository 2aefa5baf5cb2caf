"""Starts and ends the programs of this package: command line, log, one-line errors.

`--config=demo` is `configs/demo.py` of a checkout, or `train_lib/configs/demo.py` of an installed
package, in any working directory. This module imports neither JAX nor TensorFlow, because they read
their environment when they are imported.
"""

import contextlib
import difflib
import functools
import logging as standard_logging
import math
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
from train_lib import config_rules

CONFIG_HELP = (
    'Configuration of the run: a file, or a name in configs/, such as demo; '
    '--config.FIELD=VALUE changes a field.'
)

_HERE = pathlib.Path(__file__).parent
_CONFIGS = next(path for path in (_HERE / 'configs', _HERE.parent / 'configs') if path.is_dir())

# Not their parent folder, which may hold a virtual environment.
_OWN_CODE = tuple(
    str(_HERE.parent / name) for name in ('coyo11m_tfds', 'train_lib', 'input_pipeline.py')
)

flags.DEFINE_bool('verbose', False, 'Show messages of libraries, and tracebacks of errors.')


def start(main: Callable[[], None], required: Sequence[str]) -> None:
    """Parses the command line and calls `main`, which reads `flags.FLAGS`.

    A wrong command line, or one without a required flag, ends the process with `error: ...` in one
    line and status 1, Ctrl-C with `Interrupted: ...` and status 130.
    """
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS['verbose'])  # for --help
    try:
        app.run(
            lambda argv: main(), flags_parser=functools.partial(_parse_flags, required=required)
        )
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        sys.stdout.flush()
        with os.fdopen(os.dup(sys.stderr.fileno()), 'w') as stderr:
            # The last line: threads of libraries may complain until the process has ended.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            print(end.code, file=stderr)
        os._exit(1)
    except KeyboardInterrupt as error:
        if _is_verbose():
            raise
        ending.say(error, 'start the same command again')
        os._exit(ending.INTERRUPTED)


def prepare(needs_data: bool = True) -> None:
    """Keeps TensorFlow off the accelerator and the log readable; call it before other imports.

    First, it ends the process for a wrong setting or data set (for none, too, if it `needs_data`),
    before the imports that take seconds.
    """
    if 'config' in flags.FLAGS and flags.FLAGS.is_parsed():
        with errors_in_one_line():
            _check_config(flags.FLAGS.config, needs_data)
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
    """Ends the process with `error: ...` and status 1 for errors that the user can mend.

    With `--verbose` the traceback precedes the line. By default these errors are wrong settings and
    unreadable files.
    """
    try:
        yield
    except kinds as error:
        if _is_verbose():
            logging.info('Where the error comes from:', exc_info=True)
        sys.exit(f'error: {_as_flags(ending.describe(error))}')


# --- The command line ---------------------------------------------------------------------------


def resolve(arguments: Sequence[str]) -> list[str]:
    """Replaces the name of a configuration on a command line by the path of its file.

    The path of an existing file stays unchanged; the file may import this package's configurations.
    Raises a `SystemExit` if neither a file nor a configuration has the name.
    """
    if str(_CONFIGS.parent) not in sys.path:
        sys.path.append(str(_CONFIGS.parent))  # where `configs` is imported from
    resolved = list(arguments)
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition('=')
        if flag not in ('-config', '--config'):
            continue
        if equals:
            resolved[number] = f'{flag}={_find_config(value)}'
        elif number + 1 < len(arguments):
            resolved[number + 1] = _find_config(arguments[number + 1])
    return resolved


def _find_config(name: str) -> str:
    path = name.partition(':')[0]  # the file gets the rest
    if pathlib.Path(path).is_file():
        return name
    known = {file.stem: file for file in sorted(_CONFIGS.glob('*.py'))}
    stem = path.removeprefix('configs/').removesuffix('.py')
    if stem not in known:
        sys.exit(
            f'error: --config={name}: there is no such file; expected one, or the name of a '
            f'configuration of this package: {", ".join(known)}.'
        )
    return name.replace(path, str(known[stem]), 1)


def _parse_flags(argv: Sequence[str], required: Sequence[str]) -> list[str]:
    argv = resolve(argv)
    with errors_in_one_line((flags.Error, OSError, ValueError, TypeError)):
        try:
            _, *stray = flags.FLAGS(argv)
            if stray:
                raise flags.Error(f'unexpected arguments: {" ".join(stray)}')
            if 'config' in flags.FLAGS and flags.FLAGS['config'].present:
                _ = flags.FLAGS.config.seed  # the first use loads the file
            missing = [f'--{name}' for name in required if flags.FLAGS[name].value in (None, '')]
            if missing:
                raise flags.Error(f'missing: {", ".join(missing)}')
            for name in flags.FLAGS:
                value = flags.FLAGS[name].value
                if isinstance(value, float) and not math.isfinite(value):
                    raise flags.Error(f'--{name}={value}: expected a finite number')
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
    """Names the flag, or the line of the file, and what is wrong there."""
    given = dict(re.findall(r'^--?(config[\w.]*)=(.*)', '\n'.join(argv), re.MULTILINE))
    path = given.pop('config', '')
    if isinstance(error, OSError):
        return f'--config={path}: {error}'
    trace = ''.join(traceback.format_exception(error))  # quotes that of the file
    frames = re.findall(r'^ +File "(.*)", line (\d+)', trace, re.MULTILINE)
    own = [line for file, line in frames if file == path.partition(':')[0]]
    where = f'--config={path}, line {own[-1]}' if own else f'--config={path}'
    is_of_a_field = isinstance(error, (KeyError, AttributeError))
    if not (is_of_a_field and frames[-1][0].endswith('config_dict.py')):
        *_, said = re.findall(r'^\w+: .*', trace, re.MULTILINE)
        return f'{where}: {said}'
    # The message begins with the field in quotes, unless the field is being added.
    found = re.search(r'Key "(\w+)"', str(error)) or re.search(r'(\w+)', str(error))
    missing = asked = found[1] if found else ''
    if not own and (names := [name for name in given if missing in name.split('.')]):
        where, asked = f'--{names[0]}', names[0].removeprefix('config.')
    known = sorted({part for name in _fields() for part in (name, name.rpartition('.')[0])})
    ends = {name: name.rpartition('.')[2] for name in known}
    best = difflib.get_close_matches(asked.rpartition('.')[2], ends.values(), n=1)
    likely = [name for name in known if ends[name] in best]
    likely = difflib.get_close_matches(asked, likely, n=1, cutoff=0)
    advice = f'; did you mean {likely[0]!r}?' if likely else ''
    return f'{where}: there is no field {missing!r}{advice}'


def _as_flags(message: str) -> str:
    """Names settings as they are typed: `--config.data.lanes=2` where the reader says `lanes=2`."""
    if 'config' not in flags.FLAGS:  # programs that draw have flags of a run's `preview`
        return re.sub(r'(?<![\w.-])preview\.(\w+)=', r'--\1=', message)
    names = _fields()
    full = {name.removeprefix('data.'): name for name in names} | {name: name for name in names}
    fields = '|'.join(map(re.escape, full))
    # But not those in paths, such as /data/seed=1/x.
    setting = rf'(?<![\w./-])({fields})=(?!\d+/)'
    return re.sub(setting, lambda found: f'--config.{full[found[1]]}=', message)


def _check_config(config: Any, needs_data: bool) -> None:
    config_rules.check_config(config, needs_data=needs_data)
    data = config.data
    # A host whose folder is missing tells the others, once they are joined.
    is_alone = not (
        config.distributed or ('process_count' in flags.FLAGS and flags.FLAGS.process_count)
    )
    try:
        if is_alone and (data.mix or data.dir):
            input_pipeline.open_mix(data.mix or data.dir)
    except FileNotFoundError as error:
        raise FileNotFoundError(f'data.{"mix" if data.mix else "dir"}={error}') from error


def _fields() -> list[str]:
    from configs import default  # which `resolve` has made known

    return list(config_rules.flatten_fields(default.get_config().to_dict()))


# --- The log ------------------------------------------------------------------------------------


def _is_verbose() -> bool:
    # Programs that do not parse flags call `prepare`, too.
    return flags.FLAGS.is_parsed() and flags.FLAGS.verbose


def _unraisable(report: Callable[[Any], Any], error: Any) -> None:
    """Reports all but what follows from an error of a checkpoint, once for each of its arrays."""
    if str(error.exc_value) != 'Event loop is closed':
        report(error)


class _Lines(standard_logging.Formatter):
    """The time of day and the message, with the level of a warning or worse.

    Libraries log errors before they raise them, so their tracebacks are left out.
    """

    def format(self, record: standard_logging.LogRecord) -> str:
        level = '' if record.levelno <= standard_logging.INFO else f'{record.levelname}: '
        if not record.pathname.startswith(_OWN_CODE):
            record.exc_info = record.exc_text = None
        return f'{self.formatTime(record, "%H:%M:%S")} {level}{super().format(record)}'


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """True for our own messages and for the warnings of libraries."""
    return record.levelno > standard_logging.INFO or record.pathname.startswith(_OWN_CODE)
