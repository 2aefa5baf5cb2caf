"""Compares drawn pictures with those of the data by features of an image encoder."""

import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import logging
from etils import epath

import input_pipeline
from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.process import errors
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.base import ReadableFolder, WritableFolder
from train_lib.results.artist import Artist

if TYPE_CHECKING:
    from coyo11m_tfds.pictures.image_encoder import ImageEncoder

FOLDER = 'evaluation'  # of a run's workdir
NAMED_SETTINGS = 'image_encoder', 'data_set', 'vae', 'seed'  # of a result, beside the preview's
RECORDS_PER_FILE = 256  # records whose features are in one file

# Jayasumana et al., "Rethinking FID: Towards a Better Evaluation Metric for Image Generation",
# 2024 (arXiv 2401.09603), section 4.2: for CLIP features of length 1.
_KERNEL_WIDTH = 10.0
_CMMD_SCALE = 1000.0

_ROWS_AT_ONCE = 1024  # of a matrix of distances


class Features(NamedTuple):
    """Features of records, float32 `(n, D)` each."""

    data: np.ndarray  # of the records' own pictures
    drawn: np.ndarray  # of the pictures that the model drew for their captions
    texts: np.ndarray  # of their captions; `(n, 0)` if the encoder only encodes pictures


def open_validation(data_dir: str, num_pictures: int) -> StoredDataset:
    """Opens a data set whose validation split has at least `num_pictures` records.

    Raises a ValueError if it has fewer, or `data_dir` is '', and an OSError if there is none.
    """
    if not data_dir:
        raise ValueError('the run trained on a mixture: choose the data set by --data_dir')
    try:
        data = input_pipeline.open_data(data_dir)
    except FileNotFoundError as error:
        advice = 'if it has moved, name its place by --data_dir'
        raise FileNotFoundError(f'{errors.describe_error(error)}; {advice}') from error
    split = data.splits.get(schema.VALIDATION)
    num_records = split.num_records if split else 0
    # A covariance needs two.
    if not 2 <= num_pictures <= num_records:
        raise ValueError(
            f'num_pictures={num_pictures}: expected 2 to {num_records}, the number of records that '
            f'{data_dir} has in its {schema.VALIDATION} split'
        )
    return data


def evaluate_pictures(
    artist: Artist,
    image_encoder: 'ImageEncoder',
    data: StoredDataset,
    workdir: epath.PathLike,
    num_pictures: int,
) -> dict[str, Any]:
    """Draws the missing pictures of the first records, and returns the comparison of all.

    It is also written to `WORKDIR/evaluation/step_STEP_ID.json` (ID: a digest of the settings),
    and the features next to it, so that an interrupted evaluation continues.

    Args:
        artist: Draws the pictures.
        image_encoder: Computes features of pictures and perhaps of captions.
        data: Data set, see `open_validation`.
        workdir: Folder of the run.
        num_pictures: Number of records of its validation split.

    Returns:
        `num_pictures`, what `compare_features` returns, and the `settings`.
    """
    settings = artist.settings | {
        'text_encoder': f'{artist.text_encoder.name} {artist.text_encoder.revision}',
        'image_encoder': f'{image_encoder.name} {image_encoder.revision}',
        'data_set': data.identity(schema.VALIDATION),
    }
    settings_id = json_digest.sha256(settings)[:8]
    name = f'step_{artist.step:06}_{settings_id}'
    folder = storage.open_writable_folder(epath.Path(workdir) / FOLDER)
    batches = []
    for first, latents, captions in _read_records(data, num_pictures):
        end = first + len(captions)
        # The settings are in the name: other settings never read these features.
        file = f'{name}/{first:07}-{end:07}.npz'
        features = _load_features(folder, file)
        if features is None:
            features = _compute_features(artist, image_encoder, first, latents, captions)
            # Now, so that an interruption costs the drawing of one file's records at most.
            _write_features(folder, file, features)
            pictures = format_count(num_pictures, 'picture is', 'pictures are')
            logging.info('%s of %s drawn.', f'{end:,}', pictures)
        batches.append(features)
    # The fields of all files, and not all fields of a file.
    columns = zip(*batches, strict=True)
    all_features = Features(*map(np.concatenate, columns))
    distances = compare_features(all_features)
    result = {'num_pictures': num_pictures, **distances, 'settings': settings}
    content = json.dumps(result, indent=2)
    folder.write(f'{name}.json', content.encode())
    return result


