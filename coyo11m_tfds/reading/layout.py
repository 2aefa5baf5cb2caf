"""Where the large values lie in a record as this project writes it: counted from its end.

    layout = Layout(text_dim=640)
    if layout.fits(serialized):                                   # in a graph: `tf.cond`
        crop = layout.cut(serialized, 'latents', begin=8192, nbytes=8192)

A record ends with the latents and, in data sets that have them, the text embedding or the tokens,
because features are sorted by name; all have a constant size. So a crop can be cut out of the
record as it is, while `parse_example` would first copy the three of them.
"""

import tensorflow as tf

from coyo11m_tfds.reading.record_layout import RecordLayout


class Layout:
    """The end of a record of one data set."""

    def __init__(self, text_dim: int, num_tokens: int = 0):
        """Takes the width of the text embeddings and the number of tokens; 0 for none."""
        layout = RecordLayout(text_dim, num_tokens=num_tokens)
        self._from_end, self._heads = layout.from_end, layout.heads

    def fits(self, serialized: tf.Tensor) -> tf.Tensor:
        """True if all of some records are laid out like this; a bool scalar.

        Args:
            serialized: string `(n,)`.
        """
        length = tf.strings.length(serialized)
        as_expected = [
            tf.reduce_all(
                tf.strings.substr(
                    serialized,
                    tf.maximum(length - from_end, 0),
                    tf.fill(tf.shape(length), len(head)),
                )
                == head
            )
            for from_end, head in self._heads.items()
        ]
        return tf.reduce_all(as_expected)

    def cut(self, serialized: tf.Tensor, name: str, begin: tf.Tensor, nbytes: int) -> tf.Tensor:
        """Bytes of a value of each record, string `(n,)`; only where `fits` says so.

        Args:
            serialized: string `(n,)`.
            name: of the value.
            begin: of what is cut out, within the value; int32 `(n,)`.
            nbytes: how much is cut out.
        """
        at = tf.strings.length(serialized) - self._from_end[name] + begin
        return tf.strings.substr(serialized, at, tf.fill(tf.shape(at), nbytes))
