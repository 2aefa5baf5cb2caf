"""Measuring what a run draws: stored features, resumed; distances against their definitions."""

import io
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest
import scipy.linalg
from PIL import Image

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.pictures import emoji
from coyo11m_tfds.pictures.image_encoder import ImageEncoder
from coyo11m_tfds.text import text_encoders
from tests import children
from tests.fakes import image_models
from train_lib import draw
from train_lib.lifecycle import checkpoint
from train_lib.results import evaluation, true_pictures


@pytest.fixture(scope='module')
def clip(tmp_path_factory):
    return image_models.save_clip(tmp_path_factory.mktemp('models') / 'clip')


@pytest.fixture
def measure(small_run, mini_dataset, clip, tmp_path, monkeypatch):
    """Evaluates the run; features are stored in `tmp_path`, those of five records in a file."""
    monkeypatch.setattr(evaluation, 'RECORDS_PER_FILE', 5)
    image_encoder = ImageEncoder(clip)

    def run(count: int, **options) -> dict:
        artist = draw.Artist(small_run[0], batch_size=5, **options)
        data = evaluation.open_validation(str(mini_dataset), count)
        return evaluation.evaluate_pictures(artist, image_encoder, data, tmp_path, count)

    return run


def test_the_result_is_that_of_all_pictures_at_once(
    measure, small_run, mini_dataset, clip, tmp_path
):
    result = measure(12)
    [written] = (tmp_path / evaluation.FOLDER).glob('*.json')
    assert json.loads(written.read_text()) == result
    assert result['settings']['text_encoder'] == 'hash 1'
    assert result['num_pictures'] == 12 and result['settings']['step'] == 4

    features = schema.LATENTS, schema.CAPTION
    batch = next(input_pipeline.eval_batches(mini_dataset, batch_size=12, features=features))
    captions = [caption.decode() for caption in batch[schema.CAPTION]]
    artist = draw.Artist(small_run[0])
    image_encoder = ImageEncoder(clip)
    drawn = image_encoder.encode(artist.draw(captions, text_encoders.make_encoder('hash')))
    data = image_encoder.encode(artist.paint(batch[schema.LATENTS]))
    # Pictures differ by rounding, which depends on how many are drawn at a time.
    assert result['cmmd'] == pytest.approx(evaluation.cmmd(drawn, data), rel=0.02)
    expected = evaluation.frechet(drawn, data)
    assert result['frechet_distance'] == pytest.approx(expected, rel=0.02)
    texts = image_encoder.encode_texts(captions)
    assert result['clip_score'] == pytest.approx(evaluation.clip_score(drawn, texts), 0.02)


def test_a_stopped_evaluation_goes_on(measure, tmp_path, monkeypatch):
    made, drawn = [], draw.Artist.draw

    def noting(self, captions, first):
        made.append(first)
        if len(made) == 3:
            raise KeyboardInterrupt
        return drawn(self, captions, first=first)

    monkeypatch.setattr(draw.Artist, 'draw', noting)
    with pytest.raises(KeyboardInterrupt):
        measure(12)
    assert made == [0, 5, 10] and not list((tmp_path / evaluation.FOLDER).glob('*.json'))
    resumed = measure(12)
    assert made == [0, 5, 10, 10]
    # More pictures: only the last file, of two records, does not fit.
    more = measure(15)
    assert made == [0, 5, 10, 10, 10] and more['cmmd'] != resumed['cmmd']
    # A damaged file is made again; other settings use none.
    first, second, *_ = sorted(tmp_path.glob('evaluation/*/*.npz'))
    content = bytearray(first.read_bytes())
    content[content.index(b'PK\1\2') + 8] ^= 1  # says that it is encrypted
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-40])
    assert measure(12) == resumed
    assert made[5:] == [0, 5]
    assert measure(12, seed=1)['cmmd'] != resumed['cmmd']
    assert made[7:] == [0, 5, 10]
    # Nor does another text encoder draw, which this run refuses.
    monkeypatch.setattr(text_encoders.HashEncoder, 'revision', '2')
    with pytest.raises(ValueError, match="'hash' of revision 2 encodes the captions"):
        measure(12)
    assert made[10:] == []


