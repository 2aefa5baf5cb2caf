"""The model and the training step of `train_lib`, reimplemented in PyTorch.

    model = make('S/2').to('cuda')
    loss = Trainer(model, stats).step(batch, noise, t)

`benchmarks.step` measures it beside the step in JAX. It uses the fast idioms of PyTorch: scaled dot
product attention, `torch.compile`, fused AdamW, updates of lists of tensors. Equal weights and
noise give the outputs, gradients and new weights of `train_lib` (tests/benchmarks/test_step.py).
Weights are float32; products, residuals and norms have the type `DiT.dtype`. This module does not
import JAX.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

# Those of `train_lib.models`, written again for machines without JAX: width, depth, heads.
SIZES = {'tiny': (128, 6, 4), 'S': (384, 12, 6), 'B': (768, 12, 12), 'L': (1024, 24, 16)}
SIZES['XL'] = 1152, 28, 16

_TIME_FEATURES = 256
_ROTARY_PERIOD = 100.0
_MAX_PERIOD = 10_000.0
_TIME_SCALE = 1_000.0
_CHANNELS = 4  # of a latent
_EPSILON = 1e-6  # of the norms, as in Flax


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input; its weights stay float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    def zeros(self) -> 'Linear':
        """Sets all weights to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        return self


class HeadNorm(nn.RMSNorm):
    """Root mean square norm of the last axis; its scale stays float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), _EPSILON)


class Conditioning(nn.Module):
    """Embeds the time and the text and adds both, `(b, width)`."""

    def __init__(self, width: int, text_dim: int):
        super().__init__()
        self.time_1, self.time_2 = Linear(_TIME_FEATURES, width), Linear(width, width)
        self.text_1, self.text_2 = Linear(text_dim, width), Linear(width, width)
        self.no_text = nn.Parameter(0.02 * torch.randn(width))

    def forward(self, t, text, drop_text, dtype: torch.dtype) -> Tensor:
        time = self.time_2(F.silu(self.time_1(_time_features(t).to(dtype))))
        words = self.text_1(text.to(dtype))
        words = torch.where(drop_text[:, None], self.no_text.to(dtype), words)
        return time + self.text_2(F.silu(words))


class Attention(nn.Module):
    """Multi-head self-attention; queries and keys are normalized and turned by position."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.query_norm = HeadNorm(width // num_heads)
        self.key_norm = HeadNorm(width // num_heads)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (b, heads, n, width / heads)
        query, key = _turn(self.query_norm(query), turns), _turn(self.key_norm(key), turns)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer block, adaLN-Zero."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.modulation = Linear(width, 6 * width).zeros()
        self.attention = Attention(width, num_heads)
        self.mlp_1, self.mlp_2 = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor, turns: Tensor) -> Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = parts
        x = x + gate_1 * self.attention(_norm(x) * (1 + scale_1) + shift_1, turns)
        h = self.mlp_1(_norm(x) * (1 + scale_2) + shift_2)
        return x + gate_2 * self.mlp_2(F.gelu(h, approximate='tanh'))


