"""Reading of TensorFlow Lite files: graphs, tensors with their quantization, operators with their options, signatures.

The tables are read by our reader, since generated ones trust every offset; constants stay in the mapped file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mithril.graph import DType, InputError, UnsupportedError, check_memory, dtype as as_dtype
from mithril_tflite.flatbuffer import Array, Reader, Table
from mithril_tflite.schema import DTYPES, INT4, NAMES, OPTIONS, TYPE_NAMES
from mithril_tflite.sparse import Sparsity, dense, sparsity

MARKER = b"TFL3"  # at byte 4
LARGEST = 1 << 48  # elements; larger sizes are damage
MAX_RANK = 32
DEPRECATED = 127  # an older field of 8 bits has this code where it does not fit


@dataclass(frozen=True, eq=False)
class Quantization:
    """real = (stored - zero) * scale, with one scale and zero, or one per element of an axis."""

    scale: Array
    zero: Array
    axis: int

    @property
    def is_single(self) -> bool:
        return self.scale.size == 1

    def equals(self, other: Quantization | None) -> bool:
        return other is not None and all(
            np.array_equal(a, b) for a, b in ((self.scale, other.scale), (self.zero, other.zero))
        )


@dataclass(frozen=True, eq=False)
class Tensor:
    """The declaration of a tensor; ``shape`` has -1 for an open size, and is None for an unknown rank."""

    index: int
    name: str
    shape: tuple[int, ...] | None
    code: int
    buffer: int
    quantization: Quantization | None
    is_variable: bool
    sparsity: Sparsity | None

    @property
    def dtype(self) -> DType:
        name = DTYPES[self.code] if 0 <= self.code < len(DTYPES) else None
        if name is None:
            raise UnsupportedError(
                f"tensor '{self.name}' has the element type {self.type_name}",
                facts=["accepted: bool, integers of 4 to 64 bits, floats of 16 to 64 bits"],
                hint="select other outputs: ml.from_tflite(path, outputs=[...])",
            )
        return as_dtype(name)

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.code] if 0 <= self.code < len(TYPE_NAMES) else f"number {self.code}"


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of a graph: its name, the indices of its tensors (-1 for none), and its options."""

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Graph:
    """A subgraph of a file."""

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The names of tensors, which differ: those of the schema need not."""
        keys: dict[str, None] = {}
        for t in self.tensors:
            key = t.name
            while key in keys:
                key = f"{key}#{t.index}"
            keys[key] = None
        return tuple(keys)

    @cached_property
    def has_open_sizes(self) -> bool:
        return any(self.tensors[k].shape is None or -1 in (self.tensors[k].shape or ()) for k in self.inputs)


@dataclass(frozen=True)
class Signature:
    """Names of the inputs and outputs of a graph, by the index of the tensor."""

    key: str
    graph: int
    inputs: Mapping[int, str]
    outputs: Mapping[int, str]


class TfliteFile:
    """A file as read, never changed."""

    def __init__(self, data: Any, name: str) -> None:
        self.name = name
        self.bytes = memoryview(data).cast("B")
        reader = Reader(self.bytes, name)
        if bytes(self.bytes[4:8]) != MARKER:
            raise reader.damaged(f"bytes 4 to 8 are not '{MARKER.decode()}'")
        self.reader = reader
        root = reader.root()
        version = root.number(0, "I")
        if version != 3:
            raise UnsupportedError(
                f"'{name}' has version {version} of the schema",
                facts=["accepted: 3"],
                hint="convert it again by a current converter",
            )
        self._codes = [self._operator(code) for code in root.tables(1)]
        self._buffers = list(root.tables(4))
        self.graphs = tuple(self._graph(graph, k) for k, graph in enumerate(root.tables(2)))
        if not self.graphs:
            raise reader.damaged("it contains no graph")
        self.signatures = tuple(self._signature(s) for s in root.tables(7))

    def __deepcopy__(self, memo: Any) -> TfliteFile:
        return self

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.bytes).hexdigest()

    def constant(self, tensor: Tensor) -> Array | None:
        """Return the elements of a tensor, as a view of the file where its type allows it; None if it has none."""
        if tensor.buffer == 0:  # the buffer that is always empty
            return None
        raw = self._content(tensor.buffer)
        if raw is None:  # a constant without elements has no bytes
            is_empty = tensor.shape is not None and 0 in tensor.shape
            return np.zeros(tensor.shape or (), tensor.dtype.numpy) if is_empty else None
        if tensor.shape is None or -1 in tensor.shape:
            raise self.reader.damaged(f"the constant '{tensor.name}' has an open size")
        count = math.prod(tensor.shape)
        dtype = tensor.dtype
        if tensor.sparsity is not None and tensor.code != INT4 and raw.size % dtype.itemsize == 0:
            check_memory(
                count * dtype.itemsize, self.reader.size, f"the sparse tensor '{tensor.name}' of '{self.name}'"
            )
            return dense(raw.view(dtype.numpy), tensor.shape, tensor.sparsity, tensor.name)
        size = -(-count // 2) if tensor.code == INT4 else count * dtype.itemsize
        if raw.size != size:
            raise self.reader.damaged(
                f"tensor '{tensor.name}' has {raw.size} bytes, {list(tensor.shape)} of {tensor.type_name} are {size}"
            )
        if tensor.code == INT4:
            check_memory(count, self.reader.size, f"tensor '{tensor.name}' of '{self.name}'")
            return _unpacked(raw, count).reshape(tensor.shape)
        if dtype.is_bool:
            return raw.astype(np.bool_).reshape(tensor.shape)
        return raw.view(dtype.numpy).reshape(tensor.shape)

    def _content(self, index: int) -> Array | None:
        """Return the bytes of a buffer; those of files of more than 2 GB come after the tables."""
        if index >= len(self._buffers):
            raise self.reader.damaged(f"there is no buffer {index}, but {len(self._buffers)}")
        buffer = self._buffers[index]
        data = buffer.array(0, "B")
        offset, size = buffer.number(1, "Q"), buffer.number(2, "Q")
        if not data.size and offset > 1:
            self.reader.check(offset, size)
            data = np.frombuffer(self.bytes, np.uint8, size, offset)
        return data if data.size else None

    def _operator(self, code: Table) -> str:
        number = max(code.number(0, "b"), code.number(3, "i"))
        if not 0 <= number < len(NAMES):
            return f"operator {number}"
        return f"custom operator '{code.text(1)}'" if NAMES[number] == "CUSTOM" else NAMES[number]

    def _graph(self, graph: Table, index: int) -> Graph:
        tensors = tuple(self._tensor(t, k) for k, t in enumerate(graph.tables(0)))
        inputs = self._indices(graph.numbers(1, "i4"), tensors, f"an input of graph {index}", lowest=0)
        outputs = self._indices(graph.numbers(2, "i4"), tensors, f"an output of graph {index}", lowest=0)
        nodes = tuple(self._node(n, k, tensors) for k, n in enumerate(graph.tables(3)))
        return Graph(graph.text(4) or f"graph_{index}", tensors, inputs, outputs, nodes)

    def _indices(
        self, indices: tuple[int, ...], tensors: tuple[Tensor, ...], subject: str, lowest: int = -1
    ) -> tuple[int, ...]:
        for k in indices:
            if not lowest <= k < len(tensors):
                raise self.reader.damaged(f"{subject} is tensor {k}, but there are {len(tensors)}")
        return indices

    def _tensor(self, t: Table, index: int) -> Tensor:
        name = t.text(3) or f"tensor_{index}"
        shape, signature = t.numbers(0, "i4"), t.numbers(7, "i4")
        if max(len(shape), len(signature)) > MAX_RANK or (signature and len(shape) != len(signature)):
            raise self.reader.damaged(f"tensor '{name}' has the sizes {shape[:MAX_RANK]} and {signature[:MAX_RANK]}")
        sizes = signature or shape
        if any(n < -1 for n in sizes) or math.prod(abs(n) for n in sizes) > LARGEST:
            raise self.reader.damaged(f"tensor '{name}' has the sizes {list(sizes)}")
        is_known = bool(shape) or t.number(8, "?") or bool(t.number(2, "I"))
        quantization = t.table(4)
        return Tensor(
            index,
            name,
            sizes if is_known else None,
            t.number(1, "b"),
            t.number(2, "I"),
            None if quantization is None else self._quantization(quantization, sizes, name),
            t.number(5, "?"),
            None if (sparse := t.table(6)) is None else sparsity(sparse),
        )

    def _quantization(self, q: Table, shape: tuple[int, ...], name: str) -> Quantization | None:
        scale, zero, axis = q.array(2, "f4"), q.array(3, "i8"), q.number(6, "i")
        if not scale.size:
            return None
        if q.number(4, "B"):
            raise UnsupportedError(f"tensor '{name}' of '{self.name}' has a custom quantization")
        if zero.size not in (0, scale.size) or not np.isfinite(scale).all():
            raise self.reader.damaged(f"tensor '{name}' has {scale.size} scales and {zero.size} zero points")
        if scale.size > 1 and not (0 <= axis < len(shape) and shape[axis] == scale.size):
            raise self.reader.damaged(f"tensor '{name}' {list(shape)} has {scale.size} scales along axis {axis}")
        return Quantization(scale, zero if zero.size else np.zeros(scale.size, np.int64), axis)

    def _node(self, n: Table, index: int, tensors: tuple[Tensor, ...]) -> Node:
        code = n.number(0, "I")
        if code >= len(self._codes):
            raise self.reader.damaged(f"operator {index} has the code {code}, but there are {len(self._codes)}")
        name = self._codes[code]
        inputs = self._indices(n.numbers(1, "i4"), tensors, f"an operand of operator {index} ({name})")
        outputs = self._indices(n.numbers(2, "i4"), tensors, f"a result of operator {index} ({name})", lowest=0)
        return Node(index, name, inputs, outputs, dict(self._options(n, index, name)))

    def _options(self, n: Table, index: int, name: str) -> Iterator[tuple[str, Any]]:
        if name not in OPTIONS:
            return
        kind, text = OPTIONS[name]
        present = n.number(3, "B")
        if present not in (0, kind):
            raise self.reader.damaged(f"operator {index} ({name}) has options of type {present}, expected {kind}")
        table = n.table(4) if present else None
        for slot, field in enumerate(text.split()):
            if field == "_":
                continue
            label, _, rest = field.partition(":")
            letter, _, default = rest.partition("=")
            if letter == "s":
                yield label, "" if table is None else table.text(slot)
            elif letter.startswith("*"):
                yield label, () if table is None else table.numbers(slot, {"*i": "i4"}[letter])
            else:
                number = int(default or 0)
                value = number if table is None else table.number(slot, letter, number)
                yield label, bool(value) if letter == "?" else value

    def _signature(self, s: Table) -> Signature:
        key, graph = s.text(2), s.number(4, "I")
        if graph >= len(self.graphs):
            raise self.reader.damaged(f"the signature '{key}' names graph {graph} of {len(self.graphs)}")
        tensors = self.graphs[graph].tensors
        maps = [{m.number(1, "I"): m.text(0) for m in s.tables(slot)} for slot in (0, 1)]
        for names in maps:
            self._indices(tuple(names), tensors, f"a tensor of the signature '{key}'", lowest=0)
        return Signature(key, graph, *maps)


def _unpacked(raw: Array, count: int) -> Array:
    """Return signed integers of 4 bits as bytes; the lower half comes first."""
    halves = np.stack([raw & 15, raw >> 4], -1).reshape(-1)[:count].astype(np.int8)
    return (halves ^ 8) - np.int8(8)


def read(source: Any) -> TfliteFile:
    """Return a file from its path, which is mapped, or from its bytes."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return TfliteFile(source, "model")
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            f"a TensorFlow Lite model cannot be a {type(source).__name__}", facts=["accepted: a path, bytes"]
        )
    path = os.fspath(source)
    if not os.path.isfile(path):
        raise InputError(f"there is no file '{path}'")
    is_empty = os.path.getsize(path) == 0  # such a file cannot be mapped
    return TfliteFile(b"" if is_empty else np.memmap(path, np.uint8, "r"), os.path.basename(path))