def _compute_features(
    artist: Artist,
    image_encoder: 'ImageEncoder',
    first: int,
    latents: np.ndarray,
    captions: list[str],
) -> Features:
    """Draws the captions of some records, of which the first has the number `first`."""
    drawn = artist.draw(captions, first=first)
    texts = np.zeros((len(captions), 0), np.float32)
    if image_encoder.has_texts:
        texts = image_encoder.encode_texts(captions)
    return Features(
        # Decoded as the drawn ones are, so that the errors of the decoder are in both.
        data=image_encoder.encode(artist.paint(latents)),
        drawn=image_encoder.encode(drawn),
        texts=texts,
    )


def read_results(workdir: epath.Path, step: int) -> list[dict[str, Any]]:
    """Returns the results of `evaluate_pictures` at a step; files of another form are left out."""
    results = []
    for path in sorted((workdir / FOLDER).glob(f'step_{step:06}_*.json')):
        # One bad file is no reason to export without all others.
        try:
            result = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            result = None
        if _is_result(result):
            results.append(result)
        else:
            logging.warning('%s is no result of train_lib.evaluate and is left out.', path)
    return results


def _is_result(content: Any) -> bool:
    """Whether a file's JSON has the form of what `evaluate_pictures` writes."""
    if not isinstance(content, dict):
        return False
    settings = content.get('settings')
    if not isinstance(settings, dict) or not isinstance(settings.get('preview'), dict):
        return False
    for name, value in content.items():
        # By its type: a bool is an int, too.
        if name != 'settings' and type(value) not in (int, float):
            return False
    return settings.keys() >= {'average', *NAMED_SETTINGS}


def compare_features(features: Features) -> dict[str, float]:
    """Returns the distances of drawn pictures to the data; with texts also their scores."""
    num_pictures, num_features = features.data.shape
    # Covariances of so few pictures are singular.
    if num_pictures <= num_features:
        logging.warning(
            'The Fréchet distance of %d pictures with %d features is far too large: compare many '
            'more pictures than there are features.',
            num_pictures,
            num_features,
        )
    distances = {
        'cmmd': cmmd(features.drawn, features.data),
        'frechet_distance': frechet(features.drawn, features.data),
    }
    if features.texts.shape[1]:
        distances['clip_score'] = clip_score(features.drawn, features.texts)
        distances['clip_score_of_data'] = clip_score(features.data, features.texts)
    return distances


def _read_records(data: StoredDataset, count: int) -> Iterator[tuple[int, np.ndarray, list[str]]]:
    """Yields number, latents and captions of the first validation records, a file's at a time."""
    features = schema.LATENTS, schema.CAPTION
    # Closed before the end: `count` may be less than the split has, and threads read ahead.
    with input_pipeline.eval_batches(
        data, batch_size=RECORDS_PER_FILE, features=features
    ) as batches:
        for first in range(0, count, RECORDS_PER_FILE):
            batch = next(batches)
            # The last file may need only a part of its batch.
            size = min(RECORDS_PER_FILE, count - first)
            stored_captions = batch[schema.CAPTION][:size]
            captions = [caption.decode() for caption in stored_captions]
            # Of moments, these channels are the means.
            latents = batch[schema.LATENTS][:size, : data.channels]
            yield first, latents, captions


