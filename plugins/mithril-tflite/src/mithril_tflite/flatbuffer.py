"""Tables of a flatbuffer, read from a view of its bytes: every position, count and size is checked.

https://flatbuffers.dev/internals describes the format. A table begins with the distance to its vtable, which has the
offset of each field by its slot, or 0 for the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

import numpy as np

from mithril.graph import InputError, check_memory

Array = np.ndarray[Any, Any]
INT32, UINT32, UINT16 = Struct("<i"), Struct("<I"), Struct("<H")
NUMBERS = {kind: Struct(f"<{kind}") for kind in "bBhHiIqQf?"}
OBJECT = 512  # bytes of memory for a table or a text, at most
NUMBER = 32  # bytes of memory for an element of a vector, as an int in a tuple


class Reader:
    """The bytes of a file; it counts the memory of tables, since any number of offsets may lead to one."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.size, self.name = data, len(data), name
        self.spent = 0

    def damaged(self, reason: str) -> InputError:
        return InputError(
            f"'{self.name}' is not a TensorFlow Lite file, or is damaged",
            facts=[reason],
            hint="download or convert it again; ai_edge_litert.interpreter.Interpreter(path) checks a file",
        )

    def spend(self, memory: int) -> None:
        self.spent += memory
        check_memory(self.spent, self.size, f"the tables of '{self.name}'")

    def number(self, kind: Struct, position: int) -> Any:
        self.check(position, kind.size)
        return kind.unpack_from(self.data, position)[0]

    def check(self, position: int, size: int) -> None:
        if position < 0 or size > self.size - position:
            raise self.damaged(f"bytes {position} to {position + size} are not within its {self.size}")

    def root(self) -> Table:
        return Table(self, self.number(UINT32, 0))


class Table:
    """A table at a position of the file; fields are read by their slots."""

    __slots__ = ("fields", "position", "reader", "vtable")

    def __init__(self, reader: Reader, position: int) -> None:
        reader.spend(OBJECT)
        self.reader, self.position = reader, position
        self.vtable = position - reader.number(INT32, position)
        self.fields = (reader.number(UINT16, self.vtable) - 4) // 2

    def _place(self, slot: int) -> int | None:
        offset = 0 if slot >= self.fields else self.reader.number(UINT16, self.vtable + 4 + 2 * slot)
        return self.position + offset if offset else None

    def _target(self, slot: int) -> int | None:
        place = self._place(slot)
        return None if place is None else place + self.reader.number(UINT32, place)

    def _vector(self, slot: int, size: int) -> tuple[int, int]:
        """Return the position of the first element and the number of elements, each of ``size`` bytes."""
        position = self._target(slot)
        if position is None:
            return 0, 0
        count = self.reader.number(UINT32, position)
        self.reader.check(position + 4, count * size)
        return position + 4, count

    def number(self, slot: int, kind: str, default: Any = 0) -> Any:
        place = self._place(slot)
        return default if place is None else self.reader.number(NUMBERS[kind], place)

    def table(self, slot: int) -> Table | None:
        position = self._target(slot)
        return None if position is None else Table(self.reader, position)

    def tables(self, slot: int) -> Iterator[Table]:
        position, count = self._vector(slot, 4)
        self.reader.spend(OBJECT * count)
        for place in range(position, position + 4 * count, 4):
            yield Table(self.reader, place + self.reader.number(UINT32, place))

    def array(self, slot: int, kind: str) -> Array:
        """Return a vector of numbers as a view of the file."""
        dtype = np.dtype(kind).newbyteorder("<")
        position, count = self._vector(slot, dtype.itemsize)
        return np.frombuffer(self.reader.data, dtype, count, position) if count else np.zeros(0, dtype)

    def numbers(self, slot: int, kind: str) -> tuple[Any, ...]:
        array = self.array(slot, kind)
        self.reader.spend(NUMBER * array.size)
        return tuple(array.tolist())

    def text(self, slot: int) -> str:
        position, count = self._vector(slot, 1)
        self.reader.spend(OBJECT + 4 * count)
        return bytes(self.reader.data[position : position + count]).decode("utf-8", "replace")
