"""A server on loopback with a thread for each connection, which can be stopped at any moment.

server = LoopbackServer(Handler)  # a socketserver.BaseRequestHandler
server.start()
socket.create_connection(server.server_address)
server.stop()  # also ends the connections that are open
"""

import contextlib
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator


class LoopbackServer(socketserver.ThreadingTCPServer):
    """A server with a thread for each connection that can be closed while they are open."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, handler: type[socketserver.BaseRequestHandler]):
        self._open: set[socket.socket] = set()
        super().__init__(('127.0.0.1', 0), handler)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Ends all connections and waits for their threads."""
        self.shutdown()
        for connection in list(self._open):
            with contextlib.suppress(OSError):  # it was just closed
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    @contextlib.contextmanager
    def tracked(self, connection: socket.socket) -> Iterator[None]:
        """While this is open, `stop` ends this connection as well."""
        self._open.add(connection)
        try:
            yield
        finally:
            self._open.discard(connection)

    def finish_request(self, request, client_address):
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.tracked(request):
            super().finish_request(request, client_address)


def reset(connection: socket.socket) -> None:
    """Closes a connection with RST.

    Not by close(), because a stream made of the socket would keep it open, and not with shutdown(),
    which would say goodbye in good form first.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    os.close(connection.detach())
