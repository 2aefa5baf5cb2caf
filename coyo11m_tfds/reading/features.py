"""The features of a batch: where each comes from, its shape, and what is chosen for each sample."""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.reading import order
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, NOISE_SEED, ArraySpec


@dataclasses.dataclass(frozen=True)
class BatchFeatures:
    """The features of a batch, and the choices for each sample."""

    features: tuple[str, ...]
    # Of a stored row of each numeric feature, in records and columns; latents with all crops.
    stored: Mapping[str, ArraySpec]
    seed: int = 0  # of the choices for samples
    caption_dropout: float = 0.0  # share of samples that `drop_text` marks
    crop: int | None = None  # of all samples, 0 for the middle one; None: by (seed, epoch, key)
    all_crops: bool = False  # of each sample, instead of one
    with_mask: bool = False
    text: texts.TextMixture | None = None  # None for the text in the record of each sample

    @property
    def in_records(self) -> set[str]:
        """The features that records must hold, unless they are columns."""
        in_columns = {self.text.feature} if self.text and '' not in self.text.names else set()
        return {schema.KEY, *self.features} - in_columns - {CROP, NOISE_SEED}

    @property
    def array_names(self) -> list[str]:
        """Names of the arrays in a batch."""
        has_drops = self.caption_dropout and schema.TEXT_DTYPES.keys() & set(self.features)
        return [*self.features, *[DROP_TEXT] * bool(has_drops), *[MASK] * self.with_mask]

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Shape and dtype of each array in a batch of `size` rows."""
        rows = {
            **self.stored,
            schema.KEY: ArraySpec((), np.dtype(np.int64)),
            schema.CAPTION: ArraySpec((), np.dtype(object)),
            CROP: ArraySpec((), np.dtype(np.int32)),
            NOISE_SEED: ArraySpec((), np.dtype(np.uint32)),
            DROP_TEXT: ArraySpec((), np.dtype(bool)),
            MASK: ArraySpec((), np.dtype(bool)),
        }
        # A sample shows one of the stored crops, unless all are read.
        if schema.LATENTS in rows and not self.all_crops:
            shape, dtype = rows[schema.LATENTS]
            rows[schema.LATENTS] = ArraySpec(shape[1:], dtype)
        # Tokens of several texts are padded to the longest.
        if self.text:
            dtype = np.dtype(schema.TEXT_DTYPES[self.text.feature])
            rows[self.text.feature] = ArraySpec((self.text.size,), dtype)
        return {x: ArraySpec((size, *rows[x].shape), rows[x].dtype) for x in self.array_names}

    def choose_crops(self, epoch: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
        """Returns the number of the crop of each key in its epoch; int64 `(n,)`."""
        if self.crop is not None:
            return np.full(len(keys), schema.middle_crop(count) + self.crop)
        return order.sample_crops(self.seed, epoch, keys, count)

    def choose_drops(self, epoch: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns whether the text of each key is dropped in its epoch; bool `(n,)`."""
        return order.sample_drops(self.seed, epoch, keys, self.caption_dropout)


def stored_specs(stored: StoredDataset) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of a row of the large features in the records."""
    dtype, shape = stored.latents
    specs: dict[str, ArraySpec] = {
        schema.LATENTS: ArraySpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype))),
        schema.TEXT_EMBEDDING: ArraySpec((stored.text_dim,), np.dtype(np.float16)),
        schema.TOKENS: ArraySpec((stored.num_tokens,), np.dtype(np.int32)),
    }
    return {name: x for name, x in specs.items() if all(x.shape)}


def check_text_feature(folder: str, text: texts.TextMixture, features: tuple[str, ...]) -> None:
    """Raises a ValueError if the features include another kind of text than `text`."""
    others = schema.TEXT_DTYPES.keys() & set(features) - {text.feature}
    if text.in_columns and others:
        raise ValueError(
            f'{folder}: features has {min(others)!r}, but '
            f'text={text.names[0] or texts.RECORDS_TEXT!r} holds {text.feature!r}; request that '
            'feature instead'
        )
