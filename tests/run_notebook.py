"""Runs the notebook in an empty folder, and stores its outputs in the repository.

python -m tests.run_notebook
"""

import pathlib
import tempfile
from typing import Any

from tests.checkout import CHECKOUT

PATH = CHECKOUT / 'docs' / 'first_steps.ipynb'


def run_notebook(folder: pathlib.Path) -> Any:
    """Runs all cells in a folder; the notebook with outputs that name no folder of this machine."""
    import nbclient
    import nbformat

    notebook = nbformat.read(PATH, 4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=1200,
        resources={'metadata': {'path': str(folder)}},
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
    )
    client.execute()
    for cell in notebook.cells:
        for output in cell.get('outputs', []):
            if 'text' in output:
                text = output.text.replace(str(folder), '/home/you/coyo11m_tfds/docs')
                output.text = text.replace('\r\n', '\n')
            # Pillow offers both, and noise takes much more room as a PNG.
            output.get('data', {}).pop('image/png', None)
    notebook.metadata.language_info = {'name': 'python'}
    return notebook


if __name__ == '__main__':
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(run_notebook(pathlib.Path(folder)), PATH)
