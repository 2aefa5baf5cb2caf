"""Builds from a bucket to a bucket: whatever goes wrong on the way, the same bytes arrive."""

import pathlib
from collections.abc import Iterator

import pytest

from tests import made_sources
from tests.built import files_of
from tests.convert import build_kills
from tests.fakes.cloud import Fault, Gcs, fake_gcs
from tests.fakes.fake_http import KINDS

SOURCE = 'gs://source/coyo'
FILES = [range(60), range(60, 90)]
PASSING = [kind for kind in KINDS if kind not in ('401', '403')]


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    return made_sources.write_source(tmp_path_factory.mktemp('source'), FILES)


@pytest.fixture(scope='module')
def server(source, tmp_path_factory) -> Iterator[Gcs]:
    with fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        server.upload_folder(source, SOURCE)
        yield server
        assert server.errors == []


@pytest.fixture
def cloud(server) -> Iterator[Gcs]:
    """The storage server, without faults at first."""
    server.heal()
    yield server
    server.heal()


class Builder:
    """Builds with a scratch folder of its own."""

    def __init__(self, env: dict[str, str], scratch: pathlib.Path):
        self._env, self.scratch = env, scratch

    def build(self, final: str, **settings) -> str:
        """Says 'built here', or what went wrong."""
        options = {'env': self._env, 'scratch_dir': str(self.scratch), 'settings': settings}
        ended = build_kills.start(SOURCE, final, **options).end()
        return (ended.stderr if ended.returncode else ended.stdout).splitlines()[-1]


@pytest.fixture(scope='module')
def builder(server, tmp_path_factory) -> Builder:
    return Builder(server.env, tmp_path_factory.mktemp('scratch'))


@pytest.fixture(scope='module')
def undisturbed(source, tmp_path_factory) -> dict:
    """What the same source gives on a local disk."""
    final = build_kills.final_folder(tmp_path_factory.mktemp('undisturbed'))
    build_kills.run(source, final)
    return files_of(final)


def final_url(name: str) -> str:
    return f'gs://data/{name}/coyo11m_tfds/x/1.0.0'


def files_at(cloud: Gcs, final: str) -> dict[str, bytes]:
    """Objects of the data set; there must be no others beside it, nor below."""
    prefix = final.removeprefix('gs://data/')
    folder = prefix.rpartition('/')[0] + '/'
    found = {
        name: data
        for name, data in cloud.objects('data').items()
        if name.startswith(folder) and not name.endswith('/')
    }
    assert all(name.rpartition('/')[0] == prefix for name in found), sorted(found)
    return {name.removeprefix(prefix + '/'): data for name, data in found.items()}


def test_a_bucket_gets_the_same_bytes_as_a_disk(cloud, builder, undisturbed):
    final = final_url('plain')
    assert builder.build(final) == 'built here'
    assert files_at(cloud, final) == undisturbed
    assert builder.build(final) == 'built elsewhere'  # it is there
    left = [p for p in builder.scratch.rglob('*') if p.suffix in ('.pt', '.parquet', '.part')]
    # The joined captions stay, for the next build of the same source.
    assert [p.name for p in left] == ['rows.parquet']


@pytest.mark.parametrize(
    'seed', [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_faults_in_a_tenth_of_all_requests_change_nothing(cloud, builder, undisturbed, seed):
    final = final_url(f'mixed-{seed}')
    cloud.inject_share(PASSING, share=0.1, seed=seed, everywhere=True, seconds=3)
    assert builder.build(final) == 'built here'
    assert {request.fault for request in cloud.requests} - {None}
    assert files_at(cloud, final) == undisturbed


@pytest.mark.parametrize(
    ('place', 'kind', 'message'),
    [
        ('source', '503', 'given up after'),
        ('destination', '403', 'gcloud auth application-default login'),
    ],
)
def test_a_lasting_fault_is_one_clear_error_and_what_is_finished_stays(
    cloud, builder, undisturbed, place, kind, message
):
    final = final_url(f'lasting-{place}-{kind}')
    match = {
        'source': r'read source/.*010-.*\.pt',
        'destination': r'upload data/.*train-.*tfrecord-00002-of',
    }
    cloud.inject(Fault(kind, count=None, match=match[place]))
    outcome = builder.build(final)
    assert message in outcome
    assert 'gs://' in outcome
    made = [n for n in cloud.objects('data') if n.startswith(final.removeprefix('gs://data/'))]
    assert not [name for name in made if name.endswith('dataset_info.json')]
    cloud.heal()
    finished = [n for n in made if '/building-' in n and '.tfrecord' in n]
    assert builder.build(final) == 'built here'
    assert files_at(cloud, final) == undisturbed
    assert place == 'source' or finished
