"""One turn of `benchmarks.step`: compiles a training step, times it, prints a line of JSON.

    python -m benchmarks.step_sides JOB

JOB is `Job` as JSON. Each turn is a process of its own, which has the memory of the device to
itself. The side in JAX imports neither TensorFlow nor torch, the one in PyTorch not JAX.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

SIDE, CHANNELS = 32, 4  # of a latent
TEXT_DIM = 640
_PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """The measurements of a turn.

    Attributes:
        program: `jax` or `torch`.
        model: such as `S/2`.
        batch_size: samples a step.
        options: of the program: `attention` and `remat` of jax, `remat` and `mode` of torch.
        warmup: steps before the clock starts, compilation included.
        steps: that are timed.
        cache: folder for what is compiled, shared by turns.
        profile: folder for a profile of some more steps, of jax alone; '' for none.
    """

    program: str
    model: str
    batch_size: int
    options: dict[str, str]
    warmup: int
    steps: int
    cache: str
    profile: str = ''


def measure_jax(job: Job) -> dict[str, Any]:
    """The step of `train_lib` with the default configuration, on one device."""
    # All of the device's memory but what the driver needs: nothing else uses it in this turn.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.95')
    import jax

    from configs import default
    from train_lib import flow, models, program, sharding

    jax.config.update('jax_compilation_cache_dir', job.cache)
    config = default.get_config()
    config.batch_size = job.batch_size
    config.model.update(name=job.model, **job.options)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    latent_shape = SIDE, SIDE, CHANNELS
    compiled = program.make_program(config, mesh, flow.Stats(**_stats()), latent_shape=latent_shape)
    batch = _batch(job.batch_size)
    batch['latents'] = batch['latents'].astype(jax.numpy.bfloat16)
    batch = jax.device_put(batch, sharding.batch(mesh))
    state = compiled.init()

    def run(num_steps: int) -> float:
        nonlocal state
        for _ in range(num_steps):
            state, metrics = compiled.train_step(state, batch)
        return float(jax.device_get(metrics).compute()['loss'])  # waits for the steps

    row = _timed(job, run)
    if job.profile:
        with jax.profiler.trace(job.profile):
            run(_PROFILED_STEPS)
    device = mesh.devices.item()
    memory = (device.memory_stats() or {}).get('peak_bytes_in_use')
    flops = 3 * models.make(**config.model).flops(latent_shape, TEXT_DIM) * job.batch_size
    return row | {'device': device.device_kind, 'memory': memory, 'flops': flops}


def measure_torch(job: Job) -> dict[str, Any]:
    """The step of `benchmarks.torch_dit`, on one device."""
    os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', os.path.join(job.cache, 'torch'))
    import torch

    from benchmarks import torch_dit

    # Products of float32, in the last layer: TensorFloat-32, as is the default of JAX on GPUs.
    torch.set_float32_matmul_precision('high')
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    options = dict(job.options)
    mode = options.pop('mode', 'default')
    model = torch_dit.make(job.model, **options).to(device)
    stats = {name: torch.from_numpy(x).to(device) for name, x in _stats().items()}
    batch = {name: torch.from_numpy(x).to(device) for name, x in _batch(job.batch_size).items()}
    batch['latents'] = batch['latents'].bfloat16()
    trainer = torch_dit.Trainer(model, stats, mode=mode)

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            noise = torch.randn(job.batch_size, SIDE, SIDE, CHANNELS, device=device)
            t = torch.randn(job.batch_size, device=device).sigmoid()
            loss = trainer.step(batch, noise, t)
        if device == 'cuda':
            torch.cuda.synchronize()
        return loss.item()

    row = _timed(job, run)
    on_gpu = device == 'cuda'
    return row | {
        'device': torch.cuda.get_device_name() if on_gpu else 'cpu',
        'memory': torch.cuda.max_memory_allocated() if on_gpu else None,
        'flops': 3 * model.flops() * job.batch_size,
    }


def _timed(job: Job, run: Callable[[int], float]) -> dict[str, float]:
    """Seconds of a step, of those that follow each other without waiting; and the last loss."""
    run(job.warmup)
    start = time.perf_counter()
    loss = run(job.steps)
    return {'seconds': (time.perf_counter() - start) / job.steps, 'loss': loss}


def _stats() -> dict[str, np.ndarray]:
    """Such as the real data have."""
    values = {'latent_mean': (0, CHANNELS), 'latent_std': (6, CHANNELS)}
    values |= {'text_mean': (0, TEXT_DIM), 'text_std': (1, TEXT_DIM)}
    return {name: np.full(size, value, np.float32) for name, (value, size) in values.items()}


def _batch(size: int) -> dict[str, np.ndarray]:
    """Raw samples of random numbers; latents are float32 still, NumPy has no bfloat16."""
    rng = np.random.default_rng(0)
    return {
        'latents': 6 * rng.standard_normal((size, CHANNELS, SIDE, SIDE), np.float32),
        'text_embedding': rng.standard_normal((size, TEXT_DIM), np.float32).astype(np.float16),
        'drop_text': rng.random(size) < 0.1,
    }


def main() -> None:
    """Prints what was measured; `missing` where the program is not installed, `failed`, as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    try:
        row = {'jax': measure_jax, 'torch': measure_torch}[job.program](job)
    except ImportError as error:
        row = {'missing': str(error)}
    except Exception as error:  # one out of memory, say: the others are measured all the same
        traceback.print_exc()
        row = {'failed': f'{type(error).__name__}: {error}'.splitlines()[0]}
    print(json.dumps(row))


if __name__ == '__main__':
    main()
