"""Retries transient errors: exponential back-off with full jitter.

The classes of transient errors are known by their names, so that no library is imported for them.
`COYO11M_RETRY_SECONDS` (1) is the longest first delay, `COYO11M_STALL_SECONDS` (60) the longest
time that a request may wait for a byte.
"""

import errno
import http.client
import json
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from absl import logging

from coyo11m_tfds.process import errors, threads

T = TypeVar('T')

# With delays of up to 1, 2, 4, 8, 16, 32 and 32 s between them: 48 s in all, on average.
_ATTEMPTS = 8
_MAX_DOUBLINGS = 5  # the longest delay is 32 times the first
_MAX_SERVER_SECONDS = 300.0  # a server that requests a longer pause is tried again after this

# Request time-out, too early, too many requests; 5xx are transient too.
_TRANSIENT_STATUS = (408, 425, 429)
_REFUSED_STATUS = (401, 403, 407)

_TRANSIENT_ERRNO = (
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOBUFS,
)
_TRANSIENT_BUILTIN = (
    ConnectionError,
    TimeoutError,
    http.client.HTTPException,
    # For half a response that a proxy passed on as a whole one.
    json.JSONDecodeError,
    socket.gaierror,
    ssl.SSLError,
)

# By the package that defines them: names of classes that are transient, with their subclasses.
_TRANSIENT_NAMES = {
    'google': {'TransportError', 'RetryError'},
    'httpx': {'TimeoutException', 'NetworkError', 'RemoteProtocolError', 'ProxyError'},
    'requests': {'ConnectionError', 'Timeout', 'ChunkedEncodingError', 'ContentDecodingError'},
    'urllib3': {'ProtocolError', 'TimeoutError', 'MaxRetryError', 'DecodeError', 'SSLError'},
}
_TRANSIENT_NAMES['httpx2'] = _TRANSIENT_NAMES['httpx']
_REFUSED_NAMES = {
    'google': {'DefaultCredentialsError', 'RefreshError'},
    'huggingface_hub': {'LocalTokenNotFoundError'},
}
_PERMANENT_NAMES = {
    'huggingface_hub': {'OfflineModeIsEnabled'},
    # Of an object that is not what its Content-Encoding says.
    'requests': {'ContentDecodingError'},
}

# Until when threads wait for quotas, by what is said of each. All of a process meet it together.
_waits: dict[str, float] = {}
_waiting_lock = threading.Lock()

_threads = threading.local()


class GivenUp(OSError):
    """Every attempt failed with a transient error."""


class Corrupted(OSError):
    """The received bytes have a wrong checksum or length. A retry may succeed."""


def call(operation: Callable[[], T], label: str) -> T:
    """Returns `operation()`, repeated after transient errors; `label` names it and its URL.

    Raises:
        GivenUp: Every attempt failed with a transient error.
        PermissionError: The storage refuses the credentials of this machine.
        CancelledError: Nobody waits for this thread of a `ThreadPool` any more.
        Exception: Any other error of the operation, at once.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return operation()
        except Exception as error:
            if not is_transient(error):
                # Each library has errors of its own for that, and none says how to log in.
                if permission_error := _refused(error, label):
                    raise permission_error from error
                raise
            if attempt == _ATTEMPTS:
                raise GivenUp(
                    f'{label}: given up after {_ATTEMPTS} attempts; the last one failed with '
                    f'{_text(error)}. Run the same command again later; builds and copies resume.'
                ) from error
            delay = _delay(attempt, error)
            outlook = f'trying again in {delay:.1f} s (attempt {attempt} of {_ATTEMPTS} failed).'
            # All threads of a process meet a quota together: one line says it for all.
            quota = _describe_quota(error)
            if not quota:
                logging.warning('%s: %s; %s', label, _text(error), outlook)
            elif _is_first_to_wait(quota, delay):
                logging.warning('%s: %s; waiting %.0f s for the next.', label, quota, delay)
        _threads.num_retries = count_retries() + 1
        threads.pause(delay)
    raise AssertionError  # the last attempt has returned or raised


def count_retries() -> int:
    """Returns how often this thread has tried again so far, whatever it was."""
    return getattr(_threads, 'num_retries', 0)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed later."""
    # In this order: an error may be of a transient class, and still come from a permanent cause.
    if isinstance(error, Corrupted):
        return True
    if 'CERTIFICATE_VERIFY_FAILED' in str(error) or _is_named(error, _PERMANENT_NAMES):
        return False
    if isinstance(error, GivenUp):
        return False
    # google.auth marks the error of a token server that is down.
    if any(getattr(link, 'retryable', False) is True for link in errors.follow_causes(error)):
        return True
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS or 500 <= status < 600
    if getattr(error, 'errno', None) in _TRANSIENT_ERRNO:
        return True
    return isinstance(error, _TRANSIENT_BUILTIN) or _is_named(error, _TRANSIENT_NAMES)


def stall_seconds() -> float:
    """Returns the seconds after which a request without a byte is given up and retried."""
    return seconds('COYO11M_STALL_SECONDS', 60.0)


def seconds(variable: str, default: float) -> float:
    """Reads a time from an environment variable; `default` if it is unset or empty."""
    text = os.environ.get(variable, '')
    value = default
    if text:
        # What is no number is refused below, like 0.
        try:
            value = float(text)
        except ValueError:
            value = 0.0
    if not 0 < value < float('inf'):
        raise ValueError(f'{variable} is {text!r}, expected a positive number of seconds.')
    return value


