"""`encoding.json`: what `encode_images` says of the latents next to it.

It names every tar of a complete encoding, so that none can be missing or replaced.
"""

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from coyo11m_tfds import schema
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.process.errors import FieldRule
from coyo11m_tfds.storage import json_digest, model_fields
from coyo11m_tfds.storage.file_state import FileState

_SETTINGS = 'settings'
_FILES = 'files'

# Of the settings that a build takes over; the others are only compared.
_RULES = {
    schema.META_VAE: FieldRule(
        'a text in UTF-8', lambda vae: isinstance(vae, str) and foreign_text.is_readable(vae)
    ),
    schema.META_LATENT_SCALE: model_fields.pair_of(
        model_fields.number(1e-6, 1e6), model_fields.number(-1e6, 1e6)
    ),
    schema.META_MOMENTS: model_fields.BOOLEAN,
}


def how_to_encode(folder: str) -> str:
    """Returns advice for a folder without latents, which may be one of images."""
    command = f'python -m {schema.NAME}.encode_images --images={shlex.quote(folder)}'
    return f'If it holds images, encode them first: {command} --vae=VAE --out=SOURCE'


class EncodedState(FileState):
    """The state of a tar when `encode_images` had written it."""


class Encoding(NamedTuple):
    """Latents that `encode_images` makes or has made."""

    settings: Mapping[str, Any]  # what decides the latents, such as the VAE; plain values
    # All tars of a complete encoding, by their names within the folder; of shapes in sub-folders.
    files: Mapping[str, EncodedState] | None = None

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        files = None
        if self.files is not None:
            files = {name: state.to_json() for name, state in sorted(self.files.items())}
        return json_digest.seal({_SETTINGS: dict(self.settings), _FILES: files})

    @classmethod
    def parse(cls, data: bytes) -> 'Encoding':
        """The inverse of `to_bytes`; raises a ValueError for content that this cannot have made."""
        try:
            content = json_digest.unseal(data)
            settings = dict(content[_SETTINGS])
            files = content[_FILES]
            if files is not None:
                files = {name: EncodedState.from_json(state) for name, state in files.items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f'it lacks {error}') from None
        model_fields.check(settings, _RULES, _SETTINGS)
        return cls(settings, files)
