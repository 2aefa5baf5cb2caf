"""Facts about the training data that a model needs, so that it draws without the data.

    facts = data_facts.DataFacts(latent_shape=(32, 32, 4), stats=stats, encoder='hash')
    facts == data_facts.from_json(json.loads(json.dumps(facts.to_json())))   # bit for bit

A checkpoint holds it. Neither TensorFlow nor torch is imported here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from train_lib import flow


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """Shapes, statistics and the origin of the text embeddings.

    Attributes:
        latent_shape: `(height, width, channels)` of one sample.
        stats: of the train split.
        encoder: name of what made the text embeddings, such as `hf:google/gemma-3-270m`.
        encoder_revision: its commit on the hub, or `sha256:...` of the files in a local folder;
            empty where the data set does not tell.
        max_tokens: captions were cut to so many tokens; 0 for no limit or where it is unknown.
            Records that hold tokens hold so many, padding included.
        vocabulary: ids of the tokens in the records are less than this; 0 where records hold text
            embeddings.
        known_tokens: of the tokenizer `words`: hex digits, a bit for each id that some caption has;
            '' where that is not known.
    """

    latent_shape: tuple[int, int, int]
    stats: flow.Stats
    encoder: str
    encoder_revision: str = ''
    max_tokens: int = 0
    vocabulary: int = 0
    known_tokens: str = ''

    @property
    def text_dim(self) -> int:
        """Numbers of a text embedding; 0 where there is none."""
        return len(self.stats.text_mean)

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON can carry."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stats = {name: values.tolist() for name, values in vars(self.stats).items()}
        return fields | {'latent_shape': list(self.latent_shape), 'stats': stats}


def from_json(fields: Mapping[str, Any]) -> DataFacts:
    """The inverse of `DataFacts.to_json`."""
    stats = {name: np.asarray(x, np.float32) for name, x in fields['stats'].items()}
    made = {'latent_shape': tuple(fields['latent_shape']), 'stats': flow.Stats(**stats)}
    return DataFacts(**dict(fields) | made)
