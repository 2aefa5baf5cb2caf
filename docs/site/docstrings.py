"""Prepares docstrings for the API reference, which reads the source and imports nothing."""

import re

import griffe

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
