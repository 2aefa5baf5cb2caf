"""A proxy on loopback that opens the TLS connections of TensorFlow's gs:// file system.

    with TlsProxy(('127.0.0.1', port_of_a_plain_http_server), folder) as proxy:
        env = {'https_proxy': proxy.url, 'CURL_CA_BUNDLE': str(proxy.certificate)}

TensorFlow has no setting for the address of the storage, but libcurl inside it honours
`https_proxy`. This proxy answers for any host, with a certificate made at start, and passes all to
one plain HTTP server, byte for byte: also how a connection ends.
"""

import contextlib
import datetime
import ipaddress
import pathlib
import select
import socket
import socketserver
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.fakes.fake_http import LoopbackServer, reset

_HOSTS = ('storage.googleapis.com', 'www.googleapis.com', 'oauth2.googleapis.com', 'localhost')
_PIECE = 1 << 18  # bytes passed on at a time
_HANDSHAKE_SECONDS = 10


def make_certificate(folder: pathlib.Path) -> pathlib.Path:
    """A file with a fresh certificate for Google's storage hosts, which signs itself, and its key.

    An elliptic curve, because TensorFlow shakes hands anew for every request.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, 'coyo11m_tfds tests')])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(host) for host in _HOSTS]
    names.append(x509.IPAddress(ipaddress.ip_address('127.0.0.1')))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / 'certificate.pem'
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


class TlsProxy:
    """The proxy; a context manager that serves while it is open.

    Attributes:
        url: for `https_proxy`.
        certificate: PEM file, for `CURL_CA_BUNDLE`.
    """

    def __init__(self, target: tuple[str, int], folder: pathlib.Path):
        self.certificate = make_certificate(folder)
        self._server = LoopbackServer(_Relay)
        self._server.target = target
        self._server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.context.load_cert_chain(self.certificate)
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._server.stop()


class _Relay(socketserver.BaseRequestHandler):
    """One connection: CONNECT, handshake, then bytes both ways."""

    def handle(self):
        with contextlib.suppress(OSError):  # the client left
            self.request.settimeout(_HANDSHAKE_SECONDS)
            self._accept_connect()
            with (
                self.server.context.wrap_socket(self.request, server_side=True) as client,
                socket.create_connection(self.server.target) as storage,
                self.server.tracked(client),
                self.server.tracked(storage),
            ):
                client.settimeout(None)
                storage.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._relay(client, storage)

    def _accept_connect(self):
        head = b''
        while not head.endswith(b'\r\n\r\n'):
            piece = self.request.recv(4096)
            if not piece:
                raise ConnectionAbortedError
            head += piece
        if not head.startswith(b'CONNECT '):
            self.request.sendall(b'HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n')
            raise ConnectionAbortedError
        self.request.sendall(b'HTTP/1.1 200 Connection established\r\n\r\n')

    def _relay(self, client: ssl.SSLSocket, storage: socket.socket) -> None:
        """Passes bytes on until either side closes.

        One thread does both ways, because two may not share one SSLSocket. A piece is larger than
        a TLS record, so nothing that came waits inside the SSLSocket, where select() is blind.
        """
        while True:
            ready, _, _ = select.select([client, storage], [], [])
            for source, sink in ((client, storage), (storage, client)):
                if source not in ready:
                    continue
                try:
                    piece = source.recv(_PIECE)
                except ConnectionResetError:
                    reset(sink)
                    return
                if not piece:
                    return
                sink.sendall(piece)
