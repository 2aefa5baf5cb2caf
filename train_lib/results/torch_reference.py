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

import argparse
import itertools
import json
import math
import numbers
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

_SETTINGS = 'num_steps', 'guidance', 'guidance_low', 'guidance_high', 'sampler', 'time_shift'


def load(folder):
    """Returns the weights by name, float32, and the configuration."""
    config = json.loads((Path(folder) / 'config.json').read_text())
    weights = load_file(Path(folder) / 'model.safetensors')
    return weights, config


class Transformer(torch.nn.Module):
    """The weights as parameters on one device; a call draws, on the device of its arguments."""

    device = property(lambda self: self.values[0].device)
    dtype = property(lambda self: self.values[0].dtype)

    def __init__(self, weights, config, folder=None):
        super().__init__()
        self.config = config
        self.folder = folder
        # A list beside the names, because names of parameters may hold no dots.
        self.names = list(weights)
        self.values = torch.nn.ParameterList(weights.values())

    @classmethod
    def from_pretrained(cls, folder, dtype=None, torch_dtype=None):
        """Loads the model of an exported folder; diffusers calls this."""
        weights, config = load(folder)
        return cls(weights, config, Path(folder)).to(dtype or torch_dtype or torch.float32)

    def forward(self, noise, text, **changes):
        """Draws like `draw`; `changes` replace fields of `config['preview']`, as `num_steps`.

        Raises a ValueError as `draw`, and for other names of fields.
        """
        for name in sorted(changes):
            if name not in _SETTINGS:
                raise ValueError(f'{name}: expected one of {", ".join(_SETTINGS)}')
        config = self.config | {'preview': self.config['preview'] | changes}
        return draw(self._weights(), config, noise, text)

    def _weights(self):
        """Returns the weights by name."""
        return dict(zip(self.names, self.values, strict=True))

    def is_as_loaded(self):
        """Returns whether the files of `folder` still hold the weights and the configuration."""
        weights, config = load(self.folder)
        if config != self.config or list(weights) != self.names:
            return False
        for name, value in self._weights().items():
            # Offloaded weights are on the device 'meta', where nothing can have changed them.
            if value.is_meta:
                continue
            if not torch.equal(value.cpu(), weights[name].to(value.dtype)):
                return False
        return True

    def find_text_fault(self, text):
        """Returns what a text must be, and what it is instead; '' for one that `forward` takes."""
        return _find_text_fault(self._weights(), self.config, text)

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
    """Raises a ValueError for settings of the sampler that no training run has."""
    for name in _SETTINGS:
        fault = Transformer.find_fault(name, preview[name])
        if fault:
            raise ValueError(f'{name}={preview[name]!r}: expected {fault}')
    low = preview['guidance_low']
    high = preview['guidance_high']
    if low >= high:
        raise ValueError(f'guidance_low={low}: expected less than guidance_high={high}')


def _find_text_fault(weights, config, text):
    """Returns what a text must be, and what it is instead; '' for one that the model takes."""
    tensors = text if isinstance(text, tuple) else (text,)
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return f'a tensor or, of hidden states, a pair of tensors, not {type(text).__name__}'
    vocabulary = config['data']['vocabulary']
    if not vocabulary:
        width = len(config['data']['text_mean'])
        expected = f'embeddings, float (n, {width})'
        is_right = _are_embeddings(tensors, width)
    elif 'words.projection.weight' in weights:
        width = weights['words.projection.weight'].shape[1]
        expected = f'hidden states, a pair of float (n, T, {width}) and bool (n, T)'
        is_right = _are_states(tensors, width)
    else:
        expected = f'token ids, integers (n, T) from -1 to {vocabulary - 1}'
        is_right = _are_ids(tensors)
        ids = tensors[0]
        # Of a tensor on the device 'meta', only the shape is known.
        if is_right and ids.numel() and not ids.is_meta:
            least = ids.min().item()
            most = ids.max().item()
            if least < -1 or most >= vocabulary:
                return f'{expected}, not from {least} to {most}'
    if is_right:
        return ''
    given = ' and '.join(map(_describe_tensor, tensors))
    return f'{expected}, not {given}'


def _are_embeddings(tensors, width):
    """Whether these are embeddings `(n, width)`."""
    if len(tensors) != 1 or tensors[0].ndim != 2:
        return False
    return tensors[0].is_floating_point() and tensors[0].shape[1] == width


