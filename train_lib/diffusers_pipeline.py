"""Draws with an exported model by diffusers, without any other package of this project.

    pipe = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipe('a red circle').images[0].save('circle.png')

`train_lib.export` writes this file as `pipeline.py`. It encodes captions as those of the training
data were encoded: words and classes by itself, everything else by the transformers model that the
data set names. `from_pretrained` takes `encoder=` and `vae=`, folders or hub names, in place of the
recorded ones; diffusers runs no code of theirs.
"""

import hashlib
import itertools
import re
import struct
import unicodedata

import torch
import transformers
from diffusers import AutoencoderTiny, AutoModel, DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch.nn.utils.rnn import pad_sequence

_WORD_IDS = 4096
_64_BITS = 2**64 - 1


class LatentFlowPipeline(DiffusionPipeline):
    """The exported model, its text encoder and its VAE, which are None where there is none."""

    model_cpu_offload_seq = 'text_encoder->transformer->vae'
    _optional_components = ('tokenizer', 'text_encoder', 'vae')

    def __init__(self, transformer, tokenizer=None, text_encoder=None, vae=None, encoder=''):
        super().__init__()
        text, dtype = transformer.config['text'], transformer.dtype
        if not tokenizer and (model := encoder or text['model']):
            revision = None if encoder else text['revision']
            tokenizer = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
            if text['encoded']:
                text_encoder = text_encoder or _load_text_encoder(model, revision, dtype)
        vae = transformer.config['preview']['vae'] if vae is None else vae
        if isinstance(vae, str):
            vae = _load_vae(vae, dtype) if vae else None
        self.register_modules(
            transformer=transformer, tokenizer=tokenizer, text_encoder=text_encoder, vae=vae
        )
        self.image_processor = VaeImageProcessor()

    @torch.no_grad()
    def __call__(
        self,
        prompt=None,
        *,
        num_inference_steps=None,
        guidance_scale=None,
        generator=None,
        latents=None,
        prompt_embeds=None,
        output_type='pil',
    ):
        """Draws a picture for each caption of `prompt`, a string or a list of strings.

        The number of steps and the guidance are those of the training run's previews unless given.
        `latents` is standard normal noise, `(n, C, H, W)`. `prompt_embeds` replaces the prompt by
        a text in the form of the training data (reference.py). `output_type` is 'pil', 'np', 'pt'
        or, for raw latents, 'latent'.
        """
        facts, device = self.transformer.config['data'], self._execution_device
        prompts = [prompt] if isinstance(prompt, str) else prompt
        text = self.encode_prompt(prompts) if prompt_embeds is None else prompt_embeds
        shape = len(text[0] if isinstance(text, tuple) else text), *facts['latents_shape'][1:]
        if latents is None:
            latents = randn_tensor(shape, generator, device, torch.float32)
        noise = latents.to(device, torch.float32).permute(0, 2, 3, 1)
        changes = {'num_steps': num_inference_steps, 'guidance': guidance_scale}
        changes = {name: value for name, value in changes.items() if value is not None}
        images = self.transformer(noise, text, **changes)
        if output_type != 'latent':
            images = self._paint(images)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(self.image_processor.postprocess(images, output_type))

    def encode_prompt(self, prompts):
        """Returns captions as the transformer takes them, see reference.py."""
        facts, device = self.transformer.config['data'], self._execution_device
        if facts['text_encoder'] == 'hash':
            vectors = [_hash_features(_find_words(caption)) for caption in prompts]
            return torch.tensor(vectors, device=device).half()
        rows = [torch.tensor(ids, dtype=torch.long) for ids in self._tokenize(prompts)]
        tokens = pad_sequence(rows, batch_first=True, padding_value=-1).to(device)
        if not self.text_encoder:
            return tokens
        present = tokens >= 0
        states = self.text_encoder(tokens.clamp(min=0), present.long()).last_hidden_state
        if facts['vocabulary']:
            return states, present
        sums = states.float().masked_fill(~present[..., None], 0).sum(1)
        # In float16, as the data set stores them.
        return (sums / present.sum(1, keepdim=True)).half()

    def _tokenize(self, prompts):
        facts = self.transformer.config['data']
        max_tokens = facts['text_max_tokens'] or 512
        if facts['text_encoder'] == 'words':
            texts = [_find_words(caption)[:max_tokens] for caption in prompts]
            return [[_hash_word(word) % _WORD_IDS for word in words] for words in texts]
        if facts['text_encoder'] == 'labels':
            return [[int(caption)] for caption in prompts]
        if not self.tokenizer:
            raise ValueError(
                f'{facts["text_encoder"]!r} made the texts of the training data: give its folder '
                'or hub name to from_pretrained(..., encoder=), or prompt_embeds in place of prompt'
            )
        special = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0
        filler = next(token for token in special if token is not None)
        rows = self.tokenizer(prompts, truncation=True, max_length=max_tokens)['input_ids']
        return [ids or [filler] for ids in rows]

    def _paint(self, latents):
        """Pictures `(n, 3, height, width)` in [-1, 1] of raw latents."""
        config = self.transformer.config['painting']
        if isinstance(self.vae, AutoencoderTiny):
            factor, shift = config['scale']
            latents = (latents - shift) * factor
        if self.vae:
            return self.vae.decode(latents.to(self.vae.dtype)).sample.float()
        if latents.shape[1] != len(config['rgb']):
            raise ValueError(
                f'latents of {latents.shape[1]} channels need a VAE: give its folder or hub name '
                "to from_pretrained(..., vae=), or output_type='latent'"
            )
        rgb, bias = (torch.tensor(config[name]).to(latents) for name in ('rgb', 'rgb_bias'))
        return torch.einsum('nchw,cr->nrhw', latents, rgb) + bias[:, None, None]


def _load_text_encoder(model, revision, dtype):
    config = transformers.AutoConfig.from_pretrained(model, revision=revision)
    name = 'AutoModelForTextEncoding' if config.is_encoder_decoder else 'AutoModel'
    options = {'revision': revision, 'dtype': dtype, 'use_safetensors': True}
    return getattr(transformers, name).from_pretrained(model, **options)


def _load_vae(model, dtype):
    try:
        vae = AutoModel.from_pretrained(model, use_safetensors=True)
    # A repository of a whole pipeline has it in a folder of its own.
    except OSError:
        vae = AutoModel.from_pretrained(model, subfolder='vae', use_safetensors=True)
    return vae if vae.dtype == dtype else vae.to(dtype)


# --- Words and hashed features, as coyo11m_tfds.text.text_encoders makes them ---------------------


def _find_words(caption):
    return re.findall(r'\w+', unicodedata.normalize('NFKC', caption).lower())


def _hash_word(word):
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), 'little')


def _mix(x):
    """Mixes 64 bits (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _64_BITS
    return x ^ x >> 31


def _hash_features(words, dim=640):
    """The embedding of a caption by the encoder `hash`."""
    hashes, sums = [_hash_word(word) for word in words], [0.0] * dim
    pairs = itertools.pairwise(hashes)
    hashes += [_mix(a * 0x9E3779B97F4A7C15 + b & _64_BITS) for a, b in pairs]
    for feature in hashes:
        for bits in struct.unpack('<4H', feature.to_bytes(8, 'little')):
            sums[(bits >> 1) * dim >> 15] += 1 - 2 * (bits & 1)
    length = sum(x * x for x in sums) ** 0.5
    return [x / max(length, 1) for x in sums]
