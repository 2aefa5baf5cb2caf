"""Tests of credentials: what a storage refuses is a failure with the command that mends it."""

import pytest

from coyo11m_tfds.checks import places
from tests.fakes.cloud import Fault


def test_a_bucket_that_lets_in_passes_and_keeps_nothing(gcs):
    gcs.put('bucket', 'd/x', b'x')
    gcs.clear()
    (found,) = places.check_place('source', 'gs://bucket/d')
    assert found.status == 'pass'
    assert len(gcs.requests) == 1
    (found,) = places.check_place('data_dir', 'gs://bucket/out', writes=True)
    assert (found.status, 'written to' in found.text) == ('pass', True)
    assert list(gcs.objects('bucket')) == ['d/x']


@pytest.mark.parametrize('kind', ['401', '403'])
def test_a_bucket_without_credentials(gcs, kind):
    gcs.inject(Fault(kind, count=None))
    (found,) = places.check_place('source', 'gs://bucket/d')
    assert found.status == 'fail'
    assert 'access was refused' in found.text
    assert found.mend == 'gcloud auth application-default login'


def test_a_bucket_that_may_be_read_only(gcs):
    gcs.inject(Fault('403', count=None, action='upload'))
    (found,) = places.check_place('source', 'gs://bucket/d')
    assert found.status == 'pass'
    (found,) = places.check_place('data_dir', 'gs://bucket/d', writes=True)
    assert (found.status, 'writing to' in found.text) == ('fail', True)


def test_a_bucket_that_is_not_there(gcs):
    (found,) = places.check_place('data_dir', 'gs://no-such-bucket/d', writes=True)
    assert found.status == 'fail'
    assert 'gcloud storage buckets create gs://no-such-bucket' in found.text


@pytest.mark.parametrize('kind', ['401', '403'])
def test_a_hub_without_credentials(hub, kind):
    hub.inject(Fault(kind, count=None))
    (found,) = places.check_place('source', 'hf://datasets/owner/name')
    assert (found.status, found.mend) == ('fail', 'hf auth login')


def test_a_hub(hub):
    hub.commit({'a.txt': b'x'})
    (found,) = places.check_place('source', 'hf://datasets/owner/name')
    assert found.status == 'pass'
    (found,) = places.check_place('source', 'hf://datasets/owner/other')
    assert (found.status, found.mend) == ('fail', 'hf auth login')
    (found,) = places.check_place('data_dir', 'hf://datasets/owner/name', writes=True)
    assert (found.status, 'cannot be written to' in found.text) == ('fail', True)


@pytest.mark.parametrize(
    ('url', 'status'), [('/data', 'pass'), ('s3://bucket/d', 'fail'), ('gs://', 'fail')]
)
def test_other_places(url, status):
    (found,) = places.check_place('source', url)
    assert found.status == status
    assert status == 'pass' or f'{url}: expected a local path' in found.text
