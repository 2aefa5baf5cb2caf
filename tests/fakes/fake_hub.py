"""A stand-in for the HTTP interface of the Hugging Face hub, for one repository.

Large files, and those named like data, are "LFS" files as on the hub: known by their SHA-256, and a
download is redirected to another host, which must not see the user's token. Small ones are known by
git's SHA-1.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import pathlib
import urllib.parse
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
        return len(self.data) > _LFS_BYTES or self.path.endswith(_LFS_NAMES)

    @functools.cached_property
    def sha256(self) -> str:
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


class Hub(FakeServer):
    """The server of one data set, `repo`; a `gated` one gives files only to who sends `token`."""

    routes, repo, token = _ROUTES, 'owner/name', 'hf_token_for_tests'

    def __init__(self, repo_files: Mapping[str, bytes | pathlib.Path]):
        super().__init__()
        self.gated = False
        self.content_encoding = ''  # that of a proxy on the way to the files
        self.env: dict[str, str] = {'HF_ENDPOINT': self.url}
        self._commits: dict[str, dict[str, _File]] = {}
        self._branches: dict[str, str] = {}
        self.commit(repo_files)

    # --- For the tests -----------------------------------------------------------------------

    def commit(self, files: Mapping[str, bytes | pathlib.Path], branch: str = 'main') -> str:
        """Makes `files` all that the branch holds; returns the commit's hash."""
        made = {
            path: _File(path, data if isinstance(data, bytes) else data.read_bytes())
            for path, data in sorted(files.items())
        }
        names = [f'{len(self._commits)}', *(f'{file.path} {file.sha1}' for file in made.values())]
        commit = hashlib.sha1('\n'.join(names).encode()).hexdigest()
        self._commits[commit] = made
        self._branches[branch] = commit
        return commit

    # --- What a request is about -------------------------------------------------------------

    def describe(self, call: Call) -> tuple[str, str]:
        action, parts = self.route(call)
        if action in ('read', 'small', 'resolve'):
            path = '/'.join([self.repo, parts[-1]])
            return 'read' if action == 'small' else action, path
        return action, parts[0]

    def error_reply(self, refusal: Refused, call: Call) -> Reply:
        return _error(refusal.status, getattr(refusal, 'code', ''), str(refusal))

    def refuse(self, status: int, call: Call) -> Reply:
        return self.error_reply(self._refusal(status, call), call)

    def _refusal(self, status: int, call: Call) -> _Refused:
        code, message = {
            401: ('', 'Invalid credentials in Authorization header')
            if 'Authorization' in call.headers
            else ('GatedRepo', f'Access to dataset {self.repo} is restricted.'),
            403: ('GatedRepo', f'You are not in the authorized list of dataset {self.repo}.'),
            429: ('', 'We had to rate limit you.'),
            503: ('', 'Service Unavailable'),
        }[status]
        return _Refused(status, code, message)

    # --- Answers -----------------------------------------------------------------------------

    def _files(self, repo: str, revision: str) -> tuple[str, dict[str, _File]]:
        """Commit and files of a revision: a branch or a commit."""
        if repo != self.repo:
            raise _Refused(404, 'RepoNotFound', 'Repository not found')
        commit = self._branches.get(revision or 'main', revision)
        if commit not in self._commits:
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
        files = self._files(repo, revision)[1].values()
        kind = {'type': 'file'}
        return json_reply(
            [{**kind, 'path': x.path, 'size': len(x.data), 'oid': x.sha1} for x in files]
        )

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
        lines = [json.loads(line)['value'] for line in call.body.read().splitlines()]
        added = {x['path']: base64.b64decode(x['content']) for x in lines if 'path' in x}
        commit = self.commit(added)
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
        signature = files[path].sha256[:8]
        where = f'{host}/storage/{commit}/{quoted}?signature={signature}'
        return Reply(302, headers={'Location': where})

    def _on_small(self, call: Call, repo: str, commit: str, path: str) -> Reply:
        self._admit(call)
        return select_range(call, self._commits[commit][path].data)

    def _on_read(self, call: Call, commit: str, path: str) -> Reply:
        file = self._commits[commit][path]
        if 'Authorization' in call.headers:
            return _error(400, '', 'Only one auth mechanism allowed')
        if call.query.get('signature') != file.sha256[:8]:
            return _error(403, '', 'SignatureDoesNotMatch')
        encoding = self.content_encoding
        return select_range(call, file.data, {'Content-Encoding': encoding} if encoding else {})

    def _admit(self, call: Call) -> None:
        sent = call.headers.get('Authorization')
        if self.gated and sent != f'Bearer {self.token}':
            raise self._refusal(403 if sent else 401, call)


def _error(status: int, code: str, message: str) -> Reply:
    headers = {'X-Error-Message': message, **({'X-Error-Code': code} if code else {})}
    return json_reply({'error': message}, status, **headers)
