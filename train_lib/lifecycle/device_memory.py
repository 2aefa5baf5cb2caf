"""The memory that a step takes, the memory that there is, and what would fit."""

import contextlib
import re
import resource
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections

from coyo11m_tfds.process import machine
from coyo11m_tfds.process.jax_environment import promote_as_usual
from coyo11m_tfds.process.sizes import format_bytes
from train_lib.learning import models


# As the step is called: else JAX would trace it again.
@promote_as_usual
def lower_step(step: Any, *arguments: Any) -> jax.stages.Lowered:
    """Returns a bound function of `step.Program`, traced for the arguments of its call."""
    return step.func.lower(*step.args, *arguments)


# As the step is called: else JAX would compile it again.
@promote_as_usual
def check_device_memory(
    config: ml_collections.ConfigDict, lowered: jax.stages.Lowered, free: float | None = None
) -> None:
    """Raises a MemoryError, which says what would fit, if a step takes more than a device has.

    Args:
        config: Configuration of the run.
        lowered: The step, as `lower_step` returns it; it is compiled, unless it has been before.
        free: Bytes that are free on a device; by default they are measured.
    """
    # JAX keeps what is compiled here for the calls of the step.
    sizes: Any = lowered.compile().memory_analysis()
    # The state and the batch are there already, and most outputs take the place of the state.
    nbytes = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    if free is None:
        free = _measure_free_memory()
    if nbytes > free:
        raise MemoryError(
            f'a step takes {format_bytes(nbytes)} of memory, and {format_bytes(max(0, free))} are '
            f'free. {advise_flags(config, nbytes / max(1, free))}'
        )


def _measure_free_memory() -> float:
    """Returns the bytes that are free on each device of this process."""
    device, *other_devices = jax.local_devices()
    # On a CPU the kernel grants more memory than there is, and later kills the process.
    if device.platform == 'cpu':
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # The most that this process has held so far, which Linux gives in KiB.
        resident = 1024 * usage.ru_maxrss
        num_devices = 1 + len(other_devices)
        return (machine.usable_memory() - resident) // num_devices
    # Without statistics nothing is known, and the step is tried.
    stats = device.memory_stats() or {}
    return stats.get('bytes_limit', float('inf')) - stats.get('bytes_in_use', 0)


@contextlib.contextmanager
def explain_out_of_memory(config: ml_collections.ConfigDict) -> Iterator[None]:
    """Raises a MemoryError, which says what would fit, if a device runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        text = find_memory_sentence(error)
        # XLA's message has the memory that the program uses, and that of a device.
        sizes = re.findall(r'([\d.]+)G\b', text)
        # Where it has none, half of the rows at a time are worth a try.
        share = 2.0
        if len(sizes) == 2:
            used, available = map(float, sizes)
            share = used / available
        raise MemoryError(f'{text.rstrip(".")}. {advise_flags(config, share)}') from error


def find_memory_sentence(error: Exception) -> str:
    """Returns the sentence about memory in XLA's message, without the allocations."""
    pattern = r'Used [\d.]+\w? of [\d.]+\w?|the total memory required .* \([\d.]+\w?\)'
    sentence = re.search(pattern, str(error))
    return sentence[0] if sentence else str(error).splitlines()[0]


def advise_flags(config: ml_collections.ConfigDict, share: float) -> str:
    """Returns a sentence of flags that save memory, those first that cost the least time.

    `share` is the memory that a step needs, divided by that of a device.
    """
    advice = []
    if jax.default_backend() == 'cpu' and not config.model.name.startswith('tiny'):
        advice.append('--config=small (there is no accelerator)')
    model = models.make_model(**config.model, vocabulary=1)
    if getattr(model, 'remat', 'full') != 'full':
        advice.append('--config.model.remat=full')
    # The least number of slices that is enough, where activations take most of the memory.
    rows = config.batch_size // jax.device_count()
    for count in range(1, rows + 1):
        if rows % count == 0 and count >= config.accumulate * share:
            advice.append(f'--config.accumulate={count}')
            break
    advice.append('or a smaller --config.batch_size or model')
    return f'Try {", ".join(advice)}.'
