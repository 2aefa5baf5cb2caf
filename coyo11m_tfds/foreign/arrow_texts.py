"""Texts in columns of Arrow: which columns hold some, and which of these are UTF-8."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Some writers of Parquet do not mark texts, which Arrow then takes for bytes.
_TEXTS = 'string', 'large_string', 'string_view'
_BYTES = 'binary', 'large_binary', 'binary_view'


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's text types."""
    return str(kind) in _TEXTS


def is_flat(kind: pa.DataType) -> bool:
    """Whether a type is one of texts or bytes, neither in a dictionary nor in lists."""
    return str(kind) in _TEXTS + _BYTES


def holds_text(kind: pa.DataType) -> bool:
    """Whether `read_texts` takes a type: of texts, of bytes, of nulls, or of lists of these."""
    if isinstance(kind, pa.BaseExtensionType):
        return holds_text(kind.storage_type)
    if pa.types.is_dictionary(kind) or _is_list(kind):
        return holds_text(kind.value_type)
    return is_flat(kind) or pa.types.is_null(kind)


def read_texts(values: pa.Array) -> pa.Array:
    """Returns texts as large binary `(n,)`, which need not be UTF-8; null for a row without one.

    Of a list it is the first text that is not ''. `holds_text` must be true of the type.
    """
    if isinstance(values, pa.ExtensionArray):
        return read_texts(values.storage)
    if pa.types.is_dictionary(values.type):
        return read_texts(values.dictionary).take(values.indices)
    if _is_list(values.type):
        return _read_first_texts(values)
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.large_binary())
    return values.cast(pa.large_binary())


def find_unreadable(texts: pa.Array) -> np.ndarray:
    """Returns which texts, large binary, are no UTF-8: bool `(n,)`."""
    unreadable = np.zeros(len(texts), bool)
    # Arrow checks all texts at once, and only if one is bad, Python looks for it.
    try:
        texts.view(pa.large_string()).validate(full=True)
    except pa.ArrowInvalid:
        for row, text in enumerate(texts.to_pylist()):
            unreadable[row] = text is not None and not _is_utf8(text)
    return unreadable


def _is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's five types of lists."""
    tests = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


def _read_first_texts(lists: pa.Array) -> pa.Array:
    """Returns the first text of each list that is not empty; null for a list without one."""
    texts = read_texts(pc.list_flatten(lists))
    rows_of_texts = pc.list_parent_indices(lists).to_numpy()
    # A null is no longer than an empty text.
    lengths = pc.fill_null(pc.binary_length(texts), 0)
    candidates = np.flatnonzero(lengths.to_numpy())
    # `np.unique` gives the first place of each row, and texts lie in the order of the lists.
    rows, firsts = np.unique(rows_of_texts[candidates], return_index=True)
    # A list without a text, -1, becomes null.
    index = np.full(len(lists), -1)
    index[rows] = candidates[firsts]
    return texts.take(pa.array(index, mask=index < 0))


def _is_utf8(text: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
