"""Draws with an exported model by diffusers, without any other package of this project.

    pipe = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipe('a red circle').images[0].save('circle.png')

`train_lib.export` names this file by the digest of its content: diffusers runs programs of one name
in one module. `from_pretrained` takes `encoder=` and `vae=`, folders or hub names, in place of the
recorded ones.
"""

import hashlib
import re
import shutil
import unicodedata
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
import transformers
from diffusers import AutoencoderTiny, AutoModel, DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import logging
from diffusers.utils.torch_utils import randn_tensor
from torch.nn.utils.rnn import pad_sequence

_log = logging.get_logger(__name__)
_SETTINGS = {'num_inference_steps': 'num_steps', 'guidance_scale': 'guidance'}
_OUTPUT_TYPES = 'pil', 'np', 'pt', 'latent'


class LatentFlowPipeline(DiffusionPipeline):
    """The exported model; tokenizer, text encoder and VAE are None where there is none."""

    model_cpu_offload_seq = 'text_encoder->transformer->vae'
    _optional_components = ('tokenizer', 'text_encoder', 'vae')

    def __init__(self, transformer, tokenizer=None, text_encoder=None, vae=None, encoder=''):
        super().__init__()
        text = transformer.config['text']
        dtype = transformer.dtype
        model = encoder or text['model']
        if model and not tokenizer:
            # That of the training data, unless the caller names another place.
            options = {'revision': None if encoder else text['revision']}
            tokenizer = transformers.AutoTokenizer.from_pretrained(model, **options)
            if text['encoded'] and not text_encoder:
                options |= {'dtype': dtype, 'use_safetensors': True}
                text_encoder = transformers.AutoModel.from_pretrained(model, **options)
        missing_vae = ''
        if vae is None:
            vae = transformer.config['preview']['vae']
            # A VAE that was in a local folder is known by its name alone.
            missing_vae = transformer.config['painting']['local_vae']
        # Set once: diffusers compares what is set again with a configuration that comes below.
        self._missing_vae = missing_vae
        if vae == '':
            vae = None
        elif isinstance(vae, str):
            vae = _load_vae(vae, dtype)
        # What is registered diffusers moves between devices, and offloads.
        self.register_modules(
            transformer=transformer, tokenizer=tokenizer, text_encoder=text_encoder, vae=vae
        )

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
        """Draws a picture for each caption of `prompt`; the result has them as `images`.

        `prompt` is a string or a list of strings. The number of steps and the guidance are those of
        the training run's previews unless given. `latents` is standard normal noise, `(n, C, H,
        W)`. `prompt_embeds` replaces the prompt by a text in the form of the training data, as the
        other program takes it. `output_type` is 'pil', 'np', 'pt' or, for raw latents, 'latent'.
        Raises a ValueError for arguments with which no run would draw.
        """
        settings = {'num_inference_steps': num_inference_steps, 'guidance_scale': guidance_scale}
        # What is not given stays as the run had it.
        settings = {name: value for name, value in settings.items() if value is not None}
        self._check_settings(settings)
        if output_type not in _OUTPUT_TYPES:
            raise ValueError(f'output_type={output_type!r}: expected one of {_OUTPUT_TYPES}')
        device = self._execution_device
        if prompt_embeds is None:
            text = self.encode_prompt(prompt)
        else:
            text = self._place_text(prompt_embeds)
        # Of hidden states, the mask is as long.
        rows = text[0] if isinstance(text, tuple) else text
        count = len(rows)
        if not count:
            raise ValueError('prompt_embeds holds no text: expected at least one')
        # The first number is that of the crops, and a picture is one.
        _, *size = self.transformer.config['data']['latents_shape']
        shape = (count, *size)
        if latents is None:
            _check_generator(generator, count)
            latents = randn_tensor(shape, generator, device, torch.float32)
        elif tuple(latents.shape) != shape:
            raise ValueError(f'latents of shape {tuple(latents.shape)}: expected {shape}')
        # The transformer has channels last.
        noise = latents.to(device, torch.float32).permute(0, 2, 3, 1)
        changes = {_SETTINGS[name]: value for name, value in settings.items()}
        images = self.transformer(noise, text, **changes)
        if output_type != 'latent':
            images = self._paint(images)
        # Weights that were offloaded go back to the memory of the host.
        self.maybe_free_model_hooks()
        images = VaeImageProcessor().postprocess(images, output_type)
        return ImagePipelineOutput(images)

    def _check_settings(self, settings):
        """Raises a ValueError for values with which no run would draw."""
        for name, value in settings.items():
            fault = self.transformer.find_fault(_SETTINGS[name], value)
            if fault:
                raise ValueError(f'{name}={value!r}: expected {fault}')

    def _place_text(self, text):
        """Returns a text on the model's device; raises a ValueError for one of another form."""
        fault = self.transformer.find_text_fault(text)
        if fault:
            raise ValueError(f'prompt_embeds: expected {fault}')
        if isinstance(text, tuple):
            return tuple(x.to(self._execution_device) for x in text)
        return text.to(self._execution_device)

    def encode_prompt(self, prompt):
        """Returns captions, a string or a list, as the transformer takes them: its file says how.

        Raises a ValueError for anything else than captions.
        """
        prompts = _list_prompts(prompt)
        facts = self.transformer.config['data']
        device = self._execution_device
        if facts['text_encoder'] == 'hash':
            vectors = np.stack([_hash_features(caption) for caption in prompts])
            return torch.tensor(vectors, device=device).half()
        rows = [torch.tensor(ids, dtype=torch.long) for ids in self._tokenize(prompts)]
        tokens = pad_sequence(rows, batch_first=True, padding_value=-1).to(device)
        if not self.text_encoder:
            return tokens
        # Of models like T5, the encoder.
        encode = self.text_encoder
        if encode.config.is_encoder_decoder:
            encode = encode.get_encoder()
        present = tokens >= 0
        # Padding becomes any token, which the mask leaves out.
        ids = tokens.clamp(min=0)
        states = encode(ids, attention_mask=present.long()).last_hidden_state
        if facts['vocabulary']:
            return states, present
        # The training data have one embedding for each text, the mean of its tokens' states.
        present_states = states.float().masked_fill(~present[..., None], 0)
        means = present_states.sum(1) / present.sum(1, keepdim=True)
        # In float16, as the data set stores them.
        return means.half()

    def save_pretrained(self, save_directory, safe_serialization=True, push_to_hub=False, **hub):
        """Copies the export that this pipeline was loaded from; `hub` goes to `push_to_hub`.

        What `from_pretrained` got besides the folder, as `encoder`, is not copied: give it again.
        Raises a ValueError if the weights or settings have changed since they were loaded.
        """
        if not safe_serialization:
            raise ValueError('safe_serialization=False: expected True, a copy of the safetensors')
        if hub and not push_to_hub:
            raise ValueError(f'{", ".join(hub)}: expected none of these: the copy is as the export')
        folder = self._find_export()
        target = Path(save_directory)
        # A copy onto itself would begin by removing a file that it needs.
        if target.resolve() != folder.resolve():
            _copy_export(folder, target)
        if push_to_hub:
            self.push_to_hub(hub.pop('repo_id', target.name), **hub)

    def push_to_hub(self, repo_id, commit_message=None, private=None, token=None, create_pr=False):
        """Uploads the export that this pipeline was loaded from, as `save_pretrained` copies it."""
        folder = self._find_export()
        repository = huggingface_hub.create_repo(
            repo_id, token=token, private=private, exist_ok=True
        )
        return huggingface_hub.upload_folder(
            # With the name of its owner, which the hub adds.
            repo_id=repository.repo_id,
            token=token,
            folder_path=folder,
            commit_message=commit_message or f'Upload {type(self).__name__}',
            create_pr=create_pr,
        )

    def _find_export(self):
        """Returns the folder that the transformer was loaded from.

        Raises a ValueError if it has changed.
        """
        # A transformer that was made of weights in memory has no folder.
        folder = self.transformer.folder and self.transformer.folder.parent
        if not folder or not (folder / 'transformer' / 'config.json').exists():
            raise ValueError(
                f'{folder}: the export that the pipeline was loaded from is not there any more; '
                'load it again from where it is now'
            )
        if not self.transformer.is_as_loaded():
            raise ValueError(
                f'{folder} does not hold the weights and settings of this pipeline, which have '
                'changed since it was loaded: only an unchanged export can be saved again'
            )
        return folder

    def _tokenize(self, prompts):
        """Returns the token ids of each caption, a list of lists."""
        facts = self.transformer.config['data']
        name = facts['text_encoder']
        max_tokens = facts['text_max_tokens'] or 512
        if name == 'words':
            return self._number_words(prompts, max_tokens)
        if name == 'labels':
            return [[_parse_class(caption, facts['vocabulary'])] for caption in prompts]
        if not self.tokenizer:
            raise ValueError(
                f'{name!r} made the texts of the training data: give its folder or hub name to '
                'from_pretrained(..., encoder=), or prompt_embeds in place of the prompt'
            )
        # A caption without tokens gets one: attention needs a word in every row.
        filler = self.tokenizer.pad_token_id
        if filler is None:
            filler = self.tokenizer.eos_token_id
        if filler is None:
            filler = 0
        rows = self.tokenizer(prompts, truncation=True, max_length=max_tokens)['input_ids']
        return [ids or [filler] for ids in rows]

    def _number_words(self, prompts, max_tokens):
        """Returns the numbers of words in the list of the training data; 0 if it lacks a word."""
        entries = self.transformer.config['data']['text_words'].split()
        # An entry is a word with its count, `WORD:COUNT`; 0 stands for all other words.
        numbers = {}
        for number, entry in enumerate(entries, 1):
            word, _, _ = entry.rpartition(':')
            numbers[word] = number
        rows = []
        unknown: set[str] = set()
        for caption in prompts:
            words = _split_words(caption)
            unknown |= set(words) - numbers.keys()
            rows.append([numbers.get(word, 0) for word in words[:max_tokens]])
        if unknown:
            shown = ', '.join(map(repr, sorted(unknown)))
            _log.warning('No caption of the training data has %s.', shown)
        return rows

    def _paint(self, latents):
        """Returns pictures `(n, 3, height, width)` in [-1, 1] of raw latents."""
        config = self.transformer.config['painting']
        if self._missing_vae:
            raise ValueError(
                f'the VAE {self._missing_vae!r} was in a local folder: give its folder or hub name '
                "to from_pretrained(..., vae=), '' for small pictures without a VAE, or "
                "output_type='latent'"
            )
        # Other decoders take raw latents; this one is made for scaled ones.
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
        rgb = torch.tensor(config['rgb']).to(latents)
        bias = torch.tensor(config['rgb_bias']).to(latents)
        return torch.einsum('nchw,cr->nrhw', latents, rgb) + bias[:, None, None]


