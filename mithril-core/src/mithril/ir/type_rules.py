"""Shape and dtype rules that many operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.base import DType, DTypeError, Shape, ShapeError, Size, assume, bool_, product

Dtypes = Sequence[DType | None]
Attrs = Mapping[str, Any]


# -- shapes -------------------------------------------------------------------------------------------------------
def broadcast(*shapes: Shape | None, **_: Any) -> Shape:
    """NumPy's broadcasting; sizes that cannot be compared are assumed equal and guarded."""
    given = [s for s in shapes if s is not None]
    rank = max(map(len, given), default=0)
    out: list[Size] = []
    for axis in range(-rank, 0):
        size: Size = 1
        for shape in given:
            if len(shape) < -axis:
                continue
            n = shape[axis]
            if n == 1 or n == size:
                continue
            if size == 1:
                size = n
            elif assume(size, "==", n, "operands broadcast together"):
                size = n if type(n) is int else size
            else:
                texts = " and ".join("[" + ", ".join(map(str, s)) + "]" for s in given)
                raise ShapeError(f"shapes {texts} do not broadcast: axis {axis} has {size} and {n}")
        out.append(size)
    return tuple(out)


def same_shape(x: Shape, *_: Any, **__: Any) -> Shape:
    """The first operand's shape."""
    return x


def reduced(x: Shape, *, axis: Any, keepdims: bool = False, **_: Any) -> Shape:
    """The shape after reducing over axes."""
    if keepdims:
        return tuple(1 if k in axis else d for k, d in enumerate(x))
    return tuple(d for k, d in enumerate(x) if k not in axis)


def attribute_shape(*_: Any, shape: Shape, **__: Any) -> Shape:
    """The shape that the attribute ``shape`` says."""
    return shape


def expect_rank(what: str, shape: Shape, *ranks: int) -> None:
    """Raise unless the shape's rank is among those given."""
    if len(shape) not in ranks:
        accepted = " or ".join(map(str, ranks))
        raise ShapeError(
            f"'{what}' has rank {len(shape)}, expected {accepted}", facts=[f"shape [{', '.join(map(str, shape))}]"]
        )


def expect_equal(what: str, a: Size, b: Size) -> Size:
    """Raise unless the sizes agree; the known one of the two is returned."""
    if not assume(a, "==", b, what):
        raise ShapeError(f"{what}: {a} and {b} differ")
    return b if type(b) is int else a


def expect_paired(op: str, operands: Mapping[str, Shape], *, scalar: bool = True) -> None:
    """Raise unless all shapes are equal. With ``scalar`` the last operand may also be a single number.

    Losses and metrics compare element by element: [N, 1] against [N] would broadcast to [N, N] and train on nonsense.
    """
    first, *partners = operands
    shape = operands[first]
    for name in partners:
        other = operands[name]
        if scalar and name == partners[-1] and other == ():
            continue
        reason = f"'{op}' compares '{first}' and '{name}' element by element"
        if len(other) == len(shape) and all(assume(a, "==", b, reason) for a, b in zip(shape, other, strict=True)):
            continue
        raise ShapeError(
            f"'{op}' expected '{first}' and '{name}' of one shape, got {shape_text(shape)} and {shape_text(other)}",
            facts=["losses and metrics do not broadcast"],
            hint=_pairing(first, shape, name, other),
        )


def _pairing(first: str, shape: Shape, name: str, other: Shape) -> str:
    if len(other) == len(shape) + 1 and other[-1] == 1:
        return f"drop the last axis of '{name}': ops.squeeze({name}, axis=(-1,)), or {name}[:, 0] in the data"
    if len(shape) == len(other) + 1 and shape[-1] == 1:
        return f"drop the last axis of '{first}': ops.squeeze({first}, axis=(-1,)), or use {name}[:, None] in the data"
    return f"bring both to one shape, for example with ops.broadcast_to({name}, shape=...)"


def shape_text(shape: Shape) -> str:
    """Format a shape for messages: ``[N, 3]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


# -- dtypes -------------------------------------------------------------------------------------------------------
def like(dtypes: Dtypes, _: Attrs) -> DType:
    """The first operand's."""
    assert dtypes[0] is not None
    return dtypes[0]


def floating(dtypes: Dtypes, _: Attrs) -> DType:
    """The first operand's, which must be a float."""
    return _require(dtypes[0], lambda d: d.is_float, "a floating point dtype")


def numeric(dtypes: Dtypes, _: Attrs) -> DType:
    """The first operand's, which must not be bool."""
    return _require(dtypes[0], lambda d: not d.is_bool, "a number, not bool")


def integral(dtypes: Dtypes, _: Attrs) -> DType:
    """The first operand's, which must be an integer or bool."""
    return _require(dtypes[0], lambda d: not d.is_float, "an integer or bool")


def integer(dtypes: Dtypes, _: Attrs) -> DType:
    """The first operand's, which must be an integer."""
    return _require(dtypes[0], lambda d: d.is_integer, "an integer")


def boolean(dtypes: Dtypes, _: Attrs) -> DType:
    """bool."""
    return bool_


def logical(dtypes: Dtypes, _: Attrs) -> DType:
    """bool, from bool operands."""
    return _require(dtypes[0], lambda d: d.is_bool, "bool")


def attribute_dtype(_: Dtypes, attributes: Attrs) -> DType:
    """What the attribute ``dtype`` says."""
    dtype: DType = attributes["dtype"]
    return dtype


def always(dtype: DType) -> Callable[[Dtypes, Attrs], DType]:
    """One dtype whatever the operands."""
    return lambda _, __: dtype


def operand(k: int) -> Callable[[Dtypes, Attrs], DType]:
    """The k-th operand's."""

    def rule(dtypes: Dtypes, _: Attrs) -> DType:
        found = dtypes[k]
        assert found is not None
        return found

    return rule


def _require(dtype: DType | None, accepts: Callable[[DType], bool], expected: str) -> DType:
    assert dtype is not None
    if not accepts(dtype):
        raise DTypeError(f"the dtype {dtype} does not fit here", facts=[f"expected {expected}"], hint="insert a cast")
    return dtype


# -- costs --------------------------------------------------------------------------------------------------------
def per_input(flops: float) -> Callable[..., Size]:
    """So many operations per element of the first operand."""
    return lambda types, results, attributes: product(types[0].shape) * int(flops)