def _are_states(tensors, width):
    """Whether these are hidden states `(n, T, width)` and a mask `(n, T)`."""
    if len(tensors) != 2:
        return False
    states, present = tensors
    if not states.is_floating_point() or states.ndim != 3 or states.shape[2] != width:
        return False
    return present.dtype == torch.bool and present.shape == states.shape[:2]


def _are_ids(tensors):
    """Whether these are token ids `(n, T)`."""
    if len(tensors) != 1 or tensors[0].ndim != 2:
        return False
    return tensors[0].dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _describe_tensor(tensor):
    """Returns dtype and shape: float32 (2, 640)."""
    dtype = str(tensor.dtype).removeprefix('torch.')
    return f'{dtype} {tuple(tensor.shape)}'


def _check_arrays(weights, config, noise, text):
    """Raises a ValueError for noise and texts of another form than the model takes."""
    channels = len(config['data']['latent_mean'])
    patch = config['model']['patch_size']
    shape = tuple(noise.shape)
    is_right = len(shape) == 4 and shape[3] == channels and noise.is_floating_point()
    if not is_right or shape[1] % patch or shape[2] % patch:
        raise ValueError(
            f'noise: expected float (n, H, W, {channels}), with H and W that {patch} divides, not '
            f'{_describe_tensor(noise)}'
        )
    fault = _find_text_fault(weights, config, text)
    if fault:
        raise ValueError(f'text: expected {fault}')
    # Of hidden states, the mask is as long.
    texts = text[0] if isinstance(text, tuple) else text
    num_texts = len(texts)
    if num_texts != shape[0]:
        raise ValueError(f'text: expected {shape[0]}, one for each noise, not {num_texts}')


def draw(weights, config, noise, text):
    """Returns raw latents `(n, C, H, W)`, float32, on the device of the noise.

    It integrates the velocity from noise at time 1 to data at time 0, with guidance.

    Args:
        weights: Weights by name, as `load` returns them.
        config: Configuration of the export; `config['preview']` has the settings of the sampler.
        noise: Standard normal noise, `(n, H, W, C)`.
        text: One text for each noise, see above.

    Raises:
        ValueError: The settings are some that no training run has, or noise and texts have another
            form.
    """
    facts = config['data']
    preview = config['preview']
    _check_settings(preview)
    _check_arrays(weights, config, noise, text)
    count = len(noise)
    device = noise.device
    names = 'latent_mean', 'latent_std', 'text_mean', 'text_std'
    stats = {name: torch.tensor(facts[name], device=device) for name in names}
    if not facts['vocabulary']:
        # As in training: a feature that never varies becomes 0 instead of a division by zero.
        std = stats['text_std']
        text = torch.where(std > 1e-6, (text.float() - stats['text_mean']) / std, 0)
    texts = text if isinstance(text, tuple) else (text,)
    keep = torch.zeros(count, dtype=torch.bool, device=device)
    # Both halves of guidance go through the model as one batch.
    paired_texts = tuple(torch.cat([x, x]) for x in texts)
    drop = torch.cat([keep, ~keep])

    def slope(z, time):
        """Returns the velocity at a time, guided if the time is in the interval."""
        in_interval = preview['guidance_low'] <= time <= preview['guidance_high']
        if preview['guidance'] == 1 or not in_interval:
            times = time.to(device).repeat(count)
            return predict_velocity(weights, config, z, times, texts, keep)
        times = time.to(device).repeat(2 * count)
        pair = torch.cat([z, z])
        both = predict_velocity(weights, config, pair, times, paired_texts, drop)
        with_text, without = both.chunk(2)
        return without + preview['guidance'] * (with_text - without)

    z = noise
    for time, next_time in itertools.pairwise(_step_times(preview)):
        step = next_time - time
        start = mean = slope(z, time)
        # The last step of Heun's method is Euler's.
        if preview['sampler'] == 'heun' and next_time > 0:
            end = slope(z + step * start, next_time)
            mean = (start + end) / 2
        z = z + step * mean
    latents = z * stats['latent_std'] + stats['latent_mean']
    # Channels first, as decoders take them.
    return latents.permute(0, 3, 1, 2)


def _step_times(preview):
    """Returns the times at which steps begin and end, from 1 down to 0."""
    num_steps = preview['num_steps']
    shift = preview['time_shift']
    # In float64, as in the program that trained it: float32 would round twice.
    t = 1 - torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    return (shift * t / (1 + (shift - 1) * t)).float()


