"""The files of a model, given by a folder or by a name on the Hugging Face hub."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coyo11m_tfds import storage
from coyo11m_tfds.process import preparation
from coyo11m_tfds.process.errors import FieldRule
from coyo11m_tfds.storage import model_fields

# Types of weights that are read; integers and narrower floats are those of quantized models.
_FLOATS = 'F64', 'F32', 'F16', 'BF16'

# Endings of the names of weights, configuration and tokenizer in a model's folder.
_SUFFIXES = {'.safetensors', '.json', '.txt', '.model'}

# Numbers of modules that a network is made of: each takes time and memory before any weight is
# looked for. Sizes need no bound, because transformers compares shapes before it allocates.
_COUNT = re.compile(r'(\w+_)?(layers|blocks|experts|stages)|n_layer|depths?')
_MAX_COUNT = 1024
_COUNT_RULE = FieldRule(
    f'no number above {_MAX_COUNT}', lambda count: not _exceeds(count, _MAX_COUNT)
)
_QUANTIZATION_RULE = {
    'quantization_config': FieldRule('no quantized weights', lambda value: value is None)
}


class WeightFile:
    """An open safetensors file of a model, whose weights are described before they are read."""

    def __init__(self, path: Path):
        """Opens the file; raises a ValueError that names it."""
        self.path = path
        try:
            self._file = safe_open(path, 'numpy')
        except (OSError, SafetensorError) as error:
            raise ValueError(f'{path}: cannot be read: {error}') from error
        # Of all weights; the file keeps them in any order.
        self.names = frozenset(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight; raises a ValueError unless it is of floating point."""
        weight = self._file.get_slice(name)
        dtype = weight.get_dtype()
        if dtype not in _FLOATS:
            raise ValueError(
                f'{self.path}: {name!r} is {dtype}, expected one of {", ".join(_FLOATS)}: '
                'quantized weights are not read'
            )
        return tuple(weight.get_shape())

    def read(self, name: str) -> np.ndarray:
        """Returns a weight whose `shape` was accepted; raises a ValueError if it is damaged."""
        try:
            return self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f'{self.path}: cannot read {name!r}: {error}') from error


def public_name(model: str) -> str:
    """Returns the name on the hub, or that of a folder, for metadata without local paths.

    Without a model it is '', and not the name of the current folder. Bytes of a name that are no
    UTF-8, which metadata cannot hold, are replaced.
    """
    name = _find_name(storage.expand_home(model))
    return os.fsencode(name).decode('utf-8', 'replace')


def _find_name(model: str) -> str:
    """Returns the name on the hub, or that of a folder."""
    folder = Path(model)
    if model and folder.exists():
        return folder.resolve().name
    # Nor the path of a folder on another machine.
    if folder.is_absolute() or model.count('/') > 1:
        return folder.name
    return model


def local_folder(model: str, kind: str = 'text encoder') -> Path | None:
    """Returns the folder of a model, or None for a name on the hub.

    Raises:
        ValueError: It is a path, and there is no such folder.
    """
    folder = Path(storage.expand_home(model))
    if folder.is_dir():
        return folder
    # A name on the hub has one slash at most, as `owner/name`.
    if folder.exists() or folder.is_absolute() or model.count('/') > 1:
        raise ValueError(f'cannot load the {kind} {model!r}: no such folder')
    return None


def fetch_folder(model: str, kind: str, files: Sequence[str]) -> Path:
    """Returns the folder of a model; downloads files of these patterns if the cache lacks them.

    Raises:
        ValueError: There is no such model, or it cannot be downloaded.
    """
    if local := local_folder(model, kind):
        return local
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(files)))
    # The client raises errors of its own, of its HTTP library and of the disk.
    except Exception as error:
        raise ValueError(
            f'cannot load the {kind} {model!r}: {" ".join(str(error).split())} Expected a folder, '
            'or a name on the Hugging Face hub (which needs the network unless the model is in the '
            'cache).'
        ) from error


@contextlib.contextmanager
def naming_errors(source: str, advice: str = '') -> Iterator[None]:
    """Turns whatever a library raises about foreign files into a ValueError of one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # Of all, because a panic of a library in Rust is no `Exception`.
    except BaseException as error:
        raise ValueError(f'{source}: {model_fields.shorten(error)}{advice}') from error


@contextlib.contextmanager
def loading(model: str, kind: str, files: str) -> Iterator[None]:
    """Turns errors of transformers into a ValueError that names the expected `files`.

    Its models leave out triton in a process that has TensorFlow.
    """
    preparation.hide_triton_from_tensorflow()
    # Before transformers looks at the folder: it would read pickled weights, too.
    local = local_folder(model, kind)
    if local:
        check_weights(local, kind)
    folder = local or fetch_folder(model, kind, ['config.json'])
    check_network(folder / 'config.json')
    advice = (
        f' Expected a folder with config.json, *.safetensors and {files}, or a name on the Hugging '
        'Face hub (which needs the network unless the model is in the cache; pickled weights and '
        'code in the repository are not accepted).'
    )
    with naming_errors(f'cannot load the {kind} {model!r}', advice):
        try:
            yield
        except Exception:
            # An error of JSON does not name its file.
            if local:
                for path in sorted(local.glob('*.json')):
                    model_fields.read_json(path)
            raise


def check_network(path: Path) -> None:
    """Raises a ValueError for a config.json of quantized weights, or of too many modules.

    transformers checks the types of all fields.
    """
    # Models of several parts have a configuration of each, one within the other.
    objects = [model_fields.read_object(path)]
    while objects:
        fields = objects.pop()
        objects += [value for value in fields.values() if isinstance(value, dict)]
        counts = {field: _COUNT_RULE for field in fields if _COUNT.fullmatch(field)}
        model_fields.check(fields, counts | _QUANTIZATION_RULE, path)


def _exceeds(count: Any, most: int) -> bool:
    """Returns whether a number, or one of a list of numbers or lists, is above `most`."""
    # Without recursion: a foreign list may be nested more deeply than Python follows it.
    values = [count]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        # NaN is not at most anything.
        elif isinstance(value, int | float) and not value <= most:
            return True
    return False


def check_floats(model: str) -> None:
    """Raises a ValueError for a model's folder with weights that are not of floating point."""
    for path in sorted(Path(model).glob('*.safetensors')):
        file = WeightFile(path)
        # Buffers may hold integers, such as the numbers of positions.
        for name in sorted(file.names):
            if name.endswith(('weight', 'bias')):
                file.shape(name)


def check_weights(folder: Path, kind: str = 'text encoder') -> None:
    """Raises a ValueError for a model's folder without safetensors."""
    if not any(folder.glob('*.safetensors')):
        names = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"cannot load the {kind} '{folder}': expected *.safetensors in the folder, which has "
            f'{names}. Pickled weights (*.bin, *.pt) are not read, because a pickle can run code: '
            'load them where you trust them and save_pretrained() them as safetensors.'
        )


def revision(model: str) -> str:
    """Returns the commit of a downloaded model, or a digest of a folder's files."""
    folder = Path(storage.expand_home(model))
    if not folder.is_dir():
        import huggingface_hub

        config_path = huggingface_hub.try_to_load_from_cache(model, 'config.json')
        return Path(str(config_path)).parent.name  # .../snapshots/COMMIT/config.json
    # Of these alone: a README or a log in the folder makes no other model.
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    digest = hashlib.sha256()
    for path in files:
        with path.open('rb') as file:
            content = hashlib.file_digest(file, 'sha256').hexdigest()
        digest.update(f'{path.name} {content}\n'.encode())
    return f'sha256:{digest.hexdigest()}'
