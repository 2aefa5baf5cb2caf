"""The texts that people read: links lead somewhere, commands can be typed."""

import ast
import functools
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from packaging.utils import canonicalize_name
from PIL import Image

from coyo11m_tfds.process import programs
from tests import children
from tests.checkout import CHECKOUT

TEXTS = [
    path.relative_to(CHECKOUT)
    for pattern in ('*.md', '*/*.md')
    for path in sorted(CHECKOUT.glob(pattern))
    if not path.relative_to(CHECKOUT).parts[0].startswith('.')
]


def blocks(path) -> Iterator[tuple[str, str]]:
    """The language and the text of each fenced block."""
    for found in re.finditer(
        r'^```(\w*)\n(.*?)^```', (CHECKOUT / path).read_text('utf-8'), re.M | re.S
    ):
        yield found[1], found[2]


def commands(path) -> Iterator[tuple[str, list[str]]]:
    """The module and the arguments of each `python -m` of this project."""
    for language, text in blocks(path):
        if language == 'python':
            continue
        for found in re.finditer(r'python -m (\w[\w.]*)(.*)', text.replace('\\\n', ' ')):
            if found[1].split('.')[0] in ('coyo11m_tfds', 'train_lib', 'benchmarks'):
                yield found[1], re.findall(r'(?<!\S)--\w[\w.]*', found[2])


def test_the_texts_have_commands():
    assert len(TEXTS) > 6
    assert sum(1 for path in TEXTS for _ in commands(path)) > 20


@pytest.mark.parametrize('path', TEXTS, ids=str)
def test_links_lead_somewhere(path):
    text = re.sub(r'```.*?```', '', (CHECKOUT / path).read_text('utf-8'), flags=re.S)
    links = re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', text)
    for link in (''.join(pair) for pair in links):
        if '://' not in link:
            target, _, anchor = link.partition('#')
            file = (CHECKOUT / path).parent / target if target else CHECKOUT / path
            assert file.exists(), link
            if anchor:
                headings = re.findall(r'^#+ (.*)$', file.read_text('utf-8'), re.M)
                assert anchor in [
                    re.sub(r'[^\w\- ]', '', h.lower()).replace(' ', '-') for h in headings
                ]


@pytest.mark.parametrize('path', TEXTS, ids=str)
def test_code_is_narrow_enough_to_be_shown_whole(path):
    lines = [line for _, text in blocks(path) for line in text.splitlines()]
    assert [line for line in lines if len(line) > 98] == []


def test_the_index_of_docs_has_every_page():
    text = (CHECKOUT / 'docs/README.md').read_text('utf-8')
    pages = {x.name for x in (CHECKOUT / 'docs').iterdir() if x.suffix in ('.md', '.ipynb')}
    assert pages - {'README.md'} <= {*re.findall(r'\]\(([\w.]+)\)', text)}
    assert 'docs/README.md' in (CHECKOUT / 'README.md').read_text('utf-8')


def test_the_reference_has_every_function_and_class_that_pages_name():
    reference = ''.join(
        path.read_text('utf-8') for path in sorted((CHECKOUT / 'docs/api').glob('*.md'))
    )
    named = set()
    for path in TEXTS:
        names = re.findall(r'\b(?:train_lib|coyo11m_tfds)(?:\.\w+)+', (CHECKOUT / path).read_text())
        named.update(name for name in names if is_function_or_class(name))
    assert 'train_lib.draw.draw_pictures' in named
    assert {name for name in named if f'::: {name}\n' not in reference} == set()
    assert '::: input_pipeline\n' in reference


def is_function_or_class(name: str) -> bool:
    module, _, last = name.rpartition('.')
    path = CHECKOUT / f'{module.replace(".", "/")}.py'
    return path.exists() and bool(
        re.search(rf'^(def|class|from .*import.*) {last}\b', path.read_text(), re.M)
    )


def test_pages_name_every_program_and_show_every_picture():
    pages = {path for path in TEXTS if path.parent.name == 'docs' or path.name == 'README.md'}
    text = ''.join((CHECKOUT / path).read_text('utf-8') for path in sorted(pages))
    lines = [x for name in ('coyo11m_tfds', 'train_lib') for x in programs.describe_programs(name)]
    names = {line.split()[0] for line in lines} - {'train_lib.demo'}  # `make demo` runs it
    assert {name for name in names if f'python -m {name}' not in text} == set()
    pictures = {path.name for path in (CHECKOUT / 'docs').glob('*.png')}
    assert pictures == {*re.findall(r'[("](?:docs/)?(\w+\.png)[)"]', text)}


