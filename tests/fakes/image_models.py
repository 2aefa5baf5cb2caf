"""Small image encoders of random weights, in folders as transformers writes them."""

import pathlib

import tokenizers
import torch
import transformers

SIZE = 32  # pixels that the encoders see
DIM = 12  # features of `save_clip`


def save_clip(folder: pathlib.Path) -> str:
    """Writes a CLIP of pictures and texts, whose words are the letters; returns its path."""
    torch.manual_seed(0)
    tokens = ['?', '<s>', '</s>', *' abcdefghijklmnopqrstuvwxyz']
    letters = {token: number for number, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token='?'))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split('', 'isolated')
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single='<s> $A </s>', special_tokens=[('<s>', 1), ('</s>', 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token='?', bos_token='<s>', eos_token='</s>', pad_token='</s>'
    )
    tokenizer.save_pretrained(folder)
    layers = {
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_hidden_layers': 1,
        'num_attention_heads': 2,
    }
    text = {
        'vocab_size': len(letters),
        'max_position_embeddings': 16,
        'bos_token_id': 1,
        'eos_token_id': 2,
    }
    config = transformers.CLIPConfig(
        vision_config=layers | {'image_size': SIZE, 'patch_size': 8},
        text_config=layers | text,
        projection_dim=DIM,
    )
    return _save(transformers.CLIPModel(config), transformers.CLIPImageProcessor, folder)


def save_vit(folder: pathlib.Path) -> str:
    """Writes a vision transformer without texts; returns its path."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=8,
    )
    return _save(transformers.ViTModel(config), transformers.ViTImageProcessor, folder)


def _save(model, processor, folder: pathlib.Path) -> str:
    model.save_pretrained(folder)
    size = {'height': SIZE, 'width': SIZE}
    processor(size=size, crop_size=size).save_pretrained(folder)
    return str(folder)
