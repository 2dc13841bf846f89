"""Symbolic sizes of connections: formulas such as ``x.shape[0] * 2`` that are evaluated when the model is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mithril.graph import Dim, ShapeError, Value


class Shaped(Protocol):
    """The attributes of a connection that sizes use."""

    @property
    def label(self) -> str: ...
    @property
    def declared_shape(self) -> tuple[Any, ...] | None: ...


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "div": operator.truediv,
    "pow": operator.pow,
}
SYMBOLIC = {"add", "sub", "mul", "floordiv", "mod"}  # operations whose result on symbolic sizes is a size


def _formula(name: str, *, swap: bool = False) -> Any:
    def apply(self: Size, other: Any) -> Any:
        if not isinstance(other, (int, float, Dim, Size)):
            return NotImplemented
        return Formula(name, other, self) if swap else Formula(name, self, other)

    return apply


class Size:
    """A number computed from the shapes of connections."""

    __slots__ = ()

    __add__, __radd__ = _formula("add"), _formula("add", swap=True)
    __sub__, __rsub__ = _formula("sub"), _formula("sub", swap=True)
    __mul__, __rmul__ = _formula("mul"), _formula("mul", swap=True)
    __floordiv__, __rfloordiv__ = _formula("floordiv"), _formula("floordiv", swap=True)
    __mod__, __rmod__ = _formula("mod"), _formula("mod", swap=True)
    __truediv__, __rtruediv__ = _formula("div"), _formula("div", swap=True)
    __pow__, __rpow__ = _formula("pow"), _formula("pow", swap=True)

    def __neg__(self) -> Formula:
        return Formula("mul", -1, self)

    def __bool__(self) -> bool:
        raise ShapeError(
            f"the size '{self}' is not known while the model is being wired",
            hint="declare the shape with IOKey(shape=...), or decide inside a layer's build method",
        )

    def __index__(self) -> int:
        raise ShapeError(
            f"the size '{self}' is not known while the model is being wired",
            hint="declare the shape with IOKey(shape=...), or use the size only in shapes and arithmetic",
        )

    __int__ = __index__


class SizeOf(Size):
    """``x.shape[axis]``."""

    __slots__ = ("axis", "connection")

    def __init__(self, connection: Shaped, axis: int) -> None:
        self.connection = connection
        self.axis = axis

    def __str__(self) -> str:
        return f"{self.connection.label}.shape[{self.axis}]"


class Formula(Size):
    """Arithmetic on sizes."""

    __slots__ = ("left", "name", "right")

    def __init__(self, name: str, left: Any, right: Any) -> None:
        self.name = name
        self.left = left
        self.right = right

    def __str__(self) -> str:
        return f"{self.name}({self.left}, {self.right})"


class ShapeOf:
    """``x.shape``, or a slice of it, concatenated with other sizes by ``+``."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts  # sizes, and pairs (connection, slice) for slices of shapes

    def __getitem__(self, index: int | slice) -> Any:
        connection, piece = self._only()
        if piece != slice(None):
            raise ShapeError("a slice of a shape cannot be indexed again", hint="index x.shape itself")
        if isinstance(index, slice):
            ends = (index.start or 0, index.stop)
            if index.step is None and ends[1] is not None and ends[0] >= 0 and ends[1] >= 0:
                return tuple(SizeOf(connection, k) for k in range(*ends))
            return ShapeOf(((connection, index),))
        return SizeOf(connection, operator.index(index))

    def __add__(self, other: Any) -> ShapeOf:
        return ShapeOf(self.parts + (other.parts if isinstance(other, ShapeOf) else tuple(other)))

    def __radd__(self, other: Any) -> ShapeOf:
        return ShapeOf(tuple(other) + self.parts)

    def __len__(self) -> int:
        connection, piece = self._only()
        shape = connection.declared_shape
        if shape is None or piece != slice(None):
            raise ShapeError(
                f"the rank of '{connection.label}' is not known while the model is being wired",
                hint="index its shape, as in x.shape[0], or declare it with IOKey(shape=...)",
            )
        return len(shape)

    def __iter__(self) -> Iterator[SizeOf]:
        connection = self._only()[0]
        return iter([SizeOf(connection, k) for k in range(len(self))])

    def _only(self) -> tuple[Shaped, slice]:
        if len(self.parts) != 1 or not isinstance(self.parts[0], tuple):
            raise ShapeError("a composed shape cannot be indexed", hint="index x.shape itself")
        return self.parts[0]

    def __str__(self) -> str:
        return " + ".join(f"{p[0].label}.shape" if isinstance(p, tuple) else str(p) for p in self.parts)


def connections_in(value: Any) -> Iterator[Any]:
    """Yield the connections whose shapes an attribute depends on."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, SizeOf):
            yield item.connection
        elif isinstance(item, Formula):
            stack += [item.right, item.left]
        elif isinstance(item, ShapeOf):
            for part in reversed(item.parts):
                if isinstance(part, tuple):
                    yield part[0]
                else:
                    stack.append(part)
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))


def resolve(value: Any, values: dict[int, Value]) -> Any:
    """Replace the formulas in an attribute by ints and dims; ``values`` maps ids of connections to their values."""
    if isinstance(value, SizeOf):
        shape = values[id(value.connection)].shape
        if not -len(shape) <= value.axis < len(shape):
            raise ShapeError(f"'{value}' does not exist: the rank is {len(shape)}")
        return shape[value.axis]
    if isinstance(value, Formula):
        left, right = resolve(value.left, values), resolve(value.right, values)
        if value.name not in SYMBOLIC and (isinstance(left, Dim) or isinstance(right, Dim)):
            raise ShapeError(
                f"'{value}' requires sizes that are not known yet", hint="pass ints for them in shapes=..., or use //"
            )
        return ARITHMETIC[value.name](left, right)
    if isinstance(value, ShapeOf):
        out: list[Any] = []
        for part in value.parts:
            if isinstance(part, tuple):
                connection: Shaped = part[0]
                piece: slice = part[1]
                out.extend(values[id(connection)].shape[piece])
            else:
                out.append(resolve(part, values))
        return tuple(out)
    if isinstance(value, (tuple, list)):
        return tuple(resolve(item, values) for item in value)
    return value


def as_operand(value: Any, values: dict[int, Value]) -> Any:
    """Return a size as an operand: a Python number if it is static, else a scalar computed at run time."""
    if isinstance(value, Formula) and value.name not in SYMBOLIC:
        left, right = as_operand(value.left, values), as_operand(value.right, values)
        return ARITHMETIC[value.name](left, right)
    size = resolve(value, values)
    if isinstance(size, Dim):
        from mithril.ops import size_value

        return size_value(value=size)
    return size
