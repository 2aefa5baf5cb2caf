"""Starts and ends the programs of this package: command line, log, one-line errors.

`--config=demo` is `configs/demo.py` of a checkout, or `train_lib/configs/demo.py` of an installed
package, in any working directory.
"""

# Imports neither JAX nor TensorFlow, which read their environment when they are imported.

import contextlib
import difflib
import functools
import importlib
import logging as standard_logging
import math
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_dict

import input_pipeline
from coyo11m_tfds import storage
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

# Those of an installed package lie inside of it, those of a checkout next to it.
_HERE = pathlib.Path(__file__).parent
_CONFIGS = _HERE / 'configs'
if not _CONFIGS.is_dir():
    _CONFIGS = _HERE.parent / 'configs'

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

    Args:
        main: The program.
        required: Names of flags that must have a value.
        fixable: Errors that a user can fix; others keep their traceback.
    """
    # So that --help shows them, too.
    for name in ('verbose', 'version'):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    parse = functools.partial(_parse_flags, required=required)

    def call_main(argv: Sequence[str]) -> None:
        """Calls `main`, as absl calls a program."""
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
    """Checks fields and data set, and keeps the log readable.

    Call it before imports that take seconds.

    Args:
        needs_data: Whether the configuration, if the program has one, must name a data set.

    Raises:
        ValueError: A field has a wrong value, or the data sets do not fit each other.
        OSError: A data set does not exist, or its metadata cannot be read.
    """
    _prepare_log()
    # Programs that do not parse flags call this, too.
    if 'config' in flags.FLAGS and flags.FLAGS.is_parsed():
        config = flags.FLAGS.config
        config_rules.check_config(config, needs_data=needs_data)
        # A host that lacks the folder reports it to the others, once they are joined.
        has_processes = 'process_count' in flags.FLAGS and flags.FLAGS.process_count
        is_alone = not (config.distributed or has_processes)
        if is_alone and (config.data.mix or config.data.dir):
            config_rules.open_sources(config)
    programs.announce_start()


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
    """Returns the flag that sets a field: `--config.data.lanes` for `lanes`, as readers call it.

    A field without a flag stays what it is.
    """
    if 'config' not in flags.FLAGS:
        # Programs that draw have flags of a run's `preview`.
        field = field.removeprefix('preview.')
        return f'--{field}' if field in flags.FLAGS else field
    fields = _default_fields()
    for name in (field, f'data.{field}'):
        if name in fields:
            return f'--config.{name}'
    return field


# --- The command line ---------------------------------------------------------------------------


def load_config(name: str) -> config_dict.ConfigDict:
    """Returns the configuration that `--config=NAME` names, such as `load_config('small')`.

    Raises a ModuleNotFoundError for another name.
    """
    _make_configs_importable()
    return importlib.import_module(f'configs.{name}').get_config()


def _make_configs_importable() -> None:
    """Lets `configs.NAME` be imported, also by the files of users' configurations."""
    if str(_CONFIGS.parent) not in sys.path:
        sys.path.append(str(_CONFIGS.parent))


def resolve(arguments: Sequence[str]) -> list[str]:
    """Replaces the name of a configuration on a command line by the path of its file."""
    _make_configs_importable()
    # Before absl reads it: a configuration is found by its path alone.
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
    """Returns the path of the file of a configuration; ends the process if there is none."""
    # Shells leave the home folder in `--config=~/mine.py` to the program.
    name = storage.expand_home(name)
    # The file gets what follows the colon.
    path, _, _ = name.partition(':')
    # Not by `pathlib`, which raises an error for a name that is too long for a file.
    if os.path.isfile(path):
        return name
    for longer_path in _longer_paths(name):
        if os.path.isfile(longer_path):
            sys.exit(
                f'error: --config={name}: what follows the first colon goes to get_config of the '
                f'file {path}; for the file {longer_path}, expected a path without a colon, as '
                'after `cd` to its folder.'
            )
    files = {file.stem: file for file in sorted(_CONFIGS.glob('*.py'))}
    stem = path.removeprefix('configs/').removesuffix('.py')
    if stem not in files:
        sys.exit(
            f'error: --config={name}: there is no such file on this machine; expected one, '
            f'or the name of a configuration of this package: {", ".join(files)}.'
        )
    return name.replace(path, str(files[stem]), 1)


