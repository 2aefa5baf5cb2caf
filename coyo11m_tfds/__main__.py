"""Lists the programs that make, examine and change data sets.

python -m coyo11m_tfds
"""

from coyo11m_tfds.process import command_line

if __name__ == '__main__':
    command_line.list_programs('coyo11m_tfds', __doc__)
