"""Makes a site of what README.md leads to, each file at its place in the repository.

So a link of a page leads to the same on GitHub and on the site. Programs, notebooks and folders, to
which pages link, become pages themselves. The navigation is the tables of docs/README.md.
"""

import ast
import json
import pathlib
import posixpath
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = pathlib.Path(__file__).parents[2]
_HOME = 'README.md'
_INDEX = 'docs/README.md'
_PICTURES = ('.png', '.svg', '.jpg')
# The target of a link or of a picture, without the part after '#'; not that of an address.
_TARGET = re.compile(r'(?<=\]\()([^)#:\s]+)|(?<=src=")([^":]+)')
# Badges come from a server, which a site without a network does not ask.
_BADGE = re.compile(r'^!\[.*\]\(https://img\.shields\.io/.*\)\n', re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the navigation from the tables of docs/README.md: a heading is a section."""
    sections = []
    for part in (_ROOT / _INDEX).read_text('utf-8').split('\n## ')[1:]:
        title, _, table = part.partition('\n')
        pages = [_name_target(_INDEX, target) for target in _targets(table)]
        sections.append({title: [_page_name(page) for page in pages]})
    config.nav = [{'Home': _HOME}, {'All pages': _INDEX}, *sections]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by all files to which links lead from README.md."""
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    to_read = [_HOME]
    known = {_HOME}
    while to_read:
        name = to_read.pop()
        site.append(_make_file(name, config))
        if name.endswith('.md') or (_ROOT / name).is_dir():
            for target in _targets(_read_page(name)):
                linked = _name_target(_page_name(name), target)
                # MkDocs warns of what does not exist.
                if linked not in known and (_ROOT / linked).exists():
                    known.add(linked)
                    to_read.append(linked)
    site.append(File('docs/site/pages.css', str(_ROOT), config.site_dir, False))
    return site


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Lets links to programs, notebooks and folders lead to their pages."""

    def rename(found: re.Match[str]) -> str:
        target = found[0]
        linked = _name_target(page.file.src_uri, target)
        if not (_ROOT / linked).exists() or _page_name(linked) == linked:
            return target
        return posixpath.relpath(_page_name(linked), posixpath.dirname(page.file.src_uri))

    return _TARGET.sub(rename, _BADGE.sub('', markdown))


def _targets(text: str) -> Iterator[str]:
    """Returns the relative targets of all links and pictures outside of blocks of code."""
    for found in _TARGET.finditer(re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)):
        yield found[0]


def _name_target(page: str, target: str) -> str:
    """Returns the path of a link's target in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _page_name(name: str) -> str:
    """Returns the name of the page that shows a file or a folder; pictures show themselves."""
    if (_ROOT / name).is_dir():
        return f'{name}/README.md'
    if name.endswith(('.md', *_PICTURES)):
        return name
    return f'{name}.md'


def _make_file(name: str, config: MkDocsConfig) -> File:
    if _page_name(name) == name:
        return File(name, str(_ROOT), config.site_dir, config.use_directory_urls)
    inclusion = InclusionLevel.NOT_IN_NAV
    # Only this one is on the list of docs/README.md.
    if name.endswith('.ipynb'):
        inclusion = InclusionLevel.INCLUDED
    return File.generated(config, _page_name(name), content=_read_page(name), inclusion=inclusion)


def _read_page(name: str) -> str:
    """Returns a file as a page of Markdown."""
    path = _ROOT / name
    if path.is_dir():
        return _show_folder(path)
    text = path.read_text('utf-8')
    if name.endswith('.md'):
        return text
    if name.endswith('.ipynb'):
        return _show_notebook(text)
    return f'# {path.name}\n\n```{path.suffix[1:]}\n{text}```\n'


def _show_folder(path: pathlib.Path) -> str:
    """Returns a table of the modules of a folder, with the first lines of their docstrings."""
    lines = [f'# {path.name}/', '', '| file | what it is |', '|---|---|']
    for module in sorted(path.glob('*.py')):
        docstring = ast.get_docstring(ast.parse(module.read_text('utf-8'))) or ''
        lines.append(f'| [{module.name}]({module.name}) | {docstring.partition(chr(10))[0]} |')
    return '\n'.join(lines) + '\n'


def _show_notebook(text: str) -> str:
    """Returns the cells of a notebook and what they have printed and shown."""
    parts = []
    for cell in json.loads(text)['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            parts.append(source)
            continue
        parts.append(f'```python\n{source}\n```')
        parts += [_show_output(output) for output in cell['outputs']]
    return '\n\n'.join(parts) + '\n'


def _show_output(output: dict) -> str:
    if output['output_type'] == 'stream':
        return f'```text\n{"".join(output["text"]).rstrip()}\n```'
    data = output['data']
    if 'image/jpeg' in data:
        encoded = ''.join(data['image/jpeg']).replace('\n', '')
        return f'<img alt="" src="data:image/jpeg;base64,{encoded}">'
    return f'```text\n{"".join(data["text/plain"])}\n```'
