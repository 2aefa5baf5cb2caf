"""Starts and ends the programs of this package: command line, log, one-line errors.

`--config=demo` is `configs/demo.py` of a checkout, or `train_lib/configs/demo.py` of an installed
package, in any working directory.
"""

# Imports neither JAX nor TensorFlow, which read their environment when they are imported.

import contextlib
import difflib
import functools
import importlib
import itertools
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
from ml_collections import config_dict

import input_pipeline
from coyo11m_tfds.process import command_line, errors, programs
from train_lib.lifecycle import config_rules

CONFIG_HELP = (
    'Configuration of the run: a file, or a name in configs/, such as demo; '
    '--config.FIELD=VALUE changes a field.'
)

# By how absl's errors about a value begin.
_EXPECTED_TYPES = {
    'invalid literal for int': 'a whole number',
    'could not convert string to float': 'a number',
    r"\('Non-boolean argument": 'True or False',
}

_HERE = pathlib.Path(__file__).parent
_CONFIGS = next(path for path in (_HERE / 'configs', _HERE.parent / 'configs') if path.is_dir())

flags.DEFINE_bool('verbose', False, 'Show messages of libraries, and tracebacks of errors.')
flags.DEFINE_bool('version', False, 'Show the version of this package.')


def start(
    main: Callable[[], None],
    required: Sequence[str],
    fixable: tuple[type[Exception], ...] = (ValueError, OSError),
) -> None:
    """Parses the command line and calls `main`, which reads `flags.FLAGS`.

    A wrong command line, or one without a required flag, and `fixable` errors end the process with
    `error: ...` in one line and status 1, Ctrl-C with `Interrupted: ...` and status 130.
    """
    for name in ('verbose', 'version'):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])  # for --help
    parse = functools.partial(_parse_flags, required=required)

    def call_main(argv: Sequence[str]) -> None:
        with errors_in_one_line(fixable):
            main()

    try:
        app.run(call_main, flags_parser=parse)
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        sys.stdout.flush()
        # The error must be the last line, but threads of libraries may log until the process ends.
        with os.fdopen(os.dup(sys.stderr.fileno()), 'w') as stderr:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            command_line.print_lines(end.code, file=stderr)
        os._exit(1)
    except KeyboardInterrupt as error:
        if _is_verbose():
            raise
        command_line.print_error(error, 'start the same command again')
        os._exit(command_line.INTERRUPTED)


def prepare(needs_data: bool = True) -> None:
    """Checks fields and data set, keeps TensorFlow off the accelerator and the log readable.

    Call it before imports that take seconds.
    """
    _prepare_log()
    if 'config' in flags.FLAGS and flags.FLAGS.is_parsed():
        config = flags.FLAGS.config
        config_rules.check_config(config, needs_data=needs_data)
        # A host that lacks the folder reports it to the others, once they are joined.
        has_processes = 'process_count' in flags.FLAGS and flags.FLAGS.process_count
        is_alone = not (config.distributed or has_processes)
        if is_alone and (config.data.mix or config.data.dir):
            config_rules.open_sources(config)
    programs.announce_start()
    import tensorflow as tf

    # TensorFlow only reads records: the accelerator's memory is for JAX.
    tf.config.set_visible_devices([], 'GPU')


@contextlib.contextmanager
def errors_in_one_line(
    fixable: tuple[type[Exception], ...] = (ValueError, OSError),
) -> Iterator[None]:
    """Ends the process with `error: ...` and status 1 for wrong fields and unreadable files."""
    try:
        yield
    except fixable as error:
        if _is_verbose():
            logging.info('Where the error comes from:', exc_info=True)
        message = errors.describe_error(error)
        if isinstance(error, errors.FieldError):
            message = _flag_name(error.field) + message.removeprefix(error.field)
        sys.exit(f'error: {message}')


def _flag_name(field: str) -> str:
    """The flag that sets a field: `--config.data.lanes` for `lanes`, as readers call it."""
    if 'config' not in flags.FLAGS:  # programs that draw have flags of a run's `preview`
        field = field.removeprefix('preview.')
        return f'--{field}' if field in flags.FLAGS else field
    names = (x for x in (field, f'data.{field}') if x in _default_fields())
    return f'--config.{name}' if (name := next(names, None)) else field


