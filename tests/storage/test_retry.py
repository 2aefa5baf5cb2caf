"""What is tried again, how often, how long between, and what is said in the end."""

import errno
import http.client
import json
import logging
import socket
import ssl
import time

import google.api_core.exceptions
import google.auth.exceptions
import httpx2
import huggingface_hub.errors
import hypothesis
import hypothesis.strategies as st
import pytest
import requests
import urllib3

from coyo11m_tfds.storage import retry

GS = 'downloading gs://bucket/source/x.pt'
HUB = 'downloading hf://datasets/owner/name@0123/x.pt'


@pytest.fixture
def sleeps(monkeypatch) -> list[float]:
    """The delays, which are noted instead of waited for."""
    noted: list[float] = []
    monkeypatch.setattr(time, 'sleep', noted.append)
    return noted


class Failing:
    """An operation that raises these errors, one a call, and then returns 'done'."""

    def __init__(self, *errors: BaseException):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 'done'


def answered(status: int, **headers: str) -> requests.HTTPError:
    """The error of requests for an answer of this status."""
    response = requests.Response()
    response.status_code = status
    response.headers.update({name.replace('_', '-'): text for name, text in headers.items()})
    return requests.HTTPError(f'{status} for url', response=response)


def hub_answered(status: int, kind=huggingface_hub.errors.HfHubHTTPError) -> Exception:
    request = httpx2.Request('GET', 'https://huggingface.co/api/datasets/owner/name')
    return kind(f'{status} Client Error', response=httpx2.Response(status, request=request))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


TRANSIENT = [
    ConnectionResetError(errno.ECONNRESET, 'Connection reset by peer'),
    BrokenPipeError(),
    TimeoutError('timed out'),
    OSError(errno.ENETUNREACH, 'Network is unreachable'),
    socket.gaierror(socket.EAI_AGAIN, 'Temporary failure in name resolution'),
    ssl.SSLError('EOF occurred in violation of protocol'),
    http.client.IncompleteRead(b'', 10),
    json.JSONDecodeError('Expecting value', '{"items": [', 11),
    retry.Corrupted('checksum'),
    answered(408),
    answered(429),
    answered(500),
    answered(503),
    requests.ConnectionError('aborted'),
    requests.ReadTimeout(),
    requests.exceptions.ChunkedEncodingError(),
    urllib3.exceptions.ProtocolError('broken'),
    httpx2.ReadTimeout('stalled'),
    httpx2.ReadError('reset'),
    httpx2.RemoteProtocolError('cut'),
    hub_answered(429),
    hub_answered(500),
    google.api_core.exceptions.ServiceUnavailable('later'),
    google.auth.exceptions.TransportError('no token server'),
    google.auth.exceptions.RefreshError('503', retryable=True),  # the token server is down
]

PERMANENT = [
    FileNotFoundError('gone'),
    FileExistsError('412'),
    OSError(errno.ENOSPC, 'No space left on device'),
    PermissionError(errno.EACCES, 'Permission denied'),
    ValueError('bad input'),
    KeyError('crc32c'),
    ssl.SSLCertVerificationError('certificate verify failed: CERTIFICATE_VERIFY_FAILED'),
    requests.exceptions.SSLError('[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate'),
    answered(404),
    answered(412),
    hub_answered(404, huggingface_hub.errors.RepositoryNotFoundError),
    huggingface_hub.errors.OfflineModeIsEnabled('HF_HUB_OFFLINE'),
    retry.GivenUp('another call has tried already'),
    caused(retry.GivenUp('eight times'), google.auth.exceptions.RefreshError('', retryable=True)),
]

REFUSED = [
    answered(401),
    answered(403),
    google.auth.exceptions.DefaultCredentialsError('not found'),
    google.auth.exceptions.RefreshError('Reauthentication is needed'),
    hub_answered(401, huggingface_hub.errors.RepositoryNotFoundError),
    hub_answered(403, huggingface_hub.errors.GatedRepoError),
    huggingface_hub.errors.LocalTokenNotFoundError('no token'),
    # As HfFileSystem wraps it.
    caused(
        FileNotFoundError('owner/name'),
        hub_answered(401, huggingface_hub.errors.RepositoryNotFoundError),
    ),
]


