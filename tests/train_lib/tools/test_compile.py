"""The training step compiled for slices that are not there, and what the command says of it."""

import importlib
import json
import re

import jax
import jax.numpy as jnp
import pytest

from configs import default
from coyo11m_tfds.text import jax_encoder
from tests import children
from tests.checkout import CHECKOUT
from tests.text.test_jax_encoder import models  # noqa: F401, a fixture
from train_lib.learning import models as networks
from train_lib.lifecycle import chips
from train_lib.tools import compile, costs, hlo

# As their docstrings say.
PODS = {
    'tpu_v5e_16': '--topology=v5e:4x4',
    'tpu_v5e_128': '--topology=v5e:8x16',
    'tpu_v5e_256': '--topology=v5e:16x16',
}

CHIP = chips.CHIPS['TPU v5 lite']

# The command, where an import of these is an error.
_ALONE = """
import runpy
for name in ('tensorflow', 'tensorflow_datasets', 'torch'):
    sys.modules[name] = None
runpy.run_module('train_lib.tools.compile', run_name='__main__', alter_sys=True)
"""


def _run(*arguments):
    """The exit status, output and errors of the command, which needs the compiler of TPUs."""
    pytest.importorskip('libtpu')
    with children.python(_ALONE, *arguments) as child:
        output, errors = child.communicate()
    return child.returncode, output, errors


def _compile_for_slice(*arguments):
    """The report of the command."""
    status, output, errors = _run(*arguments, '--json')
    assert status == 0, errors
    return json.loads(output)


@pytest.fixture
def analyze_tiny(monkeypatch):
    """Compiles a step of a tiny model for this machine; returns its report and configuration."""
    monkeypatch.setattr(compile, 'slice_devices', lambda *_: jax.devices()[:1])
    monkeypatch.setitem(chips.CHIPS, 'cpu', CHIP)

    def analyze(fields, **options):
        config = default.get_config()
        sizes = {'model.name': 'tiny/16', 'model.depth': 1, 'batch_size': 8, 'preview.count': 1}
        config.update_from_flattened_dict(sizes | fields)
        report = compile.analyze(config, 'here', **options)
        assert report['fits']
        return report, config

    return analyze


def _report(**changes):
    report = {
        'program': 'L/2 on 16 chips',
        costs.ARITHMETIC: {'model': 19.7},
        costs.MEMORY: {'arguments': 2.0, 'total': 8.0},
        costs.MOVED: {'all-gather of 4': 3300.0, 'in all': 3300.0, 'least for this mesh': 3000.0},
        costs.TIME: {'MLP': 150.0, 'in all': 200.0},
        costs.WAITS: {'all-reduce': 50.0, 'in all': 50.0},
        costs.LEFT_OUT: ['kernel b'],
    } | changes
    return report | costs.judge(report, CHIP)


@pytest.mark.parametrize(
    ('changes', 'verdict'),
    [
        (
            {},
            'fits: 50% of the memory, 1.10 times the least traffic, 200 ms a step by the compiler, '
            'an MFU of 50%, 40% with the exchanges that wait, without kernel b',
        ),
        ({costs.MEMORY: {'total': 17.0}}, 'does not fit: 106% of the memory'),
        ({costs.TIME: {'in all': 0.0}}, 'least traffic, no estimate of the time on v5e'),
    ],
)
def test_the_verdict_has_memory_traffic_and_time(changes, verdict):
    report = _report(**changes)
    assert verdict in report['verdict']
    assert report['fits'] == (not verdict.startswith('does not'))


def test_the_table_has_every_part_and_one_verdict():
    lines = [
        re.sub(' +', ' ', line).strip() for line in compile.format_report(_report()).splitlines()
    ]
    for line in ('L/2 on 16 chips', 'arguments 2.00', 'all-gather of 4 3,300.00', 'MLP 150.00'):
        assert line in lines
    assert ' '.join(lines).count('erdict') == 1


