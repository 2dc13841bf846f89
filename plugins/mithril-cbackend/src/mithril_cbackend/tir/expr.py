"""Expressions of TIR with Python's operators: ``worker * inner + c``, ``(low <= i) & (i < high)``.

An operand that is a Python number becomes a constant of the other operand's dtype. Positions (int32) are folded with
``+ 0``, ``* 1`` and the like, because readable code and fast passes need small expressions. Nothing else is folded:
TVM's own operators take ``x * 0.0`` for zero although x may be nan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, overload

import numpy as np

from mithril.graph import Dim, ShapeError, Symbol
from mithril_cbackend.tir.tvm_api import PointerType, nodes, tirx, tvm

POSITION = "int32"


class Expr:
    """A scalar expression; comparisons return bools, ``& | ^ ~`` work on bools and on the bits of integers.

    ``==`` compares identity, as dictionaries need it; ``equal`` and ``not_equal`` build comparisons.
    """

    __array_ufunc__ = None  # NumPy's integers leave operators to this class

    def __init__(self, node: Any) -> None:
        self.node = node

    @cached_property
    def dtype(self) -> str:
        return dtype_of(self.node)

    def __add__(self, other: Any) -> Expr:
        return self if self._is_neutral(other, 0) else self._build(tirx.Add, other)

    def __radd__(self, other: Any) -> Expr:
        return self if self._is_neutral(other, 0) else self._build_reversed(tirx.Add, other)

    def __sub__(self, other: Any) -> Expr:
        return self if self._is_neutral(other, 0) else self._build(tirx.Sub, other)

    def __rsub__(self, other: Any) -> Expr:
        return self._build_reversed(tirx.Sub, other)

    @overload
    def __mul__(self, other: int) -> Any: ...

    @overload
    def __mul__(self, other: Expr | float) -> Expr: ...

    def __mul__(self, other: Any) -> Any:
        if self._is_neutral(other, 0):
            return 0
        return self if self._is_neutral(other, 1) else self._build(tirx.Mul, other)

    @overload
    def __rmul__(self, other: int) -> Any: ...

    @overload
    def __rmul__(self, other: Expr | float) -> Expr: ...

    def __rmul__(self, other: Any) -> Any:
        if self._is_neutral(other, 0):
            return 0
        return self if self._is_neutral(other, 1) else self._build_reversed(tirx.Mul, other)

    def __floordiv__(self, other: Any) -> Expr:
        """Divide towards zero, which for positions, never negative, is downwards."""
        return self if self._is_neutral(other, 1) else self._build(tirx.Div, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return self._build_reversed(tirx.Div, other)

    def __truediv__(self, other: Any) -> Expr:
        return self._build(tirx.Div, other)

    def __mod__(self, other: Any) -> Any:
        """Return the remainder of the division towards zero."""
        return 0 if self._is_neutral(other, 1) else self._build(tirx.Mod, other)

    def __lt__(self, other: Any) -> Expr:
        return self._build(tirx.LT, other)

    def __le__(self, other: Any) -> Expr:
        return self._build(tirx.LE, other)

    def __gt__(self, other: Any) -> Expr:
        return self._build(tirx.GT, other)

    def __ge__(self, other: Any) -> Expr:
        return self._build(tirx.GE, other)

    def __and__(self, other: Expr) -> Expr:
        return self._build(tirx.And if self.dtype == "bool" else tirx.bitwise_and, other)

    def __or__(self, other: Expr) -> Expr:
        return self._build(tirx.Or if self.dtype == "bool" else tirx.bitwise_or, other)

    def __xor__(self, other: Expr) -> Expr:
        if self.dtype == "bool":
            return not_equal(cast(self, "uint8"), cast(other, "uint8"))
        return self._build(tirx.bitwise_xor, other)

    def __lshift__(self, other: Any) -> Expr:
        return self._build(tirx.shift_left, other)

    def __rshift__(self, other: Any) -> Expr:
        return self._build(tirx.shift_right, other)

    def __invert__(self) -> Expr:
        return Expr(tirx.Not(self.node) if self.dtype == "bool" else tirx.bitwise_not(self.node))

    def _is_neutral(self, other: Any, number: int) -> bool:
        return isinstance(other, int) and other == number and self.dtype == POSITION

    def _operand(self, other: Any) -> Any:
        return other.node if isinstance(other, Expr) else const(other, self.dtype).node

    def _build(self, kind: Callable[[Any, Any], Any], other: Any) -> Expr:
        return Expr(kind(self.node, self._operand(other)))

    def _build_reversed(self, kind: Callable[[Any, Any], Any], other: Any) -> Expr:
        return Expr(kind(self._operand(other), self.node))


# -- values -------------------------------------------------------------------------------------------------------
def const(value: Any, dtype: str) -> Expr:
    if isinstance(value, Dim):
        return cast(_size(value), dtype)
    if dtype == "bool":
        return Expr(tirx.IntImm("bool", int(bool(value))))
    if dtype.startswith("float"):
        return Expr(tirx.FloatImm(dtype, float(value)))
    number = int(value)
    return Expr(tirx.const(number, dtype) if dtype == "uint64" else tirx.IntImm(dtype, number))  # IntImm is signed


def index(value: Any) -> Expr:
    """Return a position as an expression; symbolic sizes are arguments of the function."""
    if isinstance(value, Dim):
        return _size(value)
    return value if isinstance(value, Expr) else Expr(tirx.IntImm(POSITION, int(value)))


@cache
def size(name: str) -> Expr:
    """Return the size of a symbol, an argument of the functions that depend on it."""
    return Expr(tirx.Var(f"size_{name}", POSITION))


def _size(dim: Dim) -> Expr:
    """Return a polynomial of symbols as an expression."""
    total: Any = 0
    for factors, coefficient in dim.terms:
        term: Any = coefficient
        for factor in factors:
            term = (size(factor.name) if isinstance(factor, Symbol) else _quotient(factor)) * term
        total = term if isinstance(total, int) else total + term
    return index(total)


def _quotient(call: Any) -> Expr:
    """Return a quotient, rounded down, or a remainder of sizes; those of differences may be negative."""
    dividend, divisor = call.args
    if call.function not in ("floordiv", "mod"):
        raise ShapeError(f"the size '{call}' is not a quotient")
    quotient, rest = index(dividend) // divisor, index(index(dividend) % divisor)  # rounded towards zero
    is_difference = not isinstance(dividend, Dim) or any(c < 0 for _, c in dividend.terms)
    if call.function == "floordiv":
        return select(rest < 0, quotient - 1, quotient) if is_difference else quotient
    return select(rest < 0, rest + divisor, rest) if is_difference else rest


def equal(a: Expr, b: Any) -> Expr:
    return a._build(tirx.EQ, b)


def not_equal(a: Expr, b: Any) -> Expr:
    return a._build(tirx.NE, b)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "rem": operator.mod,
    "eq": equal,
    "ne": not_equal,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def binary(name: str, a: Expr, b: Expr) -> Expr:
    """Apply an operator by name: "add", "lt", "and", ..."""
    result: Expr = _BINARY[name](a, b)
    return result


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    """Select a or b; both are evaluated."""
    return Expr(tirx.Select(condition.node, a.node, b.node))


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    """Select a or b; only the selected operand is evaluated, so that the other may read out of bounds."""
    return Expr(tirx.if_then_else(condition.node, a.node, b.node))


def cast(x: Expr, dtype: str) -> Expr:
    if x.dtype == dtype:
        return x
    if x.dtype == "bool":  # TVM's analysis fails on casts of bool vectors
        return select(x, const(1, dtype), const(0, dtype))
    return Expr(tirx.Cast(dtype, x.node))


def bits(x: Expr, dtype: str) -> Expr:
    """Reinterpret the bits of `x` as another dtype."""
    return Expr(tirx.reinterpret(dtype, x.node))


def isnan(x: Expr) -> Expr:
    """Return not (x <= infinity), since TVM folds ``x != x`` to false."""
    return ~(x <= float("inf"))


def intrinsic(name: str, x: Expr) -> Expr:
    """Apply floor, ceil, trunc, nearbyint, sqrt or abs: single instructions."""
    return Expr(getattr(tirx, name)(x.node))


def any_above(x: Expr, limit: float, lanes: int) -> Expr:
    """Whether a lane of a vector, which a local array of a vector loop holds, is above a limit; none is negative."""
    vector = x.node.source[tirx.Ramp(index(0).node, index(1).node, lanes)]
    # Positive floats are ordered as their bits; a sum of signs is one instruction, a maximum one per lane.
    integer, number = ("int32", np.float32) if x.dtype == "float32" else ("int64", np.float64)
    bits_of_limit = int(np.array(limit, number).view(integer))
    distance = tirx.Broadcast(const(bits_of_limit, integer).node, lanes) - tirx.reinterpret(
        f"{integer}x{lanes}", vector
    )
    name = f"llvm.vector.reduce.or.v{lanes}i{integer[3:]}"
    return Expr(tirx.call_llvm_pure_intrin(integer, name, distance)) < 0


def libm(name: str, *xs: Expr) -> Expr:
    """Call a function of the C library in the operands' precision."""
    dtype = xs[0].dtype
    return Expr(tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), *[x.node for x in xs]))


