"""The command that examines a machine, a source and an encoder, and each of its checks."""

import dataclasses
import json
import os
import re
import shutil
import signal
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import input_pipeline
from coyo11m_tfds import add_column, doctor, dry_run, schema
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.process import machine, python_child
from coyo11m_tfds.process.sizes import format_bytes
from tests import built, children, made_sources
from tests.fakes.cloud import Fault

GB = 10**9
SETTINGS = BuildSettings(validation_fraction=0.1, shard_bytes=2_500_000)


@pytest.fixture(autouse=True)
def settings(monkeypatch) -> None:
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.01')
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '1')


def test_a_whole_way_is_examined(command, sample_source, tmp_path):
    config = '{"name": "x", "validation_fraction": 0.1, "shard_bytes": 2500000}'
    status, said, errors = command(
        doctor,
        f'--source={sample_source}',
        f'--data_dir={tmp_path}',
        '--encoder=hash',
        f'--build_config={config}',
    )
    assert status == 0, said + errors
    *lines, last = said.splitlines()
    assert [line.partition('  ')[2].partition(': ')[0] for line in lines] == [
        *('machine', 'accelerators', 'credentials of source', 'credentials of data_dir'),
        *('source', 'disk of data_dir', 'disk of scratch', 'encoder'),
    ]
    assert '1,173 records in 15 shards' in said
    assert last.startswith('8 checks: all pass')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings('default:old driver')
def test_a_warning_is_a_line_like_the_others(command, tmp_path, monkeypatch):
    def usable_cpus() -> int:
        warnings.warn('old driver', stacklevel=1)
        return 2

    monkeypatch.setattr(machine, 'usable_cpus', usable_cpus)
    source = made_sources.write_source(tmp_path / 's', [range(40)])
    captions = source / schema.CAPTIONS_FILE
    pq.write_table(pq.read_table(captions), captions)  # without checksums of pages
    status, said, errors = command(doctor, f'--source={source}')
    assert status == 0, said + errors
    first, second, *others = errors.splitlines()
    assert re.match('warn  warning: .*UserWarning: old driver', first)
    assert second.startswith(f'warn  warning: {captions}: its pages have no checksums')
    assert all(line.startswith('warn  warning: ') for line in others)
    num_warnings = len(others) + 2 + said.count('\nwarn  ') + said.startswith('warn  ')
    assert said.endswith(f' checks: all pass, {num_warnings} warnings\n')


def test_what_fails_is_in_the_exit_status(command, tmp_path, monkeypatch):
    monkeypatch.setenv('JAX_PLATFORMS', 'nonesuch')
    source = made_sources.write_source(tmp_path / 's', [range(40)])
    os.truncate(made_sources.latents_file(source, 0), 1000)
    status, said, errors = command(doctor, f'--source={source}', '--encoder=clip')
    assert status == 1 and 'Traceback' not in errors
    lines = [line.partition('  ')[2] for line in said.splitlines() if line.startswith('fail')]
    failed = dict(line.split(': ', 1) for line in lines)
    assert failed.keys() == {'accelerators', 'source', 'encoder'}
    assert ' checks: 3 fail' in said.splitlines()[-1]
    assert 'nonesuch' in failed['accelerators']
    assert 'JAX_PLATFORMS=cpu' in failed['accelerators']
    assert '.pt' in failed['source']
    assert "unknown encoder 'clip'" in failed['encoder']


def test_it_can_be_ended_while_a_check_hangs(tmp_path, monkeypatch):
    """And that check does not outlive it."""
    (tmp_path / 'jax.py').write_text(
        'import os, pathlib, signal, time\n'
        'signal.signal(signal.SIGINT, signal.SIG_IGN)  # as what waits in C does\n'
        f'pathlib.Path({str(tmp_path)!r}, "pid.part").write_text(str(os.getpid()))\n'
        f'os.rename({str(tmp_path / "pid.part")!r}, {str(tmp_path / "pid")!r})\n'
        'time.sleep(600)\n'
    )
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    program = """
        import runpy, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # What only builds need is not needed here.
        sys.modules.update(dict.fromkeys(['torch', 'pyarrow', 'isal', 'transformers']))
        sys.argv = ['doctor']
        runpy.run_module('coyo11m_tfds.doctor', run_name='__main__')
    """
    with children.python(program) as child:
        children.wait_until((tmp_path / 'pid').exists)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, 'Interrupted: nothing was changed.\n')
    children.wait_until(lambda: not children.is_running(int((tmp_path / 'pid').read_text())))


