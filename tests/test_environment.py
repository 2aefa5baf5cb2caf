"""The table of environment variables and the code agree."""

import ast
import re
from collections.abc import Iterator

from tests.checkout import CHECKOUT

VARIABLE = re.compile(r'RANK|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+')

# Constants of the code that look like variables.
OTHERS = {
    *('CERTIFICATE_VERIFY_FAILED', 'DROP_TEXT', 'MADV_WILLNEED', 'NOISE_SEED', 'TF_DATA'),
    *('RESOURCE_EXHAUSTED', 'SC_CLK_TCK', 'SC_PAGE_SIZE', 'SC_PHYS_PAGES', 'SHARD_X_OF_Y'),
}
# Read by Python and libraries alone, and of use here.
OF_LIBRARIES = {
    *('GOOGLE_APPLICATION_CREDENTIALS', 'HF_HOME', 'HF_TOKEN', 'JAX_PLATFORMS', 'XLA_FLAGS'),
    *('MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_', 'JAX_DEFAULT_MATMUL_PRECISION'),
    *('JAX_ENABLE_X64', 'JAX_THREEFRY_PARTITIONABLE', 'JAX_DISABLE_JIT'),
    'JAX_COMPILATION_CACHE_MAX_SIZE',
}


def in_code() -> Iterator[str]:
    """Variables named as a whole string in the code; of the tests, those that are ours."""
    files = [CHECKOUT / 'input_pipeline.py']
    for folder in ('coyo11m_tfds', 'train_lib', 'benchmarks', 'configs', 'tests'):
        files += (CHECKOUT / folder).rglob('*.py')
    for file in files:
        tests = 'tests' in file.relative_to(CHECKOUT).parts
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            name = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(name, str) or not VARIABLE.fullmatch(name) or name in OTHERS:
                continue
            # Tests also set variables of libraries, and ours to values that are refused.
            if not tests or re.search(rf"environ(\.get\(|\[)'{name}'", text):
                yield name


def in_table() -> set[str]:
    text = (CHECKOUT / 'docs' / 'environment.md').read_text()
    rows = [line for line in text.splitlines() if line.startswith('| `')]
    return {name for row in rows for name in re.findall(r'`(\w+)`', row.split('|')[1])}


def test_the_table_has_all_variables_and_no_other():
    assert in_table() == set(in_code()) | OF_LIBRARIES