def is_widened(x: Expr) -> bool:
    """Whether an integer is a widened unsigned one, and thus not negative."""
    return isinstance(x.node, tirx.Cast) and dtype_of(x.node.value).startswith("uint")


def is_affine(position: Expr) -> bool:
    """Whether a position consists of sums, differences and products of variables and numbers."""
    pending = [position.node]
    while pending:
        x = pending.pop()
        if isinstance(x, (tirx.Add, tirx.Sub, tirx.Mul)):
            pending += [x.a, x.b]
        elif not isinstance(x, (tirx.Var, tirx.IntImm)):
            return False
    return True


# -- memory -------------------------------------------------------------------------------------------------------
Buffer = Any  # a buffer of TVM


def load(buffer: Buffer, position: Any) -> Expr:
    return Expr(buffer[index(position).node])


def vector(start: Any, lanes: int) -> Expr:
    """Return the positions of a vector that begins at ``start``."""
    first = index(start)
    return first if lanes == 1 else Expr(tirx.Ramp(first.node, index(1).node, lanes))


def shuffle(a: Expr, b: Expr, lanes: Sequence[int]) -> Expr:
    """Return the elements at these lanes of the concatenation of two vectors."""
    return Expr(tirx.Shuffle([a.node, b.node], [index(k).node for k in lanes]))


