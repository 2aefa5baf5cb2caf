"""Names, shapes, dtypes and constants of the data, for all other modules; needs only numpy."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

NAME = 'coyo11m_tfds'
VERSION = '1.0.0'

# --- The source -----------------------------------------------------------------------------

LATENTS_FOLDER = 'latents-3crop'
CAPTIONS_FILE = 'coyo11m-meta.parquet'

ENCODING_FILE = 'encoding.json'  # what `encode_images` says of the latents

PT_KEYS = 'keys'  # int64 (N,)
PT_LATENTS = 'latents'  # a dtype of LATENT_DTYPES, (N, crops, C, H, W) or (N, C, H, W)
PT_EMBEDDINGS = 'embeddings'  # float16, bfloat16 or float32 (N, D); not in every source
PT_CAPTIONS = 'captions'  # list of N texts; where there is no Parquet file

PARQUET_KEY = 'key'
_MAX_DIGITS = 40  # of the text of an integer, which may begin with zeros
PART_EMBEDDING = 'embedding'  # of the parts that embed_captions makes, next to `key`
MAX_CAPTION_BYTES = 65_536  # of UTF-8; what is longer was not written by a person or a model
MAX_TEXT_DIM = 16_384  # numbers of a text embedding; the widest encoders have 8,192
MAX_TOKENS = 4096  # ids of a caption, padding included
DEFAULT_CAPTION_COLUMN = 'caption_llava'
# The default stands for the first of these that a source has.
CAPTION_COLUMNS = DEFAULT_CAPTION_COLUMN, 'caption', PT_CAPTIONS, 'text', 'prompt', 'txt'

# The text of a row that is the number of its class, as one token; name of its encoder.
LABELS = 'labels'


class LatentsFrom(NamedTuple):
    """Where latents and keys are in files that do not tell: two fields of a config."""

    name: str = ''  # of a tensor, a column or a member of an archive
    dtype: str = ''  # one of `LATENT_DTYPES`
    shape: tuple[int, ...] = ()  # (C, H, W) or (crops, C, H, W)
    key_column: str = ''  # name of the keys, where a file has it; '' for that of its format


ANY_LATENTS = LatentsFrom()


def parse_latents_from(text: str, key_column: str = '') -> LatentsFrom:
    """Returns the fields of '', 'NAME', 'NAME:DTYPE:C,H,W' or 'NAME:DTYPE:CROPS,C,H,W'.

    Raises:
        ValueError: The text has another form, or latents cannot have this dtype or this shape.
    """
    fields = text.split(':')
    name = fields[0]
    if len(fields) == 1:
        return LatentsFrom(name, key_column=key_column)
    if len(fields) == 3 and name:
        dtype = fields[1]
        sizes = []
        for word in fields[2].split(','):
            # No shape has a 0, which stands for what is no number.
            sizes.append(int(word) if word.isdecimal() else 0)
        shape = tuple(sizes)
        # Without an axis of crops there is one crop.
        full_shape = shape
        if len(shape) == 3:
            full_shape = (1, *shape)
        if are_latents(dtype, full_shape):
            return LatentsFrom(name, dtype, shape, key_column)
    raise ValueError(
        f'latents_from is {text!r}, expected NAME or NAME:DTYPE:C,H,W, such as '
        "'latents_256:float16:4,32,32'."
    )


# --- Records --------------------------------------------------------------------------------

KEY = 'key'  # int64 scalar; joins latents, captions and text embeddings
LATENTS = 'latents'  # raw bytes of (crops, C, H, W) in the source's dtype, little endian
CAPTION = 'caption'  # UTF-8
TEXT_EMBEDDING = 'text_embedding'  # raw bytes of float16 (D,)
TOKENS = 'tokens'  # raw bytes of int32 (T,), padded ids; in place of the former
TOKEN_PADDING = -1
WORDS = 'words'  # the tokenizer whose ids are numbers of words in a list
TEXT_DTYPES = {TEXT_EMBEDDING: 'float16', TOKENS: 'int32'}  # what a record may hold of a text

LATENT_DTYPES = {'float16': 2, 'bfloat16': 2, 'float32': 4}  # with the bytes of a number
MAX_LATENTS_NBYTES = 16 << 20  # of a row with all crops; a shape that takes more is a mistake

# Of the model case; a data set has the shape and the dtype of its source.
NUM_CROPS = 3
LATENT_SHAPE = (4, 32, 32)  # one crop: channels, height, width
LATENTS_SHAPE = (NUM_CROPS, *LATENT_SHAPE)
LATENT_NBYTES = 2 * int(np.prod(LATENT_SHAPE))  # one crop

DEFAULT_TEXT_DIM = 640  # hidden size of Gemma-3-270M, and the width of the `hash` encoder

TRAIN = 'train'
VALIDATION = 'validation'

# Raise it when the same source and settings give other records, shards or chunk indexes.
RECORD_FORMAT = 2

# --- Files next to the shards ---------------------------------------------------------------

# The chunk index keeps the byte offset of every CHUNK_STRIDE-th record of every shard; readers
# use chunks of a multiple of it.
CHUNK_STRIDE = 32

# Names of TFDS; the other files have the ID of their build in their names, see `of_build`.
INFO_FILE = 'dataset_info.json'  # where it is, the data set is complete
FEATURES_FILE = 'features.json'
METADATA_FILE = 'metadata.json'

COLUMNS_FILE = 'columns.json'  # features that lie elsewhere than in records, see `columns`
CHECKSUMS_FILE = 'checksums.json'  # sizes and CRC-32C of all other files, see `manifest`

# --- Why rows of the source are left out ------------------------------------------------------

NO_ROW = 'no_row'
NO_CAPTION = 'no_caption'
NO_TEXT_EMBEDDING = 'no_text_vector'  # on disk from the start
DUPLICATE_KEY = 'repeated_key'
ROWS_DISAGREE = 'rows_disagree'
NON_FINITE = 'non_finite'
CAPTION_TOO_LONG = 'caption_too_long'
CAPTION_UNREADABLE = 'caption_unreadable'
DUPLICATE_CAPTION = 'repeated_caption'  # the only reason that counts no rows of latents
DROP_REASONS = {
    NO_ROW: 'the key has no row in the Parquet file',
    NO_CAPTION: 'the caption is null or blank',
    NO_TEXT_EMBEDDING: 'the key has no text embedding',
    DUPLICATE_KEY: 'the key was in an earlier row',
    ROWS_DISAGREE: 'its file has unequal numbers of keys and latents',
    NON_FINITE: 'NaN or infinity in latents or text embedding',
    CAPTION_TOO_LONG: f'the caption has more than {MAX_CAPTION_BYTES:,} bytes',
    CAPTION_UNREADABLE: 'the caption, or the .json that holds it, cannot be read',
    DUPLICATE_CAPTION: 'a second caption of a key (a row of the Parquet file, not counted as '
    'dropped above)',
}

# Latents may be recorded as moments: half of the channels are the mean of the VAE's distribution,
# the others its standard deviation or the logarithm of its variance.
MOMENTS = DEVIATION, LOG_VARIANCE = 'deviation', 'log_variance'
LOG_VARIANCE_LIMITS = -30.0, 20.0  # of diffusers' DiagonalGaussianDistribution

# --- Metadata keys of `dataset_info` --------------------------------------------------------

# Statistics are over the train split, all crops, in raw (unscaled) units.
META_LATENT_MEAN = 'latent_mean'  # floats, one a channel
META_LATENT_STD = 'latent_std'  # floats, one a channel
META_LATENT_ROWS = 'latent_rows'  # mean and std are of their middle crops, if not all were read
META_LATENT_DTYPE = 'latent_dtype'  # one of LATENT_DTYPES
META_VAE = 'vae'  # name of the VAE, where the settings have one
META_LATENT_SCALE = 'latent_scale'  # factor and shift of the VAE, where they are known
META_MOMENTS = 'moments'  # one of MOMENTS, where the channels are those of moments
META_LICENSE = 'license'  # of the data, where the config has one
META_CITATION = 'citation'  # BibTeX, where the config has one
META_RIGHTS = META_LICENSE, META_CITATION
META_TEXT_MEAN = 'text_embedding_mean'  # D floats
META_TEXT_STD = 'text_embedding_std'  # D floats
META_TEXT_ENCODER = 'text_encoder'  # name, e.g. 'hash' or 'jax:Qwen/Qwen3-0.6B'
META_TEXT_REVISION = 'text_encoder_revision'  # commit, digest of its files or number
META_TEXT_MAX_TOKENS = 'text_max_tokens'  # captions were cut to so many; 0 for no limit
META_TEXT_DIM = 'text_embedding_dim'  # D
META_TEXT_VOCABULARY = 'text_vocabulary'  # ids of tokens are less than this
META_TEXT_WORDS = 'text_words'  # of `words`: the list of the words with ids, see `word_list`
META_TEXT_POOLING = 'text_pooling'  # how an embedding is made of those of the tokens
META_TEXT_DTYPE = 'text_dtype'  # of the encoder's weights and computation
META_CAPTION_COLUMN = 'caption_column'
META_DROPPED = 'dropped'  # {'no_row': int, 'no_caption': int, ...}
META_PART = 'part'  # of a sidecar in parts: 'i of n', from 0
META_CAPTIONS_DIGEST = 'captions_digest'  # of keys and captions that embeddings were made of
META_SOURCE_FINGERPRINT = 'source_fingerprint'  # hex digest
META_BUILD = 'build'  # the ID in the names of the files of its build
META_SOURCE = 'source'  # its place and files, see `build_settings.record_source`
META_SETTINGS = 'settings'  # what decides the records, see `BuildSettings.record`
SETTINGS_TEXT = 'text_vectors'  # of those: the text in the records, by the name it began with

# Of a data set whose latents stay where they are.
IN_PLACE_DOC = 'in the files of the source: input_pipeline reads them, tfds.load does not'

# --- Constants of the VAE -------------------------------------------------------------------

# Latents are raw; a decoder of the SDXL family expects `latents * VAE_SCALING_FACTOR`.
# Source: `scaling_factor` in the VAE configuration of stabilityai/sdxl-vae.
VAE_SCALING_FACTOR = 0.13025

# Linear approximation of SDXL's decoder at 1/8 resolution: scaled latents (4 channels) to RGB in
# [-1, 1]. Source: `latent_rgb_factors` and `latent_rgb_factors_bias` of the SDXL latent format in
# ComfyUI (comfy/latent_formats.py).
RGB_FACTORS = np.array(
    [
        [0.3651, 0.4232, 0.4341],
        [-0.2533, -0.0042, 0.1068],
        [0.1076, 0.1111, -0.0362],
        [-0.3165, -0.2492, -0.2188],
    ],
    np.float32,
)
RGB_BIAS = np.array([0.1084, -0.0175, -0.0011], np.float32)


def latents_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the size in bytes of latents of a shape and one of `LATENT_DTYPES`."""
    return LATENT_DTYPES[dtype] * math.prod(shape)


