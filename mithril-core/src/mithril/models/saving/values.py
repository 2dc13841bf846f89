"""Arguments of layers as JSON values, and back.

None, bools, ints, finite floats, strings and lists are written unchanged. Any other value is an object with one key,
its kind: ``{"tuple": [3, 3]}``, ``{"layer": 2}``, ``{"dtype": "float16"}``.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mithril.graph import (
    ALL as ALL_DTYPES,
    Dim,
    DType,
    MithrilError,
    ModelError,
    Op,
    dtype as as_dtype,
    operation,
    parse_dim,
    symbols,
    unknown,
)
from mithril.models.language.apply_op import Take
from mithril.models.language.connection import Connection
from mithril.models.language.layer import Layer
from mithril.models.language.symbolic_sizes import ARITHMETIC, Formula, ShapeOf, SizeOf

DEEPEST = 50  # levels of lists in lists
SAVED = {one.name for one in ALL_DTYPES}


class Writing:
    """The references of the values being written: numbers of layers, of connections and names of classes."""

    def layer(self, layer: Layer) -> int:
        raise NotImplementedError

    def source(self, connection: Connection, location: str) -> int:
        raise ModelError(f"{location} depends on the connection '{connection.label}'", hint="pass it to an operation")

    def class_name(self, cls: type, location: str) -> str:
        raise NotImplementedError


class Reading:
    """The objects that the references of a file denote."""

    def layer(self, number: Any, location: str) -> Layer:
        raise NotImplementedError

    def source(self, number: Any, location: str) -> Connection:
        raise malformed(location, "a connection is not possible here")

    def class_of(self, name: Any, location: str) -> Any:
        raise NotImplementedError


def malformed(location: str, reason: str, hint: str | None = None) -> ModelError:
    """Return the error for a part of a file, by its path such as ``layers[3].arguments``."""
    return ModelError("the saved model is malformed", facts=[f"at {location}: {reason}"], hint=hint)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def to_value(value: Any, location: str, writing: Writing) -> Any:
    """Return a value as JSON; raise ModelError if it has no such form, for example a function."""

    def inner(item: Any) -> Any:
        return to_value(item, location, writing)

    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [inner(x) for x in value]
    if isinstance(value, tuple):
        return {"tuple": [inner(x) for x in value]}
    if isinstance(value, Mapping):
        return {"dict": [[inner(k), inner(x)] for k, x in value.items()]}
    if isinstance(value, slice):
        return {"slice": [inner(value.start), inner(value.stop), inner(value.step)]}
    if isinstance(value, Layer):
        return {"layer": writing.layer(value)}
    if isinstance(value, Op):
        return {"operation": value.name}
    if isinstance(value, Take):
        return {"index": list(value.slices)}
    if isinstance(value, Dim):
        return {"size": str(value), "limits": {s.name: [s.low, s.high] for s in symbols(value)}}
    if isinstance(value, Connection):
        return {"source": writing.source(value, location)}
    if isinstance(value, SizeOf):
        return {"size_of": [inner(value.connection), value.axis]}
    if isinstance(value, Formula):
        return {"formula": [value.name, inner(value.left), inner(value.right)]}
    if isinstance(value, ShapeOf):
        return {"shape_of": [inner(part) for part in value.parts]}
    if value is Ellipsis:
        return {"ellipsis": None}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in SAVED:
        data = np.asarray(value, order="C").tobytes()
        return {"array": [value.dtype.name, list(value.shape), base64.b64encode(data).decode()]}
    if is_dataclass(value) and not isinstance(value, type):
        settings = [[f.name, inner(getattr(value, f.name))] for f in fields(value) if f.init]
        return {"settings": [writing.class_name(type(value), location), settings]}
    kind = "function" if callable(value) else type(value).__name__
    raise ModelError(
        f"{location} is a {kind}, which a file cannot hold",
        facts=[f"value: {value!r:.80}", "files of models hold numbers, texts, arrays, layers and operations, no code"],
        hint="write a layer class that has it, and pass the class to from_dict(..., layers=[MyLayer])"
        if callable(value)
        else "write a model that was imported as a program: compiled.export('model.onnx')",
    )


def from_value(value: Any, location: str, reading: Reading, depth: int = 0) -> Any:
    """Return the value that JSON denotes."""
    if depth > DEEPEST:
        raise malformed(location, f"lists are nested more than {DEEPEST} levels deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [from_value(x, location, reading, depth + 1) for x in value]
    kind = next(iter(value), None) if isinstance(value, dict) else None
    if kind not in _READERS:
        message, facts, hint = unknown("kind of value", str(kind), list(_READERS))
        raise malformed(location, ", ".join([message, *facts]), hint)
    try:
        return _READERS[kind](value, lambda x: from_value(x, location, reading, depth + 1), location, reading)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise malformed(location, f"{kind}: {error}") from None


def _array(value: Any, location: str) -> np.ndarray[Any, Any]:
    name, shape, text = value["array"]
    dtype = as_dtype(name).numpy
    if not isinstance(shape, list) or not all(is_int(n) and n >= 0 for n in shape):
        raise malformed(location, f"{shape!r:.60} is not the shape of an array")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise malformed(location, f"the array is damaged: {error}") from None
    if math.prod(shape) * dtype.itemsize != len(data):
        raise malformed(location, f"an array of {name}{shape} does not have {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _size(value: Any, location: str) -> Any:
    limits = {str(name): (low, high) for name, (low, high) in value.get("limits", {}).items()}
    return parse_dim(value["size"], limits)


def _formula(value: Any, inner: Callable[[Any], Any], location: str) -> Formula:
    name, left, right = value["formula"]
    if name not in ARITHMETIC:
        message, facts, hint = unknown("formula", str(name), list(ARITHMETIC))
        raise malformed(location, ", ".join([message, *facts]), hint)
    left, right = inner(left), inner(right)
    if name == "pow" and not (isinstance(right, (int, float)) and abs(right) <= 64):
        raise malformed(location, "the exponent of a size must be a number of at most 64")
    return Formula(name, left, right)


def _size_of(value: Any, inner: Callable[[Any], Any], location: str) -> SizeOf:
    source, axis = value["size_of"]
    if not is_int(axis):
        raise malformed(location, f"{axis!r:.40} is not an axis")
    return SizeOf(_connection(inner(source), location), axis)


def _connection(value: Any, location: str) -> Connection:
    if not isinstance(value, Connection):
        raise malformed(location, "a connection is expected")
    return value


def _shape_of(value: Any, inner: Callable[[Any], Any], location: str) -> ShapeOf:
    parts = [inner(part) for part in value["shape_of"]]
    for part in parts:
        if isinstance(part, tuple) and not (
            len(part) == 2 and isinstance(part[0], Connection) and isinstance(part[1], slice)
        ):
            raise malformed(location, "a part of a shape is a connection and a slice")
    return ShapeOf(tuple(parts))


def _dict(value: Any, inner: Callable[[Any], Any]) -> dict[Any, Any]:
    return {inner(key): inner(x) for key, x in value["dict"]}


def _settings(value: Any, inner: Callable[[Any], Any], location: str, reading: Reading) -> Any:
    name, pairs = value["settings"]
    cls: Any = reading.class_of(name, location)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise malformed(location, f"'{name}' is not a class of settings")
    try:
        create: Any = cls
        return create(**{str(k): inner(x) for k, x in pairs})
    except MithrilError as error:
        raise error.with_facts(f"in the saved model at {location}") from None


_READERS: dict[Any, Callable[[Any, Callable[[Any], Any], str, Reading], Any]] = {
    "float": lambda v, inner, location, r: float(v["float"]),
    "tuple": lambda v, inner, location, r: tuple(inner(x) for x in v["tuple"]),
    "dict": lambda v, inner, location, r: _dict(v, inner),
    "slice": lambda v, inner, location, r: slice(*[inner(x) for x in v["slice"]]),
    "layer": lambda v, inner, location, r: r.layer(v["layer"], location),
    "operation": lambda v, inner, location, r: operation(str(v["operation"])),
    "index": lambda v, inner, location, r: Take(tuple(bool(x) for x in v["index"])),
    "size": lambda v, inner, location, r: _size(v, location),
    "source": lambda v, inner, location, r: r.source(v["source"], location),
    "size_of": lambda v, inner, location, r: _size_of(v, inner, location),
    "formula": lambda v, inner, location, r: _formula(v, inner, location),
    "shape_of": lambda v, inner, location, r: _shape_of(v, inner, location),
    "ellipsis": lambda v, inner, location, r: Ellipsis,
    "dtype": lambda v, inner, location, r: as_dtype(v["dtype"]),
    "array": lambda v, inner, location, r: _array(v, location),
    "settings": lambda v, inner, location, r: _settings(v, inner, location, r),
}
