"""Checks this user's access to a place: by a small request, to a destination also by a small write.

    places.check_place('source', 'hf://datasets/owner/name')
    places.check_place('data_dir', 'gs://bucket/tfds', writes=True)

`hardware.check_disks` judges local folders.
"""

import uuid

from coyo11m_tfds.checks import finding
from coyo11m_tfds.checks.finding import Finding
from coyo11m_tfds.storage import retry, source_files

# How to log in, by the beginning of a URL.
_LOG_IN = {'gs://': 'gcloud auth application-default login', 'hf://': 'hf auth login'}


def check_place(name: str, url: str, writes: bool = False) -> list[Finding]:
    """Asks a storage for a listing; a local folder passes.

    Args:
        name: of the place, as 'source'.
        url: local, `gs://` or `hf://`.
        writes: whether files will be made there; then one of one byte is made and removed again.
    """
    label = f'credentials of {name}'
    if not source_files.is_remote(url):
        return [finding.passed(label, f'{url} is local and needs none')]
    try:
        _ask(url)
        if writes:
            _write(url)
    except PermissionError as error:
        return [finding.of_error(label, error, _LOG_IN.get(url[:5], ''))]
    except (OSError, ValueError) as error:
        return [finding.of_error(label, error)]
    what = 'can be listed, written to and deleted from' if writes else 'can be listed'
    return [finding.passed(label, f'{url} {what}')]


def _ask(url: str) -> None:
    if url.startswith('gs://'):
        from coyo11m_tfds.storage import gcs_objects  # imports the storage's client

        gcs_objects.split_url(url)
        source_files.check_bucket(url)
        return
    try:
        source_files.list_files(url, '', ())
    except FileNotFoundError:
        raise PermissionError(
            f'{url}: the hub has no such data set, or does not show it to this user.'
        ) from None


def _write(url: str) -> None:
    if not url.startswith('gs://'):
        raise ValueError(f'{url}: cannot be written to; expected a local folder or gs://.')
    probe = f'{url.rstrip("/")}/.doctor_{uuid.uuid4().hex}'
    retry.call(lambda: source_files.gcs().pipe_file(probe, b'x'), f'writing to {url}')
    retry.call(lambda: source_files.gcs().rm_file(probe), f'deleting from {url}')
