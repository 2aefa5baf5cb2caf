"""Plain HTTP for tests of the stand-ins, without the retries of any library.

client = Client(server)
client('GET', '/bucket/a', Range='bytes=0-9').body
"""

import http.client
import json
import urllib.parse
from typing import Any, NamedTuple

from tests.fakes.fake_http import FakeServer


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks the server by plain HTTP, every time over a new connection."""

    def __init__(self, server: FakeServer):
        self.server = server

    def __call__(self, method: str, path: str, body: bytes = b'', **headers: str) -> Answer:
        connection = http.client.HTTPConnection(*self.server.address, timeout=5)
        try:
            headers = {name.replace('_', '-'): text for name, text in headers.items()}
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return Answer(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    def upload(self, name: str, data: bytes, **query: str) -> Answer:
        """An upload in one request."""
        query = urllib.parse.urlencode({'uploadType': 'media', 'name': name, **query})
        return self('POST', f'/upload/storage/v1/b/bucket/o?{query}', data)

    def start_upload(self, name: str) -> str:
        """Path of a new resumable upload."""
        query = urllib.parse.urlencode({'uploadType': 'resumable', 'name': name})
        answer = self('POST', f'/upload/storage/v1/b/bucket/o?{query}')
        where = urllib.parse.urlsplit(answer.headers['Location'])
        return f'{where.path}?{where.query}'

    def send_part(self, path: str, data: bytes, first: int, total: int) -> Answer:
        """A part of a resumable upload; without data a question how far it is."""
        part = f'{first}-{first + len(data) - 1}' if data else '*'
        return self('PUT', path, data, Content_Range=f'bytes {part}/{total}')
