"""The training step of `train_lib` in PyTorch, on the model of `train_lib.torch_reference`.

    model = make('S/2').to('cuda')
    loss = Trainer(model, stats).step(batch, noise, t)

It uses the fast idioms of PyTorch: scaled dot product attention, `torch.compile`, fused AdamW,
updates of lists of tensors. Equal weights and noise give the outputs, gradients and new weights of
`train_lib` (tests/benchmarks/test_step.py). This module does not import JAX.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils import checkpoint

from train_lib import torch_reference

# Those of `train_lib.models`, written again for machines without JAX: width, depth, heads.
SIZES = {'tiny': (128, 6, 4), 'S': (384, 12, 6), 'B': (768, 12, 12), 'L': (1024, 24, 16)}
SIZES['XL'] = 1152, 28, 16

Tensors = Mapping[str, Tensor]

_TIME_FEATURES = 256
_CHANNELS = 4  # of a latent
_ONCE_A_SAMPLE = 'conditioning.', 'modulation.'  # in names of layers that see no tokens
_ZERO = 'modulation.', 'velocity.'  # in names of weights that begin as zeros
_REMAT = {'none': None, 'full': functools.partial(checkpoint.checkpoint, use_reentrant=False)}


class TorchDiT:
    """Predicts the velocity of rectified flow for latents of `side * side` positions.

    Weights are float32; products, residuals and norms have the type `dtype`. With `remat='full'`
    the backward pass computes each block again; with 'none' `torch.compile` decides what to keep.

    Attributes:
        weights: Weights by their names in an export (`train_lib.export`), float32.
    """

    def __init__(
        self, width: int, depth: int, num_heads: int, patch_size: int, remat: str = 'none',
        dtype: torch.dtype = torch.bfloat16, side: int = 32, text_dim: int = 640,
    ):  # fmt: skip
        self.num_tokens, self.dtype, self.remat = (side // patch_size) ** 2, dtype, remat
        model = {'width': width, 'depth': depth, 'num_heads': num_heads, 'patch_size': patch_size}
        self._config = {'model': model | {'text': 'pooled'}}
        patch = patch_size**2 * _CHANNELS
        layers = {  # numbers in and out
            'conditioning.time_1': (_TIME_FEATURES, width),
            'conditioning.time_2': (width, width),
            'conditioning.text_1': (text_dim, width),
            'conditioning.text_2': (width, width),
            'patches': (patch, width),
            'modulation': (width, 2 * width),
            'velocity': (width, patch),
        }
        scales = {'conditioning.no_text': width}
        for block in (f'blocks.{number}' for number in range(depth)):
            layers[f'{block}.modulation'] = width, 6 * width
            layers[f'{block}.attention.qkv'] = width, 3 * width
            layers[f'{block}.attention.out'] = width, width
            layers[f'{block}.mlp_1'] = width, 4 * width
            layers[f'{block}.mlp_2'] = 4 * width, width
            for norm in ('query_norm', 'key_norm'):
                scales[f'{block}.attention.{norm}'] = width // num_heads
        self.weights = {name: torch.ones(size) for name, size in scales.items()}
        for name, (inputs, outputs) in layers.items():
            self.weights[f'{name}.weight'] = torch.randn(outputs, inputs) / inputs**0.5
            self.weights[f'{name}.bias'] = torch.zeros(outputs)
        for name, weight in self.weights.items():
            if any(part in name for part in _ZERO):
                weight.zero_()
            weight.requires_grad_()

    def to(self, device: str) -> 'TorchDiT':
        """Moves the weights; returns itself."""
        moved = {name: weight.detach().to(device) for name, weight in self.weights.items()}
        self.weights = {name: weight.requires_grad_() for name, weight in moved.items()}
        return self

    def __call__(self, x: Tensor, t: Tensor, text: Tensor, drop_text: Tensor) -> Tensor:
        """Maps noisy latents `(b, H, W, C)`, times `(b,)`, texts `(b, D)` to float32 velocities.

        Texts with a True in `drop_text`, bool `(b,)`, are ignored.
        """
        # The last layer stays float32, as in JAX: the loss is a difference of numbers of like size.
        weights = {
            name: weight if name.startswith('velocity.') else weight.to(self.dtype)
            for name, weight in self.weights.items()
        }
        arguments = x.to(self.dtype), t, (text.to(self.dtype),), drop_text
        run_block = _REMAT[self.remat]
        return torch_reference.predict_velocity(weights, self._config, *arguments, run_block)

    def flops(self) -> int:
        """Returns the forward FLOPs of one sample's matrix products, counted on the layers."""
        products = sum(
            weight.numel() * (1 if any(x in name for x in _ONCE_A_SAMPLE) else self.num_tokens)
            for name, weight in self.weights.items()
            if name.endswith('.weight')
        )
        model = self._config['model']
        return 2 * (products + model['depth'] * 2 * self.num_tokens**2 * model['width'])


