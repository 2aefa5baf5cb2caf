"""Serialized records to tensors, a run of records at once.

    parser = Parser(('key', 'latents'), tf.float16, text_dim=640, seed=0)
    batch = parser.parse_regular(serialized, epoch)     # dict(key=(n,), latents=(n, 4, 32, 32))

One crop is cut out before anything is decoded, straight from the record where it lies as this
project writes it.
"""

import dataclasses
import functools

import tensorflow as tf

from coyo11m_tfds import schema
from coyo11m_tfds.reading import choices
from coyo11m_tfds.reading.layout import Layout
from coyo11m_tfds.reading.names import DROP_TEXT, MASK

Batch = dict[str, tf.Tensor]

_LARGE = {schema.LATENTS, *schema.TEXT_DTYPES}


@dataclasses.dataclass(frozen=True)
class Parser:
    """Turns serialized records into a batch.

    Attributes:
        features: to be in the batch.
        latent_dtype: of the data set.
        text_dim: width of its text embeddings, 0 without them.
        num_tokens: of a text in its records, 0 without them.
        seed: of the choices about samples.
        caption_dropout: share of samples that `drop_text` marks.
        fixed_crop: taken of all samples; None takes one by (seed, epoch, key).
        with_mask: whether `mask` is in the batch.
    """

    features: tuple[str, ...]
    latent_dtype: tf.DType
    text_dim: int
    seed: int = 0
    caption_dropout: float = 0.0
    fixed_crop: int | None = None
    with_mask: bool = False
    num_tokens: int = 0

    def is_regular(self, serialized: tf.Tensor) -> tf.Tensor:
        """True if records `(n,)` are laid out as this project writes them; a bool scalar."""
        return self._layout.fits(serialized)

    def parse_regular(self, serialized: tf.Tensor, epoch: tf.Tensor) -> Batch:
        """Parses records for which `is_regular` is true.

        Args:
            serialized: string `(n,)`.
            epoch: int64 scalar.
        """
        example = _parse(serialized, {schema.KEY, *self.features} - _LARGE)
        begin = self._crop_begins(epoch, example[schema.KEY])
        if schema.LATENTS in self.features:
            example[schema.LATENTS] = self._layout.cut(
                serialized, schema.LATENTS, begin, schema.LATENT_NBYTES
            )
        for name, nbytes in self._text_nbytes.items():
            if name in self.features:
                example[name] = self._layout.cut(serialized, name, tf.zeros_like(begin), nbytes)
        return self._decode(example, tf.ones_like(begin, tf.bool), epoch)

    def parse(self, serialized: tf.Tensor, good: tf.Tensor, epoch: tf.Tensor) -> Batch:
        """Parses any records.

        Args:
            serialized: string `(n,)`.
            good: bool `(n,)`: the mask.
            epoch: int64 scalar.
        """
        example = _parse(serialized, {schema.KEY, *self.features})
        begin = self._crop_begins(epoch, example[schema.KEY])
        if schema.LATENTS in self.features:
            size = tf.fill(tf.shape(begin), schema.LATENT_NBYTES)
            example[schema.LATENTS] = tf.strings.substr(example[schema.LATENTS], begin, size)
        return self._decode(example, good, epoch)

    def choose(self, example: Batch, epoch: tf.Tensor) -> Batch:
        """The same from a batch that TFDS has decoded, with latents `(b, 3, 4, 32, 32)`."""
        keys = example[schema.KEY]
        batch = {name: example[name] for name in self.features}
        if schema.LATENTS in batch:
            crops = self._crops(epoch, keys)
            batch[schema.LATENTS] = tf.gather(batch[schema.LATENTS], crops, axis=1, batch_dims=1)
        return self._complete(batch, tf.ones_like(keys, tf.bool), epoch, keys)

    def blank(self) -> bytes:
        """A serialized record of zeros with all features of the data set."""
        feature = {
            schema.KEY: tf.train.Feature(int64_list=tf.train.Int64List(value=[0])),
            schema.CAPTION: _bytes_feature(b''),
            schema.LATENTS: _bytes_feature(bytes(schema.NUM_CROPS * schema.LATENT_NBYTES)),
        }
        for name, nbytes in self._text_nbytes.items():
            if nbytes:
                feature[name] = _bytes_feature(bytes(nbytes))
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        return example.SerializeToString(deterministic=True)

    def _crops(self, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        if self.fixed_crop is not None:
            return tf.fill(tf.shape(keys), tf.constant(self.fixed_crop, tf.int64))
        return choices.sample_crops(self.seed, epoch, keys)

    @functools.cached_property
    def _layout(self) -> Layout:
        return Layout(self.text_dim, self.num_tokens)

    @property
    def _text_nbytes(self) -> dict[str, int]:
        return {schema.TEXT_EMBEDDING: 2 * self.text_dim, schema.TOKENS: 4 * self.num_tokens}

    def _crop_begins(self, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Where in its three crops the crop of each sample begins, in bytes."""
        return tf.cast(self._crops(epoch, keys), tf.int32) * schema.LATENT_NBYTES

    def _decode(self, example: Batch, good: tf.Tensor, epoch: tf.Tensor) -> Batch:
        """The batch from values as they are in the records, but with one crop."""
        batch = {name: example[name] for name in self.features}
        if schema.LATENTS in batch:
            flat = tf.io.decode_raw(batch[schema.LATENTS], self.latent_dtype)
            batch[schema.LATENTS] = tf.reshape(flat, [-1, *schema.LATENT_SHAPE])
        for name, dtype in schema.TEXT_DTYPES.items():
            if name in batch:
                dtype = tf.as_dtype(dtype)
                size = self._text_nbytes[name] // dtype.size
                flat = tf.io.decode_raw(batch[name], dtype)
                batch[name] = tf.ensure_shape(flat, [None, size])
        return self._complete(batch, good, epoch, example[schema.KEY])

    def _complete(self, batch: Batch, good: tf.Tensor, epoch: tf.Tensor, keys: tf.Tensor) -> Batch:
        """Adds what is not in the records."""
        if self.caption_dropout and schema.TEXT_DTYPES.keys() & batch.keys():
            batch[DROP_TEXT] = choices.sample_drops(self.seed, epoch, keys, self.caption_dropout)
        if self.with_mask:
            batch[MASK] = good
        return batch


def _parse(serialized: tf.Tensor, names: set[str]) -> Batch:
    spec = {name: tf.io.FixedLenFeature([], tf.string) for name in sorted(names)}
    if schema.KEY in spec:
        spec[schema.KEY] = tf.io.FixedLenFeature([], tf.int64)
    return tf.io.parse_example(serialized, spec)


def _bytes_feature(value: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
