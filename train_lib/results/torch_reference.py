"""Draws with an exported model in PyTorch, without any other file of this project.

    python FILE FOLDER              # draws the example of the export again and compares

    weights, config = load('FOLDER')
    latents = draw(weights, config, noise, text)    # raw latents (n, C, H, W), for a VAE's decoder

    model = Transformer.from_pretrained('FOLDER')   # the same as a module, for diffusers
    latents = model.to('cuda')(noise, text, guidance=3.0)

`train_lib.export` names this file by the digest of its content: diffusers runs programs of one name
in one module.

Noise is standard normal, `(n, H, W, C)`. A text has the form of the training data: embeddings
`(n, D)`, token ids `(n, T)` padded with -1, or hidden states of an encoder, a pair of `(n, T, D)`
and bool `(n, T)`, False for padding.
"""

import itertools
import json
import math
import numbers
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

_SETTINGS = 'num_steps', 'guidance', 'guidance_low', 'guidance_high', 'sampler', 'time_shift'


def load(folder):
    """Returns the weights by name, float32, and the configuration."""
    config = json.loads((Path(folder) / 'config.json').read_text())
    return load_file(Path(folder) / 'model.safetensors'), config


class Transformer(torch.nn.Module):
    """The weights as parameters on one device; a call draws, on the device of its arguments."""

    device = property(lambda self: self.values[0].device)
    dtype = property(lambda self: self.values[0].dtype)

    def __init__(self, weights, config, folder=None):
        super().__init__()
        self.config, self.names, self.folder = config, list(weights), folder
        self.values = torch.nn.ParameterList(weights.values())

    @classmethod
    def from_pretrained(cls, folder, dtype=None, torch_dtype=None):
        weights, config = load(folder)
        return cls(weights, config, Path(folder)).to(dtype or torch_dtype or torch.float32)

    def forward(self, noise, text, **changes):
        """Draws like `draw`; `changes` replace fields of `config['preview']`, as `num_steps`."""
        if unknown := sorted(changes.keys() - set(_SETTINGS)):
            raise ValueError(f'{unknown[0]}: expected one of {", ".join(_SETTINGS)}')
        config = self.config | {'preview': self.config['preview'] | changes}
        return draw(dict(zip(self.names, self.values, strict=True)), config, noise, text)

    def is_as_loaded(self):
        """Returns whether the files of `folder` still hold the weights and the configuration."""
        weights, config = load(self.folder)
        if config != self.config or list(weights) != self.names:
            return False
        # Offloaded weights are on the device 'meta', where nothing can have changed them.
        values = {name: x for name, x in zip(self.names, self.values, strict=True) if not x.is_meta}
        return all(torch.equal(x.cpu(), weights[name].to(x.dtype)) for name, x in values.items())

    def find_text_fault(self, text):
        """Returns what a text must be, and what it is instead; '' for one that `forward` takes."""
        return _find_text_fault(dict(zip(self.names, self.values, strict=True)), self.config, text)

    @staticmethod
    def find_fault(name, value):
        """Returns what a setting of the sampler must be, if a value is not; otherwise ''."""
        if name == 'sampler':
            return '' if value in ('euler', 'heun') else "'euler' or 'heun'"
        # A bool is a number, too, but not one that somebody meant.
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if name == 'num_steps':
            is_count = is_number and isinstance(value, numbers.Integral) and int(value) >= 1
            return '' if is_count else 'a whole number of at least 1'
        if not (is_number and math.isfinite(value)):
            return 'a finite number'
        if name == 'time_shift' and value <= 0:
            return 'more than 0'
        if name in ('guidance_low', 'guidance_high') and not 0 <= value <= 1:
            return 'from 0 to 1'
        return ''


def _check_settings(preview):
    for name in _SETTINGS:
        if fault := Transformer.find_fault(name, preview[name]):
            raise ValueError(f'{name}={preview[name]!r}: expected {fault}')
    low, high = preview['guidance_low'], preview['guidance_high']
    if low >= high:
        raise ValueError(f'guidance_low={low}: expected less than guidance_high={high}')


def _find_text_fault(weights, config, text):
    tensors = text if isinstance(text, tuple) else (text,)
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return f'a tensor or, of hidden states, a pair of tensors, not {type(text).__name__}'
    vocabulary, width = config['data']['vocabulary'], len(config['data']['text_mean'])
    is_matrix = len(tensors) == 1 and tensors[0].ndim == 2
    if not vocabulary:
        expected = f'embeddings, float (n, {width})'
        is_right = is_matrix and text.is_floating_point() and text.shape[1] == width
    elif 'words.projection.weight' in weights:
        width = weights['words.projection.weight'].shape[1]
        expected = f'hidden states, a pair of float (n, T, {width}) and bool (n, T)'
        is_right = len(tensors) == 2 and text[0].is_floating_point() and text[0].ndim == 3
        is_right = is_right and text[0].shape[2] == width
        is_right = is_right and text[1].dtype == torch.bool and text[1].shape == text[0].shape[:2]
    else:
        expected = f'token ids, integers (n, T) from -1 to {vocabulary - 1}'
        is_right = is_matrix and text.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        # Of a tensor on the device 'meta', only the shape is known.
        if is_right and text.numel() and not text.is_meta:
            least, most = text.min().item(), text.max().item()
            if least < -1 or most >= vocabulary:
                return f'{expected}, not from {least} to {most}'
    return '' if is_right else f'{expected}, not {" and ".join(map(_describe_tensor, tensors))}'


