"""Accelerators: what JAX and torch see, against what is plugged in.

    devices.check_devices(['jax', 'torch'], seconds=60)
    # [Finding('accelerators of jax', 'pass', 'jax 0.10.2: 4 x TPU v5 lite'), ...]

Each library looks in a process of its own, so that no device and no memory is claimed here. A
library that is not installed is not imported.
"""

import concurrent.futures
import importlib.util
import os
import pathlib
from collections.abc import Sequence

from coyo11m_tfds.checks import child, finding
from coyo11m_tfds.checks.finding import Finding

# Without it JAX takes three quarters of a GPU's memory at once, from whoever works on it.
_MODEST = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'TF_CPP_MIN_LOG_LEVEL': '3'}

_PROGRAMS = {
    'jax': """
import json, jax
print(json.dumps({'version': jax.__version__, 'devices': [
    [d.platform, d.device_kind] for d in jax.local_devices()]}))
""",
    'torch': """
import json, torch
kinds = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({'version': torch.__version__, 'devices': [['gpu', k] for k in kinds] or [
    ['cpu', 'cpu']]}))
""",
}
_NOT_SEEN = {
    ('jax', 'gpu'): "pip install -c constraints.txt -e '.[gpu]'",
    ('jax', 'tpu'): "pip install -c constraints.txt -e '.[tpu]'",
    ('torch', 'gpu'): 'install a CUDA build: https://pytorch.org/get-started/locally',
}
_FAILED = {
    'jax': 'end what else uses the devices, or set JAX_PLATFORMS=cpu to do without them',
    'torch': 'install a build for this machine: https://pytorch.org/get-started/locally',
}


def plugged_in(root: str | os.PathLike[str] = '/') -> str:
    """'gpu' or 'tpu' where device files show one, else ''; `root` is the folder with `dev`."""
    dev = pathlib.Path(root, 'dev')
    if any(dev.glob('nvidia[0-9]*')):
        return 'gpu'
    return 'tpu' if any(dev.glob('accel[0-9]*')) else ''


def check_devices(
    libraries: Sequence[str], seconds: float, root: str | os.PathLike[str] = '/'
) -> list[Finding]:
    """Asks each library for the devices of this host.

    Args:
        libraries: 'jax' and 'torch', or one of them.
        seconds: that each may take.
        root: see `plugged_in`.
    """
    there = plugged_in(root)
    # Together: each takes seconds to import.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(lambda library: _check(library, seconds, there), libraries))


def _check(library: str, seconds: float, there: str) -> Finding:
    name = f'accelerators of {library}'
    if importlib.util.find_spec(library) is None:
        return finding.passed(name, f'{library} is not installed')
    try:
        answer = child.ask(['-c', _PROGRAMS[library]], seconds, _MODEST)
    except (ValueError, OSError) as error:
        return finding.of_error(name, error, _FAILED[library])
    kinds = [kind for _, kind in answer['devices']]
    counts = ', '.join(f'{kinds.count(kind)} x {kind}' for kind in dict.fromkeys(kinds))
    text = f'{library} {answer["version"]}: {counts}'
    seen = {platform.replace('cuda', 'gpu') for platform, _ in answer['devices']}
    mend = _NOT_SEEN.get((library, there))
    if mend and there not in seen:
        text += f', although there is a {there.upper()} in this machine'
        return finding.warned(name, text, mend, **answer)
    return finding.passed(name, text, **answer)