def test_a_table_compares_meshes_and_warns_of_small_products():
    ring = {'all-gather of 4': 2000.0, 'collective-permute of 2, asynchronous': 1000.0}
    reports = {
        4: _report(**{costs.MOVED: {'collective-permute of 2': 90.0, 'in all': 3000.0}}),
        8: _report(**{costs.MEMORY: {'total': 17.0}}),
        16: _report(**{costs.MOVED: ring | {'in all': 3000.0}}),
        1: {'fits': False, 'verdict': 'does not fit: 20G of 15.75G'},
    }
    _, *rows = (line.split(maxsplit=5) for line in compile.format_meshes(reports).splitlines())
    assert rows[0] == ['4', '200', '50%', '40%', '8.0']
    assert rows[1] == ['8', '200', '50%', '40%', '17.0', 'does not fit']
    assert rows[2][:5] == ['16', *rows[0][1:]]
    assert rows[2][5].startswith('warning: ') and '1,000 MB' in rows[2][5]
    assert ' '.join(rows[3]) == '1 does not fit: 20G of 15.75G'


def test_operations_belong_to_parts_of_the_model(tmp_path):
    layer = 'jit(train_step)/jvp(DiT)/while/body/closed_call/blocks.body/blocks'
    names = {
        f'{layer}/mlp_2/dot_general': 'MLP',
        f'{layer}/attention/attention._heads/qkv/dot_general': 'attention: qkv and out',
        f'{layer}/attention/vmap(BNTS,BSNH->BTNH)/dot_general': 'attention: scores and values',
        f'{layer}/attention/vmap()/sub': 'attention: the rest',
        f'{layer}/modulation/dot_general': 'modulation, time and text',
        f'{layer}/LayerNorm_0/reduce_sum': 'norms, sums and stacking in layers',
        'jit(train_step)/jvp(DiT)/while/body/copy': 'norms, sums and stacking in layers',
        'jit(train_step)/while/body/muon/dot_general': 'optimizer and the rest',
        'jit(train_step)/jit(_where)/select_n': 'optimizer and the rest',
        'jit(train_step)/jvp(LanguageModel)/while/body/mlp/dot_general': 'text encoder',
    }
    estimates = dict.fromkeys(names, CHIP.clock / 1e3)
    read = hlo.Costs(estimates, [], {}, set())
    time = costs.tabulate(read, CHIP, tmp_path)[costs.TIME]
    parts = list(names.values())
    expected = {part: parts.count(part) for part in parts} | {'in all': len(names)}
    assert time == pytest.approx(expected)


def test_kernels_take_a_cycle_for_each_bundle_of_their_schedule_and_row(tmp_path):
    for name, count in {'9-attend.1': 7, '10-attend.1': 4000, '10-attend.11': 5}.items():
        file = tmp_path / f'{name}-00-schedule-analysis_final_bundles.txt'
        file.write_text(f'Schedule analysis:\n\ttotal scheduled bundles:    {count}\n')
    kernels = {hlo.Kernel('attend.1', 64): 3, hlo.Kernel('other.2', 64): 2}
    report = costs.tabulate(hlo.Costs({}, [], kernels, {(), (0,)}), CHIP, tmp_path)
    time = 4000 * 64 * 3 / CHIP.clock * 1e3
    assert report[costs.TIME] == pytest.approx({'kernel attend': time, 'in all': time})
    assert report[costs.LEFT_OUT] == [
        'most iterations of a loop',
        'kernel other, which has no schedule',
    ]


def test_each_exchange_that_waits_is_listed_with_its_time(tmp_path):
    def exchange(nbytes, is_async, times=24, columns=16):
        arrays = [('f32', (8, columns))]
        return hlo.Collective('all-reduce', 4, arrays, nbytes, times, (), is_async)

    exchanges = [exchange(2e8, False), exchange(1e8, False, 1), exchange(4e8, True)]
    exchanges.append(exchange(8e6, False, columns=2))
    report = costs.tabulate(hlo.Costs({}, exchanges, {}, set()), CHIP, tmp_path)
    expected = {'25 x all-reduce of 4, f32[8,16]': 1.5, 'shorter ones': 0.04, 'in all': 1.54}
    assert report[costs.WAITS] == pytest.approx(expected)
    moved = {'all-reduce of 4': 308, 'all-reduce of 4, asynchronous': 400, 'in all': 708}
    assert report[costs.MOVED] == moved


