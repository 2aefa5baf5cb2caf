"""Small data sets built from the sources of `conftest`."""

import pathlib
from typing import Any


def build(
    source: pathlib.Path, sidecar: pathlib.Path | str, out: pathlib.Path, **fields: Any
) -> pathlib.Path:
    """The folder of a data set with a tenth of the records in `validation`; `fields` of the config.

    It has the text embeddings of `sidecar`, or none if that is ''.

    Its shards have unequal lengths, none a multiple of 32, except by chance.
    """
    # Imported here, because TFDS takes seconds and many test files do without.
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    defaults = {
        'name': 'hash',
        'source': str(source),
        'text_embeddings': str(sidecar),
        'validation_fraction': 0.1,
        'shard_bytes': 2_500_000,
        'num_workers': 1,
    }
    builder = Builder(data_dir=out, config=Coyo11mConfig(**(defaults | fields)))
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)
