"""Token ids from a tokenizer of the package `tokenizers`, which is written in Rust.

ids, num_truncated = fast_tokenizer.encode(tokenizer, ['a cat', 'two dogs'], max_tokens=128)

It runs on all cores and without the interpreter's lock, so that another thread can run a model.
What transformers puts around it (masks, types and offsets of tokens) takes half as long again.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer


def encode(
    tokenizer: Tokenizer, captions: Sequence[str], max_tokens: int
) -> tuple[list[list[int]], int]:
    """Returns the ids of each caption, and how many captions were cut to `max_tokens`.

    Special tokens count, and stay when a caption is cut.
    """
    # Whoever used the tokenizer before may have set them otherwise.
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    encodings = tokenizer.encode_batch_fast(list(captions))
    num_truncated = sum(bool(encoding.overflowing) for encoding in encodings)
    return [encoding.ids for encoding in encodings], num_truncated