def middle_crop(count: int) -> int:
    """Returns the number of the crop that stands for the image: the middle one of `count`.

    Of an even count it is the earlier one.
    """
    return (count - 1) // 2


def are_latents(dtype: object, shape: Sequence[object]) -> bool:
    """Returns whether latents may have a dtype and a shape: `(crops, C, H, W)`, not too large."""
    if not isinstance(dtype, str) or dtype not in LATENT_DTYPES:
        return False
    if len(shape) != 4:
        return False
    for size in shape:
        # By its type, because True is an int for `isinstance`. Larger sizes would only make the
        # product below a number of many digits.
        if type(size) is not int or not 0 < size < 2**24:
            return False
    return latents_nbytes(dtype, cast(Sequence[int], shape)) <= MAX_LATENTS_NBYTES


def parse_integer(value: object) -> int | None:
    """Returns the integer of 64 bits that a value is, or is the text of; None for other values.

    Such a text has only decimal digits of ASCII, after a minus if the number is negative. It may be
    the key of a row or the number of a class.
    """
    # `int` takes more, such as 1_000 and blanks, and refuses texts of thousands of digits.
    if isinstance(value, str):
        has_only_digits = value.isascii() and value.removeprefix('-').isdigit()
        if not has_only_digits or len(value) > _MAX_DIGITS:
            return None
        value = int(value)
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    return None


def shard_filename(split: str, index: int, count: int) -> str:
    """Returns the name that TFDS gives to one of `count` shards of a split."""
    # As TFDS pads them: at least five digits, more where a number has more.
    digits = max(5, len(str(count)))
    return f'{NAME}-{split}.tfrecord-{index:0{digits}}-of-{count:0{digits}}'


def of_build(name: str, build: str) -> str:
    """Returns a file's name with the ID of a build before its first dot; '' leaves it alone."""
    if not build:
        return name
    stem, dot, rest = name.partition('.')
    return f'{stem}-{build}{dot}{rest}'


def build_of(name: str) -> str:
    """Returns the ID in a name from `of_build`, or in a template of TFDS; '' if there is none."""
    match = re.search(r'-([0-9a-f]{8})\.', name)
    return match[1] if match else ''
