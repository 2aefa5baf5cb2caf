"""Times training steps of this project and those of the same model in PyTorch.

    python -m benchmarks.step --dir /tmp/step --models=S/2,B/2,L/2,XL/2 --batch_size=256
    python -m benchmarks.step --dir /tmp/step --models=XL/2 --only=jax:cudnn:dots,torch:full

Neither TensorFlow nor data are needed. benchmarks/README.md describes the options and the
measurement.
"""

import dataclasses
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.runner import Figures, Side
from train_lib.lifecycle import chips

# Of a latent.
SIDE = 32
CHANNELS = 4
TEXT_DIM = 640
_SIZES = 'width', 'depth', 'num_heads', 'patch_size', 'text', 'prediction'  # of a model
FLAGS = {
    'models': ('S/2,B/2,L/2,XL/2', 'SIZE/PATCH of each'),
    'batch_size': (256, 'samples a step'),
    'steps': (20, 'steps that are timed in a turn'),
    'warmup': (5, 'steps before, compilation included'),
}
COLUMNS = {
    'ms a step': runner.column('seconds', ',.1f', 1e3),
    'all turns': runner.all_runs('seconds', ',.1f', 1e3),
    'samples/s': runner.column('rate', ',.1f'),
    'TFLOP/s': runner.column('flops_per_second', ',.3g', 1e-12),
    'MFU': runner.column('mfu', '.1%'),
    'memory, GB': runner.column('memory', '.1f', 1e-9, max),
    'device': lambda runs: runs[0]['device'],
}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Makes a side of each model and program; returns what runs one of them."""
    sides_of_models = {}
    for model, side in itertools.product(flags.models.split(','), flags.sides.values()):
        title = f'{model}, {side.title}'
        settings = {
            **side.settings,
            'model': model,
            'cache': folder,
            'batch_size': flags.batch_size,
            'steps': flags.steps,
            'warmup': flags.warmup,
        }
        sides_of_models[title] = dataclasses.replace(side, title=title, settings=settings)
    flags.sides = sides_of_models
    return runner.run


def measure_jax(
    *, model: str, batch_size: int, steps: int, warmup: int, cache: str, **fields: str
) -> Figures:
    """Times the step of `train_lib`'s default configuration with these fields of its model."""
    # All of the device's memory but what the driver needs: nothing else uses it in this turn.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.95')
    import jax

    from configs import default
    from coyo11m_tfds.dataset.stored_dataset import DatasetStats
    from train_lib.learning import models, sharding, step

    jax.config.update('jax_compilation_cache_dir', cache)
    config = default.get_config()
    config.batch_size = batch_size
    config.model.update(name=model, **fields)
    # One device: what several take for each other depends on their links.
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    compiled = step.make_program(config, mesh, DatasetStats(**_stats()))
    batch = _batch(batch_size)
    batch['latents'] = batch['latents'].astype(jax.numpy.bfloat16)
    batch = jax.device_put(batch, sharding.batch(mesh))
    state = compiled.init()

    def run(num_steps: int) -> float:
        """Takes some steps, and returns the loss of the last."""
        nonlocal state
        for _ in range(num_steps):
            state, metrics = compiled.train_step(state, batch)
        # Waits for the steps, which are only under way yet.
        last_metrics = jax.device_get(metrics)
        return float(last_metrics.compute()['loss'])

    seconds, loss = _timed(run, warmup, steps)
    device = mesh.devices.item()
    memory = (device.memory_stats() or {}).get('peak_bytes_in_use')
    dit = models.make_model(**config.model)
    return _figures(seconds, loss, dit, batch_size, device.device_kind, memory)


