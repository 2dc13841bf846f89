"""Writing GGUF files: metadata with the types of its values, and tensors as bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril_gguf.reader import ARRAY, BOOL, CODES, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, VERSIONS, StoredTensor

Array = np.ndarray[Any, Any]
QUANTIZATION_VERSION = np.uint32(2)  # of ggml's blocks, the metadata "general.quantization_version"
_KINDS = {np.dtype(form): kind for kind, form in SCALARS.items()}


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> None:
    """Write a GGUF file.

    Numbers of NumPy have their dtype in the file; those of Python, and lists of them, 64 bits. Empty texts and lists
    are left out, as files have no type for the elements of an empty list.
    """
    entries = {key: value for key, value in metadata.items() if not isinstance(value, (str, list)) or value}
    offset = 0
    with open(path, "wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(entries)))
        for key, value in entries.items():
            file.write(_text(key) + _value(value))
        for t in tensors:
            sizes = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
            file.write(_text(t.name) + sizes + struct.pack("<IQ", t.code, offset))
            offset += t.data.nbytes + _padding(t.data.nbytes)
        file.write(bytes(_padding(file.tell())))
        for t in tensors:
            file.write(np.asarray(t.data, order="C").data)
            file.write(bytes(_padding(t.data.nbytes)))


def stored_tensor(name: str, array: Array, code: int | None = None) -> StoredTensor:
    """Return an array as a tensor of a file; ``code`` names the type of elements that NumPy lacks."""
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return StoredTensor(name, array.shape, CODES[array.dtype] if code is None else code, array.reshape(-1).view("u1"))


def _padding(size: int) -> int:
    return -size % DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    content = text.encode("utf-8")
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list) and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    numbers = np.asarray(value)
    kind = BOOL if numbers.dtype == bool else _KINDS[numbers.dtype]
    content = numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
    return (
        struct.pack("<IIQ", ARRAY, kind, numbers.size) + content if numbers.ndim else struct.pack("<I", kind) + content
    )
