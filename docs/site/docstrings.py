"""Prepares docstrings for the API reference, which reads the source and imports nothing."""

import pathlib
import re

import griffe

_README = pathlib.Path(__file__).parents[2] / 'coyo11m_tfds/README.md'

_PAGE = re.compile(r'(docs|coyo11m_tfds)/\w+\.md')


class OptionsAsArguments(griffe.Extension):
    """Gives each function with `@takes(Options)` the parameters of the class of options.

    The source has `options`, which is what the function gets from its decorator.
    """

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_) -> None:
        """Replaces the parameters of one function."""
        for decorator in func.decorators:
            if decorator.callable_path.endswith('.takes'):
                (options,) = decorator.value.arguments
                parameters = loader.modules_collection[options.canonical_path].parameters
                func.parameters = griffe.Parameters(*[x for x in parameters if x.name != 'self'])


class LinksInDocstrings(griffe.Extension):
    """Makes links of the pages and of the functions of `input_pipeline` that docstrings name."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Adds links to the docstring of one object."""
        if obj.docstring is None:
            return
        text = _PAGE.sub(r'[\g<0>](../../\g<0>)', obj.docstring.value)
        if obj.module.name == 'input_pipeline':
            for name in obj.module.exports or ():
                if name != obj.name:
                    text = re.sub(
                        rf'(?<![`\w.])`{name}`', f'[`{name}`][input_pipeline.{name}]', text
                    )
        obj.docstring.value = text

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Adds links to the docstring of a package, which is no object of another one."""
        self.on_object(obj=pkg)


class FieldsOfConfig(griffe.Extension):
    """Describes the fields of the config of a build by the table in coyo11m_tfds/README.md."""

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        """Adds the rows of the table to the docstring of the config, as its arguments."""
        if cls.name != 'Coyo11mConfig' or cls.docstring is None:
            return
        _, _, table = _README.read_text('utf-8').partition('| field | default | meaning |\n')
        lines = ['', '', 'Args:']
        for row in table.partition('\n\n')[0].splitlines()[1:]:
            name, _, meaning = row.strip('|').split('|', 2)
            # Links of that page, as this one has them.
            meaning = meaning.strip().replace('](../docs/', '](../')
            meaning = meaning.replace('](#', '](../../coyo11m_tfds/README.md#')
            lines.append(f'    {name.strip(" `")}: {meaning}')
        cls.docstring.value += '\n'.join(lines)
