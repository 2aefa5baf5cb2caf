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
        self, weights: Tensors, sizes: Mapping[str, Any], stats: Tensors, *,
        remat: str = 'none', dtype: torch.dtype = torch.bfloat16, mode: str = 'default',
        learning_rate: float = 2e-4, weight_decay: float = 0.01, b1: float = 0.9, b2: float = 0.99,
        clip_norm: float = 1.0, ema_decay: float = 0.9999,
    ):  # fmt: skip
        self.average = {name: x.clone() for name, x in weights.items()}
        self.weights = {name: x.requires_grad_() for name, x in weights.items()}
        self._config, self._stats = {'model': sizes}, stats
        self._run_block, self._dtype = _REMAT[remat], dtype
        kernels = [x for name, x in self.weights.items() if name.endswith('.weight')]
        others = [x for name, x in self.weights.items() if not name.endswith('.weight')]
        self._optimizer = torch.optim.AdamW(
            [{'params': kernels, 'weight_decay': weight_decay}, {'params': others}],
            lr=learning_rate, betas=(b1, b2), weight_decay=0.0, fused=True,
        )  # fmt: skip
        self._clip_norm, self._ema_decay, self._num_steps = clip_norm, ema_decay, 0
        self._compiled_loss = (
            torch.compile(self._loss, mode=mode) if kernels[0].is_cuda else self._loss
        )

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
        decay = min(self._ema_decay, (1 + self._num_steps) / (10 + self._num_steps))
        average = list(self.average.values())
        swa_utils.get_ema_multi_avg_fn(decay)(average, params, self._num_steps)
        self._num_steps += 1
        return loss.detach()

    def _loss(self, batch: Tensors, noise: Tensor, t: Tensor) -> Tensor:
        stats, dtype = self._stats, self._dtype
        x = batch['latents'].float().permute(0, 2, 3, 1)
        x = (x - stats['latent_mean']) / stats['latent_std']
        text = (batch['text_embedding'].float() - stats['text_mean']) / stats['text_std']
        time = t[:, None, None, None]
        z = (1 - time) * x + time * noise
        # The last layer stays float32, as in JAX: the loss is a difference of numbers of like size.
        weights = {
            name: weight if name.startswith('velocity.') else weight.to(dtype)
            for name, weight in self.weights.items()
        }
        arguments = z.to(dtype), t, (text.to(dtype),), batch['drop_text']
        velocity = torch_reference.predict_velocity(
            weights, self._config, *arguments, self._run_block
        )
        return F.mse_loss(velocity, noise - x)