def _longer_paths(name: str) -> Iterator[str]:
    """Yields what precedes each colon but the first, and all."""
    path, *parts = name.split(':')
    for part in parts:
        path = f'{path}:{part}'
        yield path


def _parse_flags(argv: Sequence[str], required: Sequence[str]) -> list[str]:
    """Parses a command line, as absl calls it; ends the process with a line for a wrong one."""
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
                # The first use loads the file.
                _ = flags.FLAGS.config.seed
            _check_flags(required)
        except (flags.Error, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            problem = _explain_config_error(argv, error) or _explain_wrong_type(error)
            raise ValueError(problem or _explain(error)) from error
        except Exception as error:
            # Any error of the file of a configuration is one of the user.
            problem = _explain_config_error(argv, error)
            if problem:
                raise ValueError(problem) from error
            raise
        except SystemExit:
            # After absl has shown the help, for which its status is 1.
            sys.exit()
    return argv[:1]


def _check_blocks(argv: Sequence[str]) -> None:
    """Raises an error for a flag that would replace all fields of a block, such as `optimizer`."""
    fields = _default_fields()
    for name in _override_values(argv):
        if not name.startswith('config.'):
            continue
        prefix = f'{name.removeprefix("config.")}.'
        block = [field for field in fields if field.startswith(prefix)]
        if block:
            raise flags.Error(
                f'--{name}: expected a flag for each field to change, such as --config.{block[0]}'
            )


def _override_values(argv: Sequence[str]) -> dict[str, str]:
    """Returns the flags of a command line with their texts, '' for one without a value."""
    values = {}
    for argument in argv:
        if argument.startswith('-'):
            name, _, value = argument.lstrip('-').partition('=')
            values[name] = value
    return values


def _check_flags(required: Sequence[str]) -> None:
    """Raises an error if a required flag is missing, or a number is not finite."""
    missing = []
    for name in required:
        if flags.FLAGS[name].value in (None, ''):
            missing.append(f'--{name}')
    if missing:
        raise flags.Error(f'missing: {", ".join(missing)}')
    # Absl takes `nan` and `inf` for numbers.
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise flags.Error(f'--{name}={value}: expected a finite number')


def _explain(error: Exception) -> str:
    """Returns the message of an error in the flags, with a command that works."""
    program = sys.modules['__main__']
    # Only a program that `python -m` has started has a spec.
    name = program.__spec__.name if program.__spec__ else ''
    example = command_line.example_of_use(f'python -m {name}', program.__doc__)
    return f'{error}; {example}'


def _explain_wrong_type(error: Exception) -> str:
    """Returns the flag, its value and what it expects; '' for errors that are not of a type."""
    for words, expected in _EXPECTED_TYPES.items():
        match = re.fullmatch(f'flag (--[\\w.]+)=(.*): {words}.*', str(error), re.DOTALL)
        if match:
            return f'{match[1]}={match[2]!r}: expected {expected}'
    return ''


def _explain_config_error(argv: Sequence[str], error: BaseException) -> str:
    """Returns the `--config` flag, or the line of the file, and what is wrong.

    For other flags it returns ''.
    """
    overrides = _override_values(argv)
    path = overrides.get('config', '')
    # Absl and ml_collections raise errors of their own while they handle the error of the file.
    cause: BaseException | None = error
    while cause is not None:
        problem = _explain_line_of_file(path, cause)
        if problem:
            return problem
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, (LookupError, AttributeError, TypeError)):
        # They do not name the flag; the first one whose field no configuration has is it.
        fields = _default_fields()
        for flag in overrides:
            name = flag.removeprefix('config.')
            if flag != name and name not in fields:
                return f'--config.{name}: {_describe_missing(name)}'
        return f'--config={path}: {type(error).__name__}: {error}'
    if isinstance(error, OSError):
        return f'--config={path}: {error}'
    return ''