def test_more_pictures_than_there_are_records_are_refused(measure):
    with pytest.raises(ValueError, match=r'num_pictures=10000: expected 2 to \d+, .*validation'):
        measure(10_000)


NO_DATA = {
    'a mixture': ('', ValueError, 'mixture: choose the data set by --data_dir'),
    'a folder that is not there': (
        '/none',
        FileNotFoundError,
        r'^/none: there .*; if it has moved, .*_dir$',
    ),
}


@pytest.mark.parametrize(('folder', 'kind', 'message'), NO_DATA.values(), ids=NO_DATA)
def test_data_that_pictures_cannot_be_compared_with_are_refused(folder, kind, message):
    with pytest.raises(kind, match=message):
        evaluation.open_validation(folder, 12)


def _write_pictures(folder, numbers, suffix='.png'):
    """Writes emoji with their captions, as docs/images.md describes."""
    folder.mkdir()
    for place, number in enumerate(numbers):
        picture = Image.fromarray(emoji.read_pictures()[number])
        picture.save(folder / f'{place:03}{suffix}')
        (folder / f'{place:03}.txt').write_text(emoji.read_emoji()[number].caption)
    return folder


@pytest.fixture
def true_folders(tmp_path):
    """A folder of 5 pictures that are drawn for, and one of 7 others."""
    truth = _write_pictures(tmp_path / 'truth', emoji.find_part(emoji.HELD_OUT_TONE)[:5])
    return truth, _write_pictures(tmp_path / 'known', emoji.find_part(emoji.TRAINING)[:7])


def test_true_pictures_judge_what_is_drawn(small_run, true_folders, tmp_path, monkeypatch):
    truth, known = true_folders
    artist = draw.Artist(small_run[0], batch_size=2, num_steps=1)
    result = true_pictures.compare(artist, tmp_path, str(truth), str(known), 10)
    assert list(result.table) == ['drawn', 'ceiling', 'floor']
    assert result.table['ceiling']['exact'].tolist() == [True] * 5
    assert result.table['ceiling']['distance'].max() < 2
    assert not result.table['floor']['exact'].any()
    # By a judge of one picture each.
    captions = [(truth / f'{number:03}.txt').read_text() for number in range(5)]
    drawn = artist.draw(captions)
    areas = np.stack([np.asarray(Image.open(x)) for x in sorted(truth.glob('*.png'))])
    distances = np.sqrt(np.square(drawn.astype(float) - areas).mean((1, 2, 3)))
    np.testing.assert_allclose(result.table['drawn']['distance'], distances, rtol=1e-3)
    [stored] = tmp_path.glob('truth_truth_000004_*.json')
    means = json.loads(stored.read_text())['means']
    assert means['drawn']['distance'] == pytest.approx(distances.mean(), rel=1e-3)
    assert Image.open(io.BytesIO(pathlib.Path(result.grid).read_bytes())).width > 2 * 32
    # What is drawn is not drawn again.
    monkeypatch.setattr(artist, 'draw', lambda *_, **__: pytest.fail('drawn again'))
    again = true_pictures.compare(artist, tmp_path, str(truth), None, 10)
    assert list(again.table) == ['drawn', 'ceiling']
    # Nor is it a result of `--features`.
    tmp_path.rename(tmp_path.parent / 'evaluation')
    assert evaluation.read_results(tmp_path.parent, 4) == []


