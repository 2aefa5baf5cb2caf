"""Drawing with what was trained: from the workdir alone, with the right encoder."""

import dataclasses
import re
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from PIL import Image

from coyo11m_tfds.text import text_encoders
from tests import children, runs, small_vae
from train_lib import draw
from train_lib.results import caption_encoder

CAPTIONS = ['a red circle', 'a blue square', 'a red circle']


@pytest.fixture(scope='module')
def encoder():
    return text_encoders.make_encoder('hash')


@pytest.fixture(scope='module')
def artist(small_run):
    return draw.Artist(small_run[0])


@pytest.fixture(scope='module')
def pictures(artist, encoder):
    return artist.draw(CAPTIONS, encoder)


def test_every_caption_gets_a_picture_of_its_own(small_run, pictures):
    assert draw.Artist(small_run[0]).step == 4
    assert (pictures.shape, pictures.dtype) == ((3, 32, 32, 3), np.uint8)
    assert not np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])  # other noise
    again = draw.draw_pictures(small_run[0], ['a red circle'] * 3)
    assert [(x.mode, x.size) for x in again] == [('RGB', (32, 32))] * 3
    np.testing.assert_array_equal(again[2], pictures[2])


@pytest.fixture
def no_cache():
    """Takes away the folder of compiled programs that tests use."""
    names = [f'jax_compilation_cache_{name}' for name in ('dir', 'max_size')]
    names.append('jax_persistent_cache_min_compile_time_secs')
    values = {name: getattr(jax.config, name) for name in names}
    jax.config.update('jax_compilation_cache_dir', None)
    yield
    for name, value in values.items():
        jax.config.update(name, value)


def test_the_compiled_sampler_is_kept_where_runs_keep_their_programs(
    small_run, tmp_path, monkeypatch, no_cache
):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    draw.Artist(small_run[0])
    folder = tmp_path / 'coyo11m_tfds' / 'compiled'
    assert jax.config.jax_compilation_cache_dir.startswith(str(folder))


@pytest.fixture(scope='module')
def vae(tmp_path_factory):
    return small_vae.make(tmp_path_factory.mktemp('vae'))


def test_the_run_previews_by_its_vae(mini_dataset, vae, tmp_path):
    changes = {'num_steps': 2, 'eval_every': 0, 'checkpoint_every': 0, 'preview_every': 2}
    changes |= {'preview.vae': str(vae), 'preview.count': 16}
    runs.train(mini_dataset, tmp_path, **changes)
    with Image.open(tmp_path / 'previews' / 'step_000002.png') as grid:
        assert grid.width == 4 * (2 * 64 + 8) + 5 * 8


def test_a_vae_of_other_latents_is_refused_before_the_first_step(mini_dataset, small_run, tmp_path):
    other, workdir = small_vae.make(tmp_path, channels=16), tmp_path / 'run'
    message = r'decodes latents of 16 channels, expected 4'
    with pytest.raises(ValueError, match=message):
        runs.train(mini_dataset, workdir, preview_every=2, **{'preview.vae': str(other)})
    assert not workdir.exists()
    with pytest.raises(ValueError, match=message):
        draw.Artist(small_run[0], vae=str(other))


def test_a_vae_decodes_what_is_drawn(small_run, encoder, vae):
    drawn = draw.Artist(small_run[0], vae=str(vae)).draw(CAPTIONS, encoder)
    assert (drawn.shape, drawn.dtype) == ((3, 64, 64, 3), np.uint8)
    assert not np.array_equal(drawn[0], drawn[1])
    with pytest.raises(ValueError, match=r"cannot load the VAE '/none/x'"):
        draw.Artist(small_run[0], vae='/none/x')


def test_a_picture_is_the_same_however_many_are_drawn_at_a_time(small_run, encoder):
    captions = [f'a caption with the number {number}' for number in range(20)]
    whole = draw.Artist(small_run[0], batch_size=20).draw(captions, encoder).astype(int)
    drawn = draw.Artist(small_run[0], batch_size=16).draw(captions, encoder)
    assert np.abs(drawn - whole).max() <= 1  # of 255, by rounding
    assert len({picture.tobytes() for picture in drawn}) == 20