def make(name: str, **fields: Any) -> TorchDiT:
    """Makes a model by its name, `SIZE/PATCH` such as `S/2`; for fields see `TorchDiT`."""
    size, _, patch = name.partition('/')
    if size not in SIZES or not patch.isdigit():
        raise ValueError(f'model {name!r}: expected SIZE/PATCH with SIZE one of {", ".join(SIZES)}')
    return TorchDiT(*SIZES[size], patch_size=int(patch), **fields)


class Trainer:
    """Trains a model like `train_lib.step`, but does not skip steps that are not finite.

    `stats` are `latent_mean`, `latent_std` `(4,)`, `text_mean`, `text_std` `(D,)` of the data;
    `mode` is that of `torch.compile`, which is used only on GPUs.
    """

    def __init__(
        self, model: TorchDiT, stats: Tensors, mode: str = 'default',
        learning_rate: float = 2e-4, weight_decay: float = 0.01, b1: float = 0.9, b2: float = 0.99,
        clip_norm: float = 1.0, ema_decay: float = 0.9999,
    ):  # fmt: skip
        kernels = [x for name, x in model.weights.items() if name.endswith('.weight')]
        others = [x for name, x in model.weights.items() if not name.endswith('.weight')]
        self._optimizer = torch.optim.AdamW(
            [{'params': kernels, 'weight_decay': weight_decay}, {'params': others}],
            lr=learning_rate, betas=(b1, b2), weight_decay=0.0, fused=True,
        )  # fmt: skip
        self._params = list(model.weights.values())
        self.average = [weights.detach().clone() for weights in self._params]
        self._clip_norm, self._ema_decay, self._num_steps = clip_norm, ema_decay, 0

        def loss(batch, noise, t):
            return flow_loss(model, stats, batch, noise, t)

        self._loss = torch.compile(loss, mode=mode) if self._params[0].is_cuda else loss

    def step(self, batch: Tensors, noise: Tensor, t: Tensor) -> Tensor:
        """Takes a step; for arguments and result see `flow_loss`."""
        loss = self._loss(batch, noise, t)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._params, self._clip_norm)
        self._optimizer.step()
        decay = min(self._ema_decay, (1 + self._num_steps) / (10 + self._num_steps))
        swa_utils.get_ema_multi_avg_fn(decay)(self.average, self._params, self._num_steps)
        self._num_steps += 1
        return loss.detach()


def flow_loss(model: TorchDiT, stats: Tensors, batch: Tensors, noise: Tensor, t: Tensor) -> Tensor:
    """Returns the mean squared error of the velocity, given noise `(b, H, W, 4)` and times `(b,)`.

    A batch has raw `latents` `(b, 4, H, W)` and `text_embedding` `(b, D)`, and `drop_text` `(b,)`.
    """
    x = batch['latents'].float().permute(0, 2, 3, 1)
    x = (x - stats['latent_mean']) / stats['latent_std']
    text = (batch['text_embedding'].float() - stats['text_mean']) / stats['text_std']
    time = t[:, None, None, None]
    predicted = model((1 - time) * x + time * noise, t, text, batch['drop_text'])
    return F.mse_loss(predicted, noise - x)
