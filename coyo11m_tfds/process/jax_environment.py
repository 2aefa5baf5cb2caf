"""What of JAX's configuration changes numbers, and whether JAX has devices.

Environment variables such as `JAX_ENABLE_X64`, and `jax.config`, decide about all of JAX in a
process. The code names what it can: random keys are those of `threefry2x32`, arrays have dtypes.
Of the rest, some values are refused, and others belong to the settings of what was computed.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

# Values that this project needs; others change noise, dtypes or how a step is compiled.
_REQUIRED = {
    'jax_enable_x64': False,
    'jax_threefry_partitionable': True,
    'jax_disable_jit': False,
}

# Values that change roundings, or in how many bits products are computed; with JAX's defaults.
_RECORDED = {
    'jax_default_matmul_precision': None,
    'jax_softmax_custom_jvp': False,
    'jax_allow_f16_reductions': True,
    'jax_use_direct_linearize': True,
    'jax_optimization_level': 'UNKNOWN',
    'jax_exec_time_optimization_effort': 0.0,
    'jax_disable_most_optimizations': False,
}
_RECORDED_VARIABLES = 'XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'NVIDIA_TF32_OVERRIDE'

# Options of compilers that show what they do, or how fast or on how many devices they do it.
_WITHOUT_EFFECT = re.compile(
    r'--xla_(dump\w*|\w*profil\w*|\w*timeout\w*|\w*parallel\w*|force_host_platform_device_count)'
    r'(=.*)?'
)

P = ParamSpec('P')
R = TypeVar('R')


def check() -> None:
    """Raises a ValueError for a value that changes numbers, or if JAX finds no devices."""
    import jax

    for name, required in _REQUIRED.items():
        value = getattr(jax.config, name, required)
        if value != required:
            raise ValueError(
                f'{name} is {value}, which would change all numbers: expected {required}; remove '
                f'{name.upper()} from the environment, or call '
                f'jax.config.update({name!r}, {required})'
            )
    try:
        jax.local_devices()
    # JAX asserts that there is a GPU before it looks for CUDA.
    except (RuntimeError, AssertionError) as error:
        platforms = getattr(jax.config, 'jax_platforms', None) or ''
        reason, _, _ = str(error).partition(' (set JAX_PLATFORMS')
        if reason:
            reason = f' ({reason})'
        raise ValueError(
            f'JAX_PLATFORMS={platforms}: JAX finds no such devices{reason}; expected a platform of '
            'this machine, such as cpu, or an installation of JAX for the platform (the extras gpu '
            'and tpu)'
        ) from error


def describe() -> dict[str, str]:
    """Returns the values, other than JAX's defaults, that change roundings; none in most places."""
    import jax

    changed = {}
    for name, default in _RECORDED.items():
        value = getattr(jax.config, name, default)
        if value != default:
            changed[name] = str(value)
    for variable in _RECORDED_VARIABLES:
        options = os.environ.get(variable, '').split()
        options = [option for option in options if not _WITHOUT_EFFECT.fullmatch(option)]
        if options:
            changed[variable] = ' '.join(options)
    return changed


def promote_as_usual(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function mix dtypes and ranks as JAX does by default, as Flax and Optax need it."""
    # `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion` help to find mistakes in the code
    # of others. They change no numbers, but raise errors.

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        import jax

        with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
            return function(*args, **kwargs)

    return call