OTHER_OPTIONS = {
    'another seed': {'seed': 1},
    'no guidance': {'guidance': 1.0},
    'more steps': {'num_steps': 3},
    'another sampler': {'sampler': 'heun'},
    'other times': {'time_shift': 3.0},
    'guidance from a later time on': {'guidance_low': 0.6},
    'guidance up to an earlier time': {'guidance_high': 0.6},
}


@pytest.mark.parametrize('options', OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
def test_options_change_the_picture(small_run, encoder, pictures, options):
    artist = draw.Artist(small_run[0], **options)
    assert not np.array_equal(artist.draw(CAPTIONS, encoder), pictures)


WRONG_OPTIONS = {
    'no steps': ({'num_steps': 0}, r'preview\.num_steps=0: expected at least 1'),
    'half a step': ({'num_steps': 4.5}, 'num_steps=4.5: expected'),
    'a truth as steps': ({'num_steps': True}, 'num_steps=True: expected'),
    'a text as steps': ({'num_steps': '20'}, "num_steps='20': expected"),
    'guidance that is no number': ({'guidance': float('nan')}, 'guidance=nan: expected'),
    'an option that is misspelt': ({'guidanc': 1.0}, 'guidanc=1.0: there is no such'),
    'half a seed': ({'seed': 1.5}, 'seed=1.5: expected'),
    'a negative seed': ({'seed': -1}, 'seed=-1: expected'),
    'a batch of nothing': ({'batch_size': 0}, 'batch_size=0: expected'),
}


@pytest.mark.parametrize(('options', 'message'), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_options_that_cannot_be_are_named(small_run, options, message):
    with pytest.raises(ValueError, match=message):
        draw.Artist(small_run[0], **options)


NO_CAPTIONS = {
    'nothing': None,
    'no captions': [],
    'one text': 'a red circle',
    'nothing in a list': [None],
    'a number in a list': ['a', 3],
    'a number': 5,
}


@pytest.mark.parametrize('captions', NO_CAPTIONS.values(), ids=NO_CAPTIONS)
def test_captions_that_cannot_be_are_named(artist, encoder, captions):
    with pytest.raises(ValueError, match=f'^captions={re.escape(repr(captions))}: expected a'):
        artist.draw(captions, encoder)


def test_a_caption_of_bytes_that_are_no_text_is_named(artist, encoder):
    with pytest.raises(ValueError, match=r"^caption 'caf\\udce9': expected a text that is UTF-8"):
        artist.draw(['a red circle', 'caf\udce9'], encoder)


NO_PLACES = {
    'a folder that is there': ('made', 0, 'made: is a folder; expected the path of a file'),
    'a folder that is not there': ('new/', 0, 'new/: is a folder; expected the path of a'),
    'a folder in a file': ('taken/x.png', 0, 'taken is a file'),
    'a name that its folder would have': ('grid', 2, 'grid: expected a name with a suffix'),
    'a file where its folder would be': ('taken.png', 2, 'taken is a file'),
    'a folder with pictures of more captions': ('made.png', 1, 'made/00001.png: is none of the'),
}


@pytest.mark.parametrize(('name', 'num_singles', 'message'), NO_PLACES.values(), ids=NO_PLACES)
def test_a_place_that_pictures_could_not_take_is_told_before_they_are_drawn(
    tmp_path, name, num_singles, message
):
    (tmp_path / 'made').mkdir()
    (tmp_path / 'made' / '00001.png').touch()
    (tmp_path / 'taken').touch()
    draw.check_out(f'{tmp_path}/new/grid.png', 2)
    # Whose pictures are replaced.
    draw.check_out(f'{tmp_path}/made.png', 2)
    with pytest.raises((ValueError, OSError), match=message):
        draw.check_out(f'{tmp_path}/{name}', num_singles)


def test_options_of_the_run_and_an_earlier_checkpoint(small_run, encoder, pictures):
    same = draw.Artist(small_run[0], seed=0, guidance=3.0, num_steps=2, average=True)
    np.testing.assert_array_equal(same.draw(CAPTIONS, encoder), pictures)
    earlier = draw.Artist(f'{small_run[0]}@2')
    assert earlier.step == 2
    assert not np.array_equal(earlier.draw(CAPTIONS, encoder), pictures)


def test_the_hash_encoder_warns_of_words_that_the_training_data_lack(small_run, encoder, caplog):
    caplog.set_level('WARNING')  # whichever test of this process has shown more
    facts = draw.Artist(small_run[0]).facts
    # Of captions whose words are these alone.
    are_shown = np.any(encoder.encode(CAPTIONS), axis=0)
    mean, std = (np.where(are_shown, x, 0) for x in (facts.text_mean, facts.text_std))
    facts = dataclasses.replace(facts, text_mean=mean, text_std=std)
    caption_encoder.encode(facts, encoder, CAPTIONS)
    assert not caplog.messages
    texts = [f'a {word} circle' for word in ('zebra', 'quokka', 'axolotl', 'okapi', 'tapir')]
    caption_encoder.encode(facts, encoder, texts)
    [message] = caplog.messages
    assert 'No caption of the training data has ' in message and "'circle'" not in message


@pytest.mark.slow
def test_a_prompt_makes_a_picture_named_by_what_it_changes_and_replaces_none(
    small_run, tmp_path, monkeypatch
):
    workdir = shutil.copytree(small_run[0], tmp_path / 'run')
    flags = '--workdir=~/run', '--prompts=a red circle'
    monkeypatch.setenv('HOME', str(tmp_path))
    (workdir / 'captions').write_text('a red circle')
    to_home = '--prompts=~/run/captions', '--out=~/run/grid.png', '--singles'
    for options in ([], [], ['--seed=1', '--noaverage', '--sampler=heun'], to_home):
        done = children.program('train_lib.draw', *flags, *options)
        assert done.returncode == 0, done.stderr
    # Not by the name of a preview of the run itself, and in the run's folder where a step follows.
    done = children.program('train_lib.draw', f'{flags[0]}@4', '--prompts=step')
    assert done.returncode == 0, done.stderr
    names = 'a-red-circle_000004', 'a-red-circle_000004-2', 'step_000004-2'
    names += ('a-red-circle_000004_average=False_seed=1_sampler=heun',)
    assert [path.name for path in tmp_path.iterdir()] == ['run']
    assert (workdir / 'grid.png').is_file() and (workdir / 'grid' / '00000.png').is_file()
    assert {path.name for path in (workdir / 'previews').iterdir()} == {f'{x}.png' for x in names}
    done = children.program('train_lib.draw', *flags, '--time_shift=0')
    assert done.stderr.splitlines()[-1] == 'error: --time_shift=0.0: expected more than 0'
    done = children.program('train_lib.draw', flags[0], '--prompts=missing.txt')
    assert done.returncode == 1 and 'missing.txt' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(('average', 'field'), [(True, 'ema_params'), (False, 'params')])
def test_only_the_requested_weights_are_read(small_run, monkeypatch, average, field):
    read, deserialize = [], ocp.type_handlers.ArrayHandler.deserialize

    def noting(self, infos, args=None):
        read.extend(info.name.partition('.')[0] for info in infos)
        return deserialize(self, infos, args)

    monkeypatch.setattr(ocp.type_handlers.ArrayHandler, 'deserialize', noting)
    workdir, state = small_run
    params = jax.device_get(draw.Artist(workdir, average=average).params)
    jax.tree.map(np.testing.assert_array_equal, params, getattr(state, field))
    assert read == [field] * len(jax.tree.leaves(params))


def test_what_is_wrong_is_reported_in_one_line_before_anything_is_written(small_run, tmp_path):
    path, out = tmp_path / 'captions.txt', tmp_path / 'new' / 'grid.png'
    path.write_bytes('ein Käfer'.encode('latin-1'))
    flags = f'--workdir={small_run[0]}', f'--prompts={path}', f'--out={out}'
    done = children.program('train_lib.draw', *flags, PYTHONPROFILEIMPORTTIME='1')
    assert done.returncode == 1
    *lines, last = done.stderr.splitlines()
    assert last == f'error: {path}: byte 5 is not UTF-8; save it as UTF-8.'
    assert 'Traceback' not in done.stderr and not out.parent.exists()
    assert not [line for line in lines if re.search(r'\| +(tensorflow|torch)$', line)]
