"""A step that takes more memory than there is ends a run with one line that says what would fit."""

import jax
import jax.numpy as jnp
import pytest

from configs import default
from tests import children, runs
from tests.runs import small_config
from train_lib.learning import step
from train_lib.lifecycle import device_memory


def test_a_step_that_cannot_fit_is_refused_before_it_runs():
    doubled = step.bind(lambda frozen, x: jnp.sort(x) + x[0], None, None)
    lowered = device_memory.lower_step(doubled, jnp.arange(100_000.0))
    device_memory.check_device_memory(small_config('D'), lowered)
    with pytest.raises(
        MemoryError, match=r'takes [\d.]+ kB of memory, and 100.0 kB are free. Try --'
    ):
        device_memory.check_device_memory(small_config('D'), lowered, free=100_000)


def test_an_allocation_that_fails_is_explained():
    # More than the addresses of a process.
    too_much = jax.ShapeDtypeStruct((2**50,), jnp.uint8)
    message = r'^RESOURCE_EXHAUSTED: Out of memory allocating \d+ bytes\. Try .*accumulate=2'
    with (
        pytest.raises(MemoryError, match=message),
        device_memory.explain_out_of_memory(small_config('D')),
    ):
        jnp.zeros(too_much.shape, too_much.dtype).block_until_ready()


def test_other_errors_of_the_devices_stay_as_they_are():
    error = jax.errors.JaxRuntimeError('INTERNAL: another error')
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        device_memory.explain_out_of_memory(small_config('')),
    ):
        raise error


OF_V5E = (
    'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 36.63G of 15.75G hbm. Exceeded'
)


ADVICE = {
    'of the default': ({}, r'--config=small \(there .*\), --config.accumulate=4, or a smaller'),
    'without what is computed again': (
        {'model.remat': 'none'},
        r'\), --config.model.remat=full, --config.accumulate=4, or',
    ),
    'of a small model in two parts': (
        {'model.name': 'tiny/8', 'batch_size': 12, 'accumulate': 2},
        'Try --config.model.remat=full, --config.accumulate=6, or',
    ),
    'of a small model and batch': (
        {'model.name': 'tiny/8', 'batch_size': 2},
        'remat=full, or a smaller --config.batch_size',
    ),
}


@pytest.mark.parametrize(('fields', 'flags'), ADVICE.values(), ids=ADVICE)
def test_the_advice_follows_the_sizes_in_the_compilers_message(fields, flags):
    config = default.get_config()
    config.update_from_flattened_dict(fields)
    with (
        pytest.raises(MemoryError, match=f'^Used 36.63G of 15.75G. .*{flags}'),
        device_memory.explain_out_of_memory(config),
    ):
        raise jax.errors.JaxRuntimeError(OF_V5E)


# A run whose devices have no memory left for a step.
FULL = """
import runpy, jax
from train_lib.lifecycle import device_memory

def check(*arguments):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory.\\n  and 25 lines')

device_memory.check_device_memory = check
runpy.run_module('train_lib.main', run_name='__main__', alter_sys=True)
"""


def test_a_run_without_enough_memory_ends_in_one_line(mini_dataset, tmp_path):
    flags = runs.flags(mini_dataset, tmp_path / 'W')
    with children.python(FULL, *flags, forked=True) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert 'Traceback' not in errors and 'loss' not in errors
    last = errors.splitlines()[-1]
    assert last.startswith('error: RESOURCE_EXHAUSTED: Out of memory. Try --config.')
