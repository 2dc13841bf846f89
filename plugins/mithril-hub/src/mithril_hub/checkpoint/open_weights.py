"""``ml.open_weights``: the arrays of a file of weights as read-only views of it."""

from __future__ import annotations

import lzma
import math
import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mithril.backend import checked
from mithril.graph import InputError, MithrilError
from mithril.system import check_archive
from mithril_gguf.matrix import array_of
from mithril_gguf.reader import read_gguf
from mithril_hub.checkpoint.safetensors_file import read_safetensors

Array = np.ndarray[Any, Any]
LOCAL_HEADER = 30  # bytes of a zip member before its name
UNREADABLE = (  # of the zip file (NotImplementedError: an unknown compression, RuntimeError: encrypted), then of arrays
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError),
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, KeyError, struct.error, OverflowError, MemoryError),
)


@checked()
def open_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arrays of a safetensors, npz or GGUF file by name, as views whose pages are loaded when they are used.

    Arrays that are compressed, or not aligned to their elements (``numpy.savez`` does not align them), are read;
    ``bind(..., release=True)`` moves them to a mapped file. All arrays are read-only: bound to a model with
    ``static_inference=True``, they are not copied, and packed weights are the only ones in memory. Quantized
    tensors of GGUF files are decoded by ``numpy.asarray``; backend 'c' multiplies their quantized values with
    ``static_inference=True``, without decoding or rounding them.
    """
    file = Path(path)
    if file.suffix == ".safetensors":
        arrays = {name: stored.array() for name, stored in read_safetensors(file).items()}
    elif file.suffix == ".npz":
        arrays = _npz(file)
    elif file.suffix == ".gguf":
        return {name: array_of(tensor) for name, tensor in read_gguf(file).tensors.items()}
    else:
        raise InputError(
            f"open_weights cannot read '{file}'",
            facts=["it reads .safetensors, .npz and .gguf"],
            hint="ml.from_pretrained(folder) reads checkpoints",
        )
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _npz(file: Path) -> dict[str, Array]:
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            check_archive(archive, size, file)
            content = np.memmap(file, np.uint8, "r")
            members = [i for i in archive.infolist() if i.filename.endswith(".npy")]
            return {i.filename.removesuffix(".npy"): _member(content, archive, i) for i in members}
    except MithrilError:
        raise
    except UNREADABLE as error:
        raise InputError(f"'{file}' cannot be read", facts=[f"{type(error).__name__}: {error}"[:200]]) from None


def _member(content: Array, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """Return an array of an archive, a view unless it is compressed."""
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(member)
        start, size = member.tell(), dtype.itemsize * math.prod(shape)
        if dtype.hasobject:
            raise ValueError(f"'{info.filename}' has Python objects")
        if any(n < 0 for n in shape) or start + size != info.file_size:
            raise ValueError(f"'{info.filename}' has {info.file_size} bytes, its header requires {start + size}")
        if info.compress_type != zipfile.ZIP_STORED or not size:
            return np.frombuffer(member.read(), dtype).reshape(shape, order="F" if is_fortran else "C")
    name, extra = (int.from_bytes(content[info.header_offset + k :][:2].tobytes(), "little") for k in (26, 28))
    offset = info.header_offset + LOCAL_HEADER + name + extra + start
    if offset + size > content.size:
        raise ValueError(f"'{info.filename}' exceeds the file")
    array = np.asarray(content[offset : offset + size]).view(dtype).reshape(shape, order="F" if is_fortran else "C")
    return array if array.ctypes.data % dtype.alignment == 0 else array.copy()
