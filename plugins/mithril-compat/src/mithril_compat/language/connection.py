"""Connections of the predecessor's models: edges that models share, with names in each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import EllipsisType
from typing import Any, Self

import numpy as np

from mithril import ModelError


class Unset(Enum):
    """Sentinels; the members of an enum keep their identity when copied."""

    TBD = "to be determined"
    NOT_GIVEN = "not connected"


TBD = Unset.TBD
NOT_GIVEN = Unset.NOT_GIVEN


class Tensor:
    """A tensor constant, or the annotation ``Tensor[float]`` of a connection's type."""

    def __init__(
        self,
        value: Any = TBD,
        type: Any = float,
        shape: Sequence[Any] | None = None,
        *,
        differentiable: bool = False,
    ) -> None:
        self.value, self.type, self.shape, self.differentiable = value, type, shape, differentiable

    def __class_getitem__(cls, item: Any) -> TensorOf:
        return TensorOf(item)

    def array(self, float_dtype: Any) -> np.ndarray[Any, Any]:
        """Return the constant with the dtype of the program's floats."""
        value = self.value.number(float_dtype) if isinstance(self.value, Constant) else self.value
        x = np.asarray(value)
        if x.dtype == np.float64 and not isinstance(value, np.ndarray):
            return x.astype(float_dtype)
        return x.astype(np.int32) if x.dtype == np.int64 and not isinstance(value, np.ndarray) else x


class TensorOf:
    """The annotation ``Tensor[float]``, an element type."""

    def __init__(self, element: Any) -> None:
        self.element = element

    def __or__(self, other: Any) -> Self:
        return self

    __ror__ = __or__


class Constant(Enum):
    """Numbers that depend on the dtype of the program."""

    EPSILON = "eps"
    LEFT_EPSILON = "epsneg"
    MIN_POSITIVE_NORMAL = "tiny"
    MIN_POSITIVE_SUBNORMAL = "smallest_subnormal"
    STABLE_RECIPROCAL_THRESHOLD = "reciprocal"
    ZERO = 0.0
    ONE = 1.0
    ONE_OVER_TWO = 0.5

    def number(self, float_dtype: Any) -> float:
        """Return the number for a dtype of NumPy."""
        if isinstance(self.value, float):
            return self.value
        info = np.finfo(float_dtype)
        return float(info.tiny) ** 0.5 if self.value == "reciprocal" else float(getattr(info, self.value))


# The layers of operators on connections, by operator; ``mithril_compat.layers`` sets them.
operators: dict[str, Callable[..., Any]] = {}


def apply(kind: str, *operands: Any, **settings: Any) -> Any:
    """Return the output of a new layer that no model has yet."""
    return operators[kind](**settings)(*operands)