def _list_prompts(prompt):
    """Returns one caption or several as a list; raises a ValueError for anything else."""
    captions = [prompt] if isinstance(prompt, str) else prompt
    is_list = isinstance(captions, (list, tuple)) and len(captions) > 0
    if not (is_list and all(isinstance(caption, str) for caption in captions)):
        raise ValueError(f'prompt={prompt!r}: expected a caption or a list of captions')
    return captions


def _parse_class(caption, num_classes):
    """Returns the number of a class; raises a ValueError for anything else."""
    number = caption.strip()
    # A negative number would be a text that is padding alone.
    if not number.isdecimal() or int(number) >= num_classes:
        raise ValueError(
            f'{caption!r}: expected the number of a class, from 0 to {num_classes - 1}'
        )
    return int(number)


def _load_vae(model, dtype):
    """Loads the VAE of a folder or hub name."""
    try:
        vae = AutoModel.from_pretrained(model, use_safetensors=True)
    except OSError:
        # A repository of a whole pipeline has it in a folder of its own.
        vae = AutoModel.from_pretrained(model, subfolder='vae', use_safetensors=True)
    return vae if vae.dtype == dtype else vae.to(dtype)


def _check_generator(generator, count):
    """Raises a ValueError for anything else than a generator, or one for each caption."""
    if generator is None:
        return
    is_list = isinstance(generator, (list, tuple))
    generators = generator if is_list else [generator]
    if not all(isinstance(x, torch.Generator) for x in generators):
        problem = 'expected torch.Generator().manual_seed(SEED), or a list of one for each caption'
        raise ValueError(f'generator={generator!r}: {problem}')
    if is_list and len(generators) != count:
        raise ValueError(f'{len(generators)} generators: expected {count}, one for each caption')