def _describe_tensor(tensor):
    return f'{str(tensor.dtype).removeprefix("torch.")} {tuple(tensor.shape)}'


def _check_arrays(weights, config, noise, text):
    channels, patch = len(config['data']['latent_mean']), config['model']['patch_size']
    shape = tuple(noise.shape)
    is_right = len(shape) == 4 and shape[3] == channels and noise.is_floating_point()
    if not is_right or shape[1] % patch or shape[2] % patch:
        raise ValueError(
            f'noise: expected float (n, H, W, {channels}), with H and W that {patch} divides, not '
            f'{_describe_tensor(noise)}'
        )
    if fault := _find_text_fault(weights, config, text):
        raise ValueError(f'text: expected {fault}')
    num_texts = len(text[0] if isinstance(text, tuple) else text)
    if num_texts != shape[0]:
        raise ValueError(f'text: expected {shape[0]}, one for each noise, not {num_texts}')


def draw(weights, config, noise, text):
    """Integrates the velocity from noise at time 1 to data at time 0, with guidance.

    Raises a ValueError for settings of `config['preview']` that no training run has, and for
    noise and texts of another form.
    """
    facts, preview = config['data'], config['preview']
    _check_settings(preview)
    _check_arrays(weights, config, noise, text)
    names = 'latent_mean', 'latent_std', 'text_mean', 'text_std'
    count, device = len(noise), noise.device
    stats = {name: torch.tensor(facts[name], device=device) for name in names}
    if not facts['vocabulary']:
        std = stats['text_std']
        text = torch.where(std > 1e-6, (text.float() - stats['text_mean']) / std, 0)
    texts = text if isinstance(text, tuple) else (text,)
    keep = torch.zeros(count, dtype=torch.bool, device=device)
    # Both halves of guidance go through the model as one batch.
    pairs = tuple(x.repeat(2, *[1] * (x.ndim - 1)) for x in texts)
    drop = torch.cat([keep, ~keep])

    def slope(z, time):
        in_interval = preview['guidance_low'] <= time <= preview['guidance_high']
        if preview['guidance'] == 1 or not in_interval:
            times = time.to(device).repeat(count)
            return predict_velocity(weights, config, z, times, texts, keep)
        pair, times = z.repeat(2, 1, 1, 1), time.to(device).repeat(2 * count)
        with_text, without = predict_velocity(weights, config, pair, times, pairs, drop).chunk(2)
        return without + preview['guidance'] * (with_text - without)

    # In float64, as in the program that trained it: float32 would round twice.
    times = 1 - torch.arange(preview['num_steps'] + 1, dtype=torch.float64) / preview['num_steps']
    shift = preview['time_shift']
    times = (shift * times / (1 + (shift - 1) * times)).float()
    z = noise
    for time, next_time in itertools.pairwise(times):
        start = mean = slope(z, time)
        # The last step of Heun's method is Euler's.
        if preview['sampler'] == 'heun' and next_time > 0:
            mean = (start + slope(z + (next_time - time) * start, next_time)) / 2
        z = z + (next_time - time) * mean
    return (z * stats['latent_std'] + stats['latent_mean']).permute(0, 3, 1, 2)


