"""Statistics of the records of a shard, gathered while they are written.

    statistics = ShardStatistics(text_dim=640)
    good = statistics.add(keys, captions, latents, text)    # bool (n,); write only those
    whole = join([statistics, *others])                     # in the order of the shards
    mean, std = whole.latent_moments.mean_and_std()

Adding the same blocks of samples in the same order gives the same statistics to the last bit, even
through JSON, so that an interrupted build can reuse those of finished shards.
"""

import base64
import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.report import moments

LATENT_EDGES = np.arange(-60, 61)
# Where the bins of caption lengths begin, in bytes; the last one is for all longer captions.
CAPTION_EDGES = 16 * np.arange(129)

MAX_PREVIEWS = 6  # 4 KB each in JSON
MAX_NON_FINITE_KEYS = 10

# So many records of each shard are in the histogram of latents: one takes 20 us.
_HISTOGRAM_RECORDS = 64

_PREVIEW_CROP = schema.NUM_CROPS // 2  # the middle one
_PREVIEW_CAPTION_CHARACTERS = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Preview:
    """A record to look at.

    Attributes:
        key: its key.
        caption: its caption, or the beginning of one that is very long.
        rgb: the middle crop, uint8 `(32, 32, 3)`.
    """

    key: int
    caption: str
    rgb: np.ndarray

    def to_json(self) -> dict:
        """Returns plain values from which `from_json` restores this preview."""
        rgb = base64.b64encode(self.rgb.tobytes()).decode()
        return {'key': self.key, 'caption': self.caption, 'rgb': rgb}

    @classmethod
    def from_json(cls, content: dict) -> Self:
        """The inverse of `to_json`."""
        rgb = np.frombuffer(base64.b64decode(content['rgb']), np.uint8)
        shape = (*schema.LATENT_SHAPE[1:], 3)
        return cls(content['key'], content['caption'], rgb.reshape(shape))