def label(error: Exception) -> str:
    return f'{type(error).__module__.partition(".")[0]}-{type(error).__name__}-{error}'[:60]


@pytest.mark.parametrize('error', TRANSIENT, ids=label)
def test_what_may_pass_is_tried_again(error, sleeps):
    operation = Failing(error, error)
    assert retry.call(operation, GS) == 'done'
    assert operation.calls == 3
    assert len(sleeps) == 2


@pytest.mark.parametrize('error', PERMANENT, ids=label)
def test_what_stays_is_raised_as_it_is_and_at_once(error, sleeps):
    operation = Failing(error)
    with pytest.raises(type(error)) as raised:
        retry.call(operation, GS)
    assert raised.value is error
    assert operation.calls == 1
    assert sleeps == []


@pytest.mark.parametrize('error', REFUSED, ids=label)
def test_missing_access_is_told_at_once_with_what_mends_it(error, sleeps):
    for what, commands in (
        (GS, ['`gcloud auth application-default login`']),
        (HUB, ['`hf auth login`', 'https://huggingface.co/datasets/owner/name ']),
    ):
        operation = Failing(error)
        with pytest.raises(PermissionError) as raised:
            retry.call(operation, what)
        assert all(text in str(raised.value) for text in [what, *commands])
        assert raised.value.__cause__ is error
        assert operation.calls == 1
    assert sleeps == []


def test_refused_access_to_what_is_not_remote_is_raised_as_it_is():
    error = answered(403)
    with pytest.raises(requests.HTTPError) as raised:
        retry.call(Failing(error), '/data/x.tfrecord')
    assert raised.value is error


def test_after_the_last_attempt_it_says_what_failed_how_often_and_why(sleeps):
    operation = Failing(*[answered(503)] * 9)
    with pytest.raises(OSError) as raised:
        retry.call(operation, GS)
    assert (operation.calls, len(sleeps)) == (8, 7)
    for part in (GS, '8 attempts', 'HTTPError: 503 for url', 'Run the same command again'):
        assert part in str(raised.value)
    assert isinstance(raised.value.__cause__, requests.HTTPError)


def test_every_retry_is_logged(sleeps, caplog):
    caplog.set_level(logging.WARNING, 'absl')
    retry.call(Failing(answered(503), TimeoutError('late')), GS)
    first, second = (record.getMessage() for record in caplog.records)
    assert GS in first and '503' in first and 'attempt 1 of 8' in first
    assert 'TimeoutError: late' in second and 'attempt 2 of 8' in second


@hypothesis.given(first=st.floats(0.001, 100.0))
def test_delays_are_jittered_and_doubled_up_to_32_times(first):
    with pytest.MonkeyPatch.context() as patch:
        sleeps: list[float] = []
        patch.setattr(time, 'sleep', sleeps.append)
        patch.setenv('COYO11M_RETRY_SECONDS', str(first))
        retry.call(Failing(*[TimeoutError()] * 7), GS)
    for number, seconds in enumerate(sleeps):
        assert 0 <= seconds <= first * min(2**number, 32)


@pytest.mark.parametrize(
    ('headers', 'least', 'most'),
    [
        ({'Retry_After': '7'}, 7, 7),
        ({'Retry_After': 'Wed, 21 Oct 2015 07:28:00 GMT'}, 0, 1),
        ({'Retry_After': '86400'}, 300, 300),
        ({'Retry_After': '²'}, 0, 1),
        ({'RateLimit': '"resolvers";r=0;t=212'}, 213, 213),
        ({'RateLimit': '"resolvers";r=2999;t=212'}, 0, 1),
    ],
)
def test_a_server_that_asks_for_time_gets_it(headers, least, most, sleeps):
    retry.call(Failing(answered(429, **headers)), GS)
    assert least <= sleeps[0] <= most


@pytest.mark.parametrize('text', ['soon', '0', '-1', 'nan', 'inf'])
def test_seconds_that_are_none(text, monkeypatch):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', text)
    with pytest.raises(ValueError, match=f"COYO11M_STALL_SECONDS is '{text}'"):
        retry.stall_seconds()