def _write_features(folder: WritableFolder, name: str, features: Features) -> None:
    """Writes features into a file, for `_load_features`."""
    content = io.BytesIO()
    np.savez(content, **features._asdict())
    folder.write(name, content.getvalue())


def _load_features(folder: ReadableFolder, name: str) -> Features | None:
    """Returns the features in a file; None if there is none, or it is damaged."""
    content = folder.read(name)
    if content is None:
        return None
    # The files only save time, so damage is no reason to end hours of drawing.
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return Features(**arrays)
    except (
        ValueError,
        TypeError,
        EOFError,
        OSError,
        # Of a member that says to be encrypted, or made by another program.
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        logging.warning('%s is damaged (%s): its pictures are drawn again.', name, error)
        return None


# --- Distances and scores of features of one encoder, float `(n, D)`, computed in float64 ---------


def cmmd(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the CLIP maximum mean discrepancy, times 1,000.

    The estimator is that of Jayasumana et al. (arXiv 2401.09603): the squared maximum mean
    discrepancy with a Gaussian kernel of width 10 on features of length 1. The mean includes the
    pairs of an item with itself, so the result is at least 0.
    """
    x = _unit(x)
    y = _unit(y)
    return _CMMD_SCALE * (_mean_kernel(x, x) + _mean_kernel(y, y) - 2 * _mean_kernel(x, y))


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the Fréchet distance of normal distributions fitted to the features.

    With the features of Inception it is the FID of Heusel et al., "GANs Trained by a Two Time-Scale
    Update Rule", 2017 (arXiv 1706.08500): |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). It grows as
    the number of pictures falls, most of all below many times D, and needs two of each.
    """
    x = np.asarray(x, np.float64)
    y = np.asarray(y, np.float64)
    cov_x = np.atleast_2d(np.cov(x, rowvar=False))
    cov_y = np.atleast_2d(np.cov(y, rowvar=False))
    # The eigenvalues of C1 C2 are those of the symmetric C1^(1/2) C2 C1^(1/2). Rounding can make
    # eigenvalues near 0 negative, which have no root.
    values, vectors = np.linalg.eigh(cov_x)
    roots = np.sqrt(np.maximum(values, 0))
    root = (vectors * roots) @ vectors.T
    product_values = np.linalg.eigvalsh(root @ cov_y @ root)
    root_trace = np.sqrt(np.maximum(product_values, 0)).sum()
    mean_distance = np.square(x.mean(axis=0) - y.mean(axis=0)).sum()
    distance = mean_distance + np.trace(cov_x) + np.trace(cov_y) - 2 * root_trace
    return float(max(0.0, distance))


def clip_score(images: np.ndarray, texts: np.ndarray) -> float:
    """Returns 100 times the mean cosine of pictures and their captions; negative ones count as 0.

    Hessel et al., "CLIPScore", 2021 (arXiv 2104.08718), equation 1, with today's usual factor of
    100 instead of 2.5.
    """
    cosines = (_unit(images) * _unit(texts)).sum(axis=1)
    return float(100 * np.maximum(cosines, 0).mean())


def _unit(x: np.ndarray) -> np.ndarray:
    """Returns rows of length 1, float64; rows of zeros stay zeros."""
    x = np.asarray(x, np.float64)
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.maximum(lengths, np.finfo(np.float64).tiny)


def _mean_kernel(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the mean of exp(-|a - b|^2 / (2 width^2)) over all pairs of rows of length 1."""
    # The matrix of all pairs of 10,000 pictures would take 800 MB.
    total = 0.0
    for first in range(0, len(x), _ROWS_AT_ONCE):
        rows = x[first : first + _ROWS_AT_ONCE]
        # Of rows of length 1, |a - b|^2 is 2 (1 - a b).
        kernel = np.exp((rows @ y.T - 1) / _KERNEL_WIDTH**2)
        total += float(kernel.sum())
    num_pairs = len(x) * len(y)
    return total / num_pairs