@pytest.mark.parametrize(
    ('cores', 'memory', 'status'),
    [(8, 4 * GB, 'pass'), (1, 4 * GB, 'warn'), (8, GB, 'warn'), (8, GB // 4, 'fail')],
)
def test_few_cores_and_little_memory(monkeypatch, cores, memory, status):
    monkeypatch.setattr(machine, 'usable_cpus', lambda: cores)
    monkeypatch.setattr(machine, 'usable_memory', lambda: memory)
    found = doctor.check_machine()
    assert (found.status, bool(found.fix)) == (status, status != 'pass')


def test_disks_without_room(tmp_path):
    places = {
        'data_dir': (str(tmp_path / 'not' / 'yet'), 30 * GB),
        'scratch': (str(tmp_path), 32 * GB),  # on the same disk
    }
    found = list(doctor.check_disks(places, lambda folder: (80 * GB, 40 * GB, 40 * GB)))
    assert [one.status for one in found] == ['pass', 'fail']
    assert 'has 40.0 GB free, expected 62.0 GB' in found[1].text
    assert 'scratch_dir in the config' in found[1].fix


def test_a_folder_that_cannot_be_looked_for_is_a_finding(tmp_path):
    places = {'data_dir': (str(tmp_path / ('x' * 300) / 'data'), 0), 'scratch': (str(tmp_path), 0)}
    found = list(doctor.check_disks(places, lambda folder: (80 * GB, 40 * GB, 40 * GB)))
    assert [one.status for one in found] == ['fail', 'pass']
    assert found[0].text.endswith('/data: File name too long')
    assert found[0].fix == 'choose another --data_dir'


@pytest.mark.parametrize(
    ('name', 'said'), [('nvidia0', 'a GPU'), ('accel0', 'a TPU'), ('nvidiactl', '')]
)
def test_a_device_that_jax_does_not_see(tmp_path, monkeypatch, name, said):
    monkeypatch.setattr(python_child, 'run_python', lambda program: ['0.10', [['cpu', 'cpu']]])
    (tmp_path / 'dev').mkdir()
    (tmp_path / 'dev' / name).touch()
    found = doctor.check_devices(str(tmp_path))
    assert found.status == ('warn' if said else 'pass')
    assert said in found.text and '1 x cpu' in found.text


NO_ANSWERS = {
    'it takes too long': ('import time; time.sleep(60)', 'no answer within'),
    'it is killed': ('import os; os.kill(os.getpid(), 9)', 'ran out of memory'),
    'it ends by itself': ('raise SystemExit("error: no device")', '^no device$'),
}


@pytest.mark.parametrize(('code', 'message'), NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_a_process_that_gives_no_answer(code, message):
    with pytest.raises((ValueError, TimeoutError), match=message):
        python_child.run_python(code, 1)


def test_a_bucket_that_lets_in_passes_and_keeps_nothing(gcs):
    gcs.put('bucket', 'd/x', b'x')
    found = doctor.check_credentials('data_dir', 'gs://bucket/out', writes=True)
    assert (found.status, 'written to' in found.text) == ('pass', True)
    assert list(gcs.objects('bucket')) == ['d/x']
    gcs.inject(Fault('403', count=None, action='upload'))
    assert doctor.check_credentials('source', 'gs://bucket/d').status == 'pass'
    found = doctor.check_credentials('data_dir', 'gs://bucket/d', writes=True)
    assert (found.status, 'writing to' in found.text) == ('fail', True)


def test_a_folder_that_a_build_refuses_fails(gcs):
    for url in ('gs://bucket//d', 's3://bucket/d'):
        assert doctor.check_credentials('data_dir', url, writes=True).status == 'fail'
    assert gcs.objects('bucket') == {}


def test_a_zonal_bucket_is_refused_where_it_can_be_told(gcs):
    gcs.put('zonal', 'd/x', b'x')
    gcs.location_types['zonal'] = 'zone'
    found = doctor.check_credentials('source', 'gs://zonal/d')
    assert (found.status, 'zonal (Rapid) bucket' in found.text) == ('fail', True)
    gcs.inject(Fault('403', count=None, action='layout'))
    assert doctor.check_credentials('source', 'gs://zonal/d').status == 'pass'


def test_a_hub(hub):
    hub.commit({'a.txt': b'x'})
    assert doctor.check_credentials('source', 'hf://datasets/owner/name').status == 'pass'
    found = doctor.check_credentials('source', 'hf://datasets/owner/other')
    assert (found.status, found.fix) == ('fail', 'hf auth login')
    found = doctor.check_credentials('data_dir', 'hf://datasets/owner/name', is_output=True)
    assert (found.status, 'expected a local path or gs://bucket' in found.text) == ('fail', True)


def test_the_quota_of_a_run_from_the_hub(hub, mini_dataset, command):
    hub.commit({f'data/{name}': x for name, x in built.files_of(mini_dataset).items()})
    data = 'hf://datasets/owner/name/data'
    use = {'samples_per_second': 2000.0, 'chunk': 64}
    finding = doctor.check_quota(data, num_processes=8, **use)
    assert finding.status == 'pass'
    for text in (
        *('2,000 samples/s in chunks of 64', '31.2 requests/s of 1.7 MB'),
        *('12 files in 8 processes', 'up to 160 resolves', 'this account has 5,000 in 300 s'),
    ):
        assert text in finding.text
    hub.set_quota('resolvers', 100)
    finding = doctor.check_quota(data, num_processes=8, **use)
    assert (finding.status, 'hf auth login' in finding.fix) == ('warn', True)
    for place in (f'{data}/absent', 'hf://datasets/owner/absent'):
        assert doctor.check_quota(place, num_processes=1, **use).status == 'fail'
    assert doctor.check_quota(str(mini_dataset), num_processes=1, **use).status == 'pass'
    stored = input_pipeline.open_data(data)
    of_others = dataclasses.replace(stored, splits={'test': stored.splits[schema.TRAIN]})
    finding = doctor.check_quota(of_others, num_processes=1, **use)
    assert (finding.status, "has no records in a split 'train'" in finding.text) == ('fail', True)
    status, said, _ = command(doctor, f'--data={data}', '--chunk=256', '--processes=2')
    assert status == 0 and 'pass  quota: hf://datasets/owner/name@' in said
    status, _, errors = command(doctor, f'--data={data}', '--chunk=0')
    assert status == 2 and 'chunk=0: expected at least 1' in errors


def test_rows_of_columns_are_in_the_requests_of_a_run(hub, mini_dataset, tmp_path):
    copy = shutil.copytree(mini_dataset, tmp_path / mini_dataset.name)
    keys = []
    for split in (schema.TRAIN, schema.VALIDATION):
        batches = input_pipeline.eval_batches(copy, batch_size=64, split=split)
        keys += [key for batch in batches for key in batch['key'][batch['mask']].tolist()]
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4096 * len(keys), '<f4')), 4096)
    pq.write_table(pa.table({'key': keys, 'wide': rows}), tmp_path / 'wide.parquet')
    add_column.add(copy, 'wide', parquet=tmp_path / 'wide.parquet', column='wide')
    hub.commit({f'data/{name}': x for name, x in built.files_of(copy).items()})
    data = 'hf://datasets/owner/name/data'
    finding = doctor.check_quota(data, samples_per_second=2000.0, chunk=64, num_processes=8)
    # Half of them of 64 records with 27 KB each, half of them of 64 rows with 16 KB each.
    assert '62.5 requests/s of 1.4 MB' in finding.text


