"""Installs the data set, the input pipeline and the trainer.

    pip install -c constraints.txt -e '.[convert,text,test]'

Training does not need torch. The extra `convert` is for the machine that runs `tfds build`, `text`
for the one that makes text embeddings with a transformers model, and `dataflow` for the one that
starts a build on Dataflow.
"""

import pathlib
import re
import shutil

import setuptools
from setuptools.command.build_py import build_py

# TensorFlow only reads records here, so its CPU build suffices, also with a GPU or TPU. It exists
# only for Linux on x86-64.
_CPU_BUILD = 'platform_system == "Linux" and platform_machine == "x86_64"'
_ONE_BUILD = 'platform_system != "Linux" or platform_machine != "x86_64"'

CONVERT = [
    'apache-beam>=2.72',  # the `tfds` command imports it
    'huggingface_hub>=2.4',
    'isal>=1.7',  # CRC-32 at the speed of the memory
    'mlcroissant>=1.0',  # the `tfds` command imports it
    'pandas>=2.2.2',
    'pyarrow>=21',
    'torch>=2.6',
]


class BuildWithStubs(build_py):
    """Adds the types of `input_pipeline` as a package of stubs.

    Type checkers read the types of an installed package with a file `py.typed`, but not those of a
    single module (PEP 561).
    """

    def run(self):
        """Builds the packages, and the stubs next to them."""
        super().run()
        stubs = pathlib.Path(self.build_lib, 'input_pipeline-stubs')
        stubs.mkdir(exist_ok=True)
        shutil.copy('input_pipeline.py', stubs / '__init__.pyi')


setuptools.setup(
    cmdclass={'build_py': BuildWithStubs},
    name='coyo11m_tfds',
    version=re.search(
        r"__version__ = '(.*)'", pathlib.Path('coyo11m_tfds/__init__.py').read_text()
    )[1],
    description='VAE latents and captions as a TFDS data set, an exactly resumable input pipeline '
    'and a JAX trainer for text-to-image models',
    long_description=pathlib.Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    project_urls={
        'Data set': 'https://huggingface.co/datasets/KBlueLeaf/coyo11m-256px-ccrop-latent',
    },
    classifiers=[f'Programming Language :: Python :: 3.{minor}' for minor in (11, 12, 13)],
    python_requires='>=3.11',
    packages=[
        *setuptools.find_packages(include=['coyo11m_tfds*', 'train_lib*']),
        'train_lib.configs',  # `--config=NAME` finds them there
    ],
    package_dir={'train_lib.configs': 'configs'},
    py_modules=['input_pipeline'],
    package_data={
        'coyo11m_tfds': [
            *('README.md', 'CITATIONS.bib', 'TAGS.txt', 'py.typed'),
            *('report/page.html', 'pictures/noto_emoji/*'),
        ],
        'train_lib': ['fonts/*', 'py.typed'],
    },
    install_requires=[
        'absl-py>=2.1',
        'clu>=0.0.12',
        'etils[epath]>=1.15',
        'filelock>=3.12',  # JAX locks its cache of compiled programs with it
        'flax>=0.10.6',
        'gcsfs>=2025.2',  # epath reaches gs:// by it where TensorFlow is not imported
        'google-cloud-storage>=3.0',
        'google-crc32c>=1.6',
        'importlib_resources>=6.0',  # tensorflow-datasets imports it
        'jax>=0.7',
        'jinja2>=3.1',  # the page of a report
        'ml_collections>=1.1',
        'numpy>=2.0',
        'optax>=0.2.5',
        'orbax-checkpoint>=0.11.26',
        'packaging>=23.0',
        'pillow>=12.1.1',
        'protobuf>=6.31.1,<7',  # tensorflow-datasets 4.9.10 calls what protobuf 7 has removed
        'safetensors>=0.8',
        'tensorboard>=2.20',  # clu.metric_writers imports it
        f'tensorflow-cpu>=2.20; {_CPU_BUILD}',
        f'tensorflow>=2.20; {_ONE_BUILD}',
        'tensorflow-datasets>=4.9.8',
        'tqdm>=4.66',
        'urllib3>=2.0.2',
    ],
    extras_require={
        'convert': CONVERT,
        'dataflow': [*CONVERT, 'apache-beam[gcp]>=2.72'],  # 50 more packages
        'dask': [*CONVERT, 'apache-beam[dask]>=2.72'],
        'text': ['pyarrow>=21', 'torch>=2.6', 'transformers>=5.18'],
        # Qwen3 and Gemma 3 in JAX, without torch and transformers.
        'text-jax': [
            'huggingface_hub>=2.4',
            'pyarrow>=21',
            'safetensors>=0.8',
            'tokenizers>=0.23.3',
        ],
        'fonts': ['noto-cjk-sans-otc>=0.0.1'],  # Chinese, Japanese and Korean, for previews
        'test': [
            'accelerate>=1.0',  # with gguf, transformers unpacks an encoder for `make slow`
            'dill>=0.3.8',  # tfds.testing.DatasetBuilderTestCase imports it
            'gguf>=0.10',
            'grain>=0.2.12',  # docs/reading.md reads with it
            'hypothesis>=6.100',
            'mypy>=2.4',
            'pytest>=9.0',
            'pytest-xdist>=3.6.1',
            'ruff>=0.9',
        ],
        # Other writers and readers, for `benchmarks/`.
        'bench': [
            'array_record>=0.8.1',
            'datasets>=5.0',
            'grain>=0.2.12',
            'litdata>=0.2.60',
            'msgpack>=1.1',
            'psutil>=5.9',
        ],
        'tpu': ['jax[tpu]'],
        'gpu': ['jax[cuda13]'],
        'gpu-cuda12': ['jax[cuda12]'],  # for drivers before 580
        'wandb': ['wandb>=0.19'],
    },
)
