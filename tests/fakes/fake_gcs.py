"""A stand-in for Google Cloud Storage: for its own client, gcsfs, TensorFlow and TensorStore.

The JSON interface, as far as these clients use it. A bucket exists from its first mention on,
unless its name begins with 'no-such-'.
"""

import base64
import dataclasses
import gzip
import json
import pathlib
import re
import threading
import urllib.parse
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from tests.fakes.fake_http import (
    BrokenOff,
    Call,
    FakeServer,
    Refused,
    Reply,
    json_reply,
    select_range,
)
from tests.fakes.gcs_store import CONTENT_TYPE, Object, Store, Unchanged

_UPLOAD_UNIT = 256 << 10  # of an upload that breaks off, whole units are kept
_PAGE = 1000

# Paths, percent-encoded, and what the methods mean there. Names are one segment each, as the
# slashes in them are encoded; only the last form has them plain.
_BUCKETS = '/storage/v1/b'
_ROUTES = [
    (f'{_BUCKETS}/([^/]+)/?', {'GET': 'bucket'}),
    (f'{_BUCKETS}/([^/]+)/storageLayout', {'GET': 'layout'}),
    (f'{_BUCKETS}/([^/]+)/o/?', {'GET': 'list'}),
    (f'{_BUCKETS}/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)', {'POST': 'copy'}),
    (f'(?:/download)?{_BUCKETS}/([^/]+)/o/([^/]+)', {'GET': 'stat', 'DELETE': 'delete'}),
    (f'/upload{_BUCKETS}/([^/]+)/o/?', {'POST': 'upload', 'PUT': 'upload'}),
    ('/(?!storage/|upload/|download/)([^/]+)/(.+)', {'GET': 'read'}),
]


def select_fields(answer: Any, fields: str) -> Any:
    """What the parameter `fields` lets through, as in 'items(name,size),nextPageToken'."""
    if not fields:
        return answer
    if isinstance(answer, list):
        return [select_fields(item, fields) for item in answer]
    # What is wanted of each field: `items/name,items/size` is `items(name,size)`.
    fields_below: dict[str, list[str]] = {}
    # At commas, but not at those in parentheses.
    for part in re.findall(r'(?:[^,(]|\([^)]*\))+', fields):
        name, below, listed = re.fullmatch(r'([^/(]+)(?:/(.+)|\((.+)\))?', part).groups()
        fields_below.setdefault(name, []).append(below or listed or '')
    selected = {}
    for name, parts in fields_below.items():
        if name in answer:
            selected[name] = select_fields(answer[name], ','.join(filter(None, parts)))
    return selected


