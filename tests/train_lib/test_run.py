"""Programs start with a few lines, the loss first, find configurations by name, and end in one."""

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests import children, forked, runs
from tests.checkout import CHECKOUT
from train_lib import run

NOISE = re.compile(
    'oneDNN|absl::InitializeLog|Unable to initialize backend|Type inference failed|dataset_info|'
    'work unit|invalid value|Warning|Traceback|KeyboardInterrupt|interpreter state'
)


def start(flags, before=(), **variables):
    """Starts `train_lib.main`, maybe by a command, where the environment says nothing of it."""
    said = 'TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS', 'JAX_PLATFORMS'
    env = {name: x for name, x in os.environ.items() if name not in said} | variables
    line = [*before, sys.executable, '-m', 'train_lib.main', *flags]
    output = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    return subprocess.Popen(line, cwd=CHECKOUT, env=env, **output)


def command(*arguments, **variables):
    """The exit status and all lines of output."""
    process = start(*arguments, **variables)
    output, _ = process.communicate()
    return process.returncode, output.splitlines()


def test_a_run_from_its_first_line_to_ctrl_c(mini_dataset, tmp_path):
    changes = {'num_steps': 9_000, 'log_every': 2, 'eval_every': 4, 'preview_every': 4}
    # Of predicted latents, few steps leave the velocity wrong by many times its size.
    changes |= {'model.prediction': 'latents'}
    flags, lines = runs.flags(mini_dataset, tmp_path, **changes, checkpoint_every=2), []
    # Libtpu, if it is installed, complains of a machine without TPUs.
    variables = {'JAX_PLATFORMS': 'cpu'} if importlib.util.find_spec('libtpu') else {}
    with start(flags, **variables) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            if 'checkpoint at step 4' in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 75, lines  # the default of config.requeue_status
    assert not list(filter(NOISE.search, lines))
    # By TensorFlow, which a thread has imported while the step was compiled.
    assert runs.read_scalars(tmp_path)
    assert lines.count('Ctrl-C: saving, then leaving. Once more leaves at once.') == 1
    assert f'Stopped at step {max(runs.saved_steps(tmp_path))}. To resume: ' in lines[-1]
    texts = [re.sub(r'^\d\d:\d\d:\d\d ', '', line) for line in lines]
    assert texts.pop(0) == 'train_lib.main starts ...'
    first = next(i for i, text in enumerate(texts) if text.startswith('loss'))
    # Whether a test before this one has compiled it decides which.
    compiled = (
        r'the compiled step was read from \S+ in \S+ s|the step was not in .*: compiled in .*'
    )
    assert re.fullmatch(compiled, texts[first - 1])
    assert [text.split(':')[0] for text in texts[: first - 1]] == [
        'machine',
        'data',
        'model',
        f'steps 1 to 9000, into {tmp_path}; compiling ...',
    ]
    assert re.fullmatch(
        r'data: .*/hash/1\.0\.0, [\d,]+ records, \S+ MB, [\d.]+ steps an epoch, '
        r'read by rows',
        texts[1],
    )
    assert re.fullmatch(
        r'model: tiny/16, \S+ million parameters, \S+ GFLOP to train on a sample, float32', texts[2]
    )
    assert re.fullmatch(
        r'loss \S+, step 1 after \d+ s: .* first batch, .* compile .*', texts[first]
    )
    rest = texts[first + 1 :]
    shapes = [
        r'loss \S+, step 2 of 9000, \S+ steps/s, \d+:\d\d:\d\d left, epoch 0\.\d\d, \S+ samples/s, '
        r'waiting \d+%',
        r'checkpoint at step 2: .* \(\S+ s\)',
        r'loss \S+, step 4 of 9000, .*',
        r'evaluation at step 4 \.\.\.',
        r'evaluation at step 4: loss [\d.]+ at uniform times; quarters of time, from data to '
        r'noise: [\d.]+, [\d.]+, [\d.]+, [\d.]+ \(a velocity of 0 has 2: times next to the data '
        r'are not learned\) \(\S+ s\)',
        r'preview at step 4: 3 pictures in .*step_000004\.png \(\S+ s\)',
        r'checkpoint at step 4: .* \(\S+ s\)',
    ]
    for text, shape in zip(rest, shapes, strict=False):
        assert re.fullmatch(shape, text)