def number(name: str) -> Expr:
    """Return a 64-bit integer parameter."""
    return Expr(tirx.Var(name, "int64"))


def int_to_pointer(number: Expr) -> Expr:
    return Expr(tirx.reinterpret("handle", number.node))


def pointer_to_int(pointer: Expr) -> Expr:
    """Return the operand of ``int_to_pointer``."""
    return Expr(pointer.node.args[0])


def address_of(buffer: Buffer, position: Any) -> Expr:
    """Return the address of an element."""
    return Expr(tirx.call_intrin("handle", "tirx.address_of", load(buffer, position).node))


def address(table: Buffer, slot: int, offset: Any = 0) -> Expr:
    """Return the pointer in a slot of the address table, moved by ``offset`` bytes: a number, or int64 code."""
    base = load(table, slot)
    return int_to_pointer(base if isinstance(offset, int) and offset == 0 else base + offset)


# -- inspection of TVM's nodes, for the C printer -----------------------------------------------------------------
def dtype_of(node: Any) -> str:
    return str(node.ty.dtype)


def kind_of(node: Any) -> str:
    """Return the dtype of an expression, ``handle`` for pointers."""
    return "handle" if isinstance(node.ty, PointerType) else dtype_of(node)


def pointed(node: Any) -> str:
    """Return the dtype of the elements that a pointer points at."""
    return str(node.ty.element_type.dtype)


def mentions(node: Any, var: Any) -> bool:
    """Whether an expression reads a variable."""
    return any(isinstance(y, tirx.Var) and y.same_as(var) for y in _leaves(node))


def reads(x: Expr) -> Iterator[tuple[str, bool]]:
    """Yield the names of the variables and buffers that an expression reads, and whether each is a variable."""
    for y in _leaves(x.node):
        yield (y.name, True) if isinstance(y, tirx.Var) else (y.source.name, False)


def _leaves(node: Any) -> Iterator[Any]:
    """Yield the variables and loads of an expression."""
    pending = [node]
    while pending:
        y = pending.pop()
        if isinstance(y, tirx.Var):
            yield y
        elif isinstance(y, tvm.ir.TensorLoad):
            yield y
            pending += list(y.indices)
        elif isinstance(y, nodes.Call):
            pending += list(y.args)
        else:
            pending += [
                getattr(y, k) for k in ("a", "b", "value", "condition", "true_value", "false_value") if hasattr(y, k)
            ]
            pending = [z for z in pending if not isinstance(z, (int, float, str))]
