"""coyo11m_tfds: VAE latents (`.pt`) and captions (Parquet) as a TFDS data set.

    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT

    import tensorflow_datasets as tfds
    ds = tfds.load('coyo11m_tfds', data_dir='OUT', split='train')

Importing this package is cheap: TensorFlow, TFDS, pyarrow and torch are imported by the modules
that use them, so that `coyo11m_tfds.schema` serves programs that have none of these. Import
`coyo11m_tfds.coyo11m_tfds_dataset_builder` to register the builder's code.
In the `tfds` command importing the package is enough, so that this works from everywhere:

    tfds build coyo11m_tfds -i coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT
"""

import sys

__version__ = '0.1.0'

if hasattr(sys.modules['__main__'], 'launch_cli'):  # the program is `tfds`
    from coyo11m_tfds import build

    build.prepare()
