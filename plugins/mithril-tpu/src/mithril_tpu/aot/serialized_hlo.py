"""Instructions of a serialized TPU program, for programs whose text jaxlib cannot print.

jaxlib's HLO parser is older than libtpu's format: it rejects programs with newer kinds of asynchronous instructions.
The serialized program contains the HLO module as a protocol buffer. This module reads only the fields that describe
operations and shapes, and skips all others, so that it does not depend on the version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

Array = tuple[int, tuple[int, ...]]  # bits of an element, dimensions
Field = tuple[int, int | bytes]

# Riegeli, the container of the records: blocks with headers, whose first begins with this hash.
_BLOCK, _HEADER, _SIGNATURE = 1 << 16, 24, bytes.fromhex("83af70d10d884a3f")
_MODULE = re.compile(rb"\n[\x01-\x7f]jit_\w+\x12")  # the module's name, then the name of its entry computation
_CHAIN = re.compile(rb"chain_id\x12.(\w+)", re.DOTALL)
_LENGTH = 5  # bytes of the varint of a length, at most

# Field numbers of hlo.proto and xla_data.proto.
_COMPUTATIONS, _INSTRUCTIONS, _OPCODE, _SHAPE, _CHANNEL, _FRONTEND_ATTRIBUTES = 3, 2, 2, 3, 26, 68
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES = 2, 3, 4
_WIDTHS = {1: 8, 2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32, 12: 64, 15: 64, 16: 16, 18: 128}
_WIDTHS |= {19: 8, 20: 8, 21: 4, 22: 4, 23: 8, 24: 8, 25: 8}  # float8 and 4-bit types


class Instruction(NamedTuple):
    """An instruction; several fusions perform the collectives of one chain together."""

    opcode: str
    arrays: list[Array]  # results
    chain: tuple[int, bytes] | None


def instructions(serialized: bytes) -> list[Instruction] | None:
    """Return the instructions of all computations; None if no module is found."""
    start = serialized.find(_SIGNATURE)
    data = serialized
    if start >= 0:
        data = b"".join(serialized[k + _HEADER : k + _BLOCK] for k in range(start, len(serialized), _BLOCK))
    modules = [module for match in _MODULE.finditer(data) for module in _delimited(data, match.start())]
    if not modules:
        return None
    return [
        _instruction(body)
        for computation in _all(modules[-1], _COMPUTATIONS)
        for body in _all(_fields(computation), _INSTRUCTIONS)
    ]


def _delimited(data: bytes, start: int) -> Iterator[list[Field]]:
    """Yield the fields of the message that begins at ``start``, if the bytes before are its length."""
    for width in range(1, _LENGTH + 1):
        try:
            length, end = _varint(data, start - width)
            if end == start and start + length <= len(data):
                fields = _fields(data[start : start + length])
                if any(number == _COMPUTATIONS for number, _ in fields):
                    yield fields
        except (ValueError, IndexError):
            continue


def _instruction(body: bytes) -> Instruction:
    fields = _fields(body)
    shapes = [array for shape in _all(fields, _SHAPE) for array in _arrays(shape)]
    channel = next((v for number, v in fields if number == _CHANNEL and isinstance(v, int)), 0)
    chains = (match[1] for text in _all(fields, _FRONTEND_ATTRIBUTES) if (match := _CHAIN.search(text)))
    chain = next(((channel, number) for number in chains), None)
    return Instruction(next(_all(fields, _OPCODE), b"").decode(), shapes, chain)


def _arrays(shape: bytes) -> Iterator[Array]:
    """Yield the arrays of a shape, which may be a tuple."""
    fields = _fields(shape)
    bits = next((_WIDTHS.get(v, 0) for number, v in fields if number == _ELEMENT_TYPE and isinstance(v, int)), 0)
    if bits:
        dimensions: list[int] = []
        for number, v in fields:
            if number == _DIMENSIONS:
                dimensions += [v] if isinstance(v, int) else _packed(v)
        yield bits, tuple(dimensions)
    for inner in _all(fields, _TUPLE_SHAPES):
        yield from _arrays(inner)


def _all(fields: list[Field], number: int) -> Iterator[bytes]:
    return (v for n, v in fields if n == number and isinstance(v, bytes))


# -- protocol buffers ---------------------------------------------------------------------------------------------
def _fields(data: bytes) -> list[Field]:
    """Return the numbers and values of a message's fields; raise ValueError if it is not a message."""
    fields: list[Field] = []
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == 0:
            number, position = _varint(data, position)
            fields.append((key >> 3, number))
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position + length > len(data):
            raise ValueError("a field exceeds its message")
        fields.append((key >> 3, data[position : position + length]))
        position += length
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of variable length, and the position after it."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
        shift += 7
        # Without an end, damaged bytes would be read as one number.
        if shift > 63:
            raise ValueError("a number exceeds 64 bits")


def _packed(data: bytes) -> list[int]:
    numbers, position = [], 0
    while position < len(data):
        number, position = _varint(data, position)
        numbers.append(number)
    return numbers
