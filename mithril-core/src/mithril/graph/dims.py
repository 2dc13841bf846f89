"""Symbolic dimensions: integers, named symbols with bounds, and polynomials of them in canonical form.

``str(dim)`` is a Python expression, used in generated code and in graph text.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from mithril.graph.dtypes import ALL as ALL_DTYPES, DType
from mithril.graph.errors import ParseError, ShapeError
from mithril.graph.limits import check_limit, parsed_expression

# A size: an integer, or a symbolic size that is known at run time.
Size = Union[int, "Dim"]
RESERVED = {d.short for d in ALL_DTYPES} | {"True", "False", "None", "inf", "nan", "max", "min", "none"}
# A shape: a tuple of integers and symbolic sizes.
Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named unknown size. Symbols of equal name are the same size; the bounds are assumptions about it."""

    name: str
    low: int = field(default=0, compare=False)
    high: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """A ``floordiv``, ``mod``, ``max`` or ``min`` of sizes that is not a polynomial."""

    function: str
    args: tuple[Size, ...]

    def __str__(self) -> str:
        if self.function in ("max", "min"):
            return f"{self.function}({', '.join(map(str, self.args))})"
        sign = "//" if self.function == "floordiv" else "%"
        left, right = (_parenthesized(a) for a in self.args)
        return f"{left}{sign}{right}"


Atom = Symbol | Call
Monomial = tuple[Atom, ...]  # sorted by text, repeated for powers; () is the constant term


