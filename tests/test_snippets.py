"""What README and docs print runs as it is printed, on what `sample_data` makes by default.

Each page is run in a folder with `SOURCE` and `OUT`, as if its reader had typed the README's.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.convert.build_settings import CAPTION_FLAGS
from tests import built, children, made_sources, test_formats
from tests.checkout import CHECKOUT
from tests.test_readme import TEXTS, blocks

PAGES = [
    # First, because its workers are forked, which JAX does not like.
    'docs/pytorch.md',
    'README.md',
    'coyo11m_tfds/README.md',
    'docs/reading.md',
    'docs/training.md',
    'docs/sources.md',
]

# What is not here, and what takes its place.
PLACES = {
    "'gs://BUCKET/": "'OUT/",
    'jax:Qwen/Qwen3-0.6B --out=other': 'hash --out=other',
    ' --config.encoder=jax:Qwen/Qwen3-0.6B': '',
    'jax:Qwen/Qwen3-0.6B': 'words',
    # As written, for an accelerator and a day.
    '--config=default': '--config=default --config.num_steps=2 --config.model.name=tiny/8'
    ' --config.eval_every=2 --config.preview.num_steps=2 --config.optimizer.warmup_steps=1',
    # As written, for minutes.
    '--config=small': '--config=small --config.num_steps=2 --config.optimizer.warmup_steps=1',
}
# Installing, pods, buckets, hub, compilers and programs that do not end.
ELSEWHERE = r'pip |make |gcloud |tensorboard |\S+=\$|.*(gs://|tools\.compile|DATA\b|--vae=|--features=|worker)'

# Loops over training batches do not end: they are left after the first.
RUN = """
import ast, json, os, sys
for page, texts in json.loads(sys.argv[1]):
    names = {'__name__': page}
    for text in texts:
        tree = ast.parse(text, page)
        for node in tree.body:
            if isinstance(node, ast.For):
                node.body.append(ast.Break())
        exec(compile(ast.fix_missing_locations(tree), page, 'exec'), names)
    print(page, len(texts), flush=True)
os._exit(0)
"""


def as_here(text: str) -> str:
    for printed, here in PLACES.items():
        text = text.replace(printed, here)
    return text


def python_blocks(page: str) -> list[str]:
    return [as_here(text) for language, text in blocks(page) if language == 'python']


def shell_commands(page: str) -> list[str]:
    """The commands of a page, each in one line."""
    found = []
    for language, text in blocks(page):
        if language in ('', 'bash'):
            lines = text.replace('\\\n', ' ').splitlines()
            found += [line for line in lines if re.match(r'python -m |tfds ', line)]
    return [as_here(line) for line in found if not re.match(ELSEWHERE, line)]


def run(command: list[str], folder: pathlib.Path) -> str:
    path = f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'
    env = {'PYTHONPATH': str(CHECKOUT), 'JAX_PLATFORMS': 'cpu', 'PATH': path}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f'{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
    return done.stdout


@pytest.fixture(scope='module')
def typed(tmp_path_factory) -> pathlib.Path:
    """The folder of somebody who has typed what *Your own data* prints."""
    import tensorflow_datasets as tfds

    from coyo11m_tfds import embed_captions, sample_data
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    folder = tmp_path_factory.mktemp('typed')
    source = str(folder / 'SOURCE')
    sample_data.make_sample(source, num_samples=1200)
    words = folder / 'OUT' / 'text-words'
    embed_captions.embed(source, 'words', words, embed_captions.EmbedSettings(tokens_only=True))
    for name, kind in test_formats.LIKE.items():
        test_formats.make_source(folder / name, kind, count=600)
    own = made_sources.write_source(folder / 'OWN', [range(300), range(300, 600)])
    shutil.copy(own / schema.CAPTIONS_FILE, folder)
    made_sources.rename_columns(own, 'image_id', 'blip')
    shutil.move(folder / schema.CAPTIONS_FILE, own)
    made_sources.rename_columns(own, 'image_id', 'text', parts=3)
    config = Coyo11mConfig(name='words', text_embeddings=str(words))
    for chosen in ('latents', config):
        builder = Builder(data_dir=folder / 'OUT', config=chosen)
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(manual_dir=source)
        )
    return folder


def test_the_sources_of_the_page_are_built_as_printed(typed, tmp_path):
    commands = [x for x in shell_commands('docs/sources.md') if 'coyo11m_tfds.build' in x]
    assert len(commands) == len(test_formats.LIKE) + 2
    for command in commands:
        flags = dict(flag[2:].split('=', 1) for flag in shlex.split(command)[3:])
        fields = {x: flags[x] for x in CAPTION_FLAGS if x in flags} | json.loads(flags['config'])
        built.build(typed / flags['manual_dir'], '', tmp_path, **fields)


def test_the_python_of_all_pages_runs(typed):
    pages = [(page, python_blocks(page)) for page in PAGES]
    said = run([*children.interpreter(forked=True), '-c', RUN, json.dumps(pages)], typed)
    for page, texts in pages:
        assert f'{page} {len(texts)}\n' in said
    assert {str(path) for path in TEXTS if python_blocks(path)} <= set(PAGES)


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES[1:])
def test_the_commands_of_a_page_run_one_after_the_other(page, typed, tmp_path):
    commands = shell_commands(page)
    assert len(commands) > 1
    folder = tmp_path / 'typed'
    if page == 'README.md':  # which begins with nothing
        folder.mkdir()
    else:
        shutil.copytree(typed, folder)
    (folder / 'captions.txt').write_text('A large red circle on a blue background.\n')
    for command in commands:
        run(['bash', '-c', command], folder)