# --- The command line ---------------------------------------------------------------------------


def load_config(name: str) -> config_dict.ConfigDict:
    """Returns the configuration that `--config=NAME` names, such as `load_config('small')`."""
    _make_configs_importable()
    return importlib.import_module(f'configs.{name}').get_config()


def _make_configs_importable() -> None:
    if str(_CONFIGS.parent) not in sys.path:
        sys.path.append(str(_CONFIGS.parent))


def resolve(arguments: Sequence[str]) -> list[str]:
    """Replaces the name of a configuration on a command line by the path of its file."""
    _make_configs_importable()
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
    files = {file.stem: file for file in sorted(_CONFIGS.glob('*.py'))}
    file = next((x for x in _longer_paths(name) if pathlib.Path(x).is_file()), '')
    if file:
        sys.exit(
            f'error: --config={name}: what follows the first colon goes to get_config of the file '
            f'{path}; for the file {file}, expected a path without a colon, as after `cd` to its '
            'folder.'
        )
    stem = path.removeprefix('configs/').removesuffix('.py')
    if stem not in files:
        sys.exit(
            f'error: --config={name}: there is no such file on this machine; expected one, '
            f'or the name of a configuration of this package: {", ".join(files)}.'
        )
    return name.replace(path, str(files[stem]), 1)


def _longer_paths(name: str) -> Iterator[str]:
    """Yields what precedes each colon but the first, and all."""
    return itertools.islice(itertools.accumulate(name.split(':'), '{}:{}'.format), 1, None)


def _parse_flags(argv: Sequence[str], required: Sequence[str]) -> list[str]:
    argv = resolve(argv)
    with errors_in_one_line():
        try:
            _check_blocks(argv)
            _, *extra_arguments = flags.FLAGS(argv)
            if flags.FLAGS.version:
                command_line.print_lines(command_line.VERSION)
                sys.exit()
            if extra_arguments:
                raise flags.Error(f'unexpected arguments: {" ".join(extra_arguments)}')
            if 'config' in flags.FLAGS and flags.FLAGS['config'].present:
                _ = flags.FLAGS.config.seed  # the first use loads the file
            _check_flags(required)
        except (flags.Error, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            problem = _explain_config_error(argv, error) or _explain_wrong_type(error)
            raise ValueError(problem or _explain(error)) from error
        except Exception as error:
            # Any error of the file of a configuration is one of the user.
            if problem := _explain_config_error(argv, error):
                raise ValueError(problem) from error
            raise
        except SystemExit:
            sys.exit()  # absl shows the help, and ends with 1
    return argv[:1]


def _check_blocks(argv: Sequence[str]) -> None:
    """Raises an error for a flag that would replace all fields of a block, such as `optimizer`."""
    fields = _default_fields()
    for name in _override_values(argv):
        block = [field for field in fields if field.startswith(f'{name.removeprefix("config.")}.')]
        if name.startswith('config.') and block:
            raise flags.Error(
                f'--{name}: expected a flag for each field to change, such as --config.{block[0]}'
            )


def _override_values(argv: Sequence[str]) -> dict[str, str]:
    return dict(x.lstrip('-').partition('=')[::2] for x in argv if x.startswith('-'))


def _check_flags(required: Sequence[str]) -> None:
    missing = [f'--{name}' for name in required if flags.FLAGS[name].value in (None, '')]
    if missing:
        raise flags.Error(f'missing: {", ".join(missing)}')
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise flags.Error(f'--{name}={value}: expected a finite number')


def _explain(error: Exception) -> str:
    """The message of an error in the flags, with a command that works."""
    program = sys.modules['__main__']
    name = program.__spec__.name if program.__spec__ else ''
    return f'{error}; {command_line.example_of_use(f"python -m {name}", program.__doc__)}'


def _explain_wrong_type(error: Exception) -> str:
    """Names the flag, its value and what it expects; '' for errors that are not of a type."""
    for words, expected in _EXPECTED_TYPES.items():
        match = re.fullmatch(f'flag (--[\\w.]+)=(.*): {words}.*', str(error), re.DOTALL)
        if match:
            return f'{match[1]}={match[2]!r}: expected {expected}'
    return ''


def _explain_config_error(argv: Sequence[str], error: BaseException) -> str:
    """Names the `--config` flag, or the line of the file, and what is wrong; '' for other flags."""
    overrides = _override_values(argv)
    path = overrides.get('config', '')
    # Absl and ml_collections raise errors of their own while they handle the error of the file.
    cause: BaseException | None = error
    while cause is not None:
        frames = list(traceback.walk_tb(cause.__traceback__))
        lines = [line for x, line in frames if x.f_code.co_filename == path.partition(':')[0]]
        if lines:
            code, variables = frames[-1][0].f_code, frames[-1][0].f_locals
            is_of_a_field = isinstance(cause, (KeyError, AttributeError))
            if is_of_a_field and code.co_filename == config_dict.config_dict.__file__:
                problem = _describe_missing(variables.get('attribute') or variables['key'])
            else:
                problem = f'{type(cause).__name__}: {cause}'
            return f'--config={path}, line {lines[-1]}: {problem}'
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, (LookupError, AttributeError, TypeError)):
        names = [x.removeprefix('config.') for x in overrides if x.startswith('config.')]
        for name in names:
            if name not in _default_fields():
                return f'--config.{name}: {_describe_missing(name)}'
        return f'--config={path}: {type(error).__name__}: {error}'
    return f'--config={path}: {error}' if isinstance(error, OSError) else ''


