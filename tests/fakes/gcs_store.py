"""Objects of the stand-in for Google Cloud Storage, with their generations and preconditions."""

import base64
import dataclasses
import functools
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import google_crc32c

from tests.fakes.fake_http import Refused

CONTENT_TYPE = 'application/octet-stream'


@dataclasses.dataclass
class Object:
    """One object; its `generation` is in microseconds since 1970."""

    bucket: str
    name: str
    data: bytes
    generation: int
    content_type: str = CONTENT_TYPE
    encoding: str = ''  # 'gzip' is unpacked on its way to clients that do not accept it

    @functools.cached_property
    def crc32c(self) -> str:
        """Base64 of the big-endian checksum."""
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, 'big')).decode()

    @property
    def etag(self) -> str:
        """Stands for the generation; clients must not read anything in it."""
        return base64.b64encode(str(self.generation).encode()).decode()

    def resource(self, url: str) -> dict[str, Any]:
        """The metadata as the JSON interface gives it."""
        quoted = urllib.parse.quote(self.name, safe='')
        seconds, micros = divmod(self.generation, 1_000_000)
        second = time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))
        when = f'{second}.{micros // 1000:03d}Z'
        resource = {
            'mediaLink': f'{url}/download/storage/v1/b/{self.bucket}/o/{quoted}?alt=media',
            'name': self.name,
            'bucket': self.bucket,
            'generation': str(self.generation),
            'metageneration': '1',
            'contentType': self.content_type,
            'size': str(len(self.data)),
            'crc32c': self.crc32c,
            'etag': self.etag,
            'timeCreated': when,
            'updated': when,
        }
        # Google leaves it out where there is none.
        if self.encoding:
            resource['contentEncoding'] = self.encoding
        return resource

    def headers(self) -> dict[str, str]:
        """Headers of an answer with the content."""
        return {
            'Content-Type': self.content_type,
            'Accept-Ranges': 'bytes',
            'ETag': f'"{self.etag}"',
            'X-Goog-Generation': str(self.generation),
            'X-Goog-Hash': f'crc32c={self.crc32c}',
            'X-Goog-Stored-Content-Length': str(len(self.data)),
            'X-Goog-Stored-Content-Encoding': self.encoding or 'identity',
        }


class Unchanged(Refused):
    """The object is the one that the caller knows; those who only read get 304 and no body."""


class Store:
    """Buckets and their objects; every method is one atomic step, and keeps to preconditions."""

    def __init__(self):
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, Object]] = {}
        self._last_generation = 0

    def bucket(self, bucket: str) -> dict[str, Object]:
        """A copy of a bucket; refuses names of buckets that shall not exist."""
        with self._lock:
            return dict(self._bucket(bucket))

    def find(self, query: Mapping[str, str], bucket: str, name: str) -> Object:
        """Returns an object, in the generation that the query names; refuses if there is none."""
        with self._lock:
            self.check(query, bucket, name)
            return self._find(bucket, name, query.get('generation'))

    def check(self, query: Mapping[str, str], bucket: str, name: str, kind: str = 'if') -> None:
        """Refuses if a precondition on the object's generation does not hold."""
        with self._lock:
            found = self._bucket(bucket).get(name)
        # 0 stands for no object, in the preconditions, too.
        generation = found.generation if found else 0
        wanted = int(query.get(f'{kind}GenerationMatch', generation))
        unwanted = int(query.get(f'{kind}GenerationNotMatch', -1))
        if wanted != generation:
            raise Refused(412, 'At least one of the pre-conditions you specified did not hold.')
        if unwanted == generation:
            raise Unchanged(412, 'The object has the generation that it must not have.')

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        query: Mapping[str, str] = {},
        content_type: str = CONTENT_TYPE,
        encoding: str = '',
    ) -> Object:
        """Stores an object, and returns it with a generation that is later than all others."""
        with self._lock:
            self.check(query, bucket, name)
            # Two may come in one microsecond.
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            made = Object(bucket, name, data, self._last_generation, content_type, encoding)
            self._bucket(bucket)[name] = made
        return made

    def remove(self, bucket: str, name: str, query: Mapping[str, str] = {}) -> None:
        """Removes an object; refuses where there is none."""
        with self._lock:
            self.find(query, bucket, name)
            del self._bucket(bucket)[name]

    def copy(
        self, query: Mapping[str, str], bucket: str, name: str, to_bucket: str, to_name: str
    ) -> Object:
        """Stores the content of an object under another name; returns the new object."""
        with self._lock:
            self.check(query, bucket, name, 'ifSource')
            found = self._find(bucket, name, query.get('sourceGeneration'))
            return self.put(to_bucket, to_name, found.data, query, found.content_type)

    def _bucket(self, bucket: str) -> dict[str, Object]:
        if bucket.startswith('no-such-'):
            raise Refused(404, 'The specified bucket does not exist.')
        return self._buckets.setdefault(bucket, {})

    def _find(self, bucket: str, name: str, generation: str | None) -> Object:
        found = self._bucket(bucket).get(name)
        if found is None or (generation is not None and int(generation) != found.generation):
            raise Refused(404, f'No such object: {bucket}/{name}')
        return found