WRONG_FLAGS = {
    '--config=none': '--config=none: there is no such file on this machine; .*: default, demo, ',
    '--config.modle.name=S': "--config.modle.name: .* 'modle'; did you mean 'model.name'",
    '--config.learning_rate=3': "'learning_rate'; did you mean 'optimizer.learning_rate'",
    '--config.patch_size=4': "'patch_size'; did you mean 'model.patch_size'",
    '--config.data.seed=3': "'seed' in this block; did you mean config.seed\\?",
    '--config.model.zzz=S': "--config.model.zzz: there is no field 'zzz'$",
    '--config.batch_size=many': "--config.batch_size='many': expected a whole number$",
    '--config.seed=1: 2': "--config.seed='1: 2': expected a whole number$",
    '--config.model.width=1.5': "--config.model.width='1.5': expected a whole number$",
    '--config.ema_decay=': "--config.ema_decay='': expected a number$",
    '--config.distributed=maybe': "--config.distributed='maybe': expected True or False$",
    '--process_count=two': "--process_count='two': expected a whole number$",
    '--config.optimizer={"name": "adamw"}': '--config.optimizer: .* such as --config.optimizer.b1',
    '--config.optimizer=adamw': '--config.optimizer: expected a flag for each field to change',
    '--config.mesh=(1,2)': '--config.mesh: expected a flag for each .* such as --config.mesh.data',
    '--config.optimizer.name.x=3': "--config.optimizer.name.x: there is no field 'x'",
    '--config.data.mix[0]=3': '--config.data.mix\\[0\\]: there is no field',
    '--config.data.dir=/none': "--config.data.dir='/none': there is no such folder; build the",
    '--config.data.dir=configs': "--config.data.dir='configs': expected the folder of a built data",
    # Of a variable that is not set.
    '--workdir=': 'missing: --workdir; expected e.g.',
}
HEAD = 'from configs import default\n\ndef get_config():\n    config = default.get_config()\n'
# The end of a configuration file, and what is said of it.
WRONG_FILES = {
    'a field that is not there': (
        "config.modle.name = 'S/4'",
        "--config=FILE, line 5: there is no field 'modle'; did you mean 'model'",
    ),
    'a number that is a text': (
        "config.batch_size = '3'",
        '--config=FILE, line 5: TypeError: .*batch_size',
    ),
    'a field of another part': (
        'config.optimizer.batch_size = 3',
        "--config=FILE, line 5: .* 'batch_size' in this block; did you mean config.batch_size",
    ),
    'an error of its own': (
        "config.data.dir = {}['data']",
        "--config=FILE, line 5: KeyError: 'data'$",
    ),
    'an assertion of its own': (
        'assert False, "no"',
        '--config=FILE, line 5: AssertionError: no$',
    ),
    'a line that is no Python': (
        'config.seed = (',
        r"--config=FILE, line 5: SyntaxError: '\(' was never closed$",
    ),
    'a part that is replaced': (
        'config.optimizer = {"name": "adamw"}',
        "the configuration lacks the field 'optimizer",
    ),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('mistakes')


@pytest.fixture(scope='module')
def said(folder) -> dict[str, tuple[int, list[str]]]:
    """The exit status and the lines of the program, by the flag or by what is wrong in a file."""
    commands = {flag: [*runs.flags('', folder / 'run'), flag] for flag in WRONG_FLAGS}
    texts = {
        what: f'{HEAD}    {end}\n    return config\n' for what, (end, _) in WRONG_FILES.items()
    }
    texts['a:b'] = f'{HEAD}    return config\n'
    texts['nothing'] = 'def get_config():\n    pass\n'
    for what, text in texts.items():
        path = file_of(folder, what)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        commands[what] = [f'--config={path}', f'--workdir={folder}/run']
    ended = forked.run([('train_lib.main', flags) for flags in commands.values()])
    return dict(zip(commands, ended, strict=True))


def file_of(folder: pathlib.Path, what: str) -> pathlib.Path:
    return folder / what.replace(' ', '_') / 'mine.py'


@pytest.mark.parametrize(('flag', 'message'), WRONG_FLAGS.items(), ids=WRONG_FLAGS)
def test_a_wrong_flag_is_told_in_one_line(said, flag, message):
    status, lines = said[flag]
    assert (status, len(lines)) == (1, 1), lines
    assert re.match(f'error: .*{message}', lines[0])


@pytest.mark.parametrize('what', WRONG_FILES)
def test_a_mistake_in_a_configuration_file_is_told_in_one_line(said, folder, what):
    status, lines = said[what]
    assert (status, len(lines)) == (1, 1), lines
    message = WRONG_FILES[what][1].replace('FILE', str(file_of(folder, what)))
    assert re.match(f'error: {message}', lines[0])


def test_a_colon_in_the_path_of_a_configuration_is_told(said, folder):
    status, lines = said['a:b']
    assert (status, len(lines)) == (1, 1), lines
    place = file_of(folder, 'a:b')
    words = f'--config={place}: what follows the first colon .* a path without a colon'
    assert re.match(f'error: {words}', lines[0])


def test_a_configuration_that_returns_nothing_is_told(said, folder):
    status, lines = said['nothing']
    assert status == 1
    assert re.match(f'error: --config={file_of(folder, "nothing")}: .*NoneType', lines[-1])
    assert lines[-2].endswith('did you forget a return statement?')


def test_ctrl_c_ends_a_program_that_only_reads_checkpoints_in_one_line():
    program = """
        from train_lib import run
        def main():
            raise KeyboardInterrupt  # no signal, which programs in the background ignore
        run.start(main, required=[])
    """
    with children.python(program) as child:
        output = child.communicate(timeout=60)
    assert (child.returncode, output) == (130, ('', 'Interrupted: start the same command again.\n'))


@pytest.mark.slow
def test_a_run_on_several_hosts_that_are_not_known_is_told(tmp_path):
    flags = '--config=tpu_v5e_16', '--config.data.dir=D', f'--workdir={tmp_path}/run'
    code, lines = command(flags, JAX_PLATFORMS='cpu')
    assert code == 1
    assert lines[-1].startswith('error: the hosts of this run are not known: ')
    assert '--config.distributed=False' in lines[-1] and 'Traceback' not in ''.join(lines)


@pytest.mark.slow
def test_a_full_disk_and_a_damaged_checkpoint_are_told_in_the_last_line(mini_dataset, tmp_path):
    flags = runs.flags(mini_dataset, tmp_path, num_steps=3, eval_every=0)
    limited = ['bash', '-c', 'ulimit -f 200; exec "$@"', 'bash']  # no file of more than 0.2 MB
    code, lines = command(flags, before=limited)
    assert code == 1
    expected = f'error: {tmp_path}/checkpoints: a checkpoint cannot be written: '
    assert lines[-1].startswith(expected) and 'File too large' in lines[-1]
    assert not [line for line in lines if line.startswith('Traceback')]
    assert not runs.saved_steps(tmp_path)

    assert command(flags)[0] == 0
    for path in (tmp_path / 'checkpoints' / '3' / 'state').rglob('d/*'):
        path.write_bytes(path.read_bytes()[:-1000])
    code, lines = command([*flags, '--config.keep_checkpoints=4'])
    assert code == 1
    expected = f'error: {tmp_path}/checkpoints/3/state/'
    assert lines[-1].startswith(expected)
    assert f'damaged: remove the folder {tmp_path}/checkpoints/3 to use' in lines[-1]
    assert not [line for line in lines if line.startswith('Traceback')]


@pytest.mark.slow
def test_verbose_shows_configuration_parameters_and_tracebacks(mini_dataset, tmp_path):
    # It diverges in its second step.
    wrong = {'optimizer.learning_rate': 1e30, 'optimizer.clip_norm': 1e30, 'max_skipped': 0}
    flags = runs.flags(mini_dataset, tmp_path, num_steps=5, eval_every=0, **wrong)
    code, lines = command([*flags, '--verbose'])
    assert code == 1
    output = '\n'.join(lines)
    assert 'max_skipped_in_a_row: 10' in output
    assert re.search(r'\| \S+kernel +\|', output)
    assert 'train/grad_norm=' in output
    assert 'Traceback (most recent call last):' in lines
    assert re.match(r'error: 1 step (in a row )?up to step \d had a loss or', lines[-1])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another current folder than the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [])
    return tmp_path