class Dim:
    """A symbolic size: ``Dim("B")``, ``Dim("B", 1, 32)``, or arithmetic on those."""

    __slots__ = ("_hash", "_text", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, name: str = "", low: int = 0, high: int | None = None, **unknown: Any) -> None:
        if unknown or not isinstance(name, str) or not isinstance(low, int) or not isinstance(high, int | None):
            values = [f"{x!r:.60}" for x in (name, low, high)] + [f"{n}={x!r:.60}" for n, x in unknown.items()]
            raise ShapeError(f"a dimension cannot be {', '.join(values)}", hint='Dim("B"), or Dim("B", 1, 32)')
        if not name.isidentifier() or name in RESERVED:
            raise ShapeError(
                f"'{name}' cannot name a dimension", hint="use letters, digits and '_', and no name of a dtype"
            )
        if low < 0 or (high is not None and high < low):
            raise ShapeError(f"dimension '{name}' has invalid bounds", facts=[f"low={low}, high={high}"])
        self._set((((Symbol(name, low, high),), 1),))

    def _set(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        # Hashed once: sizes are keys of every table of types, and the text of a size is written only
        # where it is read.
        self._hash = hash(terms)
        self._text = ""

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (str(self), *(f"{s.name}:{s.low}:{s.high}" for s in symbols(self)))

    # -- arithmetic -------------------------------------------------------------------------------------------
    def __add__(self, other: Size) -> Size:
        return _sum([(self, 1), (other, 1)]) if isinstance(other, (int, Dim)) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return _sum([(self, 1), (other, -1)]) if isinstance(other, (int, Dim)) else NotImplemented

    def __rsub__(self, other: Size) -> Size:
        return _sum([(other, 1), (self, -1)])

    def __neg__(self) -> Size:
        return _sum([(self, -1)])

    def __mul__(self, other: Size) -> Size:
        if not isinstance(other, (int, Dim)):
            return NotImplemented
        left_terms, right_terms, out = _terms(self), _terms(other), dict[Monomial, int]()
        if len(left_terms) > 1 < len(right_terms):  # a product of sums can have as many terms
            check_limit("terms", len(left_terms) * len(right_terms), "a product of sizes has too many terms")
        factors = len(left_terms[0][0]) + len(right_terms[0][0])
        check_limit("factors", factors, "a product of sizes has too many factors")
        for left, a in left_terms:
            for right, b in right_terms:
                # Sorted factors make equal products equal keys: a size has one canonical form, so ``==``
                # need not simplify.
                key = tuple(sorted(left + right, key=str))
                out[key] = out.get(key, 0) + a * b
        return _canonical(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return mod(self, other)

    def __rmod__(self, other: Size) -> Size:
        return mod(other, self)

    # -- identity ---------------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dim) and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self._text:
            self._text = _text(self.terms)
        return self._text

    def __repr__(self) -> str:
        return f"Dim({self})"

    def __bool__(self) -> bool:
        # ``if n:`` of a size that cannot be 0 is decided for all values; anything else would select a
        # branch for one of them.
        low, _ = bounds(self)
        if low is not None and low > 0:
            return True
        raise ShapeError(f"the size '{self}' is symbolic, so a Python condition cannot depend on it")

    def __int__(self) -> int:
        raise ShapeError(
            f"the size '{self}' is symbolic, expected an int",
            hint="pass an int for it in shapes=..., or write the model without using it as an int",
        )

    __index__ = __int__

    def __reduce__(self) -> tuple[object, ...]:
        return parse_dim, (str(self), {s.name: (s.low, s.high) for s in symbols(self)})

    # -- facts ------------------------------------------------------------------------------------------------
    @property
    def symbol(self) -> Symbol | None:
        """The symbol, if this dim consists of only one."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            atom = self.terms[0][0][0]
            return atom if isinstance(atom, Symbol) else None
        return None


def _make(terms: tuple[tuple[Monomial, int], ...]) -> Dim:
    dim = Dim.__new__(Dim)
    dim._set(terms)
    return dim


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    return size.terms if isinstance(size, Dim) else (((), int(size)),)


def _canonical(coefficients: Mapping[Monomial, int]) -> Size:
    terms = [(m, c) for m, c in coefficients.items() if c]
    if not terms:
        return 0
    if len(terms) == 1 and terms[0][0] == ():
        return terms[0][1]
    check_limit("terms", len(terms), "a size has too many terms")
    terms.sort(key=lambda term: (-len(term[0]), [str(a) for a in term[0]]))
    return _make(tuple(terms))


def _sum(parts: Iterable[tuple[Size, int]]) -> Size:
    out: dict[Monomial, int] = {}
    for size, factor in parts:
        for monomial, coefficient in _terms(size):
            out[monomial] = out.get(monomial, 0) + factor * coefficient
    return _canonical(out)


def _text(terms: tuple[tuple[Monomial, int], ...]) -> str:
    out = ""
    for monomial, coefficient in terms:
        is_single = len(monomial) == 1 and coefficient == 1
        factors = [str(a) if is_single else _factor(a) for a in monomial]
        size = abs(coefficient)
        if size != 1 or not factors:
            factors.insert(0, str(size))
        sign = "-" if coefficient < 0 else "+" if out else ""
        out += sign + "*".join(factors)
    return out


def _factor(atom: Atom) -> str:
    text = str(atom)
    return f"({text})" if isinstance(atom, Call) and atom.function in ("floordiv", "mod") else text


def _parenthesized(size: Size) -> str:
    text = str(size)
    return text if isinstance(size, int) or (isinstance(size, Dim) and size.symbol) else f"({text})"


def _call(function: str, *args: Size) -> Dim:
    return _make((((Call(function, args),), 1),))


def floordiv(a: Size, b: Size) -> Size:
    """Return ``a // b``, simplified if b divides terms of a, otherwise as a ``Call``."""
    if isinstance(b, int):
        if b == 0:
            raise ShapeError(f"division of the size '{a}' by zero")
        if isinstance(a, int):
            return a // b
        # Terms that b divides leave the division, so that (2*L + 1)//2 is L.
        quotient_terms = {m: c // b for m, c in a.terms if c % b == 0}
        rest = {m: c for m, c in a.terms if c % b}
        constant = rest.pop((), 0)  # k*b + r splits into k outside and r inside of the division
        quotient_terms[()] = quotient_terms.get((), 0) + constant // b
        if constant % b:
            rest[()] = constant % b
        if not any(rest) and rest.get((), 0) < b:
            return _canonical(quotient_terms)
        return _sum([(_canonical(quotient_terms), 1), (_call("floordiv", _canonical(rest), b), 1)])
    if a == b:
        return 1
    if a == 0:
        return 0
    quotient = _divide(a, b)
    return quotient if quotient is not None else _call("floordiv", a, b)


def _divide(a: Size, b: Dim) -> Size | None:
    """Return ``a / b`` if b is one term that divides every term of a, else None."""
    if len(b.terms) != 1:
        return None
    divisor, coefficient = b.terms[0]
    out: dict[Monomial, int] = {}
    for monomial, c in _terms(a):
        left = list(monomial)
        for atom in divisor:
            if atom not in left:
                return None
            left.remove(atom)
        if c % coefficient:
            return None
        out[tuple(left)] = c // coefficient
    return _canonical(out)


def mod(a: Size, b: Size) -> Size:
    """Return ``a % b`` with the sign of b."""
    if isinstance(b, int) and b == 0:
        raise ShapeError(f"division of the size '{a}' by zero")
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if isinstance(b, int):
        # Coefficients modulo b: -1*L % 2 and L % 2 are the same number, and the text of the size stays
        # short.
        rest = _canonical({m: c % b for m, c in _terms(a)})
        return rest % b if isinstance(rest, int) else _call("mod", rest, b)
    if a == b or a == 0 or _divide(a, b) is not None:
        return 0
    return _call("mod", a, b)


def maximum(a: Size, b: Size) -> Size:
    """Return the larger size, which is symbolic if that depends on the symbols."""
    return _extreme("max", a, b)


def minimum(a: Size, b: Size) -> Size:
    """Return the smaller size, which is symbolic if that depends on the symbols."""
    return _extreme("min", a, b)


def _extreme(function: str, a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b) if function == "max" else min(a, b)
    # Bounds decide where they can; else the operands are sorted, so that max(a, b) and max(b, a) are
    # one size.
    if at_most(a, b):
        small, large = a, b
    elif at_most(b, a):
        small, large = b, a
    else:
        return _call(function, *sorted((a, b), key=str))
    return large if function == "max" else small


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes, which is symbolic if one of them is."""
    out: Size = 1
    for size in sizes:
        out = out * size
    return out


def is_static(shape: Iterable[Size]) -> bool:
    """Whether all sizes are integers."""
    return all(type(d) is int for d in shape)


# -- bounds -------------------------------------------------------------------------------------------------------
def bounds(size: Size) -> tuple[int | None, int | None]:
    """Return a closed interval that contains the size; None means unbounded."""
    if isinstance(size, int):
        return size, size
    low: int | None = 0
    high: int | None = 0
    for monomial, coefficient in size.terms:
        a, b = _monomial_bounds(monomial)
        if coefficient < 0:
            a, b = b, a
        low = None if low is None or a is None else low + coefficient * a
        high = None if high is None or b is None else high + coefficient * b
    return low, high


def _monomial_bounds(monomial: Monomial) -> tuple[int | None, int | None]:
    low = 1
    high: int | None = 1
    for atom in monomial:
        a, b = (atom.low, atom.high) if isinstance(atom, Symbol) else _call_bounds(atom)
        if a is None or a < 0:
            return None, None  # shapes never contain products of negative factors
        low *= a
        high = None if high is None or b is None else high * b
    return low, high


def _call_bounds(call: Call) -> tuple[int | None, int | None]:
    (a_low, a_high), (b_low, b_high) = (bounds(arg) for arg in call.args)
    if call.function == "floordiv":
        if b_low is None or b_low <= 0:
            return (0, a_high) if a_low is not None and a_low >= 0 else (None, None)
        # The least quotient has the largest divisor for positive sizes; a division moves a negative one
        # towards 0.
        low = None if a_low is None else a_low // (b_high or b_low) if a_low >= 0 and b_high else min(a_low, 0)
        return low, None if a_high is None else max(a_high // b_low, 0)
    if call.function == "mod":
        return 0, None if b_high is None else b_high - 1
    pick = max if call.function == "max" else min
    known_low = [v for v in (a_low, b_low) if v is not None]
    known_high = [v for v in (a_high, b_high) if v is not None]
    # One known lower bound is enough for max, one known upper bound for min.
    either = call.function == "max"
    low = pick(known_low) if len(known_low) == 2 or (either and known_low) else None
    high = pick(known_high) if len(known_high) == 2 or (not either and known_high) else None
    return low, high


def equal(a: Size, b: Size) -> bool | None:
    """Return whether the sizes are equal, or None if that depends on the symbols."""
    if a == b:
        return True
    # The difference cancels equal terms before its bounds are known: L + 1 is not L, whatever L is.
    low, high = bounds(_sum([(a, 1), (b, -1)]))
    return False if (low is not None and low > 0) or (high is not None and high < 0) else None


def at_most(a: Size, b: Size) -> bool | None:
    """Return whether ``a <= b``, or None if that depends on the symbols."""
    low, high = bounds(_sum([(b, 1), (a, -1)]))
    if low is not None and low >= 0:
        return True
    return False if high is not None and high < 0 else None


def symbols(*sizes: Size) -> list[Symbol]:
    """Return the symbols of the sizes, each once, in order of appearance."""
    by_name: dict[str, Symbol] = {}
    stack: list[Size] = list(reversed(sizes))
    while stack:
        size = stack.pop()
        if isinstance(size, Dim):
            for monomial, _ in size.terms:
                for atom in monomial:
                    if isinstance(atom, Symbol):
                        by_name.setdefault(atom.name, atom)
                    else:
                        stack.extend(atom.args)
    return list(by_name.values())


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """Substitute values for symbols by name; symbols without a value are unchanged."""
    if isinstance(size, int):
        return size
    total: Size = 0
    for monomial, coefficient in size.terms:
        term: Size = coefficient
        for atom in monomial:
            if isinstance(atom, Symbol):
                term = term * values.get(atom.name, _make((((atom,), 1),)))
            else:
                # Functions are applied again rather than copied, because they simplify once their operands
                # are known.
                args = [substitute(arg, values) for arg in atom.args]
                term = term * FUNCTIONS[atom.function](*args)
        total = total + term
    return total


FUNCTIONS = {"floordiv": floordiv, "mod": mod, "max": maximum, "min": minimum}


def parse_dim(text: str, limits: Mapping[str, tuple[int, int | None]] | None = None) -> Size:
    """Parse ``str(dim)``; ``limits`` provides the bounds of symbols."""
    try:
        return dim_of_node(parsed_expression(text.strip(), f"the size '{text[:60]}'"), limits or {})
    except ParseError as error:
        raise error.with_hint(FORM) from None


FORM = "sizes look like 32, B, B*H or (L-3)//2+1"


def dim_of_node(node: ast.expr, limits: Mapping[str, tuple[int, int | None]]) -> Size:
    try:
        return _dim(node, limits)
    except RecursionError:
        raise ParseError("a size is nested too deeply", hint=FORM) from None


def _dim(node: ast.expr, limits: Mapping[str, tuple[int, int | None]]) -> Size:
    match node:
        case ast.Constant(value=int(value)):
            return int(value)
        case ast.Name(id=name):
            return Dim(name, *limits.get(name, ()))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_dim(inner, limits)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_dim(left, limits), _dim(right, limits))
        case ast.Call(func=ast.Name(id=("max" | "min") as name), args=[first, second], keywords=[]):
            return FUNCTIONS[name](_dim(first, limits), _dim(second, limits))
    raise ParseError(f"'{ast.unparse(node)}' is not a size", hint=FORM)


OPERATORS: Mapping[type[ast.operator], Callable[[Size, Size], Size]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}


def numel(shape: Shape) -> Size:
    """Return the number of elements."""
    return math.prod(shape) if is_static(shape) else product(shape)


INTEGERS = {int}  # without bool, its subclass


def shape_text(shape: Shape) -> str:
    """Format a shape for messages: ``[N, 3]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


class TensorType:
    """The static type of a value: element type and shape (ints and dims)."""

    __slots__ = ("_hash", "dtype", "is_static", "shape")

    def __init__(self, dtype: DType, shape: Shape) -> None:
        self.dtype = dtype
        self.shape = shape
        self._hash = hash((id(dtype), shape))
        self.is_static = {*map(type, shape)} <= INTEGERS

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.dtype, self.shape)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, TensorType) and self.dtype is other.dtype and self.shape == other.shape

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.dtype.short}{shape_text(self.shape)}"

    def __repr__(self) -> str:
        return f"TensorType({self})"
