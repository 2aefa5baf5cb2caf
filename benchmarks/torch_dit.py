"""The training step of `train_lib` in PyTorch, on the model of `train_lib.results.torch_reference`.

It uses the fast idioms of PyTorch: scaled dot product attention, `torch.compile`, fused AdamW,
updates of lists of tensors. Equal weights and noise give the outputs, gradients and new weights of
`train_lib` (tests/benchmarks/test_step.py).
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils import checkpoint

from train_lib.results import torch_reference

Tensors = Mapping[str, Tensor]

_REMAT = {'none': None, 'full': functools.partial(checkpoint.checkpoint, use_reentrant=False)}


class Trainer:
    """Trains a model like `train_lib.learning.step`, but does not skip steps that are not finite.

    Its float32 `weights`, which it changes, have the names of an export (`dit.flatten_weights`);
    `sizes` are the export's fields `model`; `stats` are `latent_mean`, `latent_std` `(4,)`,
    `text_mean`, `text_std` `(D,)` of the data. Products, residuals and norms have the type `dtype`.
    With `remat='full'` the backward pass computes each block again; with 'none' `torch.compile`
    decides what to keep; `mode` is that of `torch.compile`, which is used only on GPUs.
    """

    def __init__(
        self,
        weights: Tensors,
        sizes: Mapping[str, Any],
        stats: Tensors,
        *,
        remat: str = 'none',
        dtype: torch.dtype = torch.bfloat16,
        mode: str = 'default',
        learning_rate: float = 2e-4,
        weight_decay: float = 0.01,
        b1: float = 0.9,
        b2: float = 0.99,
        clip_norm: float = 1.0,
        ema_decay: float = 0.9999,
    ):
        """Takes the model and the data of the class, and fields of the trainer's optimizer."""
        self.average = {name: weight.clone() for name, weight in weights.items()}
        self.weights = {name: weight.requires_grad_() for name, weight in weights.items()}
        self._config = {'model': sizes}
        self._stats = stats
        self._run_block = _REMAT[remat]
        self._dtype = dtype
        # Only matrices decay.
        kernels = []
        others = []
        for name, weight in self.weights.items():
            if name.endswith('.weight'):
                kernels.append(weight)
            else:
                others.append(weight)
        self._optimizer = torch.optim.AdamW(
            [{'params': kernels, 'weight_decay': weight_decay}, {'params': others}],
            lr=learning_rate,
            betas=(b1, b2),
            weight_decay=0.0,
            fused=True,
        )
        self._clip_norm = clip_norm
        self._ema_decay = ema_decay
        self._num_steps = 0
        self._compiled_loss = self._loss
        if kernels[0].is_cuda:
            self._compiled_loss = torch.compile(self._loss, mode=mode)

    def step(self, batch: Tensors, noise: Tensor, t: Tensor) -> Tensor:
        """Takes a step, given noise `(b, H, W, 4)` and times `(b,)`; returns the loss.

        A batch has raw `latents` `(b, 4, H, W)`, `text_embedding` `(b, D)` and `drop_text` `(b,)`.
        """
        loss = self._compiled_loss(batch, noise, t)
        params = list(self.weights.values())
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, self._clip_norm)
        self._optimizer.step()
        # As `train_lib` warms its average up.
        decay = min(self._ema_decay, (1 + self._num_steps) / (10 + self._num_steps))
        average = list(self.average.values())
        swa_utils.get_ema_multi_avg_fn(decay)(average, params, self._num_steps)
        self._num_steps += 1
        return loss.detach()

    def _loss(self, batch: Tensors, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the mean squared error of the velocity."""
        stats = self._stats
        x = batch['latents'].float().permute(0, 2, 3, 1)
        x = (x - stats['latent_mean']) / stats['latent_std']
        text = (batch['text_embedding'].float() - stats['text_mean']) / stats['text_std']
        # Between data and noise, at the time t.
        time = t[:, None, None, None]
        z = (1 - time) * x + time * noise
        # The last layer stays float32, as in JAX: the loss is a difference of numbers of like size.
        weights = {}
        for name, weight in self.weights.items():
            is_last = name.startswith('velocity.')
            weights[name] = weight if is_last else weight.to(self._dtype)
        velocity = torch_reference.predict_velocity(
            weights,
            self._config,
            z.to(self._dtype),
            t,
            (text.to(self._dtype),),
            batch['drop_text'],
            self._run_block,
        )
        return F.mse_loss(velocity, noise - x)
