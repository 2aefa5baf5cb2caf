"""Has `tests.fork_server` run a program, and ends as the program does.

    python -IS tests/fork_client.py SOCKET -m PROGRAM ...
    python -IS tests/fork_client.py SOCKET -c CODE ...

The program has the arguments, files, folder and environment of this process. If this process is
killed, so is the program.
"""

import json
import os
import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
path, *arguments = sys.argv[1:]
request = {'arguments': arguments, 'folder': os.getcwd(), 'environment': {**os.environ}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(path)
    socket.send_fds(server, [b'f'], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b'\n')
    status = int(server.makefile().readline())
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
