"""A stand-in for the HTTP interface of the Hugging Face hub, for repositories of data sets.

Large files, and those named like data, are "LFS" files as on the hub: known by their SHA-256, and a
download is redirected to an address on another host, which must not see the user's token. The
address is signed and serves any range for some time. Small ones are known by git's SHA-1.

Requests are counted as on the hub, in windows of fixed length, and every answer says how many are
left (https://huggingface.co/docs/hub/rate-limits).
"""

import base64
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Mapping

from tests.fakes.fake_http import Call, FakeServer, Refused, Reply, json_reply, select_range

_LFS_BYTES = 1 << 20
_LFS_NAMES = ('.pt', '.parquet', '.bin')

# Paths, percent-encoded; a repository's name is two segments.
_REPO = r'(?:datasets/|models/|)([^/]+/[^/]+)'
_ROUTES = [
    (f'/api/{_REPO}(?:/revision/([^/]+))?', {'GET': 'info'}),
    (f'/api/{_REPO}/tree/([^/]+)', {'GET': 'tree'}),
    (f'/{_REPO}/resolve/([^/]+)/(.+)', {'GET': 'resolve', 'HEAD': 'head'}),
    (f'/api/resolve-cache/{_REPO}/([^/]+)/(.+)', {'GET': 'small'}),
    ('/storage/([^/]+)/(.+)', {'GET': 'read'}),
    ('/api/repos/create()', {'POST': 'create'}),
    ('/api/validate-yaml()', {'POST': 'check_card'}),
    (f'/api/{_REPO}/preupload/main', {'POST': 'plan_upload'}),
    (f'/api/{_REPO}/commit/main', {'POST': 'commit'}),
    # Once a process, for the User-Agent header.
    ('/api/agent-harnesses()', {'GET': 'harnesses'}),
]


@dataclasses.dataclass(frozen=True, eq=False)
class _File:
    """One file of the repository."""

    path: str
    data: bytes

    @property
    def is_lfs(self) -> bool:
        """Whether the hub stores it outside of git."""
        return len(self.data) > _LFS_BYTES or self.path.endswith(_LFS_NAMES)

    @functools.cached_property
    def sha256(self) -> str:
        """The hub's name of a content outside of git, in hex digits."""
        return hashlib.sha256(self.data).hexdigest()

    @functools.cached_property
    def sha1(self) -> str:
        """Git's name of the content."""
        return hashlib.sha1(b'blob %d\0' % len(self.data) + self.data).hexdigest()


