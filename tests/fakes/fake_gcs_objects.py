"""Objects of the stand-in for Google Cloud Storage, and the forms in which requests name them.

stored = Object('bucket', 'a/b.txt', b'hello', generation=1_700_000_000_000_000)
select_fields(stored.resource('http://localhost'), 'size,crc32c')  # {'size': '5', 'crc32c': ...}
list_names(['a/b.txt', 'c.txt'], {'delimiter': '/'})               # ['a/' (a folder), 'c.txt']
split_multipart(content_type, body)                                # metadata and content
"""

import base64
import dataclasses
import functools
import hashlib
import json
import mmap
import re
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

import google_crc32c

_PIECE = 1 << 20
# Larger objects have no MD5, as those that upload tools compose of parts; CRC32C is for all.
_COMPOSED_BYTES = 32 << 20


@dataclasses.dataclass
class Object:
    """One object; `data` is bytes or a memory-mapped file, `generation` microseconds since 1970."""

    bucket: str
    name: str
    data: bytes | mmap.mmap
    generation: int
    content_type: str = 'application/octet-stream'
    metadata: dict[str, str] | None = None

    @functools.cached_property
    def crc32c(self) -> str:
        """Base64 of the big-endian checksum."""
        value = 0
        with memoryview(self.data) as view:
            for start in range(0, len(view), _PIECE):
                value = google_crc32c.extend(value, bytes(view[start : start + _PIECE]))
        return base64.b64encode(value.to_bytes(4, 'big')).decode()

    @functools.cached_property
    def md5(self) -> str | None:
        if len(self.data) > _COMPOSED_BYTES:
            return None
        return base64.b64encode(hashlib.md5(self.data).digest()).decode()

    @property
    def etag(self) -> str:
        return base64.b64encode(str(self.generation).encode()).decode()

    def resource(self, url: str) -> dict[str, Any]:
        """The metadata as the JSON interface gives it."""
        quoted = urllib.parse.quote(self.name, safe='')
        seconds, micros = divmod(self.generation, 1_000_000)
        when = time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds)) + f'.{micros // 1000:03d}Z'
        resource = {
            'kind': 'storage#object',
            'id': f'{self.bucket}/{self.name}/{self.generation}',
            'selfLink': f'{url}/storage/v1/b/{self.bucket}/o/{quoted}',
            'mediaLink': f'{url}/download/storage/v1/b/{self.bucket}/o/{quoted}?alt=media',
            'name': self.name,
            'bucket': self.bucket,
            'generation': str(self.generation),
            'metageneration': '1',
            'contentType': self.content_type,
            'storageClass': 'STANDARD',
            'size': str(len(self.data)),
            'md5Hash': self.md5,
            'crc32c': self.crc32c,
            'etag': self.etag,
            'timeCreated': when,
            'updated': when,
            'metadata': self.metadata,
        }
        return {name: value for name, value in resource.items() if value is not None}

    def headers(self) -> dict[str, str]:
        """Headers of an answer with the content."""
        md5 = f',md5={self.md5}' if self.md5 else ''
        return {
            'Content-Type': self.content_type,
            'Accept-Ranges': 'bytes',
            'ETag': f'"{self.etag}"',
            'X-Goog-Generation': str(self.generation),
            'X-Goog-Metageneration': '1',
            'X-Goog-Hash': f'crc32c={self.crc32c}{md5}',
            'X-Goog-Stored-Content-Length': str(len(self.data)),
        }