def measure_torch(
    *,
    model: str,
    batch_size: int,
    steps: int,
    warmup: int,
    cache: str,
    mode: str = 'default',
    **fields: str,
) -> Figures:
    """Times the step of `torch_dit` with these options and a mode of `torch.compile`."""
    os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', os.path.join(cache, 'torch'))
    import torch

    # JAX makes the first weights, and leaves the GPU to torch. Before its import, which reads this.
    os.environ['JAX_PLATFORMS'] = 'cpu'
    import jax

    from benchmarks import torch_dit
    from train_lib.learning import models
    from train_lib.learning.dit import flatten_weights

    # Products of float32, in the last layer: TensorFloat-32, as is the default of JAX on GPUs.
    torch.set_float32_matmul_precision('high')
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    dit = models.make_model(model)
    latents = np.zeros((1, SIDE, SIDE, CHANNELS), np.float32)
    time = np.zeros(1, np.float32)
    text = np.zeros((1, TEXT_DIM), np.float32)
    params = jax.jit(dit.init)(jax.random.key(0), latents, time, text, None)['params']
    weights = {name: torch.tensor(x, device=device) for name, x in flatten_weights(params).items()}
    stats = {name: torch.from_numpy(x).to(device) for name, x in _stats().items()}
    batch = {name: torch.from_numpy(x).to(device) for name, x in _batch(batch_size).items()}
    batch['latents'] = batch['latents'].bfloat16()
    sizes = {name: getattr(dit, name) for name in _SIZES}
    trainer = torch_dit.Trainer(weights, sizes, stats, mode=mode, **fields)

    def run(num_steps: int) -> float:
        """Takes some steps, and returns the loss of the last."""
        for _ in range(num_steps):
            noise = torch.randn(batch_size, SIDE, SIDE, CHANNELS, device=device)
            t = torch.randn(batch_size, device=device).sigmoid()
            loss = trainer.step(batch, noise, t)
        # Waits for the steps.
        return loss.item()

    seconds, loss = _timed(run, warmup, steps)
    if device == 'cpu':
        return _figures(seconds, loss, dit, batch_size, 'cpu', None)
    memory = torch.cuda.max_memory_allocated()
    return _figures(seconds, loss, dit, batch_size, torch.cuda.get_device_name(), memory)


def _timed(run: Callable[[int], float], warmup: int, steps: int) -> tuple[float, float]:
    """Returns the mean seconds of consecutive steps, and the last loss."""
    # Compiles at the first step.
    run(warmup)
    start = time.perf_counter()
    loss = run(steps)
    seconds = time.perf_counter() - start
    return seconds / steps, loss


def _figures(
    seconds: float, loss: float, dit: Any, batch_size: int, device: str, memory: int | None
) -> Figures:
    """Returns the figures of a run; the share of a chip's peak is None where that is not known."""
    rate = batch_size / seconds
    # Forward once, and backward twice.
    flops = 3 * rate * dit.flops((SIDE, SIDE, CHANNELS), TEXT_DIM)
    chip = chips.CHIPS.get(device)
    return {
        'seconds': seconds,
        'loss': loss,
        'rate': rate,
        'flops_per_second': flops,
        'mfu': flops / chip.flops if chip else None,
        'memory': memory,
        'device': device,
    }


def _stats() -> dict[str, np.ndarray]:
    """Returns statistics like those of the real data."""
    return {
        'latent_mean': np.zeros(CHANNELS, np.float32),
        'latent_std': np.full(CHANNELS, 6, np.float32),
        'text_mean': np.zeros(TEXT_DIM, np.float32),
        'text_std': np.ones(TEXT_DIM, np.float32),
    }


def _batch(size: int) -> dict[str, np.ndarray]:
    """Returns raw samples of random numbers; latents are float32, NumPy has no bfloat16."""
    rng = np.random.default_rng(0)
    return {
        'latents': 6 * rng.standard_normal((size, CHANNELS, SIDE, SIDE), np.float32),
        'text_embedding': rng.standard_normal((size, TEXT_DIM), np.float32).astype(np.float16),
        'drop_text': rng.random(size) < 0.1,
    }


_PLAIN = {'remat': 'none'}
_CUDNN = {'attention': 'cudnn', **_PLAIN}
# What a run is: the program, then how attention is computed and what is kept for the backward pass.
_SETTINGS = {
    'jax': _PLAIN,
    'jax:dots': {'remat': 'dots'},
    'jax:full': {'remat': 'full'},
    'jax:cudnn': _CUDNN,
    'jax:cudnn:dots': {**_CUDNN, 'remat': 'dots'},
    'jax:cudnn:full': {**_CUDNN, 'remat': 'full'},
    'torch': {},
    'torch:full': {'remat': 'full'},
    # Without graphs: the optimizer would have to copy the gradients out of theirs.
    'torch:max-autotune': {'mode': 'max-autotune-no-cudagraphs'},
}
_FUNCTIONS = {'jax': measure_jax, 'torch': measure_torch}
SIDES = {
    name: Side(name, _FUNCTIONS[name.partition(':')[0]], settings)
    for name, settings in _SETTINGS.items()
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, COLUMNS, FLAGS, prepare))