def list_names(names: Iterable[str], query: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Names that a listing gives, sorted, each with whether it stands for a folder."""
    prefix = query.get('prefix', '')
    delimiter = query.get('delimiter', '')
    first = query.get('startOffset', '')
    stop = query.get('endOffset', '')
    entries = set()
    for name in names:
        is_before_stop = not stop or name < stop
        if not (name.startswith(prefix) and first <= name and is_before_stop):
            continue
        entry = name, False
        below = name.removeprefix(prefix)
        # All names of a folder are one entry, which ends with the delimiter.
        if delimiter and delimiter in below:
            head, _, _ = below.partition(delimiter)
            entry = prefix + head + delimiter, True
        entries.add(entry)
    return sorted(entries)


def split_multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], str, bytes]:
    """Metadata, type and content of an upload of two parts; the lines may end in LF alone."""
    name = re.search(r'boundary="?([^";]+)"?', content_type)[1]
    boundary = b'--' + name.encode()
    newline = b'\r\n' if body.startswith(boundary + b'\r\n') else b'\n'
    empty_line = 2 * newline
    _, first, second = body.split(boundary + newline, 2)
    _, metadata = first.split(empty_line, 1)
    head, content = second.split(empty_line, 1)
    # The last one: the content may hold the same bytes.
    end = content.rindex(newline + boundary + b'--')
    match = re.search(r'(?im)^content-type:\s*(\S+)', head.decode())
    type_of_content = match[1] if match else CONTENT_TYPE
    return json.loads(metadata), type_of_content, content[:end]


@dataclasses.dataclass
class _Session:
    """A resumable upload under way."""

    bucket: str
    name: str
    query: dict[str, str]
    content_type: str
    data: bytearray = dataclasses.field(default_factory=bytearray)
    done: Object | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Gcs(FakeServer):
    """The server; `env` leads a child process here."""

    routes = _ROUTES

    def __init__(self):
        super().__init__()
        self.env: dict[str, str] = {'STORAGE_EMULATOR_HOST': self.url}
        self.requester_pays: set[str] = set()  # buckets that are read only for a project to bill
        self.location_types: dict[str, str] = {}  # of buckets that are not in one region
        self.tells_size_of_empty = True  # in the metadata of empty objects
        self.copied_at_once = 1 << 62  # bytes that a request copies at most; the next one continues
        self._store = Store()
        self.put, self.remove = self._store.put, self._store.remove
        self._sessions: dict[str, _Session] = {}

    # --- For the tests -----------------------------------------------------------------------

    def objects(self, bucket: str) -> dict[str, bytes]:
        """Content of all objects by name, sorted."""
        found = self._store.bucket(bucket)
        return {name: item.data for name, item in sorted(found.items())}

    def resource(self, bucket: str, name: str) -> dict[str, Any]:
        """Metadata of an object, as the JSON interface gives it; KeyError if there is none."""
        return self._store.bucket(bucket)[name].resource(self.url)

    def upload_folder(self, folder: str | pathlib.Path, url: str) -> None:
        """Stores all files below `folder` under 'gs://bucket/prefix'."""
        bucket, prefix = _split_url(url)
        # In the order of their names, so that generations tell nothing of the disk.
        for path in sorted(pathlib.Path(folder).rglob('*')):
            if path.is_file():
                name = prefix + path.relative_to(folder).as_posix()
                self.put(bucket, name, path.read_bytes())

    def download_folder(self, url: str, folder: str | pathlib.Path) -> None:
        """Writes all objects under 'gs://bucket/prefix' as files below `folder`."""
        bucket, prefix = _split_url(url)
        for name, item in self._store.bucket(bucket).items():
            if not name.startswith(prefix):
                continue
            path = pathlib.Path(folder) / name.removeprefix(prefix)
            # Such an object marks a directory.
            if name.endswith('/'):
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(item.data)

    # --- What a request is about -------------------------------------------------------------

    def describe(self, call: Call) -> tuple[str, str]:
        action, names = self.route(call)
        bucket = names[0]
        if action == 'list':
            prefix = call.query.get('prefix', '')
            return action, f'{bucket}/{prefix}'
        if action in ('start', 'upload'):
            session = self._sessions.get(call.query.get('upload_id', ''))
            name = session.name if session else _name_to_upload(call)
            return action, f'{bucket}/{name}'
        # Of a copy, the first two are those of the object that is read.
        return action, '/'.join(names[:2])

    def route(self, call: Call) -> tuple[str, list[str]]:
        action, names = super().route(call)
        if action == 'stat' and call.query.get('alt') == 'media':
            action = 'read'
        if action == 'upload' and 'upload_id' not in call.query:
            action = 'start' if call.query['uploadType'] == 'resumable' else 'upload'
        return action, names

    def answer(self, call: Call) -> Reply:
        _, names = self.route(call)
        project = call.query.get('userProject') or call.headers.get('X-Goog-User-Project')
        if names[0] in self.requester_pays and not project:
            return _error(400, 'Bucket is a requester pays bucket but no user project provided.')
        return super().answer(call)

    def error_reply(self, refusal: Refused, call: Call) -> Reply:
        if isinstance(refusal, Unchanged) and call.method == 'GET':
            return Reply(304)
        return _error(refusal.status, str(refusal))

    def refuse(self, status: int, call: Call) -> Reply:
        denied = 'does not have storage.objects.get access to the Google Cloud Storage object.'
        known = 'Authorization' in call.headers
        messages = {
            401: 'Invalid Credentials' if known else f'Anonymous caller {denied}',
            403: f'someone@example.com {denied}',
            429: 'The rate of change requests to the object exceeds the rate limit.',
            503: 'Backend Error',
        }
        return _error(status, messages[status])

    # --- Buckets and listings ----------------------------------------------------------------

    def _on_bucket(self, call: Call, bucket: str) -> Reply:
        self._store.bucket(bucket)
        return json_reply({'name': bucket})

    def _on_layout(self, call: Call, bucket: str) -> Reply:
        self._store.bucket(bucket)
        return json_reply({'locationType': self.location_types.get(bucket, 'region')})

    def _on_list(self, call: Call, bucket: str) -> Reply:
        stored = self._store.bucket(bucket)
        after = base64.urlsafe_b64decode(call.query.get('pageToken', '')).decode()
        names = [entry for entry in list_names(stored, call.query) if entry[0] > after]
        size = min(int(call.query.get('maxResults', _PAGE)), _PAGE)
        page = names[:size]
        # Google leaves out a list that is empty.
        answer: dict[str, Any] = {}
        for name, is_folder in page:
            if is_folder:
                answer.setdefault('prefixes', []).append(name)
            else:
                answer.setdefault('items', []).append(self._resource(call, stored[name]))
        if len(names) > size:
            last_name, _ = page[-1]
            answer['nextPageToken'] = base64.urlsafe_b64encode(last_name.encode()).decode()
        return json_reply(select_fields(answer, call.query.get('fields', '')))

    def _resource(self, call: Call, item: Object) -> dict[str, Any]:
        resource = item.resource(_base(call))
        if not (item.data or self.tells_size_of_empty):
            del resource['size']
        return resource

    # --- Objects -----------------------------------------------------------------------------

    def _on_stat(self, call: Call, bucket: str, name: str) -> Reply:
        found = self._store.find(call.query, bucket, name)
        return json_reply(select_fields(self._resource(call, found), call.query.get('fields', '')))

    def _on_read(self, call: Call, bucket: str, name: str) -> Reply:
        found = self._store.find(call.query, bucket, name)
        if found.encoding == 'gzip' and 'gzip' not in call.headers.get('Accept-Encoding', ''):
            # Without ranges, whatever was requested.
            return Reply(200, gzip.decompress(found.data), found.headers())
        headers = found.headers()
        if found.encoding:
            headers['Content-Encoding'] = found.encoding
        return select_range(call, found.data, headers)

    def _on_delete(self, call: Call, bucket: str, name: str) -> Reply:
        self.remove(bucket, name, call.query)
        return Reply(204)

    def _on_copy(self, call: Call, bucket: str, name: str, to_bucket: str, to_name: str) -> Reply:
        size = len(self._store.find({}, bucket, name).data)
        copied = min(int(call.query.get('rewriteToken', 0)) + self.copied_at_once, size)
        answer: dict[str, Any] = {
            'totalBytesRewritten': str(copied),
            'objectSize': str(size),
            'done': copied == size,
        }
        if copied < size:
            return json_reply(answer | {'rewriteToken': str(copied)})
        made = self._store.copy(call.query, bucket, name, to_bucket, to_name)
        return json_reply(answer | {'resource': self._resource(call, made)})

    # --- Uploads -----------------------------------------------------------------------------

    def _on_upload(self, call: Call, bucket: str) -> Reply:
        if 'upload_id' in call.query:
            return self._continue(call)
        name = call.query.get('name')
        content_type = call.headers.get('Content-Type', CONTENT_TYPE)
        pieces = call.body.pieces()
        if call.query['uploadType'] == 'multipart':
            described, content_type, content = split_multipart(content_type, call.body.read())
            name = described.get('name', name)
            pieces = iter([content])
        data = b''.join(call.file_pieces(pieces))
        made = self.put(bucket, name, data, call.query, content_type)
        return json_reply(self._resource(call, made))

    def _on_start(self, call: Call, bucket: str) -> Reply:
        described = json.loads(call.body.read() or b'{}')
        name = described.get('name', call.query.get('name'))
        self._store.check(call.query, bucket, name)
        content_type = call.headers.get('X-Upload-Content-Type', CONTENT_TYPE)
        number = uuid.uuid4().hex
        self._sessions[number] = _Session(bucket, name, call.query, content_type)
        quoted = urllib.parse.quote(name, safe='')
        path = f'/upload/storage/v1/b/{bucket}/o'
        query = f'uploadType=resumable&name={quoted}&upload_id={number}'
        return Reply(200, headers={'Location': f'{_base(call)}{path}?{query}'})

    def _continue(self, call: Call) -> Reply:
        session = self._sessions[call.query['upload_id']]
        with session.lock:
            if session.done is not None:
                return json_reply(self._resource(call, session.done))
            first = call.range[0] if call.range else 0
            if first > len(session.data):
                raise Refused(503, f'offset {first} exceeds the {len(session.data)} bytes uploaded')
            # A client that has missed an answer sends bytes once more.
            del session.data[first:]
            try:
                for piece in call.file_pieces(call.body.pieces()):
                    session.data += piece
            except BrokenOff:
                num_units = len(session.data) // _UPLOAD_UNIT
                del session.data[num_units * _UPLOAD_UNIT :]
                raise
            return self._session_state(call, session)

    def _session_state(self, call: Call, session: _Session) -> Reply:
        """The finished object, or how far the upload is; makes the object of the last byte."""
        size = len(session.data)
        # Without the header, the request had all.
        _, _, total = call.headers.get('Content-Range', f'/{size}').rpartition('/')
        is_complete = total != '*' and int(total) == size
        if session.done is None and is_complete:
            session.done = self.put(
                session.bucket,
                session.name,
                bytes(session.data),
                session.query,
                session.content_type,
            )
        if session.done is not None:
            return json_reply(self._resource(call, session.done))
        kept = {}
        if session.data:
            kept['Range'] = f'bytes=0-{size - 1}'
        return Reply(308, headers=kept)


def _name_to_upload(call: Call) -> str:
    """What the object shall be called; the metadata in front of its content may say so as well."""
    if 'name' in call.query:
        return call.query['name']
    in_body = re.search(rb'"name": *("[^"]*")', call.body.peek())
    return json.loads(in_body[1]) if in_body else ''


def _split_url(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix('gs://').partition('/')
    return bucket, prefix.rstrip('/') + '/' if prefix else ''


def _base(call: Call) -> str:
    """How the client calls this server: TensorFlow reaches it under Google's names."""
    host = call.headers['Host']
    return f'https://{host}' if host.endswith('googleapis.com') else f'http://{host}'


def _error(status: int, message: str) -> Reply:
    details = [{'message': message, 'domain': 'global', 'reason': 'error'}]
    return json_reply({'error': {'code': status, 'message': message, 'errors': details}}, status)