def _describe_missing(name: str) -> str:
    """Describes a field that no configuration has, with the most similar one that there is."""
    fields = {x for field in _default_fields() for x in (field, field.rpartition('.')[0])}
    steps = list(itertools.accumulate(name.split('.'), '{}.{}'.format))
    missing = next(x for x in steps if x not in fields).rpartition('.')[2]
    endings = {field: field.rpartition('.')[2] for field in sorted(fields)}
    closest = difflib.get_close_matches(name.rpartition('.')[2], endings.values(), n=1)
    matches = [field for field in endings if endings[field] in closest]
    matches = difflib.get_close_matches(name, matches, n=1, cutoff=0)
    advice = f'; did you mean {matches[0]!r}?' if matches else ''
    return f'there is no field {missing!r}{advice}'


def _default_fields() -> list[str]:
    return list(config_rules.flatten_fields(load_config('default').to_dict()))


# --- The log ------------------------------------------------------------------------------------


def _is_verbose() -> bool:
    # Programs that do not parse flags call `prepare`, too.
    return flags.FLAGS.is_parsed() and flags.FLAGS.verbose


def _prepare_log() -> None:
    handler = logging.get_absl_handler()
    if _is_verbose():
        handler.setFormatter(_VerboseFormatter())
        return
    handler.addFilter(_is_worth_reading)
    handler.setFormatter(_RunFormatter())
    sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)
    input_pipeline.quiet_tensorflow()


def _report_unraisable(report: Callable[[Any], Any], error: Any) -> None:
    """Leaves out what a failed checkpoint causes for each of its arrays; reports all else."""
    if str(error.exc_value) != 'Event loop is closed':
        report(error)


class _RunFormatter(command_line.LogFormatter):
    """Leaves out the tracebacks of libraries, which log errors before they raise them."""

    def format(self, record: standard_logging.LogRecord) -> str:
        if not record.pathname.startswith(command_line.OWN_CODE):
            record.exc_info = record.exc_text = None
        return super().format(record)


class _VerboseFormatter(command_line.SafeFormatter, logging.PythonFormatter):
    """Formats messages with the lines of code that log them."""


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """True for our own messages and for the warnings of libraries."""
    is_own = record.pathname.startswith(command_line.OWN_CODE)
    return is_own or record.levelno > standard_logging.INFO
