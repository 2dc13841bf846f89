"""The file ``.metadata`` of a DCP checkpoint: a pickle, read without ``pickle``.

Its objects become plain records. Nothing that the file names is imported or called, and only the instructions and the
classes that DCP itself writes are accepted.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

Offset = tuple[int, ...]
Key = tuple[str, Offset | None]  # of a stored part: the name of its tensor, and its offset

MOST_AXES = 64
MODULES = ("torch", "pathlib")
CLASSES = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING", "_get_layout"),
    *("_StorageInfo", "_StoragePrefix", "Size", "PosixPath", "WindowsPath"),
}
DTYPES = {"bool", "bfloat16", "complex64", *(f"float{n}" for n in (16, 32, 64))}
DTYPES |= {f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}
LITERALS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NUMBERS_AND_TEXTS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE")


@dataclass(frozen=True)
class Name:
    """A class or a dtype that the file names."""

    text: str


@dataclass
class Record:
    """An object of a class: its fields by name, or a tuple of them."""

    kind: str
    state: Any = field(default_factory=dict)

    def get(self, name: str, expected: type) -> Any:
        """Return a field of the expected type."""
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if not isinstance(value, expected):
            raise ValueError(f"'{name}' of {self.kind} is {type(value).__name__}, expected {expected.__name__}")
        return value

    def sizes(self, name: str) -> Offset:
        """Return a field of sizes or offsets."""
        sizes: Offset = self.get(name, tuple)
        return _sizes(sizes)


def read_records(data: bytes) -> Record:
    """Return the object in the file; raise ValueError for anything that DCP does not write."""
    machine = _Machine()
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name == "STOP":
            break
        machine.step(instruction.name, argument)
    (result,) = machine.stack
    return _record(result, "Metadata")


class _Machine:
    """The stack of the instructions."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = self._since_mark()
                stack[-1].extend(items)
            case "SETITEM":
                self._set([stack.pop(-2), stack.pop()])
            case "SETITEMS":
                self._set(self._since_mark())
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_named(stack.pop(-2), stack.pop()))
            case "NEWOBJ" | "REDUCE":
                stack.append(_made(stack.pop(-2), stack.pop()))
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case _ if name in LITERALS:
                stack.append(LITERALS[name])
            case _ if name in NUMBERS_AND_TEXTS:
                stack.append(argument)
            case _ if name in TUPLES:
                count = TUPLES[name]
                stack[-count:] = [tuple(stack[-count:])]
            case _:
                raise ValueError(f"it contains the instruction {name}, which DCP does not write")

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value


def _named(module: Any, name: Any) -> Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a class is not named by a text")
    if module.partition(".")[0] in MODULES and (name in CLASSES or (module == "torch" and name in DTYPES)):
        return Name(name)
    raise ValueError(f"it names {module:.100}.{name:.100}, which is not in the metadata of DCP")


def _made(kind: Any, arguments: Any) -> Any:
    """Return the record of an object; sizes are tuples of numbers."""
    if not isinstance(kind, Name) or kind.text not in CLASSES:
        raise ValueError(f"it calls a {type(kind).__name__}")
    return _sizes(arguments[0]) if kind.text == "Size" else Record(kind.text)


def _sizes(value: Any) -> Offset:
    # a file can repeat a long list in few bytes
    if not isinstance(value, (tuple, list)) or len(value) > MOST_AXES:
        raise ValueError("sizes or offsets are not a short list")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise ValueError("a size or an offset is not a number")
    return tuple(value)


def _key(value: Any) -> str | Key:
    """Return the key of a dictionary: a text, or the name and the offset of a part."""
    if isinstance(value, str):
        return value
    index = _record(value, "MetadataIndex")
    return index.get("fqn", str), index.sizes("offset") if index.state.get("offset") is not None else None


def _record(value: Any, kind: str) -> Record:
    if not isinstance(value, Record) or value.kind != kind:
        raise ValueError(f"it contains a {type(value).__name__}, expected {kind}")
    return value
