"""JAX's cache of compiled programs: where it is, its bound, and whether a step came from it."""

import functools
import hashlib
import platform
import re
import time
import warnings
from pathlib import Path

import filelock
import jax
import ml_collections
from absl import logging
from etils import epath

from coyo11m_tfds import schema, storage
from coyo11m_tfds.storage import scratch
from train_lib.lifecycle import workdirs

AUTO = 'auto'  # the value of `config.compilation_cache` for the usual folder
_FOLDER = 'compiled'  # in the user's cache or in the workdir
_MAX_BYTES = 4_000_000_000  # of all entries; a step of XL/2 is one of some 100 MB
# Programs that are compiled in less time are not kept. JAX's default is 1 s, and some of a run take
# less.
_LEAST_SECONDS = 0.1

# Of JAX's warning: it then compiles the program, and leaves the entry as it is.
_UNREADABLE = "Error reading persistent compilation cache entry for '(.*?)'"


def use_cache(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> None:
    """Lets JAX keep compiled programs in the folder of `config.compilation_cache`.

    A folder that JAX has already, as from `JAX_COMPILATION_CACHE_DIR`, stays. A folder that cannot
    be written to is named in a warning, and nothing is kept.
    """
    if _folder_of_jax() or not config.compilation_cache:
        return
    folder = storage.make_absolute(_choose_folder(config, workdir))
    # The chips of accelerators are in JAX's own key of a program, those of CPUs are not.
    if jax.default_backend() == 'cpu':
        folder = f'{folder}/cpu-{_digest_instructions()}'
    try:
        # The process that writes.
        if jax.process_index() == 0:
            storage.open_writable_folder(folder).check_writable()
        if _may_be_bounded(folder):
            _remove_unfinished(Path(folder))
            jax.config.update('jax_compilation_cache_max_size', _MAX_BYTES)
    except (OSError, ValueError) as error:
        logging.warning(
            'Each start compiles anew, because compiled programs cannot be kept: %s. '
            "Set --config.compilation_cache to another folder, or to '' to keep none.",
            str(error).rstrip('.'),
        )
        return
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)


def _choose_folder(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> str:
    """Returns the folder that the configuration names or, for `AUTO`, the usual one."""
    if config.compilation_cache != AUTO:
        return config.compilation_cache
    # JAX writes in process 0 alone: the others find its programs only in a folder that they share.
    if jax.process_count() > 1:
        return str(workdirs.absolute(workdir) / _FOLDER)
    return scratch.user_cache(schema.NAME, _FOLDER)


def _digest_instructions() -> str:
    """Returns 8 hex digits that stand for the instructions of this machine's cores.

    JAX would give a program that was compiled for a CPU to another one, which may lack some.
    """
    description = Path('/proc/cpuinfo')
    instructions = platform.machine()
    if description.exists():
        for line in description.read_text('utf-8', 'replace').splitlines():
            # All cores have the same; ARM calls them features.
            if re.match('flags|Features', line):
                instructions += line
                break
    return hashlib.sha256(instructions.encode()).hexdigest()[:8]


def _may_be_bounded(folder: str) -> bool:
    """Whether JAX can lock a folder, as its bound needs it."""
    # Many processes would wait for each other: they read one after the other.
    return storage.local_path(folder) is not None and jax.process_count() == 1


def _remove_unfinished(folder: Path) -> None:
    """Removes entries whose writer was killed.

    JAX would neither read nor replace them and, without the times of their use, remove no others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The lock that JAX takes while it writes an entry, and last the time of its use.
    with filelock.FileLock(folder / '.lockfile', timeout=10):
        for entry in folder.glob('*-cache'):
            name = entry.name.removesuffix('-cache')
            if not (folder / f'{name}-atime').exists():
                entry.unlink()


def compile_step(lowered: jax.stages.Lowered) -> None:
    """Compiles the training step, or reads it from the cache; logs which of both, and its seconds.

    JAX keeps what is compiled here for the calls of the step.
    """
    num_hits = len(_list_hits())
    begin = time.monotonic()
    try:
        # An entry that cannot be read would never be replaced.
        with warnings.catch_warnings():
            warnings.filterwarnings('error', message=_UNREADABLE)
            lowered.compile()
    except UserWarning as warning:
        logging.warning('%s. It is compiled anew.', warning)
        _remove_entries(str(warning))
        lowered.compile()
    seconds = time.monotonic() - begin
    if jax.process_index():
        return
    folder = _folder_of_jax()
    if len(_list_hits()) > num_hits:
        logging.info('the compiled step was read from %s in %.1f s', folder, seconds)
    elif folder:
        logging.info('the step was not in %s: compiled in %.1f s', folder, seconds)
    else:
        logging.info('compiled in %.1f s; compiled programs are not kept', seconds)


def _folder_of_jax() -> str:
    """Returns the folder in which JAX keeps compiled programs; '' for none."""
    return getattr(jax.config, 'jax_compilation_cache_dir', None) or ''


@functools.cache
def _list_hits() -> list[str]:
    """Returns a list that JAX makes longer at each program that it reads from the cache."""
    hits: list[str] = []

    def note(event: str, **details: str | int) -> None:
        """Notes an event of JAX if a program was read."""
        if event == '/jax/compilation_cache/cache_hits':
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    return hits


def _remove_entries(warning: str) -> None:
    """Removes all entries of the module that JAX's warning names; it does not name the entry."""
    [module] = re.findall(_UNREADABLE, warning)
    for entry in epath.Path(_folder_of_jax()).glob(f'{module}-*'):
        entry.unlink(missing_ok=True)
