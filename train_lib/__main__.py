"""Lists the programs that train, draw and measure.

python -m train_lib
"""

from coyo11m_tfds.process import command_line

if __name__ == '__main__':
    command_line.list_programs('train_lib', __doc__)
