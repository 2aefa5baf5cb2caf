"""Python in a process whose Hugging Face hub client has a cache folder and no network.

offline_hub.put(folder, home=tmp_path, name='owner/tiny', commit='0' * 40)
said = offline_hub.run('...', home=tmp_path)
"""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap


def put(folder: pathlib.Path, home: pathlib.Path, name: str, commit: str) -> None:
    """Puts a model into the cache, as it lies there after a download."""
    folder_name = name.replace('/', '--')
    repository = home / 'hub' / f'models--{folder_name}'
    shutil.copytree(folder, repository / 'snapshots' / commit)
    (repository / 'refs').mkdir()
    (repository / 'refs' / 'main').write_text(commit)


def run(code: str, home: pathlib.Path) -> str:
    """What the code prints."""
    ended = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)],
        env=os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout
