"""What training imports of the other half of the project."""

import ast
import pathlib

import train_lib


def test_training_reads_through_the_face_alone():
    found = {}
    for path in pathlib.Path(train_lib.__file__).parent.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('coyo11m_tfds'):
                names = {f'{node.module}.{alias.name}' for alias in node.names}
                found.setdefault(path.name, set()).update(name.split('.')[1] for name in names)
    assert found['data.py'] == {'schema', 'process'}
    rooms = set().union(*found.values())
    assert not rooms & {'reading', 'source', 'convert', 'report'}
