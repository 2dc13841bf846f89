"""Reading GGUF files from anywhere: every size, offset and name is checked against the file before it is used."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mithril.graph import InputError, check_memory, dtype as as_dtype
from mithril.system import Store
from mithril_gguf.formats import BY_CODE, OTHERS, TERNARY

MAGIC = b"GGUF"
# Files of version 1 have counts of 32 bits.
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 17  # of metadata, and of tensors
MAX_KEY = 1 << 10
MAX_NAME = 63  # ggml cuts longer names off
MAX_ELEMENTS = 1 << 44
# Bytes of memory of an element of a list: a small number, another one, a short text.
POINTER, NUMBER, TEXT = 8, 40, 80
ARRAY, STRING, BOOL = 9, 8, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d"}
DEFAULT_ALIGNMENT = 32  # bytes, of tensors
Array = np.ndarray[Any, Any]

# Tensors that are not quantized: NumPy dtype by code.
_TYPES = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}
PLAIN = {code: as_dtype(name).numpy.newbyteorder("<") for code, name in _TYPES.items()}
CODES = {dtype: code for code, dtype in PLAIN.items()}


class BlockType(Protocol):
    """A format of blocks."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """The elements of a block."""

    def row(self, elements: int) -> int:
        """Return the bytes of a row."""


Types = Mapping[int, BlockType]  # by the code in files


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: sizes as NumPy has them, type code, and its bytes."""

    name: str
    shape: tuple[int, ...]
    code: int
    data: Array

    @property
    def plain(self) -> Array:
        """The elements of a tensor that is not quantized."""
        array: Array = self.data.view(PLAIN[self.code]).reshape(self.shape)
        return array


@dataclass(frozen=True)
class GGUFFile:
    """Contents of a GGUF file."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def text(self, key: str) -> str:
        """Return a string of the metadata."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise InputError(f"'{self.path}' has no text '{key}'", hint="it was not written by mithril-ggml")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings of the metadata; empty lists are not stored."""
        values = self.metadata.get(key, [])
        if not isinstance(values, list) or not all(isinstance(x, str) for x in values):
            raise InputError(f"'{self.path}': '{key}' is not a list of strings")
        return values


