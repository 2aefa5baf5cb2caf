"""What identifies the files of a text encoder: a public name and a revision.

    model_files.public_name('/models/gemma-3-270m')    # 'gemma-3-270m'
    model_files.revision('google/gemma-3-270m')        # the commit that was loaded

A model is a folder, or a name on the Hugging Face hub.
"""

import hashlib
from pathlib import Path

# Endings of the names of weights, configuration and tokenizer in a model's folder.
_SUFFIXES = {'.safetensors', '.gguf', '.json', '.txt', '.model'}


def public_name(model: str) -> str:
    """The name on the hub, or the folder's own name: metadata hold no paths of a machine."""
    return Path(model).resolve().name if Path(model).exists() else model


def revision(model: str) -> str:
    """The commit of a model on the hub that has been loaded, or a digest of a folder's files."""
    folder = Path(model)
    if not folder.is_dir():
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(model, 'config.json')
        return Path(str(cached)).parent.name  # .../snapshots/COMMIT/config.json
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    digest = hashlib.sha256()
    for path in files:
        with path.open('rb') as file:
            of_file = hashlib.file_digest(file, 'sha256').hexdigest()
        digest.update(f'{path.name} {of_file}\n'.encode())
    return f'sha256:{digest.hexdigest()}'