def predict_velocity(weights, config, z, t, text, drop, run_block=None):
    """Applies the transformer to z `(n, H, W, C)`, times `(n,)` and texts that are not dropped.

    `run_block(block, *arguments)` returns what the block returns, for a program that trains.
    """
    model, (n, height, width, channels) = config['model'], z.shape
    p = model['patch_size']
    rows, columns = height // p, width // p
    words, pooled = None, text[0]
    if 'words.nothing' in weights:
        words, pooled = _word_vectors(weights, text, drop)
    # The words of a model with pooled texts are there for their mean alone.
    if model['text'] != 'sequence':
        words = None
    condition = _embed_condition(weights, t, pooled, drop)

    x = z.reshape(n, rows, p, columns, p, channels).transpose(2, 3)
    x = _dense(weights, 'patches', x.reshape(n, -1, p * p * channels))
    x = x + _positions(rows, columns, model['width']).to(x)
    rotations = _cosines_and_sines(rows, columns, model['width'] // model['num_heads'])
    rotations = [values.to(x.device) for values in rotations]
    for block in range(model['depth']):
        arguments = weights, f'blocks.{block}', model['num_heads'], x, condition, rotations, words
        x = run_block(_block, *arguments) if run_block else _block(*arguments)
    shift, scale = _dense(weights, 'modulation', condition)[:, None].chunk(2, -1)
    x = _dense(weights, 'velocity', _modulated_norm(x, shift, scale))
    x = x.reshape(n, rows, columns, p, p, channels).transpose(2, 3)
    x = x.reshape(n, height, width, channels)
    if model['prediction'] == 'latents':
        x = (z - x) / t.clamp(min=0.05)[:, None, None, None]
    return x


def _embed_condition(weights, t, pooled, drop):
    """The time and the mean of a text as one vector."""
    frequencies = 1000 * 1e4 ** -(torch.arange(128, dtype=torch.float64) / 128)
    angles = t[:, None] * frequencies.to(t)
    time = torch.cat([angles.cos(), angles.sin()], 1)
    time = _dense(weights, 'conditioning.time_1', time)
    text = _dense(weights, 'conditioning.text_1', pooled)
    text = torch.where(drop[:, None], weights['conditioning.no_text'], text)
    time = _dense(weights, 'conditioning.time_2', F.silu(time))
    return F.silu(time + _dense(weights, 'conditioning.text_2', F.silu(text)))


def _block(weights, name, num_heads, x, condition, rotations, words):
    modulation = _dense(weights, f'{name}.modulation', condition)[:, None]
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.chunk(6, -1)

    def heads(y, layer, count):
        y = _dense(weights, f'{name}.attention.{layer}', y)
        return y.unflatten(-1, (count, num_heads, -1)).permute(2, 0, 3, 1, 4)

    query, key, value = heads(_modulated_norm(x, shift_1, scale_1), 'qkv', 3)
    query_scale = weights[f'{name}.attention.query_norm']
    key_scale = weights[f'{name}.attention.key_norm']
    query = _rotate_halves(_rms_norm(query, query_scale), rotations)
    key = _rotate_halves(_rms_norm(key, key_scale), rotations)
    # Words come behind the tokens and have no positions.
    mask = None
    if words is not None:
        vectors, present = words
        word_keys, word_values = heads(vectors, 'words', 2)
        key = torch.cat([key, _rms_norm(word_keys, key_scale)], 2)
        value = torch.cat([value, word_values], 2)
        mask = F.pad(present, (x.shape[1], 0), value=True)[:, None, None]
    mixed = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
    x = x + gate_1 * _dense(weights, f'{name}.attention.out', mixed)
    hidden = _dense(weights, f'{name}.mlp_1', _modulated_norm(x, shift_2, scale_2))
    return x + gate_2 * _dense(weights, f'{name}.mlp_2', F.gelu(hidden, approximate='tanh'))


def _word_vectors(weights, text, drop):
    """The sequence of a text's vectors behind one for no text, and their mean."""
    # Hidden states come with a mask; token ids are padded with -1.
    if len(text) == 2:
        states, real = text
        normalized = _rms_norm(states, weights['words.norm.scale'])
        vectors = _dense(weights, 'words.projection', normalized)
    else:
        real = text[0] >= 0
        entries = torch.where(real[..., None], weights['words.table'][text[0]], 0)
        padded = F.pad(entries, (0, 0, 1, 1))
        triples = torch.cat([padded[:, :-2], entries, padded[:, 2:]], -1)
        vectors = F.silu(_dense(weights, 'words.neighbours', triples))
    # Also of dropped texts: another vector stands in for them later.
    vectors_or_0 = torch.where(real[..., None], vectors, 0)
    pooled = vectors_or_0.sum(1) / real.sum(1, keepdim=True).clamp(min=1)
    nothing = weights['words.nothing'].expand(len(vectors), 1, -1)
    present = F.pad(real & ~drop[:, None], (1, 0), value=True)
    return (torch.cat([nothing, vectors], 1), present), pooled


def _dense(weights, name, x):
    weight = weights[f'{name}.weight']
    return F.linear(x.to(weight.dtype), weight, weights[f'{name}.bias'])


def _modulated_norm(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _rms_norm(x, scale):
    return F.rms_norm(x, x.shape[-1:], scale, 1e-6)


def _axial_angles(rows, columns, period, count):
    """The angles of each axis, position and frequency."""
    frequencies = period ** -(torch.arange(count, dtype=torch.float64) / count)
    grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing='ij')
    return [axis.flatten()[:, None] * frequencies for axis in grid]


def _positions(rows, columns, width):
    angles = _axial_angles(rows, columns, 1e4, width // 4)
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], -1).float()


def _cosines_and_sines(rows, columns, head_dim):
    angles = torch.cat(_axial_angles(rows, columns, 100, head_dim // 4), 1).float()
    return angles.cos(), angles.sin()


def _rotate_halves(x, rotations):
    (cosine, sine), (a, b) = rotations, x.float().chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)


if __name__ == '__main__':
    weights, config = load(sys.argv[1])
    example = load_file(Path(sys.argv[1]) / 'example.safetensors')
    states = 'present' in example  # of a text encoder
    text = (example['text'], example['present'].bool()) if states else example['text']
    with torch.inference_mode():
        latents = draw(weights, config, example['noise'], text)
    difference = (latents - example['latents']).abs().max() / example['latents'].std()
    print(f'largest difference to the example: {difference:.1e} standard deviations')