def test_pictures_that_cannot_be_judged_are_named(small_run, true_folders, tmp_path, monkeypatch):
    truth, _ = true_folders
    # Before any of them goes through a VAE.
    encode = lambda _: pytest.fail('encoded')  # noqa: E731
    monkeypatch.setattr(true_pictures, 'make_round_trip', lambda _: encode)
    run = shutil.copytree(small_run[0], tmp_path / 'run')
    artist = draw.Artist(run, num_steps=1)
    # A run that trains on removes its checkpoints in turn.
    steps = (run / checkpoint.FOLDER).rename(tmp_path / 'removed')
    with pytest.raises(OSError, match='the checkpoint cannot be read'):
        true_pictures.compare(artist, tmp_path, str(truth), None, 10)
    steps.rename(run / checkpoint.FOLDER)
    (truth / '003.txt').write_text(' ')
    with pytest.raises(ValueError, match=r'003\.png has no caption, expected one'):
        true_pictures.compare(artist, tmp_path, str(truth), None, 10)
    with pytest.raises(ValueError, match='/none: there is no such folder'):
        true_pictures.compare(artist, tmp_path, str(truth), '/none', 10)
    Image.new('RGB', (16, 40)).save(truth / '003.png')
    with pytest.raises(ValueError, match=r'003\.png: too small: .* at least 32 x 32 pix'):
        true_pictures.compare(artist, tmp_path, str(truth), None, 10)
    assert not list(tmp_path.glob('*.json'))


@pytest.mark.slow
def test_the_command_says_what_it_found(small_run, mini_dataset, clip):
    flags = f'--workdir={small_run[0]}', f'--features={clip}', f'--data_dir={mini_dataset}'
    flags += '--num_pictures=4', '--num_steps=1'
    done = children.program('train_lib.evaluate', *flags)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(': ') for line in done.stdout.splitlines())
    assert (found['guidance'], found['num_steps'], found['sampler']) == ('3.0', '1', 'euler')
    found = {name: found[name] for name in list(found)[list(found).index('num_pictures') :]}
    names = {'num_pictures', 'cmmd', 'frechet_distance', 'clip_score', 'clip_score_of_data'}
    assert found.keys() == names
    assert all(np.isfinite(float(value)) for value in found.values())
    assert '4 pictures with 12 features is far too large' in done.stderr


def features(count: int, dim: int, seed: int, shift: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, dim)) @ random.normal(size=(dim, dim)) + shift).astype('f4')


def naive_cmmd(x: np.ndarray, y: np.ndarray) -> float:
    def kernel(a, b):
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return np.exp(-np.square(a - b).sum() / (2 * 10**2))

    def mean(a, b):
        return np.mean([kernel(p, q) for p, q in itertools.product(a, b)])

    x, y = x.astype(np.float64), y.astype(np.float64)
    return 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))


def naive_frechet(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    c, d = np.cov(x.T), np.cov(y.T)
    root = scipy.linalg.sqrtm(c @ d).real
    return np.square(x.mean(0) - y.mean(0)).sum() + np.trace(c + d - 2 * root)


def test_cmmd_is_its_definition(monkeypatch):
    monkeypatch.setattr(evaluation, '_ROWS_AT_ONCE', 7)  # fewer than there are
    x, y = features(30, 6, 0), features(20, 6, 1, shift=0.5)
    assert evaluation.cmmd(x, y) == pytest.approx(naive_cmmd(x, y), rel=1e-6)
    assert evaluation.cmmd(x, x) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize('count', [200, 5])  # of 5, covariances of 8 numbers are singular
def test_frechet_is_its_definition(count):
    x, y = features(count, 8, 0), features(2 * count, 8, 1, shift=0.5)
    assert evaluation.frechet(x, y) == pytest.approx(naive_frechet(x, y), rel=1e-4)
    assert evaluation.frechet(x, x) == pytest.approx(0, abs=1e-6)


def test_a_score_counts_directions_and_no_negative_ones():
    images = np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    texts = np.array([[1.0, 0.0], [0.0, -1.0], [0.0, 5.0]])
    assert evaluation.clip_score(images, texts) == pytest.approx(100 * (1 + 0.5**0.5) / 3)
