"""Stand-ins for Google Cloud Storage and the Hugging Face hub, as fixtures.

Their clients in this process reach them. TensorFlow reads its environment once, so what uses gs://
through it runs in a child process with `gcs.env`.
"""

import contextlib
import pathlib
import tempfile
import threading
from collections.abc import Iterator, Mapping

import pytest

from tests.fakes.fake_gcs import Gcs
from tests.fakes.fake_http import CERTIFICATE
from tests.fakes.fake_hub import Hub
from tests.fakes.faults import Fault

__all__ = ['Fault', 'Gcs', 'Hub', 'bucket', 'fake_gcs', 'fake_hub', 'gcs', 'hub', 'place']

# The patience of the code under test. A lease is short: those of killed processes are waited for.
_PATIENCE = {
    'COYO11M_RETRY_SECONDS': '0.02',
    'COYO11M_STALL_SECONDS': '2',
    'COYO11M_LEASE_SECONDS': '1',
}

# No request leaves this machine, and no account of the developer's is used.
_NOBODY = {
    'NO_GCE_CHECK': 'true',
    'GOOGLE_APPLICATION_CREDENTIALS': '',
    'no_proxy': '127.0.0.1,localhost',
    'NO_PROXY': '127.0.0.1,localhost',
}

# tsl/platform/cloud/gcs_file_system.cc; seconds unless US says microseconds.
_TENSORFLOW = {
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token-for-tests',
    'GCS_RETRY_CONFIG_INIT_DELAY_TIME_US': '0',  # any other value adds up to a second of jitter
    'GCS_RETRY_CONFIG_MAX_RETRIES': '4',
    'GCS_REQUEST_CONNECTION_TIMEOUT_SECS': '10',
    'GCS_REQUEST_IDLE_TIMEOUT_SECS': '1',
    'GCS_METADATA_REQUEST_TIMEOUT_SECS': '10',
    'GCS_READ_REQUEST_TIMEOUT_SECS': '60',
    'GCS_WRITE_REQUEST_TIMEOUT_SECS': '60',
}


@contextlib.contextmanager
def fake_gcs(root: pathlib.Path) -> Iterator[Gcs]:
    """A storage server, to which TensorFlow is led as well; `root` is its clients' home."""
    with Gcs() as server:
        server.env = {
            **_PATIENCE,
            **_NOBODY,
            **_TENSORFLOW,
            'CLOUDSDK_CONFIG': str(root),
            'STORAGE_EMULATOR_HOST': server.url,
            'TENSORSTORE_GCS_HTTP_URL': server.url,  # of Orbax
            'https_proxy': server.url,
            'CURL_CA_BUNDLE': str(CERTIFICATE),
        }
        yield server
        # What this process reads ahead comes to its end while there is a server.
        for thread in threading.enumerate():
            if thread.name.startswith('fetch'):
                thread.join(30)


def through_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """The `env` of `fake_gcs`, in which all readers, not TensorFlow alone, go through the proxy."""
    certificate = env['CURL_CA_BUNDLE']
    return {
        **env,
        'STORAGE_EMULATOR_HOST': 'https://storage.googleapis.com',
        'REQUESTS_CA_BUNDLE': certificate,
        'SSL_CERT_FILE': certificate,
    }


@contextlib.contextmanager
def fake_hub(repo_files: Mapping[str, bytes | pathlib.Path]) -> Iterator[Hub]:
    """A hub with one data set; the cache of huggingface_hub in child processes is its own."""
    with Hub(repo_files) as server, tempfile.TemporaryDirectory() as home:
        server.env = {
            **_PATIENCE,
            **_NOBODY,
            'HF_ENDPOINT': server.url,
            'HF_HOME': home,
            'HF_TOKEN': '',
            'HF_HUB_DISABLE_TELEMETRY': '1',
        }
        yield server


@pytest.fixture
def gcs(tmp_path_factory, monkeypatch) -> Iterator[Gcs]:
    """An empty storage server without faults; this process reaches it."""
    from google.auth.compute_engine import _metadata

    with fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        # Decided by the environment when this module is imported, maybe long ago.
        monkeypatch.setattr(_metadata, '_NO_GCE_CHECK', True)
        yield server
    assert not server.errors, server.errors  # not rewritten by pytest in a plain module


@pytest.fixture(params=['local', 'bucket'])
def place(request, tmp_path) -> str:
    """A folder on a disk, and one in a bucket, that does not exist yet."""
    if request.param == 'local':
        return str(tmp_path / 'new' / 'set')
    request.getfixturevalue('gcs')
    return 'gs://bucket/new/set'


@pytest.fixture
def bucket(gcs, monkeypatch) -> Gcs:
    """The same, for tests of many attempts: pauses between them are hardly any."""
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.002')
    return gcs


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A hub whose data set 'owner/name' is empty: `hub.commit(files)` fills it."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http

    with fake_hub({}) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        # It reads its environment once, when it is imported.
        home = server.env['HF_HOME']
        files = '/{repo_id}/resolve/{revision}/{filename}'
        for name, value in {
            'ENDPOINT': server.url,
            'HUGGINGFACE_CO_URL_TEMPLATE': server.url + files,
            'HF_TOKEN_PATH': f'{home}/token',
            'AGENT_HARNESSES_PATH': f'{home}/agent_harnesses.json',
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, 'endpoint', server.url)
        yield server
        _http.close_session()
    assert not server.errors, server.errors  # not rewritten by pytest in a plain module
