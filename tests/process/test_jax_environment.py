"""What JAX's environment changes is refused, or told; it starts with devices or with one line."""

import jax
import pytest

from coyo11m_tfds.process import jax_environment

REFUSED = {
    'jax_enable_x64': (jax.enable_x64, True),
    'jax_threefry_partitionable': (jax.threefry_partitionable, False),
    'jax_disable_jit': (jax.disable_jit, True),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_would_change_all_numbers_is_refused(name):
    context, value = REFUSED[name]
    jax_environment.check()
    with context(value), pytest.raises(ValueError, match=f'^{name} is {value}, .*: expected'):
        jax_environment.check()


def test_what_changes_roundings_is_told(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=/x --xla_force_host_platform_device_count=2')
    assert jax_environment.describe() == {}
    monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_enable_fast_math=true --xla_dump_to=/x')
    monkeypatch.setenv('NVIDIA_TF32_OVERRIDE', '0')
    with jax.default_matmul_precision('bfloat16'):
        assert jax_environment.describe() == {
            'jax_default_matmul_precision': 'bfloat16',
            'XLA_FLAGS': '--xla_cpu_enable_fast_math=true',
            'NVIDIA_TF32_OVERRIDE': '0',
        }