def predict_velocity(weights, config, z, t, text, drop, run_block=None):
    """Returns the velocity, `(n, H, W, C)`.

    Args:
        weights: Weights by name.
        config: Configuration of the export.
        z: Positions, `(n, H, W, C)`.
        t: Times, `(n,)`.
        text: Tuple of the tensors of a text, see above.
        drop: bool `(n,)`, True for texts to ignore.
        run_block: For a program that trains: `run_block(block, *arguments)` returns what
            `block(*arguments)` returns.
    """
    model = config['model']
    n, height, width, channels = z.shape
    p = model['patch_size']
    rows = height // p
    columns = width // p
    words = None
    pooled = text[0]
    if 'words.nothing' in weights:
        words, pooled = _word_vectors(weights, text, drop)
    # The words of a model with pooled texts are there for their mean alone.
    if model['text'] != 'sequence':
        words = None
    condition = _embed_condition(weights, t, pooled, drop)

    # A token is a square of p by p positions.
    squares = z.reshape(n, rows, p, columns, p, channels).transpose(2, 3)
    x = _dense(weights, 'patches', squares.reshape(n, -1, p * p * channels))
    x = x + _positions(rows, columns, model['width']).to(x)
    head_dim = model['width'] // model['num_heads']
    rotations = _cosines_and_sines(rows, columns, head_dim)
    rotations = [values.to(x.device) for values in rotations]
    # A program that trains may compute a block again in the backward pass.
    run = run_block or _run_once
    for block in range(model['depth']):
        name = f'blocks.{block}'
        arguments = weights, name, model['num_heads'], x, condition, rotations, words
        x = run(_apply_block, *arguments)
    shift, scale = _dense(weights, 'modulation', condition)[:, None].chunk(2, -1)
    x = _dense(weights, 'velocity', _modulated_norm(x, shift, scale))
    x = x.reshape(n, rows, columns, p, p, channels).transpose(2, 3)
    x = x.reshape(n, height, width, channels)
    if model['prediction'] == 'latents':
        # The last layer has computed clean latents; the divisor is bounded as in training.
        divisor = t.clamp(min=0.05)[:, None, None, None]
        x = (z - x) / divisor
    return x


def _run_once(block, *arguments):
    """Returns what a block returns; it is not computed again."""
    return block(*arguments)


def _embed_condition(weights, t, pooled, drop):
    """Returns the time and the mean of a text as one vector, `(n, width)`."""
    frequencies = 1000 * 1e4 ** -(torch.arange(128, dtype=torch.float64) / 128)
    angles = t[:, None] * frequencies.to(t)
    features = torch.cat([angles.cos(), angles.sin()], 1)
    time = _dense(weights, 'conditioning.time_1', features)
    text = _dense(weights, 'conditioning.text_1', pooled)
    # Another vector stands in for a dropped text.
    text = torch.where(drop[:, None], weights['conditioning.no_text'], text)
    time = _dense(weights, 'conditioning.time_2', F.silu(time))
    text = _dense(weights, 'conditioning.text_2', F.silu(text))
    return F.silu(time + text)


def _apply_block(weights, name, num_heads, x, condition, rotations, words):
    """Returns the tokens `x`, `(n, rows * columns, width)`, after the block of this name."""
    modulation = _dense(weights, f'{name}.modulation', condition)[:, None]
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.chunk(6, -1)

    def split_heads(y, layer, count):
        """Returns `count` products of a layer, `(n, heads, tokens, width / heads)` each."""
        y = _dense(weights, f'{name}.attention.{layer}', y)
        return y.unflatten(-1, (count, num_heads, -1)).permute(2, 0, 3, 1, 4)

    query, key, value = split_heads(_modulated_norm(x, shift_1, scale_1), 'qkv', 3)
    query_scale = weights[f'{name}.attention.query_norm']
    key_scale = weights[f'{name}.attention.key_norm']
    query = _rotate_halves(_rms_norm(query, query_scale), rotations)
    key = _rotate_halves(_rms_norm(key, key_scale), rotations)
    # Words come behind the tokens and have no positions.
    mask = None
    if words is not None:
        vectors, present = words
        word_keys, word_values = split_heads(vectors, 'words', 2)
        key = torch.cat([key, _rms_norm(word_keys, key_scale)], 2)
        value = torch.cat([value, word_values], 2)
        # Tokens are all present.
        present = F.pad(present, (x.shape[1], 0), value=True)
        mask = present[:, None, None]
    mixed = F.scaled_dot_product_attention(query, key, value, mask)
    # The heads side by side again.
    mixed = mixed.transpose(1, 2).flatten(2)
    x = x + gate_1 * _dense(weights, f'{name}.attention.out', mixed)
    hidden = _dense(weights, f'{name}.mlp_1', _modulated_norm(x, shift_2, scale_2))
    return x + gate_2 * _dense(weights, f'{name}.mlp_2', F.gelu(hidden, approximate='tanh'))