class DiT(nn.Module):
    """Predicts the velocity of rectified flow for latents of `side * side` positions.

    With `remat='full'` the backward pass computes each block again; with 'none' `torch.compile`
    decides what to keep.
    """

    def __init__(
        self, width: int, depth: int, num_heads: int, patch_size: int, remat: str = 'none',
        dtype: torch.dtype = torch.bfloat16, side: int = 32, text_dim: int = 640,
    ):  # fmt: skip
        super().__init__()
        self.patch_size, self.dtype, self.remat = patch_size, dtype, remat
        self.conditioning = Conditioning(width, text_dim)
        self.patches = Linear(patch_size**2 * _CHANNELS, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.modulation = Linear(width, 2 * width).zeros()
        self.velocity = Linear(width, patch_size**2 * _CHANNELS).zeros()
        positions = _sincos_positions_2d(side // patch_size, width)
        self.register_buffer('positions', positions, persistent=False)
        turns = _turns(side // patch_size, width // num_heads)
        self.register_buffer('turns', turns, persistent=False)

    def forward(self, x: Tensor, t: Tensor, text: Tensor, drop_text: Tensor) -> Tensor:
        """Maps noisy latents `(b, H, W, C)`, times `(b,)`, texts `(b, D)` to float32 velocities.

        Texts with a True in `drop_text`, bool `(b,)`, are ignored.
        """
        p, n = self.patch_size, x.shape[1] // self.patch_size
        x = x.unflatten(2, (n, p)).unflatten(1, (n, p)).transpose(2, 3).flatten(3).flatten(1, 2)
        condition = F.silu(self.conditioning(t, text, drop_text, self.dtype))
        x = self.patches(x.to(self.dtype)) + self.positions.to(self.dtype)
        for block in self.blocks:
            if self.remat == 'full':
                x = checkpoint.checkpoint(block, x, condition, self.turns, use_reentrant=False)
            else:
                x = block(x, condition, self.turns)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        x = self.velocity((_norm(x) * (1 + scale) + shift).float())
        return (
            x.unflatten(2, (p, p, -1))
            .unflatten(1, (n, n))
            .transpose(2, 3)
            .flatten(3, 4)
            .flatten(1, 2)
        )

    def flops(self) -> int:
        """Returns the forward FLOPs of one sample's matrix products, counted on the layers."""
        tokens, width = self.positions.shape
        products = sum(
            layer.weight.numel()
            * (1 if 'conditioning.' in name or 'modulation' in name else tokens)
            for name, layer in self.named_modules()
            if isinstance(layer, Linear)
        )
        return 2 * (products + len(self.blocks) * 2 * tokens**2 * width)


def make(name: str, **fields: Any) -> DiT:
    """Makes a model by its name, `SIZE/PATCH` such as `S/2`; for fields see `DiT`.

    Raises:
        ValueError: The name is unknown.
    """
    size, _, patch = name.partition('/')
    if size not in SIZES or not patch.isdigit():
        raise ValueError(f'model {name!r}: expected SIZE/PATCH with SIZE one of {", ".join(SIZES)}')
    return DiT(*SIZES[size], patch_size=int(patch), **fields)


class Trainer:
    """Trains a model like `train_lib.step`, but does not skip steps that are not finite.

    Args:
        model: The model, on the device of the training.
        stats: `latent_mean`, `latent_std` `(4,)`, `text_mean`, `text_std` `(D,)` of the data.
        mode: Mode of `torch.compile`, which is used only on GPUs.
    """

    def __init__(
        self, model: DiT, stats: Mapping[str, Tensor], mode: str = 'default',
        learning_rate: float = 2e-4, weight_decay: float = 0.01, b1: float = 0.9, b2: float = 0.99,
        clip_norm: float = 1.0, ema_decay: float = 0.9999,
    ):  # fmt: skip
        kernels = [layer.weight for layer in model.modules() if isinstance(layer, Linear)]
        ids = set(map(id, kernels))
        others = [weights for weights in model.parameters() if id(weights) not in ids]
        self._optimizer = torch.optim.AdamW(
            [{'params': kernels, 'weight_decay': weight_decay}, {'params': others}],
            lr=learning_rate, betas=(b1, b2), weight_decay=0.0, fused=True,
        )  # fmt: skip
        self._params = list(model.parameters())
        self.average = [weights.detach().clone() for weights in self._params]
        self._clip_norm, self._ema_decay, self._num_steps = clip_norm, ema_decay, 0

        def loss(batch, noise, t):
            return flow_loss(model, stats, batch, noise, t)

        self._loss = torch.compile(loss, mode=mode) if self._params[0].is_cuda else loss

    def step(self, batch: Mapping[str, Tensor], noise: Tensor, t: Tensor) -> Tensor:
        """Takes a step; for arguments and result see `flow_loss`."""
        loss = self._loss(batch, noise, t)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._params, self._clip_norm)
        self._optimizer.step()
        decay = min(self._ema_decay, (1 + self._num_steps) / (10 + self._num_steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self._params, 1 - decay)
        self._num_steps += 1
        return loss.detach()


def flow_loss(
    model: DiT, stats: Mapping[str, Tensor], batch: Mapping[str, Tensor], noise: Tensor, t: Tensor
) -> Tensor:
    """Returns the mean squared error of the velocity, given noise `(b, H, W, 4)` and times `(b,)`.

    A batch has raw `latents` `(b, 4, H, W)` and `text_embedding` `(b, D)`, and `drop_text` `(b,)`.
    """
    x = batch['latents'].float().permute(0, 2, 3, 1)
    x = (x - stats['latent_mean']) / stats['latent_std']
    text = (batch['text_embedding'].float() - stats['text_mean']) / stats['text_std']
    time = t[:, None, None, None]
    predicted = model((1 - time) * x + time * noise, t, text, batch['drop_text'])
    return F.mse_loss(predicted, noise - x)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=_EPSILON)


def _time_features(t: Tensor) -> Tensor:
    half = _TIME_FEATURES // 2
    # Rounded as in `train_lib`: at angles of 1,000 the last bit of a frequency is 6e-5 of a sine.
    frequencies = torch.exp(-math.log(_MAX_PERIOD) * torch.arange(half, device=t.device) / half)
    angles = _TIME_SCALE * t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _sincos_positions_2d(side: int, width: int) -> Tensor:
    """Float32 `(side * side, width)`: half of the width says the row, half the column."""
    frequencies = _MAX_PERIOD ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(side)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)
    rows, columns = axis.repeat_interleave(side, 0), axis.repeat(side, 1)
    return torch.cat([rows, columns], dim=-1).float()


def _turns(side: int, head_dim: int) -> Tensor:
    """Cosines and sines, float32 `(2, side * side, head_dim / 2)`: half says the row."""
    frequencies = _ROTARY_PERIOD ** -(
        torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim // 4)
    )
    axis = torch.arange(side)[:, None] * frequencies
    angles = torch.cat([axis.repeat_interleave(side, 0), axis.repeat(side, 1)], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = turns
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, dim=-1).to(x.dtype)
