"""Reading safetensors files through a memory map: every size and offset is checked before a tensor is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mithril.graph import InputError, parsed_json

MAX_HEADER = 100_000_000  # bytes, the limit of the format
MOST_AXES = 64  # of an array of NumPy
ALIGNMENT = 8  # bytes: writers pad the header to it, and kernels rely on aligned elements
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, that is read on request."""

    file: Path
    dtype: Any
    shape: tuple[int, ...]
    begin: int  # in bytes from the start of the file

    def array(self) -> np.ndarray[Any, Any]:
        """Return a read-only view of the file, whose pages are loaded when they are used."""
        if 0 in self.shape:
            return np.zeros((0,), self.dtype).reshape(self.shape)
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        raw = np.asarray(np.memmap(self.file, np.uint8, "r", offset=self.begin, shape=(size,)))
        if self.begin % ALIGNMENT:
            raw = raw.copy()
        array: np.ndarray[Any, Any] = raw.view(self.dtype).reshape(self.shape)
        return array


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name, without reading their content."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = file.read(length) if length <= min(MAX_HEADER, size - 8) else None
    except OSError as error:
        raise InputError(f"'{path}' cannot be read", facts=[str(error)]) from None
    if size < 8 or content is None:
        raise _damaged(path, f"a header of {length} bytes in a file of {size}")
    try:
        header = parsed_json(content, f"the header of '{path}'")
    except InputError as error:
        raise _damaged(path, "\n".join([f"its header is not JSON: {error.what}", *error.facts])) from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    tensors: dict[str, Stored] = {}
    end = 0
    for name, row in sorted(header.items(), key=_offset):
        if name != "__metadata__":
            tensors[name], end = _stored(path, name, row, 8 + length, size, end)
    return tensors


def _offset(item: tuple[str, Any]) -> int:
    row = item[1]
    offsets = row.get("data_offsets") if isinstance(row, dict) else None
    return offsets[0] if isinstance(offsets, list) and offsets and isinstance(offsets[0], int) else 0


def _stored(path: Path, name: str, row: Any, start: int, size: int, end: int) -> tuple[Stored, int]:
    """Return one tensor and the end of its bytes, which must not overlap those of the tensor before."""
    try:
        dtype, shape, (first, last) = DTYPES[row["dtype"]], row["shape"], row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"the entry of '{name}' is {str(row)[:200]}") from None
    # NumPy stores strides: the product of the other sizes counts also where one is zero
    sizes = [n for n in shape if n != 0] if isinstance(shape, list) else None
    if sizes is None or len(shape) > MOST_AXES or not all(_is_count(n) for n in (*sizes, first, last)):
        raise _damaged(path, f"'{name}' has the sizes {str(shape)[:200]} at {first} to {last}")
    if math.prod(sizes) >= 1 << 48:
        raise _damaged(path, f"'{name}' has the sizes {str(shape)[:200]}")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if last - first != expected or first < end or start + last > size:
        raise _damaged(path, f"'{name}' {shape} lies at {first} to {last}, outside of the file or in another tensor")
    return Stored(path, dtype, tuple(shape), start + first), last


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48


def _damaged(path: Path, fact: str) -> InputError:
    return InputError(f"'{path}' is damaged, or no safetensors file", facts=[fact])