class _Refused(Refused):
    """Has also the code that the hub gives in a header."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(status, message)
        self.code = code


@dataclasses.dataclass
class Quota:
    """Requests of a kind that a user may send in a window; for many threads."""

    kind: str  # 'api' or 'resolvers'
    limit: int
    window: float = 300.0  # seconds

    def __post_init__(self):
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._num_sent = 0

    def count(self) -> tuple[bool, dict[str, str]]:
        """Counts a request; returns whether it is within the quota, and headers for its answer."""
        with self._lock:
            now = time.monotonic()
            num_windows = (now - self._begin) // self.window
            # Windows follow each other, also those in which nothing is sent.
            if num_windows >= 1:
                self._begin += num_windows * self.window
                self._num_sent = 0
            self._num_sent += 1
            num_left = max(0, self.limit - self._num_sent)
            seconds = math.ceil(self._begin + self.window - now)
            headers = {
                'RateLimit': f'"{self.kind}";r={num_left};t={seconds}',
                'RateLimit-Policy': (
                    f'"fixed window";"{self.kind}";q={self.limit};w={self.window:g}'
                ),
            }
            return self._num_sent <= self.limit, headers


class Hub(FakeServer):
    """The server of data sets, first of `repo`; a `gated` one wants `token` for every file.

    Attributes:
        quotas: By kind; those of a free account, unless `set_quota` sets others.
        address_seconds: How long a signed address serves a file.
        address_uses: How many requests it serves; None for any number.
    """

    routes = _ROUTES
    repo = 'owner/name'
    token = 'hf_token_for_tests'

    def __init__(self, repo_files: Mapping[str, bytes | pathlib.Path]):
        super().__init__()
        self.gated = False
        self.content_encoding = ''  # that of a proxy on the way to the files
        self.quotas: dict[str, Quota] = {}
        self.set_quota('api', 1000)
        self.set_quota('resolvers', 5000)
        self.address_seconds = 3600.0
        self.address_uses: int | None = None
        # By signature: time of the end, and number of requests.
        self._ends: dict[str, float] = {}
        self._uses: Counter[str] = Counter()
        self._numbers = itertools.count()
        # By the number of reads after which they happen: contents of the branch.
        self._pushes: dict[int, Mapping[str, bytes]] = {}
        self._num_reads = itertools.count(1)
        self.env: dict[str, str] = {'HF_ENDPOINT': self.url}
        self._commits: dict[str, dict[str, _File]] = {}
        self._branches: dict[tuple[str, str], str] = {}  # commits by repository and name
        self._repos: dict[str, str] = {}  # of each commit
        self.commit(repo_files)

    # --- For the tests -----------------------------------------------------------------------

    def commit(
        self,
        files: Mapping[str, bytes | pathlib.Path],
        branch: str = 'main',
        repo: str = repo,
    ) -> str:
        """Makes `files` all that the branch of a repository holds; returns the commit's hash."""
        committed = {}
        # The number of the commit: equal files are another commit, as on the hub.
        lines = [str(len(self._commits))]
        for path, data in sorted(files.items()):
            content = data if isinstance(data, bytes) else data.read_bytes()
            file = _File(path, content)
            committed[path] = file
            lines.append(f'{path} {file.sha1}')
        commit = hashlib.sha1('\n'.join(lines).encode()).hexdigest()
        self._commits[commit] = committed
        self._repos[commit] = repo
        self._branches[repo, branch] = commit
        return commit

    def set_quota(self, kind: str, limit: int, window: float = 300.0) -> None:
        """Allows so many requests of a kind in a window of so many seconds, from now on."""
        self.quotas[kind] = Quota(kind, limit, window)

    def push_after(self, num_reads: int, files: Mapping[str, bytes]) -> None:
        """Makes `files` all that `main` holds, after so many more reads of files."""
        self._num_reads = itertools.count(1)
        self._pushes[num_reads] = files

    def count(self, *actions: str) -> int:
        """Returns how many requests of these actions the log has."""
        return sum(request.action in actions for request in self.requests)

    @property
    def num_api_calls(self) -> int:
        """How many requests the log has that count as calls of the hub's API."""
        return self.count('info', 'tree', 'harnesses')

    def make_restless(self, *, after_reads: int) -> None:
        """Makes quotas small, addresses short-lived and answers late, lost or cut.

        After some reads a push leaves nothing on `main`, which `was_restless` expects, too.
        """
        self.set_quota('resolvers', 12, window=1.0)
        self.set_quota('api', 4, window=1.0)
        self.address_uses = 6
        self.latency = 0.002
        self.inject_share(['reset', 'cut', '503'], share=0.05)
        self.push_after(after_reads, {'README.md': b'All was moved.'})

    @property
    def was_restless(self) -> bool:
        """Whether all that `make_restless` prepares has happened."""
        statuses = {request.status for request in self.requests}
        faults = {request.fault for request in self.requests}
        return not self._pushes and statuses >= {403, 429} and 'reset' in faults

    # --- What a request is about -------------------------------------------------------------

    def describe(self, call: Call) -> tuple[str, str]:
        action, parts = self.route(call)
        if action in ('read', 'small', 'resolve'):
            # The host of the files knows the commit instead.
            repo = self._repos.get(parts[0], parts[0])
            path = f'{repo}/{parts[-1]}'
            # Both carry the bytes of a file.
            if action == 'small':
                action = 'read'
            return action, path
        return action, parts[0]

    def error_reply(self, refusal: Refused, call: Call) -> Reply:
        return _error(refusal.status, getattr(refusal, 'code', ''), str(refusal))

    def refuse(self, status: int, call: Call) -> Reply:
        return self.error_reply(self._refusal(status, call), call)

    def _refusal(self, status: int, call: Call) -> _Refused:
        unknown = 'GatedRepo', f'Access to dataset {self.repo} is restricted.'
        if 'Authorization' in call.headers:
            unknown = '', 'Invalid credentials in Authorization header'
        code, message = {
            401: unknown,
            403: ('GatedRepo', f'You are not in the authorized list of dataset {self.repo}.'),
            429: ('', 'We had to rate limit you.'),
            503: ('', 'Service Unavailable'),
        }[status]
        return _Refused(status, code, message)

    def answer(self, call: Call) -> Reply:
        """Counts the request, unless it is one to the host that stores the files."""
        kind = ''
        if '/resolve/' in call.path or '/resolve-cache/' in call.path:
            kind = 'resolvers'
        elif call.path.startswith('/api/'):
            kind = 'api'
        if not kind:
            return super().answer(call)
        is_within, headers = self.quotas[kind].count()
        reply = super().answer(call) if is_within else self.refuse(429, call)
        return dataclasses.replace(reply, headers={**reply.headers, **headers})

    # --- Answers -----------------------------------------------------------------------------

    def _files(self, repo: str, revision: str) -> tuple[str, dict[str, _File]]:
        """Commit and files of a revision: a branch or a commit."""
        if repo not in self._repos.values():
            raise _Refused(404, 'RepoNotFound', 'Repository not found')
        commit = self._branches.get((repo, revision or 'main'), revision)
        if self._repos.get(commit) != repo:
            raise _Refused(404, 'RevisionNotFound', f'Invalid rev id: {revision}')
        return commit, self._commits[commit]

    def _on_info(self, call: Call, repo: str, revision: str) -> Reply:
        commit, files = self._files(repo, revision)
        siblings = [{'rfilename': path} for path in files]
        if call.query.get('blobs', '').lower() == 'true':
            for sibling, file in zip(siblings, files.values(), strict=True):
                sibling |= {'blobId': file.sha1, 'size': len(file.data)}
                if file.is_lfs:
                    sizes = {'size': len(file.data), 'pointerSize': 134}
                    sibling['lfs'] = {'sha256': file.sha256} | sizes
        return json_reply({'id': repo, 'sha': commit, 'siblings': siblings})

    def _on_tree(self, call: Call, repo: str, revision: str) -> Reply:
        _, files = self._files(repo, revision)
        entries = []
        for path, file in files.items():
            size = len(file.data)
            entries.append({'type': 'file', 'path': path, 'size': size, 'oid': file.sha1})
        return json_reply(entries)

    def _on_harnesses(self, call: Call, _: str) -> Reply:
        return json_reply({'standardEnvVars': [], 'harnesses': {}})

    def _on_create(self, call: Call, _: str) -> Reply:
        return json_reply({'url': f'{self.url}/{self.repo}'})

    def _on_check_card(self, call: Call, _: str) -> Reply:
        assert json.loads(call.body.read())['content'].startswith('---\n')
        return json_reply({'errors': [], 'warnings': []})

    def _on_plan_upload(self, call: Call, repo: str) -> Reply:
        files = json.loads(call.body.read())['files']
        plan = {'uploadMode': 'regular', 'shouldIgnore': False}
        return json_reply({'files': [{'path': file['path'], **plan} for file in files]})

    def _on_commit(self, call: Call, repo: str) -> Reply:
        files = {}
        for line in call.body.read().splitlines():
            value = json.loads(line)['value']
            # The first line is the message of the commit.
            if 'path' in value:
                files[value['path']] = base64.b64decode(value['content'])
        commit = self.commit(files)
        url = f'{self.url}/{repo}/commit/{commit}'
        return json_reply({'success': True, 'commitOid': commit, 'commitUrl': url})

    def _on_head(self, call: Call, repo: str, revision: str, path: str) -> Reply:
        commit, files = self._files(repo, revision)
        if path not in files:
            return Reply(404, headers={'X-Error-Code': 'EntryNotFound'})
        state = {'ETag': files[path].sha1, 'Content-Length': str(len(files[path].data))}
        return Reply(200, headers={'X-Repo-Commit': commit, **state})

    def _on_resolve(self, call: Call, repo: str, revision: str, path: str) -> Reply:
        commit, files = self._files(repo, revision)
        self._admit(call)
        if path not in files:
            raise _Refused(404, 'EntryNotFound', 'Entry not found')
        quoted = urllib.parse.quote(path)
        if not files[path].is_lfs:
            where = f'/api/resolve-cache/datasets/{repo}/{commit}/{quoted}'
            return Reply(307, headers={'Location': where})
        # Not `url`: under another name this is another host to the client.
        host = f'http://localhost:{self.address[1]}'
        signature = f'{files[path].sha256[:8]}-{next(self._numbers)}'
        end = time.time() + self.address_seconds
        self._ends[signature] = end
        where = f'{host}/storage/{commit}/{quoted}?Expires={end:.0f}&signature={signature}'
        return Reply(302, headers={'Location': where})

    def _on_small(self, call: Call, repo: str, commit: str, path: str) -> Reply:
        self._admit(call)
        return select_range(call, self._commits[commit][path].data)

    def _on_read(self, call: Call, commit: str, path: str) -> Reply:
        file = self._commits[commit][path]
        if 'Authorization' in call.headers:
            return _error(400, '', 'Only one auth mechanism allowed')
        signature = call.query.get('signature', '')
        if not signature.startswith(file.sha256[:8]):
            return _error(403, '', 'SignatureDoesNotMatch')
        self._uses[signature] += 1
        is_worn = self.address_uses is not None and self._uses[signature] > self.address_uses
        if is_worn or time.time() > self._ends[signature]:
            return _error(403, '', 'AccessDenied')
        pushed_files = self._pushes.pop(next(self._num_reads), None)
        if pushed_files is not None:
            self.commit(pushed_files)
        headers = {}
        if self.content_encoding:
            headers['Content-Encoding'] = self.content_encoding
        return select_range(call, file.data, headers)

    def _admit(self, call: Call) -> None:
        """Refuses a user who may not read a gated data set."""
        authorization = call.headers.get('Authorization')
        if self.gated and authorization != f'Bearer {self.token}':
            status = 403 if authorization else 401
            raise self._refusal(status, call)


def _error(status: int, code: str, message: str) -> Reply:
    """Returns the answer of the hub to a request that it refuses; '' for no code."""
    headers = {'X-Error-Message': message}
    if code:
        headers['X-Error-Code'] = code
    return json_reply({'error': message}, status, **headers)
