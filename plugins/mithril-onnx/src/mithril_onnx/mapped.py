"""Large tensors of ONNX files where they are: the file is mapped, and protobuf reads the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LARGE = 1 << 12  # bytes; smaller tensors are read by protobuf
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
GRAPH, INITIALIZER = 7, 5  # fields of a model and of a graph
NAME, RAW_DATA = 8, 9  # fields of a tensor


class IrregularError(Exception):
    """The bytes are for protobuf to judge."""


def without_large_tensors(path: str) -> tuple[bytes, dict[str, Array]]:
    """Return a file without the bytes of its large initializers, and these bytes by name, as views of the mapped file.

    Of tensors of one name only the first can be without its bytes. A file that is unusual or damaged is returned whole.
    """
    try:
        data = np.asarray(np.memmap(path, np.uint8, "r"))
    except (ValueError, OSError):  # an empty file
        with open(path, "rb") as file:
            return file.read(), {}
    tensors: dict[str, Array] = {}
    try:
        return b"".join(_model(data, tensors, set())), tensors
    except (IrregularError, UnicodeDecodeError):
        return data.tobytes(), {}


def _model(data: Array, tensors: dict[str, Array], names: set[str]) -> Iterator[bytes]:
    for number, start, body, end in fields(data, 0, data.size):
        if number != GRAPH:
            yield data[start:end].tobytes()
            continue
        graph = b"".join(_graph(data, body, end, tensors, names))
        yield _key(GRAPH) + _varint(len(graph)) + graph


def _graph(data: Array, start: int, end: int, tensors: dict[str, Array], names: set[str]) -> Iterator[bytes]:
    for number, begin, body, after in fields(data, start, end):
        name, places = _tensor(data, body, after) if number == INITIALIZER else ("", [])
        is_first = name not in names
        names.add(name)
        if not name or not is_first or len(places) != 1 or after - body <= LARGE:
            yield data[begin:after].tobytes()
            continue
        first, content, last = places[0]
        tensors[name] = data[content:last]
        tensor = data[body:first].tobytes() + data[last:after].tobytes()
        yield _key(INITIALIZER) + _varint(len(tensor)) + tensor


def _tensor(data: Array, start: int, end: int) -> tuple[str, list[tuple[int, int, int]]]:
    """Return the name of a tensor and the places of its bytes: the field's, their own, and the end."""
    name, places = "", []
    for number, begin, body, after in fields(data, start, end):
        if number == NAME:
            name = data[body:after].tobytes().decode("utf-8")
        elif number == RAW_DATA:
            places.append((begin, body, after))
    return name, places


def fields(data: Array | bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of each field, its start, the start of its content, and its end."""
    while position < end:
        start = position
        key, position = _number(data, position, end)
        kind = key & 7
        if kind == BYTES:
            size, position = _number(data, position, end)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        elif kind == VARINT:
            size = _number(data, position, end)[1] - position
        else:
            raise IrregularError
        if size > end - position:
            raise IrregularError
        yield key >> 3, start, position, position + size
        position += size


def _number(data: Array | bytes, position: int, end: int) -> tuple[int, int]:
    """Return the number at a place, in groups of seven bits, and the place after it."""
    value = 0
    for k in range(10):
        if position >= end:
            raise IrregularError
        byte = int(data[position])
        position += 1
        value |= (byte & 127) << (7 * k)
        if byte < 128:
            return value, position
    raise IrregularError


def _key(number: int) -> bytes:
    return _varint(number << 3 | BYTES)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
