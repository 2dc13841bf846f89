"""Shape and dtype rules that many operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.graph.dims import Shape, Size, product, shape_text
from mithril.graph.dtypes import DType, bool_
from mithril.graph.errors import DTypeError, ShapeError
from mithril.graph.guards import assume

Dtypes = Sequence[DType | None]
Attrs = Mapping[str, Any]


# -- shapes -------------------------------------------------------------------------------------------------------
def broadcast(*shapes: Shape | None, **_: Any) -> Shape:
    """Broadcast shapes by NumPy's rules; sizes that cannot be compared are assumed equal by a guard."""
    present = [s for s in shapes if s is not None]
    rank = max(map(len, present), default=0)
    out: list[Size] = []
    for axis in range(-rank, 0):
        size: Size = 1
        for shape in present:
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
                texts = " and ".join(map(shape_text, present))
                raise ShapeError(f"shapes {texts} do not broadcast: axis {axis} has {size} and {n}")
        out.append(size)
    return tuple(out)


def same_shape(x: Shape, *_: Any, **__: Any) -> Shape:
    """Return the shape of the first operand."""
    return x


def reduced(x: Shape, *, axis: Any, keepdims: bool = False, **_: Any) -> Shape:
    """Return the shape after a reduction over axes."""
    if keepdims:
        return tuple(1 if k in axis else d for k, d in enumerate(x))
    return tuple(d for k, d in enumerate(x) if k not in axis)


def expect_rank(name: str, shape: Shape, *ranks: int) -> None:
    """Raise unless the rank of the shape is one of ``ranks``."""
    if len(shape) not in ranks:
        accepted = " or ".join(map(str, ranks))
        raise ShapeError(f"'{name}' has rank {len(shape)}, expected {accepted}", facts=[f"shape {shape_text(shape)}"])


def expect_equal(reason: str, a: Size, b: Size) -> Size:
    """Return the common size, preferably the static one; raise if the sizes differ."""
    if not assume(a, "==", b, reason):
        raise ShapeError(f"{reason}: {a} and {b} differ")
    return b if type(b) is int else a


def expect_paired(op: str, operands: Mapping[str, Shape], *, scalar: bool = True) -> None:
    """Raise unless all shapes are equal. With ``scalar`` the last operand may also be a scalar.

    Losses and metrics compare element by element: [N, 1] and [N] would silently broadcast to [N, N].
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
            f"'{op}' requires '{first}' and '{name}' of equal shape, got {shape_text(shape)} and {shape_text(other)}",
            facts=["losses and metrics do not broadcast"],
            hint=_pairing(first, shape, name, other),
        )


def _pairing(first: str, shape: Shape, name: str, other: Shape) -> str:
    if len(other) == len(shape) + 1 and other[-1] == 1:
        return f"drop the last axis of '{name}': ops.squeeze({name}, axis=(-1,)), or {name}[:, 0] in the data"
    if len(shape) == len(other) + 1 and shape[-1] == 1:
        return f"drop the last axis of '{first}': ops.squeeze({first}, axis=(-1,)), or use {name}[:, None] in the data"
    return f"pass operands of equal shape, for example ops.broadcast_to({name}, shape=...)"


# -- dtypes -------------------------------------------------------------------------------------------------------
def like(dtypes: Dtypes, _: Attrs) -> DType:
    """Return the dtype of the first operand."""
    assert dtypes[0] is not None
    return dtypes[0]


def floating(dtypes: Dtypes, _: Attrs) -> DType:
    """Return the dtype of the first operand, which must be a float."""
    return _require(dtypes[0], lambda d: d.is_float, "a floating point dtype")


def numeric(dtypes: Dtypes, _: Attrs) -> DType:
    """Return the dtype of the first operand, which must not be bool."""
    return _require(dtypes[0], lambda d: not d.is_bool, "a number, not bool")


def integral(dtypes: Dtypes, _: Attrs) -> DType:
    """Return the dtype of the first operand, which must be an integer or bool."""
    return _require(dtypes[0], lambda d: not d.is_float, "an integer or bool")


def integer(dtypes: Dtypes, _: Attrs) -> DType:
    """Return the dtype of the first operand, which must be an integer."""
    return _require(dtypes[0], lambda d: d.is_integer, "an integer")


def boolean(dtypes: Dtypes, _: Attrs) -> DType:
    """Return bool."""
    return bool_


def logical(dtypes: Dtypes, _: Attrs) -> DType:
    """Return bool; the first operand must be bool."""
    return _require(dtypes[0], lambda d: d.is_bool, "bool")


def attribute_dtype(_: Dtypes, attributes: Attrs) -> DType:
    """Return the attribute ``dtype``."""
    dtype: DType = attributes["dtype"]
    return dtype


def always(dtype: DType) -> Callable[[Dtypes, Attrs], DType]:
    """Return a rule with a constant dtype."""
    return lambda _, __: dtype


def operand(k: int) -> Callable[[Dtypes, Attrs], DType]:
    """Return a rule that takes the dtype of operand k."""

    def rule(dtypes: Dtypes, _: Attrs) -> DType:
        dtype = dtypes[k]
        assert dtype is not None
        return dtype

    return rule


def _require(dtype: DType | None, accepts: Callable[[DType], bool], expected: str) -> DType:
    assert dtype is not None
    if not accepts(dtype):
        raise DTypeError(f"the dtype {dtype} is not accepted", facts=[f"expected {expected}"], hint="insert a cast")
    return dtype


# -- costs --------------------------------------------------------------------------------------------------------
def per_input(flops: float) -> Callable[..., Size]:
    """Return a cost rule of ``flops`` operations per element of the first operand."""
    return lambda types, results, attributes: product(types[0].shape) * int(flops)