def _copy_export(folder, target):
    """Copies an export; last the file without which an export is not complete."""
    last = Path('transformer') / 'config.json'
    # An interrupted copy must not look like a complete one.
    (target / last).unlink(missing_ok=True)
    (target / 'transformer').mkdir(parents=True, exist_ok=True)
    for place in folder, folder / 'transformer':
        for path in place.iterdir():
            name = path.relative_to(folder)
            if path.is_file() and name != last:
                shutil.copyfile(path, target / name)
    shutil.copyfile(folder / last, target / last)


def _split_words(caption):
    """Returns the words of a caption, as coyo11m_tfds.text.text_encoders splits it."""
    return re.findall(r'\w+', unicodedata.normalize('NFKC', caption).lower())


def _hash_words(caption):
    """Returns a hash of 64 bits of each word of a caption."""
    words = [word.encode() for word in _split_words(caption)]
    digests = [hashlib.blake2b(word, digest_size=8).digest() for word in words]
    return [int.from_bytes(digest, 'little') for digest in digests]


def _hash_features(caption, dim=640):
    """Returns the embedding of a caption by the encoder `hash`, from its words and their pairs."""
    words = np.array(_hash_words(caption), np.uint64)
    # splitmix64; its increment is also the multiplier of the first word of a pair.
    z = (words[:-1] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + words[1:]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    pairs = z ^ (z >> np.uint64(31))
    # Each hash adds four signs, of 16 bits each: 15 choose the bucket, and one is the sign.
    parts = np.concatenate([words, pairs]).view('<u2').astype(np.int64)
    buckets = (parts >> 1) * dim >> 15
    signs = 1 - 2 * (parts & 1)
    sums = np.bincount(buckets, signs, dim)
    # Of whole numbers, the length is 0 or at least 1: a caption without words stays 0.
    length = np.linalg.norm(sums)
    return sums / np.maximum(length, 1)
