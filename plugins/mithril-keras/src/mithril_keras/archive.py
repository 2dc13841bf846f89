"""``.keras`` archives: a zip file with a configuration and an HDF5 file of weights, read without Keras.

Sizes and positions are checked before memory is allocated. Weights are views of the mapped file.
"""

from __future__ import annotations

import hashlib
import io
import math
import mmap
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np

from mithril.graph import InputError, MithrilError, UnsupportedError, parsed_json
from mithril.system import check_archive

Array = np.ndarray[Any, Any]

CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
LARGEST_COMPACT = 64 << 10  # bytes of a dataset within its header
DAMAGE: tuple[type[BaseException], ...] = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, MemoryError, OverflowError, RecursionError),
    *(ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError),
)


class Archive:
    """The configuration of a saved model, and its variables by group and number."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            with Path(path).open("rb") as file:
                self.content: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise InputError(f"there is no file '{self.name}'") from None
        except (OSError, ValueError) as error:
            raise self.damaged(error) from None
        try:
            with zipfile.ZipFile(io.BufferedReader(_Reader(self.content))) as z:
                self._open(z)
        except MithrilError:
            raise
        except DAMAGE as error:
            raise self.damaged(error) from None

    def __deepcopy__(self, memo: Any) -> Archive:
        return self  # a mapped file, which copies of a model share

    def damaged(self, reason: object) -> InputError:
        """Return the error for a file that is not a valid archive."""
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
        hint = "save it by model.save('model.keras') of Keras 3"
        return InputError(f"'{self.name}' is not a valid Keras archive", facts=[text[:300]], hint=hint)

    def _open(self, z: zipfile.ZipFile) -> None:
        check_archive(z, len(self.content), self.name)
        members = {i.filename: i for i in z.infolist()}
        for name in (CONFIG, WEIGHTS):
            if name not in members:
                raise ValueError(f"it has no {name}")
        text = z.read(members[CONFIG])
        self.config = parsed_json(text, f"{CONFIG} of '{self.name}'")
        if METADATA in members:
            self._check_version(parsed_json(z.read(members[METADATA]), f"{METADATA} of '{self.name}'"))
        weights = self._member(z, members[WEIGHTS])
        self.digest = hashlib.sha256(text).hexdigest() + str(zlib.crc32(weights))
        self.weights: Any = memoryview(weights)
        self.file = h5py.File(_Reader(self.weights), "r")

    def _member(self, z: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
        """Return the content of a member: a view of the mapped file unless it is compressed."""
        if info.compress_type != zipfile.ZIP_STORED:
            return z.read(info)
        # The extra field of the local header may be longer than that of the directory, which zipfile
        # lists.
        name_size, extra_size = struct.unpack_from("<HH", self.content, info.header_offset + 26)
        start = info.header_offset + 30 + name_size + extra_size
        if self.content[info.header_offset : info.header_offset + 4] != b"PK\x03\x04":
            raise ValueError(f"{info.filename} has no local header")
        if start + info.file_size > len(self.content):
            raise ValueError(f"{info.filename} ends outside the file")
        return memoryview(self.content)[start : start + info.file_size]

    def _check_version(self, metadata: Any) -> None:
        version = str(metadata.get("keras_version", "3")) if isinstance(metadata, dict) else "3"
        if version.split(".")[0] in ("1", "2"):
            raise UnsupportedError(
                f"'{self.name}' was saved by Keras {version}",
                facts=["read: archives of Keras 3"],
                hint="load it in Keras 3 by keras.saving.load_model(path), and save it again by model.save(path)",
            )

    # -- variables ----------------------------------------------------------------------------------------------------
    def count(self, group: str) -> int:
        """Return the number of variables of a group."""
        node = self._node(f"{group}/vars" if group else "vars")
        return len(node) if isinstance(node, h5py.Group) else 0

    def variable(self, group: str, index: int) -> Array:
        """Return a variable; an error if it is missing or damaged."""
        path = f"{group}/vars/{index}" if group else f"vars/{index}"
        node = self._node(path)
        if not isinstance(node, h5py.Dataset):
            raise InputError(
                f"'{self.name}' has no weights at '{path}', which its configuration requires",
                hint="build the model in Keras before it is saved, by calling it once",
            )
        try:
            return self._array(node, path)
        except DAMAGE as error:
            raise self.damaged(f"{path}: {error}") from None

    def _node(self, path: str) -> Any:
        """Return a group or dataset within the file; links to other files are not followed."""
        node: Any = self.file
        try:
            for part in path.split("/"):
                if not isinstance(node, h5py.Group) or part not in node:
                    return None
                if not isinstance(node.get(part, getlink=True), h5py.HardLink):
                    raise ValueError(f"{path} is a link")
                node = node[part]
        except DAMAGE as error:
            raise self.damaged(error) from None
        return node

    def _array(self, data: Any, path: str) -> Array:
        shape, dtype = tuple(int(n) for n in data.shape or ()), data.dtype
        # HDF5 has no bfloat16: Keras stores two bytes without a type, and the name as an attribute.
        if dtype.kind == "V" and dtype.itemsize == 2 and _text(data.attrs.get("dtype")) == "bfloat16":
            dtype = np.dtype(ml_dtypes.bfloat16)
        elif dtype.kind not in "fiub" or data.shape is None:
            raise ValueError(f"elements of {dtype} are not numbers")
        size = math.prod(shape) * dtype.itemsize
        # External data could name any file of the user; chunks may be compressed, so that a small file
        # holds a huge array.
        if data.chunks is not None or data.is_virtual or data.external:
            raise ValueError("only contiguous datasets are read")
        if size > len(self.weights):
            raise ValueError(f"the shape {list(shape)} is larger than the file")
        offset = data.id.get_offset()
        # HDF5 gives no offset to data inside the header, at most 64 KiB, nor to data that was never
        # written.
        if offset is None:
            if size > LARGEST_COMPACT:
                raise ValueError(f"{size} bytes are not stored")
            array: Array = np.zeros(shape, dtype) if size == 0 else np.asarray(data[()]).view(dtype).reshape(shape)
            return array
        if offset < 0 or offset + size > len(self.weights):
            raise ValueError(f"the data at {offset} end outside the file")
        # Members of a zip file begin at any byte.
        view = np.frombuffer(self.weights, dtype, math.prod(shape), offset).reshape(shape)
        return view if view.flags.aligned else view.copy()


class _Reader(io.RawIOBase):
    """A mapped file, or a part of one, as a file object."""

    def __init__(self, content: Any) -> None:
        super().__init__()
        self.content = memoryview(content)
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self.position, len(self.content))[whence]
        if start + offset < 0:
            raise OSError("a position before the beginning of the file")
        self.position = start + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        part = self.content[self.position : self.position + len(buffer)]
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
