"""coyo11m_tfds: VAE latents (such as `.pt`) and their captions as a TFDS data set.

    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT

    import tensorflow_datasets as tfds
    ds = tfds.load('coyo11m_tfds', data_dir='OUT', split='train')

An import of this package is cheap: only the modules that use TensorFlow, TFDS, pyarrow or torch
import them, so programs without these can import `coyo11m_tfds.schema`. Import
`coyo11m_tfds.coyo11m_tfds_dataset_builder` to register the builder. In the `tfds` command, an
import of the package suffices, so this works in any folder:

    tfds build coyo11m_tfds -i coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT
"""

from coyo11m_tfds.process import programs

__version__ = '0.1.0'

# Before the program imports what takes seconds.
programs.announce_on_terminal()

# TFDS' command imports this package after it has parsed its flags, and has no other place at which
# a data set could prepare it.
if programs.runs_tfds():
    from coyo11m_tfds import build

    build.prepare_tfds_command()