@pytest.mark.parametrize(
    ('step', 'samples'), [('train', 3 * 8), ('evaluate', 2 * 8), ('draw', 2 * 5)]
)
def test_every_step_is_compiled(analyze_tiny, step, samples):
    report, config = analyze_tiny({'preview.num_steps': 5}, step=step)
    flops = samples * networks.make_model(**config.model).flops((32, 32, 4), 640)
    assert report[costs.ARITHMETIC] == {'model': pytest.approx(flops / 1e12)}


def test_without_libtpu_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match='libtpu is not installed: pip install'):
        compile.slice_devices('v5e:4x4')


def test_texts_are_tokens_where_the_configuration_says_so(analyze_tiny):
    fields = {'model.text': 'sequence', 'optimizer.name': 'muon'}
    report, config = analyze_tiny(fields, num_tokens=9)
    model = networks.make_model(**config.model, vocabulary=compile.VOCABULARY)
    expected = 3 * 8 * model.flops((32, 32, 4), 0, 9) / 1e12
    assert report[costs.ARITHMETIC] == {'model': pytest.approx(expected)}


def test_a_frozen_encoder_is_in_what_is_compiled(analyze_tiny, models):  # noqa: F811
    report, _ = analyze_tiny({'encoder': f'jax:{models}/text'}, num_tokens=64)
    checkpoint = jax_encoder.open_checkpoint(f'{models}/text')
    params = jax.tree.leaves(jax_encoder.load_params(checkpoint, jnp.bfloat16))
    nbytes = sum(leaf.nbytes for leaf in params)
    assert report[costs.MEMORY]['weights of the encoder'] == pytest.approx(nbytes / 1e9)
    flops = 8 * checkpoint.config.flops(64)
    assert report[costs.ARITHMETIC]['text encoder'] == pytest.approx(flops / 1e12)
    assert report[costs.MEMORY]['arguments'] > report[costs.MEMORY]['weights of the encoder']


def test_a_setting_out_of_its_range_is_refused_as_by_a_run():
    config = default.get_config()
    config.num_steps = 0
    with pytest.raises(ValueError, match='num_steps=0: expected from 1 to 2'):
        compile.analyze(config, 'v5e:4x4')


def test_every_topology_has_devices_of_a_kind_with_figures():
    pytest.importorskip('libtpu')
    code = """
        from train_lib.tools import compile
        for topology in sys.argv[1:]:
            devices = compile.slice_devices(topology)
            print(len(devices), *{device.device_kind for device in devices}, sep=',')
    """
    counts = {'v4:2x2x1': 4, 'v5e:2x2': 4, 'v5p:2x2x1': 4, 'v6e:2x2': 4, 'tpu7x:2x2x1': 8}
    lines = children.output(code, *counts).splitlines()
    for (topology, count), line in zip(counts.items(), lines, strict=True):
        devices, kind = line.split(',')
        assert (int(devices), chips.CHIPS[kind].name) == (count, topology.partition(':')[0])


def test_a_topology_that_there_is_not_is_refused():
    status, _, errors = _run('--config=default', '--topology=v5e:3x5')
    assert status == 1
    begin, error = errors.splitlines()  # and nothing of libtpu
    assert begin.startswith('compiling for v5e:3x5')
    assert error.startswith('error: --topology=v5e:3x5: expected a name such as v5e:4x4')


def test_the_command_compares_meshes():
    fields = '--config.model.name=tiny/16', '--config.model.depth=1', '--config.batch_size=8'
    arguments = '--config=default', '--topology=v5e:2x2', '--fsdp=1,4', *fields
    status, output, errors = _run(*arguments, '--json')
    assert status == 0, errors
    meshes = {fsdp: report['program'] for fsdp, report in json.loads(output).items()}
    assert [meshes[fsdp].partition('mesh ')[2] for fsdp in ('1', '4')] == [
        'data 4 x fsdp 1',
        'data 1 x fsdp 4',
    ]