def _delay(attempt: int, error: Exception) -> float:
    """Returns the seconds to wait after a failed attempt, counted from 1."""
    num_doublings = min(attempt - 1, _MAX_DOUBLINGS)
    longest = seconds('COYO11M_RETRY_SECONDS', 1.0) * 2**num_doublings
    # Not the shared generator: workers that seed it alike would all retry at the same moment.
    delay = random.SystemRandom().uniform(0.0, longest)
    server_seconds = min(_server_seconds(error), _MAX_SERVER_SECONDS)
    return max(delay, server_seconds)


def _headers(error: Exception) -> Mapping[str, str]:
    """Returns the headers of the response that an error is about, of any library; {} without."""
    response = getattr(error, 'response', None)
    return getattr(response, 'headers', None) or {}


def _server_seconds(error: Exception) -> float:
    """Returns the pause that the server requests, in seconds; 0 if it requests none."""
    headers = _headers(error)
    retry_after = str(headers.get('retry-after', ''))
    # Not `isdigit`, which takes ², of which `float` makes no number.
    if retry_after.isdecimal():
        return float(retry_after)
    # The hub's windows are five minutes: RateLimit: "resolvers";r=0;t=212
    window = re.search(r';\s*r=0\b.*;\s*t=(\d+)', str(headers.get('ratelimit', '')))
    if not window:
        return 0.0
    # One more, as the seconds may be rounded down.
    return float(window[1]) + 1.0


def _describe_quota(error: Exception) -> str:
    """Returns which quota of the hub is used up; '' if `error` has another cause."""
    headers = _headers(error)
    used_up = re.match(r'"(\w+)";\s*r=0\b', str(headers.get('ratelimit', '')))
    # The headers come with every response, also with errors of another kind.
    if not used_up or _status(error) != 429:
        return ''
    policy = re.search(r'q=(\d+);\s*w=(\d+)', str(headers.get('ratelimit-policy', '')))
    size = ''
    if policy:
        size = f' of {int(policy[1]):,} in {policy[2]} s'
    return f"the hub's quota of {used_up[1]}{size} is used up"


def _is_first_to_wait(quota: str, delay: float) -> bool:
    """Returns whether no other thread has reported this quota in its present window."""
    with _waiting_lock:
        now = time.monotonic()
        is_first = now >= _waits.get(quota, 0.0)
        if is_first:
            _waits[quota] = now + delay
    return is_first


def _refused(error: Exception, label: str) -> PermissionError | None:
    """Returns an error that says how to get access; None if `error` has another cause."""
    # From the local disk, or made here before.
    if isinstance(error, PermissionError | GivenUp):
        return None
    # A library may have raised another error from that of the refusal.
    is_refused = False
    for link in errors.follow_causes(error):
        if _status(link) in _REFUSED_STATUS or _is_named(link, _REFUSED_NAMES):
            is_refused = True
    if not is_refused:
        return None
    hub = re.search(r'hf://(datasets/[^/@\s]+/[^/@\s]+)?', label)
    is_bucket = 'gs://' in label
    if hub:
        page = f'https://huggingface.co/{hub[1] or "datasets/..."}'
        fix = (
            'Log in with `hf auth login` and accept the terms of the data set on its page, '
            f'{page} (the hub answers the same when a name is wrong).'
        )
    elif is_bucket:
        fix = (
            'Log in with `gcloud auth application-default login`, and ask the owner of the bucket '
            'for access to its objects if that is not enough.'
        )
    else:
        return None
    reason = ''
    if is_bucket:
        response = getattr(error, 'response', None)
        reason = find_message(getattr(response, 'text', ''))
    return PermissionError(f'{label}: access was refused ({reason or _text(error)}). {fix}')


def find_message(body: str) -> str:
    """Returns the message in the JSON of an error of gs://; '' if there is none."""
    match = re.search(r'"message": *"([^"]*)"', body)
    return ' '.join(match[1].split()) if match else ''


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of any library stands for; None without one."""
    # Of `remote`, google.api_core and urllib; below, of requests, httpx and huggingface_hub.
    for name in ('status', 'code'):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return int(value)
    return getattr(getattr(error, 'response', None), 'status_code', None)


def _is_named(error: BaseException, names: dict[str, set[str]]) -> bool:
    """Returns whether the class of an error, or one above it, is among names by packages."""
    for kind in type(error).__mro__:
        package = kind.__module__.partition('.')[0]
        if kind.__name__ in names.get(package, ()):
            return True
    return False


def _text(error: BaseException) -> str:
    """Returns the type and the first line of an error, at most 300 characters of it."""
    lines = str(error).strip().splitlines()
    first_line = ''
    if lines:
        first_line = lines[0].strip()
    # Before it is cut, as half an address would not be known for one.
    first_line = strip_request(first_line)
    return f'{type(error).__name__}: {first_line[:300]}'


def strip_request(message: str) -> str:
    """Returns the message of a client without the address and the parameters of its request."""
    # An address may be signed, so that whoever has it can read the file.
    message = re.sub(r' with url: \S+', '', message)
    return re.sub(r'\b(GET|PUT|POST|PATCH|DELETE) https?://\S+: ', '', message)
