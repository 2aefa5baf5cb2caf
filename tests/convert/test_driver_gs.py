"""Builds from a bucket to a bucket: whatever goes wrong on the way, the same bytes arrive."""

import pathlib
import signal

import pytest

from tests import children, made_sources
from tests.built import files_of
from tests.convert import build_kills
from tests.fakes.cloud import Fault
from tests.fakes.faults import KINDS

SOURCE = 'gs://source/coyo'
PASSING = [kind for kind in KINDS if kind not in ('401', '403')]


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('source')
    return made_sources.write_source(folder, [range(60), range(60, 90)])


@pytest.fixture(scope='module')
def undisturbed(source, tmp_path_factory) -> dict:
    """What the same source gives on a local disk."""
    final = build_kills.final_folder(tmp_path_factory.mktemp('undisturbed'))
    build_kills.run(source, final)
    return files_of(final)


@pytest.fixture
def place(gcs, source, tmp_path) -> build_kills.Place:
    gcs.upload_folder(source, SOURCE)
    return build_kills.Place(SOURCE, 'gs://data/out', tmp_path / 'scratch', gcs.env)


def last_line(place: build_kills.Place) -> str:
    """Builds; returns 'built here', or what went wrong."""
    ended = place.start().end()
    return (ended.stderr if ended.returncode else ended.stdout).splitlines()[-1]


def test_a_bucket_gets_the_same_bytes_as_a_disk(place, source, undisturbed, tmp_path):
    ended = place.start().end()
    assert ended.stdout.endswith('built here\n')
    size = sum(path.stat().st_size for path in source.rglob('*.pt'))
    assert f', {size:,} bytes fetched, in ' in ended.stderr
    assert (place.read(), place.others()) == (undisturbed, set())
    assert last_line(place) == 'built elsewhere'  # it is there
    scratch = tmp_path / 'scratch'
    cached = [p for p in scratch.rglob('*') if p.suffix in ('.pt', '.parquet', '.part')]
    # The joined captions stay, for the next build of the same source.
    assert [p.name for p in cached] == ['rows.parquet']


@pytest.mark.parametrize(
    'seed', [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_faults_in_a_tenth_of_all_requests_change_nothing(gcs, place, undisturbed, seed):
    gcs.inject_share(PASSING, share=0.1, seed=seed, everywhere=True, seconds=3)
    assert last_line(place) == 'built here'
    assert {request.fault for request in gcs.requests} - {None}
    gcs.heal()
    assert (place.read(), place.others()) == (undisturbed, set())


@pytest.mark.parametrize(
    ('kind', 'match', 'message'),
    [
        ('503', r'read source/.*010-.*\.pt', 'given up after'),
        (
            '403',
            r'upload data/.*train-.*tfrecord-00002-of',
            'gcloud auth application-default login',
        ),
    ],
    ids=['source', 'destination'],
)
def test_a_lasting_fault_is_one_clear_error_and_what_is_finished_stays(
    gcs, place, undisturbed, kind, match, message
):
    gcs.inject(Fault(kind, count=None, match=match))
    error = last_line(place)
    assert message in error and 'gs://' in error
    objects = [name for name in gcs.objects('data') if name.startswith('out/')]
    assert not [name for name in objects if name.endswith('dataset_info.json')]
    gcs.heal()
    assert last_line(place) == 'built here'
    assert (place.read(), place.others()) == (undisturbed, set())
    assert kind == '503' or [n for n in objects if '/building-' in n and '.tfrecord' in n]


@pytest.mark.parametrize('match', ['read source', 'upload data/.*tfrecord'])
def test_an_interrupted_build_does_not_wait_for_a_bucket_out_of_reach(gcs, source, tmp_path, match):
    gcs.upload_folder(source, SOURCE)
    env = gcs.env | {'COYO11M_RETRY_SECONDS': '600'}
    place = build_kills.Place(SOURCE, 'gs://data/out', tmp_path / 'scratch', env)
    gcs.inject(Fault('503', count=None, match=match))
    build = place.start()
    children.wait_until(lambda: any(request.fault for request in gcs.requests))
    build.send_signal(signal.SIGINT)
    children.wait_until(lambda: build.poll() is not None, seconds=60)
    assert 'KeyboardInterrupt' in build.end().stderr