def _word_vectors(weights, text, drop):
    """Returns the sequence of a text's vectors behind one for no text, and their mean."""
    # Hidden states come with a mask; token ids are padded with -1.
    if len(text) == 2:
        states, is_word = text
        normalized = _rms_norm(states, weights['words.norm.scale'])
        vectors = _dense(weights, 'words.projection', normalized)
    else:
        (ids,) = text
        is_word = ids >= 0
        entries = torch.where(is_word[..., None], weights['words.table'][ids], 0)
        # Each entry between its neighbours; zeros lie beyond the ends of a text.
        padded = F.pad(entries, (0, 0, 1, 1))
        triples = torch.cat([padded[:, :-2], entries, padded[:, 2:]], -1)
        vectors = F.silu(_dense(weights, 'words.neighbours', triples))
    # Also of dropped texts: another vector stands in for them later.
    vectors_or_0 = torch.where(is_word[..., None], vectors, 0)
    # At least 1: a text without words has a mean of zeros.
    count = is_word.sum(1, keepdim=True).clamp(min=1)
    pooled = vectors_or_0.sum(1) / count
    # Attention divides by the sum over what is present: a dropped text leaves this vector.
    nothing = weights['words.nothing'].expand(len(vectors), 1, -1)
    sequence = torch.cat([nothing, vectors], 1)
    present = F.pad(is_word & ~drop[:, None], (1, 0), value=True)
    return (sequence, present), pooled


def _dense(weights, name, x):
    """Applies the dense layer of this name."""
    weight = weights[f'{name}.weight']
    return F.linear(x.to(weight.dtype), weight, weights[f'{name}.bias'])


def _modulated_norm(x, shift, scale):
    """Returns the layer norm of `x`, scaled and shifted."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _rms_norm(x, scale):
    """Returns the RMS norm over the last axis."""
    return F.rms_norm(x, x.shape[-1:], scale, 1e-6)


def _axial_angles(rows, columns, period, count):
    """Returns the angles of rows and of columns, float64 `(rows * columns, count)` each."""
    frequencies = period ** -(torch.arange(count, dtype=torch.float64) / count)
    places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing='ij')
    return [axis.flatten()[:, None] * frequencies for axis in places]


def _positions(rows, columns, width):
    """Returns sine-cosine vectors of positions, float32 `(rows * columns, width)`."""
    of_rows, of_columns = _axial_angles(rows, columns, 1e4, width // 4)
    vectors = [of_rows.sin(), of_rows.cos(), of_columns.sin(), of_columns.cos()]
    return torch.cat(vectors, -1).float()


def _cosines_and_sines(rows, columns, head_dim):
    """Returns the rotations of queries and keys, float32 `(rows * columns, head_dim / 2)` each."""
    angles = torch.cat(_axial_angles(rows, columns, 100, head_dim // 4), 1).float()
    return angles.cos(), angles.sin()


def _rotate_halves(x, rotations):
    """Turns each pair of entries, one of each half of the last axis, by its angle."""
    cosine, sine = rotations
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Draws the example of an export and compares.')
    parser.add_argument('folder', metavar='FOLDER', help='transformer/ of an export')
    folder = Path(parser.parse_args().folder)
    weights, config = load(folder)
    example = load_file(folder / 'example.safetensors')
    texts = example['text']
    # Hidden states of a text encoder come with a mask.
    text = (texts, example['present'].bool()) if 'present' in example else texts
    with torch.inference_mode():
        latents = draw(weights, config, example['noise'], text)
    difference = (latents - example['latents']).abs().max() / example['latents'].std()
    print(f'largest difference to the example: {difference:.1e} standard deviations')