def test_a_mesh_that_is_no_number_is_refused_before_the_others_are_compiled():
    arguments = '--config=default', '--topology=v5e:2x2', '--fsdp=1,x'
    ended = children.program('train_lib.tools.compile', *arguments, forked=True)
    assert ended.returncode == 1
    assert ended.stderr == 'error: --fsdp=1,x: expected numbers such as 4,8,16\n'


def _figures(text):
    """Numbers of a report by what stands before them, without the single exchanges."""
    rows = re.findall(r'^  (\D.*?)  +([-\d.,]+)$', text, re.MULTILINE)
    return {name: float(number.replace(',', '')) for name, number in rows}


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'topology'), PODS.items())
def test_a_pods_configuration_does_what_its_docstring_says(name, topology):
    report = _compile_for_slice(f'--config=configs/{name}.py', topology)
    assert report[costs.MEMORY]['total'] <= 15.75 * 1.024**3  # what the compiler allows
    assert report[costs.MOVED]['in all'] <= 1.2 * report[costs.MOVED]['least for this mesh']
    assert report['mfu'] >= 0.6
    assert not report[costs.LEFT_OUT]
    # Small changes of the model or the compiler need no new figures.
    documentation = re.sub(r'\s+', ' ', importlib.import_module(f'configs.{name}').__doc__)
    assert topology in documentation
    documented, measured = (
        [*map(float, re.findall(r'[\d.]+', text[text.index('fits:') :])[:5])]
        for text in (documentation, report['verdict'])
    )
    assert documented == pytest.approx(measured, rel=0.02, abs=1)
    if name == 'tpu_v5e_16':  # whose whole report is on the page
        page = (CHECKOUT / 'docs' / 'pods.md').read_text()
        documented = _figures(page.split(f'`configs/{name}.py`')[1].split('```')[1])
        measured = _figures(compile.format_report(report))
        assert documented == pytest.approx(measured, rel=0.03, abs=0.1)


@pytest.mark.slow
def test_another_encoder_costs_what_the_table_says():
    report = _compile_for_slice(
        *('--config=configs/tpu_v5e_16.py', '--topology=v5e:4x4', '--config.mesh.fsdp=4'),
        *('--config.gradient_dtype=float32', '--config.optimizer.name=adamw'),
        '--config.encoder=jax:Qwen/Qwen3-0.6B',
    )
    table = (CHECKOUT / 'docs' / 'pods.md').read_text()
    row = re.search(r'^\| \| AdamW, words by Qwen3-0\.6B, `fsdp` 4 \|(.*)', table, re.MULTILINE)[1]
    documented = [float(cell.rstrip('% ')) for cell in row.split('|')[:7]]
    time, total = report[costs.TIME], report[costs.MEMORY]['total']
    kernels = sum(ms for name, ms in time.items() if name.startswith('kernel'))
    with_waiting = float(re.search(r'([\d.]+)% with the exchanges', report['verdict'])[1])
    waiting = report[costs.WAITS]['in all']
    measured = time['in all'], 100 * report['mfu'], time['text encoder'], kernels, waiting
    assert documented == pytest.approx([*measured, with_waiting, total], rel=0.03, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['default', 'gpu'])
def test_the_batch_of_one_accelerator_leaves_a_third_of_16_gb(name):
    # A slice has four chips at least, of which each gets as many samples.
    fields = '--topology=v5e:2x2', '--config.batch_size=1024', '--config.model.remat=full'
    report = _compile_for_slice(f'--config=configs/{name}.py', *fields)
    assert report[costs.MEMORY]['total'] <= 16 * 2 / 3


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_sum():
    fields = '--config.batch_size=4096', '--config.model.remat=none'
    status, output, _ = _run('--config=default', '--topology=v5e:2x2', *fields)
    assert status == 1
    assert re.search(r'Verdict: does not fit: .*\d+G.*15.75G', output, re.DOTALL), output
