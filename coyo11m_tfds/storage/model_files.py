"""The files of a model, given by a folder or by a name on the Hugging Face hub."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError

# Endings of the names of weights, configuration and tokenizer in a model's folder.
_SUFFIXES = {'.safetensors', '.json', '.txt', '.model'}

_LOADING_ERRORS = OSError, ValueError, TypeError, AttributeError, ImportError, SafetensorError


def public_name(model: str) -> str:
    """Returns the name on the hub, or that of a folder, for metadata without local paths."""
    return Path(model).resolve().name if Path(model).exists() else model


def local_folder(model: str, kind: str = 'text encoder') -> Path | None:
    """Returns the folder of a model, or None for a name on the hub."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or model.count('/') > 1:
        raise ValueError(f'cannot load the {kind} {model!r}: no such folder')
    return None


def fetch_folder(model: str, kind: str, files: Sequence[str]) -> Path:
    """Returns the folder of a model; downloads files of these patterns if the cache lacks them."""
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
def loading(model: str, kind: str, files: str) -> Iterator[None]:
    """Turns errors of transformers into a ValueError that names the expected `files`."""
    # Before transformers looks at the folder: it would read pickled weights, too.
    if local := local_folder(model, kind):
        check_weights(local, kind)
    try:
        yield
    except _LOADING_ERRORS as error:
        raise ValueError(
            f'cannot load the {kind} {model!r}: {error}\n'
            f'Expected a folder with config.json, *.safetensors and {files}, or a name on the '
            'Hugging Face hub (which needs the network unless the model is in the cache; pickled '
            'weights and code in the repository are not accepted).'
        ) from error


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
    folder = Path(model)
    if not folder.is_dir():
        import huggingface_hub

        config_path = huggingface_hub.try_to_load_from_cache(model, 'config.json')
        return Path(str(config_path)).parent.name  # .../snapshots/COMMIT/config.json
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    digest = hashlib.sha256()
    for path in files:
        with path.open('rb') as file:
            content = hashlib.file_digest(file, 'sha256').hexdigest()
        digest.update(f'{path.name} {content}\n'.encode())
    return f'sha256:{digest.hexdigest()}'
