"""Encodes pictures and captions with an image encoder of transformers.

    encoder = ImageEncoder('openai/clip-vit-base-patch32')   # or a folder
    encoder.encode(pictures)        # uint8 (n, H, W, 3) -> float32 (n, encoder.dim)
    encoder.encode_texts(captions)  # of a model with a text encoder, such as CLIP

Weights are read from safetensors only, and code in a model's repository is never run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from coyo11m_tfds import storage
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import model_files

_BATCH = 32  # pictures, or captions, in a forward pass
_FILES = 'preprocessor_config.json (for a model of pictures and texts also a tokenizer)'


class ImageEncoder:
    """A vision model of transformers, on the GPU if there is one; computes in float32."""

    def __init__(self, model: str):
        """Loads the weights of a folder, or of a name on the hub.

        Raises a ValueError for a model that is not there, or makes no features of pictures.
        """
        # transformers reads a `~` as the name of a folder.
        model = storage.expand_home(model)
        self._device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        with model_files.loading(model, 'image encoder', _FILES):
            source: dict[str, Any] = {'trust_remote_code': False}
            # Before transformers converts weights of any type to float32.
            model_files.check_floats(model)
            self._model, report = transformers.AutoModel.from_pretrained(
                model, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **source
            )
            self._processor = transformers.AutoImageProcessor.from_pretrained(model, **source)
            self.has_texts = hasattr(self._model, 'get_text_features')
            if self.has_texts:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(model, **source)
            # transformers gives weights that are missing random values.
            missing = sorted(report['missing_keys'])
            if missing:
                tensors = format_count(len(missing), 'tensor')
                raise ValueError(f'the weights lack {tensors}, such as {missing[0]}.')
            self._model.eval().to(self._device)
            # One picture shows whether the model and the processor fit together.
            self._encode([np.zeros((32, 32, 3), np.uint8)])
        self.name = model_files.public_name(model)
        self.revision = model_files.revision(model)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """Returns the features of pictures, uint8 `(n, H, W, 3)`; float32 `(n, D)`."""
        features = []
        for first in range(0, len(pictures), _BATCH):
            batch = pictures[first : first + _BATCH]
            features.append(self._encode(list(batch)))
        return np.concatenate(features)

    @torch.inference_mode()
    def encode_texts(self, captions: Sequence[str]) -> np.ndarray:
        """Returns the features of captions, cut to the model's length; float32 `(n, D)`."""
        positions = self._model.config.text_config.max_position_embeddings
        features = []
        for first in range(0, len(captions), _BATCH):
            batch = captions[first : first + _BATCH]
            # SigLIP was trained with all captions padded to one length; for CLIP it is the same.
            tokens = self._tokenizer(
                list(batch),
                padding='max_length',
                truncation=True,
                max_length=positions,
                return_tensors='pt',
            ).to(self._device)
            features.append(_pooled(self._model.get_text_features(**tokens)))
        return np.concatenate(features)

    @torch.inference_mode()
    def _encode(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the features of a batch, whose pictures the model's processor prepares."""
        inputs = self._processor(images=pictures, return_tensors='pt').to(self._device)
        # Of a model of pictures alone, the model itself.
        encode = getattr(self._model, 'get_image_features', self._model)
        return _pooled(encode(pixel_values=inputs['pixel_values']))


def _pooled(output: Any) -> np.ndarray:
    """Returns the features in the output of a model, float32 `(n, D)`."""
    # Models with texts (CLIP, SigLIP) give a projection into the space of texts, others (DINOv2,
    # ViT, ResNet) a pooled output or, without one, the last hidden states.
    if not isinstance(output, torch.Tensor):
        pooled = getattr(output, 'pooler_output', None)
        if pooled is None:
            pooled = output.last_hidden_state.mean(dim=1)
        output = pooled
    return output.flatten(1).float().cpu().numpy()