def _explain_line_of_file(path: str, error: BaseException) -> str:
    """Returns the line of a configuration's file that raised an error, and what is wrong.

    For errors that were raised elsewhere it returns ''.
    """
    file, _, _ = path.partition(':')
    # Of a file that Python cannot parse, no line has run.
    if isinstance(error, SyntaxError) and error.filename == file:
        return f'--config={path}, line {error.lineno}: {type(error).__name__}: {error.msg}'
    frames = list(traceback.walk_tb(error.__traceback__))
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    if not lines:
        return ''
    last_frame, _ = frames[-1]
    return f'--config={path}, line {lines[-1]}: {_describe_file_error(error, last_frame)}'


def _describe_file_error(error: BaseException, last_frame: types.FrameType) -> str:
    """Returns what is wrong in the file of a configuration; the error was raised in this frame."""
    is_of_a_dict = last_frame.f_code.co_filename == config_dict.config_dict.__file__
    if is_of_a_dict and isinstance(error, (KeyError, AttributeError)):
        variables = last_frame.f_locals
        return _describe_missing(variables.get('attribute') or variables['key'])
    return f'{type(error).__name__}: {error}'


def _describe_missing(name: str) -> str:
    """Describes a field that no configuration has, with the most similar one that there is."""
    # Blocks are fields, too.
    fields = set()
    for field in _default_fields():
        block, _, _ = field.rpartition('.')
        fields |= {field, block}
    missing = _find_missing_part(name, fields)
    similar = _find_similar_field(name, fields)
    if not similar:
        return f'there is no field {missing!r}'
    # A file names a field by its last part alone, which another block may have.
    if missing == similar:
        return f'there is no field {missing!r} in this block; did you mean config.{missing}?'
    return f'there is no field {missing!r}; did you mean {similar!r}?'


def _find_missing_part(name: str, fields: Collection[str]) -> str:
    """Returns the first part of a field's name that is missing: of `data.a.b`, perhaps `a`."""
    parts = name.split('.')
    for number, part in enumerate(parts, 1):
        if '.'.join(parts[:number]) not in fields:
            return part
    return parts[-1]


def _find_similar_field(name: str, fields: Collection[str]) -> str:
    """Returns the field with the most similar name, '' if there is none.

    The most similar last part counts, and among equal ones the most similar name.
    """
    endings = {}
    # Sorted, so that the advice is the same in each process.
    for field in sorted(fields):
        _, _, last_part = field.rpartition('.')
        endings[field] = last_part
    _, _, ending = name.rpartition('.')
    closest = difflib.get_close_matches(ending, endings.values(), n=1)
    candidates = [field for field in endings if endings[field] in closest]
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    return matches[0] if matches else ''


def _default_fields() -> list[str]:
    """Returns the names of all fields, such as `data.lanes`."""
    return list(config_rules.flatten_fields(load_config('default').to_dict()))


# --- The log ------------------------------------------------------------------------------------


def _is_verbose() -> bool:
    """Whether the user wants messages of libraries and tracebacks."""
    # Programs that do not parse flags call `prepare`, too.
    return flags.FLAGS.is_parsed() and flags.FLAGS.verbose


def _prepare_log() -> None:
    """Keeps the log to what is worth reading, unless the user wants everything."""
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
        """Returns the lines of a message."""
        if not record.pathname.startswith(command_line.OWN_CODE):
            record.exc_info = record.exc_text = None
        return super().format(record)


class _VerboseFormatter(command_line.SafeFormatter, logging.PythonFormatter):
    """Formats messages with the lines of code that log them."""


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """Whether a message is our own, or a warning of a library."""
    is_own = record.pathname.startswith(command_line.OWN_CODE)
    return is_own or record.levelno > standard_logging.INFO