class Connection:
    """An edge: the output of a layer or an input, by name or not. Operators on it make layers."""

    def __init__(
        self,
        name: str | None = None,
        value: Any = TBD,
        shape: Sequence[Any] | None = None,
        type: Any = None,
        differentiable: bool | None = None,
        interval: Any = None,
        *,
        expose: bool | None = None,
    ) -> None:
        if isinstance(value, (tuple, list)) and any(isinstance(x, Tensor) and x.value is TBD for x in value):
            value = TBD  # a tuple of unknown tensors declares a type
        self.name = name
        self.home: Any = None  # the model in which it has its name
        self.alias: Connection | None = None
        self.value = value
        self.declared_shape = None if shape is None else tuple(shape)
        self.type = type
        self.differentiable = differentiable
        self.exposed = expose
        self.origin_name = name
        self.producer: Any = None  # the layer whose output it is
        if isinstance(value, Tensor) and value.value is TBD:
            self.value, self.type = TBD, value.type
            self.declared_shape = None if value.shape is None else tuple(value.shape)
            self.differentiable = self.differentiable or value.differentiable

    # -- edges -------------------------------------------------------------------------------------------------------
    @property
    def edge(self) -> Connection:
        """The connection that represents all that were merged with this one."""
        edge = self
        while edge.alias is not None:
            edge = edge.alias
        return edge

    @property
    def key(self) -> str | None:
        return self.name or self.edge.origin_name

    @property
    def metadata(self) -> Connection:
        return self.edge

    @property
    def is_valued(self) -> bool:
        return self.edge.value is not TBD

    def merge(self, other: Connection) -> None:
        """Make one edge of two; ``other`` is the later declaration."""
        first, later = self.edge, other.edge
        if first is later:
            return
        if first.producer is not None and later.producer is not None:
            names = f"'{first.origin_name}' and '{later.origin_name}'"
            raise ModelError(f"{names} are outputs of two layers and cannot be one connection")
        if later.producer is not None and first.value is not TBD:
            raise ModelError(f"'{later.origin_name}' is an output, so its value cannot be set")
        later.alias = first
        first.producer = first.producer or later.producer
        first.value = later.value if first.value is TBD else first.value
        first.differentiable = later.differentiable if later.differentiable is not None else first.differentiable
        first.declared_shape = merged_shape(first.declared_shape, later.declared_shape)
        first.type = first.type or later.type
        first.origin_name = first.origin_name or later.origin_name
        first.exposed = first.exposed or later.exposed

    def set_differentiability(self, differentiable: bool = True) -> None:
        self.edge.differentiable = differentiable

    def set_value(self, value: Any) -> None:
        self.edge.value = value

    def set_type(self, value: Any) -> None:
        self.edge.type = value

    def set_shapes(self, value: Sequence[Any]) -> None:
        self.edge.declared_shape = merged_shape(self.edge.declared_shape, tuple(value))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.key}'>"

    def __hash__(self) -> int:
        return id(self)

    # -- operators ---------------------------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Any:
        return apply("index", self, index)

    def eq(self, other: Any) -> Any:
        return apply("eq", self, other)

    def ne(self, other: Any) -> Any:
        return apply("ne", self, other)

    def __neg__(self) -> Any:
        return apply("neg", self)

    def __invert__(self) -> Any:
        return apply("invert", self)

    @property
    def shape(self) -> Any:
        return apply("shape", self)

    @property
    def T(self) -> Any:
        return apply("transpose", self)

    def reshape(self, shape: Any) -> Any:
        return apply("reshape", self, shape)

    def transpose(self, axes: Any = None) -> Any:
        return apply("transpose", self, axes)

    def size(self, dim: Any = None) -> Any:
        return apply("size", self, dim)

    def var(self, axis: Any = None, keepdim: Any = False, correction: Any = 0.0) -> Any:
        return apply("var", self, axis, keepdim, correction)

    def cast(self, dtype: Any = None) -> Any:
        return apply("cast", self, dtype)

    def clamp(self, min_val: Any = None, max_val: Any = None) -> Any:
        return apply("clamp", self, min_val, max_val)


def _binary(kind: str, swapped: bool) -> Callable[[Connection, Any], Any]:
    def method(self: Connection, other: Any) -> Any:
        return apply(kind, other, self) if swapped else apply(kind, self, other)

    return method


def _unary(kind: str) -> Callable[[Connection], Any]:
    return lambda self: apply(kind, self)


def _reduction(kind: str) -> Callable[..., Any]:
    return lambda self, axis=None, keepdim=False: apply(kind, self, axis, keepdim)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in _BINARY:
    setattr(Connection, f"__{_name}__", _binary(_name, False))
    setattr(Connection, f"__r{_name}__", _binary(_name, True))
for _name in ("gt", "ge", "lt", "le"):
    setattr(Connection, f"__{_name}__", _binary(_name, False))
for _name in ("abs", "len", "tensor", "sqrt", "exp", "item", "dtype", "sin", "cos", "atleast_1d", "floor"):
    setattr(Connection, _name, _unary(_name))
for _name in ("mean", "sum", "max", "min", "prod"):
    setattr(Connection, _name, _reduction(_name))

IOKey = Connection


def merged_shape(first: Sequence[Any] | None, later: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the shape of two declarations; sizes of the first one win, unless they are unknown."""
    if first is None or later is None:
        return None if first is later else tuple(first or later or ())
    if any(_is_variadic(s) for s in (*first, *later)):
        return tuple(first if not any(_is_variadic(s) for s in first) else later)
    if len(first) != len(later) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(first, later, strict=True)
    ):
        raise ModelError(f"the shapes {list(first)} and {list(later)} of one connection differ")
    return tuple(b if not isinstance(a, int) else a for a, b in zip(first, later, strict=True))


def _is_variadic(size: Any) -> bool:
    return isinstance(size, (tuple, EllipsisType))


def holds_connections(target: Any) -> bool:
    """Whether a tuple, a list or a slice contains connections."""
    if isinstance(target, slice):
        return holds_connections((target.start, target.stop, target.step))
    return isinstance(target, (tuple, list)) and any(
        isinstance(item, (Connection, Tensor)) or holds_connections(item) for item in target
    )


Targets = Mapping[str, Any]