class _Reader:
    def __init__(self, data: Array, path: str) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.memory = 0  # bytes of the Python objects of the metadata

    def error(self, message: str) -> InputError:
        return InputError(
            f"'{self.path}' is damaged, or no GGUF file: {message}", facts=[f"at byte {self.at} of {self.data.size}"]
        )

    def bytes(self, count: int, field: str) -> bytes:
        if count < 0 or count > self.data.size - self.at:
            raise self.error(f"it ends inside {field}")
        content = self.data[self.at : self.at + count].tobytes()
        self.at += count
        return content

    def number(self, form: str, field: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form), field))[0]

    def text(self, field: str, limit: int | None = None) -> str:
        length = self.number("<Q", f"the length of {field}")
        if limit is not None and length > limit:
            raise self.error(f"{field} is {length} bytes long, at most {limit} are allowed")
        try:
            return self.bytes(length, field).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{field} is no UTF-8 text") from None

    def value(self, kind: int, field: str, nested: bool = False) -> Any:
        if kind == STRING:
            return self.text(field)
        if kind in SCALARS:
            return self.number(SCALARS[kind], field)
        if kind == ARRAY and not nested:
            return self.array(field)
        raise self.error(f"{field} has the unknown type {kind}")

    def charge(self, memory: int, field: str) -> None:
        self.memory += memory
        check_memory(self.memory, self.data.size, f"the metadata of '{self.path}' up to {field:.60}")

    def array(self, field: str) -> list[Any]:
        kind = self.number("<I", f"the type of {field}")
        count = self.number("<Q", f"the length of {field}")
        left = self.data.size - self.at
        if kind == STRING:
            if count > left // 8:
                raise self.error(f"{field} has {count} elements, more than the file can hold")
            self.charge(count * TEXT, field)
            return [self.text(f"an element of {field}") for _ in range(count)]
        if kind not in SCALARS:
            raise self.error(f"{field} has elements of the unknown type {kind}")
        size = struct.calcsize(SCALARS[kind])
        if count > left // size:
            raise self.error(f"{field} has {count} elements, more than the file can hold")
        self.charge(count * (POINTER if size == 1 else NUMBER), field)
        form = "u1" if kind == BOOL else SCALARS[kind]
        raw = np.frombuffer(self.bytes(count * size, field), dtype=np.dtype(form))
        return [bool(x) for x in raw] if kind == BOOL else raw.tolist()

    # -- the parts of a file -----------------------------------------------------------------------------------------
    def count(self, field: str) -> int:
        number = int(self.number("<Q", f"the number of {field}"))
        if number > MAX_ENTRIES:
            raise self.error(f"it claims to have {number} {field}")
        return number

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("a key", MAX_KEY)
            if not key or key in metadata:
                raise self.error(f"the key '{key}' is empty or given twice")
            metadata[key] = self.value(self.number("<I", f"the type of '{key}'"), f"'{key}'")
        return metadata

    def infos(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        infos: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self.text("the name of a tensor", MAX_NAME)
            if not name or name in infos:
                raise self.error(f"the tensor '{name}' has no name or is there twice")
            rank = self.number("<I", f"the rank of '{name}'")
            if not 1 <= rank <= 4:
                raise self.error(f"tensor '{name}' has rank {rank}")
            sizes = tuple(int(self.number("<Q", f"the sizes of '{name}'")) for _ in range(rank))
            elements = 1
            for n in sizes:
                elements *= n
                if not 0 < n <= MAX_ELEMENTS or elements > MAX_ELEMENTS:
                    raise self.error(f"tensor '{name}' has the sizes {list(sizes)}")
            code = self.number("<I", f"the type of '{name}'")
            infos[name] = (name, tuple(reversed(sizes)), code, self.number("<Q", f"the offset of '{name}'"))
        return list(infos.values())


def _opened(path: str | os.PathLike[str], *, mapped: bool) -> _Reader:
    """Return a reader of a file behind its version."""
    name = os.fspath(path)
    try:
        if not Path(name).is_file():
            raise InputError(f"there is no file '{name}'")
        if Path(name).stat().st_size < 24:
            raise InputError(f"'{name}' is damaged, or no GGUF file: it is shorter than a header")
        data: Array = np.memmap(name, np.uint8, "r") if mapped else _copied(name)
    except OSError as error:
        raise InputError(f"'{name}' cannot be read", facts=[str(error)]) from None
    reader = _Reader(np.asarray(data), name)
    if reader.bytes(4, "the header") != MAGIC:
        raise InputError(f"'{name}' is not a GGUF file: it does not begin with 'GGUF'")
    version = reader.number("<I", "the header")
    if version not in VERSIONS:
        raise reader.error(f"version {version} is unknown, or the bytes are in another order")
    return reader


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the metadata of a GGUF file, whose tensors may have any type."""
    reader = _opened(path, mapped=True)
    _, entries = reader.count("tensors"), reader.count("entries")
    return reader.metadata(entries)


def read_gguf(path: str | os.PathLike[str], *, mapped: bool = True, types: Types = BY_CODE) -> GGUFFile:
    """Read a GGUF file. ``mapped`` leaves tensors in it until they are used; it must then not change.

    Otherwise they are left in a copy of the file. ``types`` has the formats of blocks that the file may contain.
    """
    reader = _opened(path, mapped=mapped)
    tensors, entries = reader.count("tensors"), reader.count("entries")
    metadata = reader.metadata(entries)
    infos = reader.infos(tensors)
    return GGUFFile(reader.path, metadata, _tensors(reader, metadata, infos, types))


def _copied(path: str) -> Array:
    """Return the bytes of a copy of a file, which has no name and whose pages are loaded when they are used."""
    folder = Store().folder
    with open(path, "rb") as file:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as copy:
                shutil.copyfileobj(file, copy)
                copy.flush()
                return np.frombuffer(mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except OSError as error:
            raise InputError(
                f"'{path}' cannot be copied to '{folder}'",
                facts=[str(error)],
                hint="make room there, set MITHRIL_CACHE_DIR to another folder, or leave out mapped=False",
            ) from None


def _tensors(
    reader: _Reader, metadata: dict[str, Any], infos: list[tuple[str, tuple[int, ...], int, int]], types: Types
) -> dict[str, StoredTensor]:
    """Return the byte range of each tensor: inside the file, aligned, without overlap."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise reader.error(f"an alignment of {alignment!r}")
    begin = -(-reader.at // alignment) * alignment
    room = reader.data.size - begin
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, shape, code, offset in sorted(infos, key=lambda row: row[3]):
        size = _bytes(reader, name, shape, code, types)
        if offset % alignment or offset < end or offset + size > room:
            raise reader.error(f"the bytes of tensor '{name}' lie outside of the file, or in another tensor")
        end = offset + size
        tensors[name] = StoredTensor(name, shape, code, reader.data[begin + offset : begin + offset + size])
    return tensors


def _bytes(reader: _Reader, name: str, shape: tuple[int, ...], code: int, types: Types) -> int:
    """Return the number of bytes of a tensor of this type."""
    elements = 1
    for n in shape:
        elements *= n
    if code in PLAIN:
        return elements * PLAIN[code].itemsize
    kind = types.get(code)
    if kind is None and code in OTHERS:
        names = ", ".join(sorted(t.name for t in types.values()))
        raise InputError(
            f"tensor '{name}' of '{reader.path}' is of the type {OTHERS[code]}, which is not decoded here",
            facts=[f"types: {names}"],
            hint=f"ml.load('{reader.path}') reads it (pip install mithril-ggml)"
            if code in TERNARY and types is BY_CODE
            else "quantize the file to one of these types",
        )
    if kind is None:
        raise reader.error(f"tensor '{name}' has the unknown type {code}")
    if shape[-1] % kind.block:
        raise reader.error(f"tensor '{name}' of rows of {shape[-1]} elements cannot be {kind.name}")
    return elements // shape[-1] * kind.row(shape[-1])
