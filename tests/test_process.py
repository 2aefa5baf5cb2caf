"""What processes of a run learn of each other, on processes that are real."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

_PROGRAM = """
import socket, sys
import jax
from train_lib import process

port, index, name = sys.argv[1:]
jax.distributed.initialize(f'127.0.0.1:{port}', 3, int(index))
socket.gethostname = lambda: name
print(process.processes_on_host())
"""


@pytest.mark.slow
def test_processes_of_one_host_share_its_memory():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, '-c', _PROGRAM, port, str(index), name],
            cwd=pathlib.Path(__file__).parents[1],
            env=os.environ | {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '2'},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, name in enumerate(['a', 'b', 'a'])
    ]
    try:
        told = [process.communicate(timeout=120)[0].split()[-1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert told == ['2', '1', '2']