def test_a_dry_run_is_as_the_build(sample_source, hash_sidecar, mini_dataset, monkeypatch):
    settings = BuildSettings(
        validation_fraction=0.1, shard_bytes=2_500_000, text_embeddings=str(hash_sidecar)
    )
    splits = json.loads((mini_dataset / schema.INFO_FILE).read_bytes())['splits']
    lengths = [int(length) for split in splits for length in split['shardLengths']]
    records, num_bytes = sum(lengths), sum(int(split['numBytes']) for split in splits)
    found = dry_run.plan_or_estimate(sample_source, settings)
    assert (found.num_records, found.num_shards) == (records, len(lengths))
    assert found.num_bytes == pytest.approx(num_bytes, rel=0.01)
    line = doctor.describe_build(sample_source, found)
    size = format_bytes(found.num_bytes)
    assert f'{records:,} records in {len(lengths)} shards of {size}' in line.text
    assert line.status == 'pass'

    monkeypatch.setattr(dry_run, '_EXACT_BYTES', {False: 0, True: 0})  # as of a large source
    found = dry_run.plan_or_estimate(sample_source, settings)
    assert found.num_shards == 0
    assert found.num_records == pytest.approx(records, rel=0.03)
    assert found.num_bytes == pytest.approx(num_bytes, rel=0.1)
    assert 'become about 1,200 records' in doctor.describe_build(sample_source, found).text


def test_a_remote_source(gcs, tmp_path, monkeypatch):
    folder = made_sources.write_source(tmp_path / 's', [range(40), range(40, 90)])
    gcs.upload_folder(folder, 'gs://bucket/s')
    found = dry_run.plan_or_estimate('gs://bucket/s', SETTINGS)
    assert (found.num_shards > 0, found.num_records) == (True, 90)
    files = [path for path in folder.rglob('*') if path.is_file()]
    captions = (folder / schema.CAPTIONS_FILE).stat().st_size  # sorted ones are kept as well
    assert found.scratch_bytes == captions + sum(file.stat().st_size for file in files)
    heads = dataclasses.replace(SETTINGS, latents='in_place', read_latents='heads')
    assert dry_run.plan_or_estimate('gs://bucket/s', heads).scratch_bytes == captions
    monkeypatch.setattr(dry_run, '_EXACT_BYTES', {False: 0, True: 0})
    gcs.clear()
    assert dry_run.plan_or_estimate('gs://bucket/s', SETTINGS).num_records == pytest.approx(
        90, rel=0.02
    )
    read = sum(r.nbytes for r in gcs.requests if r.path.endswith(schema.CAPTIONS_FILE))
    assert 0 < read <= captions


def test_many_captions_make_an_encoder_slow():
    found = doctor.check_encoder_speed('hash', num_captions=10**12)
    assert (found.status, 'embeddings of 640 numbers' in found.text) == ('warn', True)
    assert 'GPU' in found.fix
