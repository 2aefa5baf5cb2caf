"""Measures how long a run takes from the command to its first step, new and resumed.

    python -m benchmarks.start --config demo --data_dir demo/data/coyo11m_tfds/words/1.0.0
    python -m benchmarks.start --config small --data_dir D --trees ../before . --repeats 5

Each run is a process of its own. A new one finds no compiled programs; it is stopped after its
first step, and the same command resumes it. With several checkouts (`--trees`), their runs take
turns. On a busy machine, seconds of CPU tell more than seconds.
"""

import argparse
import collections
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_FIRST_STEP = re.compile(r', step \d+ after .*: (\d+) s to begin')
_TICKS = os.sysconf('SC_CLK_TCK')


class Start(NamedTuple):
    """What a run took up to the end of its first step."""

    seconds: float  # since the command
    cpu_seconds: float  # of all threads
    begin_seconds: float  # up to the first batch, by the log; whole seconds


def measure_start(tree: str, flags: list[str], cache: str) -> Start:
    """Returns what the first step of a run took; then stops the run, which saves a checkpoint.

    Args:
        tree: Folder of the checkout that runs.
        flags: Flags of `train_lib.main`.
        cache: Folder of the user's cache, in which compiled programs are kept.
    """
    environment = os.environ | {'PYTHONPATH': os.path.abspath(tree), 'XDG_CACHE_HOME': cache}
    environment.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    # JAX's own folder would take the place of the user's cache.
    environment.pop('JAX_COMPILATION_CACHE_DIR', None)
    begin = time.monotonic()
    command = [sys.executable, '-m', 'train_lib.main', *flags]
    # In the checkout, because Python prefers the current folder.
    with subprocess.Popen(
        command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        start = None
        for line in process.stderr or ():
            lines.append(line)
            match = _FIRST_STEP.search(line)
            # The rest of the log is read, too, or a full pipe would stop the run from ending.
            if match:
                seconds = time.monotonic() - begin
                start = Start(seconds, _read_cpu_seconds(process.pid), float(match[1]))
                process.send_signal(signal.SIGTERM)
    if start is None:
        log = ''.join(lines)
        raise RuntimeError(f'{tree}: the run ended before its first step: {log}')
    return start


def _read_cpu_seconds(pid: int) -> float:
    """Returns the seconds of CPU that a process has taken, by Linux."""
    with open(f'/proc/{pid}/stat', encoding='utf-8') as file:
        # The name of the program, in parentheses, may hold spaces.
        _, _, numbers = file.read().rpartition(')')
    # `utime` and `stime`, the fields 14 and 15 in proc(5); the first of these is field 3.
    user, system = numbers.split()[11:13]
    return (int(user) + int(system)) / _TICKS


def main() -> None:
    """Prints a line for each run, and the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--config', default='demo', help='name of a configuration')
    parser.add_argument('--data_dir', required=True, help='folder of a data set')
    parser.add_argument('--trees', nargs='+', default=['.'], help='checkouts to compare')
    parser.add_argument('--repeats', type=int, default=5, help='runs of each kind')
    options = parser.parse_args()
    starts: dict[tuple[str, str], list[Start]] = collections.defaultdict(list)
    for _ in range(options.repeats):
        for tree in options.trees:
            with tempfile.TemporaryDirectory() as folder:
                # Absolute, because each run has its checkout as its current folder.
                data_dir = os.path.abspath(options.data_dir)
                flags = [
                    f'--config={options.config}',
                    f'--config.data.dir={data_dir}',
                    f'--workdir={folder}/run',
                ]
                # The same command twice: the first leaves a checkpoint and compiled programs.
                for kind in ('new', 'resumed'):
                    start = measure_start(tree, flags, f'{folder}/cache')
                    starts[tree, kind].append(start)
                    print(f'{tree}: {kind}: {_describe(start)}', flush=True)
    print(f'\nmedians of {options.repeats}, {options.config}, {os.cpu_count()} cores')
    for (tree, kind), measured in starts.items():
        # Of each figure by itself, so that they may come from several runs.
        figures = zip(*measured, strict=True)
        medians = Start(*map(statistics.median, figures))
        print(f'{tree}: {kind}: {_describe(medians)}')


def _describe(start: Start) -> str:
    """Returns a line about what a run took."""
    return (
        f'{start.seconds:.1f} s to the first step, {start.begin_seconds:.0f} s to begin, '
        f'{start.cpu_seconds:.1f} s of CPU'
    )


if __name__ == '__main__':
    main()