@pytest.mark.parametrize('name', ['order', 'workers'])
def test_a_picture_of_the_pages_is_drawn_by_its_command(name, tmp_path):
    path = tmp_path / 'picture.png'
    program = CHECKOUT / 'docs/pictures.py'
    subprocess.run([sys.executable, program, name, path], cwd=CHECKOUT, check=True)
    with Image.open(path) as drawn, Image.open(CHECKOUT / f'docs/{name}.png') as shown:
        assert drawn.size == shown.size


@pytest.mark.parametrize('path', TEXTS, ids=str)
def test_modules_and_fields_of_commands_exist(path):
    config = importlib.import_module('configs.default').get_config()
    for module, flags in commands(path):
        assert importlib.util.find_spec(module), module
        for flag in flags:
            if flag.startswith('--config.'):
                functools.reduce(lambda part, name: part[name], flag.split('.')[1:], config)


def extras() -> list[str]:
    """The names of setup.py's extras."""
    (given,) = re.findall(
        r'^    extras_require=({.*?^    })', (CHECKOUT / 'setup.py').read_text(), re.M | re.S
    )
    return re.findall(r"^ +'(.+)':", given, re.M)


def test_pip_of_every_version_knows_the_extras():
    """That of Python 3.11 takes `text_jax` for `text-jax`, and finds no extra of that name."""
    assert len(extras()) > 8
    assert [str(canonicalize_name(name)) for name in extras()] == extras()


def test_extras_that_are_named_anywhere_are_those_of_setup_py():
    files = [CHECKOUT / 'Makefile', CHECKOUT / 'setup.py', *(CHECKOUT / path for path in TEXTS)]
    for folder in ('coyo11m_tfds', 'train_lib', 'benchmarks', 'configs'):
        files += (CHECKOUT / folder).rglob('*.py')
    named = set()
    for file in files:
        for found in re.finditer(r"\.\[([\w,-]+)\]|_needing\('([\w-]+)'", file.read_text('utf-8')):
            named.update((found[1] or found[2]).split(','))
    table = (CHECKOUT / 'README.md').read_text().partition('| extra |')[2].partition('\n\n')[0]
    in_table = re.findall(
        r'`([\w-]+)`', '|'.join(row.split('|')[1] for row in table.splitlines()[2:])
    )
    assert {'convert', 'text-jax', 'tpu', 'wandb'} <= named <= {*extras()}
    assert sorted(in_table) == sorted(extras())


@functools.cache
def help_of(module: str) -> str:
    done = children.program(module, '--help')
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('path', TEXTS, ids=str)
def test_flags_of_commands_are_those_of_the_programs(path):
    for module, flags in commands(path):
        for flag in flags:
            if not flag.startswith('--config.'):
                name = re.sub(r'^--(no)?', '', flag)
                assert re.search(rf'--(\[no\])?({flag[2:]}|{name})\b', help_of(module)), (
                    module,
                    flag,
                )


def test_packages_import_only_lower_floors():
    """As the table of docs/design.md has them; the configurations and `__init__` stand aside."""
    floors = {}
    for row in re.findall(r'^\| (\d+) \|(.*)$', (CHECKOUT / 'docs/design.md').read_text(), re.M):
        floors |= dict.fromkeys(re.findall(r'`([\w.]+)`', row[1]), int(row[0]))
    places = {name: place_of(name) for name in modules()}
    assert set(places.values()) - {''} == floors.keys()
    upward = {
        (place, other)
        for name, place in places.items()
        for other in {place_of(imported) for imported in imports(name)} - {place, ''}
        if place and floors[other] >= floors[place]
    }
    assert not upward


def test_training_reads_through_the_face_alone():
    of_training = [name for name in modules() if name.startswith('train_lib.')]
    rooms = {name: {place_of(other) for other in imports(name)} for name in of_training}
    assert not set().union(*rooms.values()) & {'reading', 'source', 'convert', 'report'}
    of_data = {place for place in rooms['train_lib.data'] if not place.startswith('train_lib')}
    assert of_data == {'', 'schema', 'process'}


def modules() -> Iterator[str]:
    for top in ('coyo11m_tfds', 'train_lib', 'input_pipeline.py'):
        for path in [CHECKOUT / top] if top.endswith('.py') else (CHECKOUT / top).rglob('*.py'):
            if 'dummy_data' not in path.parts:
                yield '.'.join(path.relative_to(CHECKOUT).with_suffix('').parts)


def imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((CHECKOUT / f'{module.replace(".", "/")}.py').read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f'{node.module}.{name.name}' for name in node.names)


def place_of(module: str) -> str:
    """The package or program of the table that a module belongs to; '' for others."""
    first, part, *_ = [*module.split('.'), '', '']
    path = CHECKOUT / first / part
    if first == 'train_lib':
        return f'{first}.{part}' if part and path.is_dir() else first
    if first == 'coyo11m_tfds' and part not in ('', '__init__', '__main__'):
        return part if path.is_dir() or path.with_suffix('.py').exists() else ''
    return first if first == 'input_pipeline' else ''
