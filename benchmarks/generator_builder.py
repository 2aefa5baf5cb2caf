"""The data set as an ordinary TFDS generator builder, with the features of this project's.

GeneratorBuilder(lambda: iter([(7, latents, 'A cat.')]), data_dir=OUT).download_and_prepare()
"""

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow_datasets as tfds

from coyo11m_tfds import schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import make_features

Samples = Callable[[], Iterator[tuple[int, np.ndarray, str]]]


class GeneratorBuilder(tfds.core.GeneratorBasedBuilder):
    """Writes what a function yields: key, latents float16 `(3, 4, 32, 32)`, caption."""

    VERSION = tfds.core.Version('1.0.0')

    def __init__(self, samples: Samples, disable_shuffling: bool = False, **kwargs):
        self._samples, self._disable_shuffling = samples, disable_shuffling
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            features=make_features('float16', text_dim=None),
            disable_shuffling=self._disable_shuffling,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {schema.TRAIN: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict]]:
        for key, latents, caption in self._samples():
            yield key, {schema.KEY: key, schema.LATENTS: latents, schema.CAPTION: caption}