class Refused(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Unchanged(Refused):
    """The object is the one that the caller knows; those who only read get 304 and no body."""


class Store:
    """Buckets and their objects; every method is one atomic step.

    `query` holds the parameters of a request; those that are preconditions are kept to.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, Object]] = {}
        self._last_generation = 0

    def bucket(self, bucket: str) -> dict[str, Object]:
        """A copy of a bucket; refuses names of buckets that shall not exist."""
        with self._lock:
            return dict(self._bucket(bucket))

    def find(self, query: Mapping[str, str], bucket: str, name: str) -> Object:
        with self._lock:
            self.check(query, bucket, name)
            return self._find(bucket, name, query.get('generation'))

    def check(self, query: Mapping[str, str], bucket: str, name: str, kind: str = 'if') -> None:
        """Refuses if a precondition on the object's generation does not hold."""
        with self._lock:
            found = self._bucket(bucket).get(name)
        generation = found.generation if found else 0
        wanted = int(query.get(f'{kind}GenerationMatch', generation))
        unwanted = int(query.get(f'{kind}GenerationNotMatch', -1))
        if wanted != generation:
            raise Refused(412, 'At least one of the pre-conditions you specified did not hold.')
        if unwanted == generation:
            raise Unchanged(412, 'The object has the generation that it must not have.')

    def store(
        self,
        query: Mapping[str, str],
        bucket: str,
        name: str,
        data: bytes | mmap.mmap,
        content_type: str = 'application/octet-stream',
        metadata: dict[str, str] | None = None,
    ) -> Object:
        with self._lock:
            self.check(query, bucket, name)
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            made = Object(bucket, name, data, self._last_generation, content_type, metadata)
            self._bucket(bucket)[name] = made
        return made

    def delete(self, query: Mapping[str, str], bucket: str, name: str) -> None:
        with self._lock:
            self.find(query, bucket, name)
            del self._bucket(bucket)[name]

    def copy(
        self, query: Mapping[str, str], bucket: str, name: str, to_bucket: str, to_name: str
    ) -> Object:
        with self._lock:
            self.check(query, bucket, name, 'ifSource')
            found = self._find(bucket, name, query.get('sourceGeneration'))
            return self.store(
                query, to_bucket, to_name, found.data, found.content_type, found.metadata
            )

    def _bucket(self, bucket: str) -> dict[str, Object]:
        if bucket.startswith('no-such-'):
            raise Refused(404, 'The specified bucket does not exist.')
        return self._buckets.setdefault(bucket, {})

    def _find(self, bucket: str, name: str, generation: str | None) -> Object:
        found = self._bucket(bucket).get(name)
        if found is None or (generation is not None and int(generation) != found.generation):
            raise Refused(404, f'No such object: {bucket}/{name}')
        return found


def select_fields(answer: Any, fields: str) -> Any:
    """What the parameter `fields` lets through, as in 'items(name,size),nextPageToken'."""
    if not fields:
        return answer
    if isinstance(answer, list):
        return [select_fields(item, fields) for item in answer]
    wanted: dict[str, list[str]] = {}
    for part in re.findall(r'(?:[^,(]|\([^)]*\))+', fields):
        name, below, listed = re.fullmatch(r'([^/(]+)(?:/(.+)|\((.+)\))?', part).groups()
        wanted.setdefault(name, []).append(below or listed or '')
    return {
        name: select_fields(answer[name], ','.join(filter(None, parts)))
        for name, parts in wanted.items()
        if name in answer
    }


def list_names(names: Iterable[str], query: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Names that a listing gives, sorted, each with whether it stands for a folder."""
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
    first, stop = query.get('startOffset', ''), query.get('endOffset', '')
    found = set()
    for name in names:
        if not name.startswith(prefix) or name < first or (stop and name >= stop):
            continue
        head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, '', '')
        found.add((prefix + head + cut, True) if cut else (name, False))
    return sorted(found)


def split_multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], str, bytes]:
    """Metadata, type and content of an upload of two parts; the lines may end in LF alone."""
    boundary = b'--' + re.search(r'boundary="?([^";]+)"?', content_type)[1].encode()
    newline = b'\r\n' if body[len(boundary) :].startswith(b'\r\n') else b'\n'
    _, metadata, rest = body.split(boundary + newline, 2)
    described = json.loads(metadata.split(2 * newline, 1)[1])
    head, content = rest.split(2 * newline, 1)
    content = content[: content.rindex(newline + boundary + b'--')]
    kind = re.search(r'(?im)^content-type:\s*(\S+)', head.decode())
    return described, kind[1] if kind else 'application/octet-stream', content