class ShardStatistics:
    """Counts, moments and histograms of the good samples of a shard, or of several shards.

    Args:
        text_dim: numbers of a text embedding; None where there are none.
        vocabulary: of token ids that are to be noted; 0 for none.

    Attributes:
        num_records: good samples, i.e. those whose latents and text embedding are finite.
        latent_moments: of the 4 channels.
        text_moments: of each number of the text embeddings; None where there are none.
        latent_histogram: int64 `(4, 122)`, of the first 64 good samples of each shard: below the
            first of `LATENT_EDGES`, from each edge to the next, from the last edge on.
        caption_histogram: int64 `(129,)`, captions by length in bytes, bins from each of
            `CAPTION_EDGES` on.
        previews: the first good samples, at most 6; none of several shards.
        known_tokens: bool `(vocabulary,)`, ids that occur in good samples.
        non_finite: samples that are not good.
        non_finite_keys: keys of the first of these, at most 10.
    """

    def __init__(self, text_dim: int | None, vocabulary: int = 0):
        self.num_records = 0
        self.latent_moments = moments.Moments(schema.LATENT_SHAPE[0])
        self.text_moments = None if text_dim is None else moments.Moments(text_dim)
        self.latent_histogram = np.zeros((schema.LATENT_SHAPE[0], len(LATENT_EDGES) + 1), np.int64)
        self.caption_histogram = np.zeros(len(CAPTION_EDGES), np.int64)
        self.previews: list[Preview] = []
        self.known_tokens = np.zeros(vocabulary, bool)
        self.non_finite = 0
        self.non_finite_keys: list[int] = []

    def add(
        self,
        keys: np.ndarray,
        captions: Sequence[bytes],
        latents: np.ndarray,
        text: np.ndarray | None = None,
    ) -> np.ndarray:
        """Adds samples in the order of the shard; those that are not finite are only counted.

        In blocks of 256 and shards of 5,000 it takes 2.5 us a record, with text embeddings of 640
        numbers 3.6 us, on one of 2 cores; a block with a bad sample takes twice that.

        Args:
            keys: int64 `(n,)`.
            captions: UTF-8, one a sample.
            latents: float32 `(n, 3, 4, 32, 32)`.
            text: text embeddings, float16 `(n, text_dim)`, where there are any.

        Returns:
            Which samples are good, bool `(n,)`.
        """
        if self.text_moments is None:
            good = moments.add_latents(self.latent_moments, latents)
        else:
            embeddings = np.asarray(text, np.float64)
            with np.errstate(invalid='ignore'):
                finite = np.isfinite(embeddings.sum(axis=1))  # float64 holds the sum of any float16
            good = moments.add_latents(self.latent_moments, latents, finite)
            moments.add_vectors(self.text_moments, embeddings if good.all() else embeddings[good])
        self._count_non_finite(keys, good)
        self._add_good(*_choose(good, keys, captions, latents))
        return good

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Notes the ids of good samples, int32 `(n, T)`, padded with a negative number."""
        self.known_tokens[tokens[tokens >= 0]] = True

    def _count_non_finite(self, keys: np.ndarray, good: np.ndarray) -> None:
        bad = keys[~good].tolist()
        self.non_finite += len(bad)
        self.non_finite_keys += bad[: MAX_NON_FINITE_KEYS - len(self.non_finite_keys)]

    def _add_good(self, keys: np.ndarray, captions: Sequence[bytes], latents: np.ndarray) -> None:
        for row in range(min(MAX_PREVIEWS - len(self.previews), len(keys))):
            self.previews.append(_make_preview(keys[row], captions[row], latents[row]))
        room = max(_HISTOGRAM_RECORDS - self.num_records, 0)
        self.latent_histogram += _latent_histogram(latents[:room])
        lengths = np.fromiter(map(len, captions), np.int64, len(captions))
        bins = np.minimum(lengths // CAPTION_EDGES[1], len(CAPTION_EDGES) - 1)
        self.caption_histogram += np.bincount(bins, minlength=len(CAPTION_EDGES))
        self.num_records += len(keys)

    def to_json(self) -> dict:
        """Returns plain values from which `from_json` restores these statistics to the last bit,
        also after writing them to JSON and reading them."""
        return {
            'num_records': self.num_records,
            'latent_moments': self.latent_moments.to_json(),
            'text_moments': self.text_moments and self.text_moments.to_json(),
            'latent_histogram': self.latent_histogram.tolist(),
            'caption_histogram': self.caption_histogram.tolist(),
            'known_tokens': self.known_tokens.tobytes().hex(),
            'previews': [preview.to_json() for preview in self.previews],
            'non_finite': self.non_finite,
            'non_finite_keys': self.non_finite_keys,
        }

    @classmethod
    def from_json(cls, content: dict) -> Self:
        """The inverse of `to_json`."""
        statistics = cls(text_dim=None)
        statistics.num_records = content['num_records']
        statistics.latent_moments = moments.Moments.from_json(content['latent_moments'])
        if content['text_moments']:
            statistics.text_moments = moments.Moments.from_json(content['text_moments'])
        statistics.latent_histogram[:] = content['latent_histogram']
        statistics.caption_histogram[:] = content['caption_histogram']
        statistics.previews = [Preview.from_json(preview) for preview in content['previews']]
        known = bytes.fromhex(content['known_tokens'])
        statistics.known_tokens = np.frombuffer(known, bool).copy()
        statistics.non_finite = content['non_finite']
        statistics.non_finite_keys = list(content['non_finite_keys'])
        return statistics


def join(parts: Sequence[ShardStatistics]) -> ShardStatistics:
    """Adds up the statistics of several shards, at least one, in the given order."""
    joined = ShardStatistics(text_dim=None)
    joined.num_records = sum(part.num_records for part in parts)
    joined.latent_moments = moments.join([part.latent_moments for part in parts])
    if parts[0].text_moments:
        joined.text_moments = moments.join([p.text_moments for p in parts if p.text_moments])
    joined.latent_histogram = np.sum([part.latent_histogram for part in parts], axis=0)
    joined.caption_histogram = np.sum([part.caption_histogram for part in parts], axis=0)
    joined.known_tokens = np.any([part.known_tokens for part in parts], axis=0)
    joined.non_finite = sum(part.non_finite for part in parts)
    keys = [key for part in parts for key in part.non_finite_keys]
    joined.non_finite_keys = keys[:MAX_NON_FINITE_KEYS]
    return joined


def _choose(
    good: np.ndarray, keys: np.ndarray, captions: Sequence[bytes], latents: np.ndarray
) -> tuple[np.ndarray, Sequence[bytes], np.ndarray]:
    """Returns what belongs to the good samples, without a copy where all are."""
    if good.all():
        return keys, captions, latents
    return keys[good], [captions[row] for row in np.flatnonzero(good).tolist()], latents[good]


def _latent_histogram(latents: np.ndarray) -> np.ndarray:
    """Counts float32 `(n, 3, 4, 32, 32)` by channel and bin, int64 `(4, 122)`."""
    channels, size = schema.LATENT_SHAPE[0], len(LATENT_EDGES) + 1
    bins = np.floor(latents)
    np.clip(bins, LATENT_EDGES[0] - 1, LATENT_EDGES[-1], out=bins)
    bins += (np.arange(channels, dtype=np.float32) * size + 1 - LATENT_EDGES[0])[:, None, None]
    counts = np.bincount(bins.astype(np.int64).ravel(), minlength=channels * size)
    return counts.reshape(channels, size)


def _make_preview(key: np.int64, caption: bytes, latents: np.ndarray) -> Preview:
    # A source may hold bytes that are not UTF-8; nothing may end the build because of a picture.
    text = caption.decode(errors='replace')
    if len(text) > _PREVIEW_CAPTION_CHARACTERS:
        text = text[:_PREVIEW_CAPTION_CHARACTERS] + '…'
    return Preview(int(key), text, latent_rgb.latents_to_rgb(latents[_PREVIEW_CROP]))