@pytest.mark.parametrize('name', ['demo', 'demo.py', 'configs/demo.py'])
def test_the_name_of_a_configuration_becomes_its_path(elsewhere, name):
    path = str(CHECKOUT / 'configs' / 'demo.py')
    resolved = run.resolve(['x', f'--config={name}', '--workdir=w'])
    assert resolved == ['x', f'--config={path}', '--workdir=w']
    assert run.resolve(['x', '-config', name]) == ['x', '-config', path]
    assert sys.path == [str(CHECKOUT)]  # so that a file of one's own can import the default


def test_a_name_that_is_too_long_for_a_file_is_told(elsewhere):
    with pytest.raises(SystemExit, match=r'^error: --config=n{300}: there is no such file'):
        run.resolve(['x', f'--config={"n" * 300}'])


def test_what_is_no_name_stays(elsewhere, monkeypatch):
    (elsewhere / 'demo.py').touch()
    # The shell leaves what follows `=` as it is.
    monkeypatch.setenv('HOME', str(elsewhere))
    resolved = run.resolve(['x', '--config=~/demo.py:big'])
    assert resolved == ['x', f'--config={elsewhere}/demo.py:big']
    arguments = ['x', '--config=demo.py:big', '--config.data.dir=demo', '--workdir', 'demo']
    assert run.resolve(arguments) == arguments


_START = """
from absl import flags
import input_pipeline
from train_lib import main

def apply():
    print('prepared', *{'tensorflow', 'tensorflow_datasets', 'torch'} & set(sys.modules))
    sys.exit()

input_pipeline.prepare_process = apply
flags.FLAGS(sys.argv)
main.main()
"""


_TO_THE_COMPILATION = """
from absl import flags
from train_lib import main
from train_lib.lifecycle import device_memory

def lower_step(*_):
    print('compiles', *{'tensorflow', 'tensorflow_datasets', 'torch', 'pandas'} & set(sys.modules))
    sys.exit()

device_memory.lower_step = lower_step
flags.FLAGS(sys.argv)
main.main()
"""


def test_a_run_imports_tensorflow_only_while_it_compiles(mini_dataset, tmp_path):
    flags = runs.flags(mini_dataset, tmp_path)
    assert children.output(_TO_THE_COMPILATION, *flags).split() == ['compiles']


def test_settings_for_reading_are_made_before_tensorflow_is_imported(tmp_path):
    flags = ['--config=configs/default.py', f'--workdir={tmp_path}']
    assert children.output(_START, *flags).split() == ['prepared']
