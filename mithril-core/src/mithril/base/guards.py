"""Guards: relations between sizes that were assumed while compiling and are checked when the sizes are known."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from mithril.base.dims import Dim, Shape, Size, Symbol, at_most, equal, mod, substitute, symbols
from mithril.base.errors import GuardError, ShapeError


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes that was assumed while compiling and is checked when the sizes are known."""

    left: Size
    relation: str  # "==", "<=" or "divides": left divides right
    right: Size
    why: str = field(default="", compare=False)

    def holds(self, values: Mapping[str, int]) -> bool:
        left, right = substitute(self.left, values), substitute(self.right, values)
        if not isinstance(left, int) or not isinstance(right, int):
            raise GuardError(f"the sizes in '{self}' are not all known")
        if self.relation == "==":
            return left == right
        return left <= right if self.relation == "<=" else left != 0 and right % left == 0

    def check(self, values: Mapping[str, int], where: Mapping[str, str]) -> None:
        """Raise unless the guard holds; ``where`` names the input and axis that each symbol was read from."""
        if not self.holds(values):
            facts = [
                f"{s.name} = {values[s.name]} ({where.get(s.name, 'given')})" for s in symbols(self.left, self.right)
            ]
            raise GuardError(f"these sizes must satisfy {self}", facts=[self.why, *facts])

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"


class _Collecting(threading.local):
    guards: list[Guard] | None = None


_collecting = _Collecting()


@contextmanager
def collect_guards() -> Iterator[list[Guard]]:
    """Guards assumed by the shape rules that run inside."""
    outer, _collecting.guards = _collecting.guards, []
    try:
        yield _collecting.guards
    finally:
        _collecting.guards = outer


def assume(left: Size, relation: str, right: Size, why: str = "") -> bool:
    """Whether a relation holds; one that cannot be decided is recorded as a guard and taken for true."""
    if relation == "==":
        known = equal(left, right)
    elif relation == "<=":
        known = at_most(left, right)
    else:
        rest = mod(right, left)
        known = rest == 0 if isinstance(rest, int) else None
    if known is None:
        if _collecting.guards is None:
            raise ShapeError(f"cannot decide whether {left} {relation} {right}", facts=[why])
        _collecting.guards.append(Guard(left, relation, right, why))
        return True
    return known


# -- reading symbols from real shapes -----------------------------------------------------------------------------
def bind(declared: Mapping[str, Shape], actual: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The symbols' values that make the declared shapes equal the actual ones, or an error naming input and axis."""
    values: dict[str, int] = {}
    where: dict[str, str] = {}
    later: list[tuple[str, int, Size, int]] = []
    for name, shape in declared.items():
        given = actual[name]
        if len(given) != len(shape):
            raise GuardError(
                f"input '{name}' has rank {len(given)}, expected {len(shape)}",
                facts=[f"expected {_shape_text(shape)}", f"given    {_shape_text(given)}"],
            )
        for axis, (size, n) in enumerate(zip(shape, given, strict=True)):
            later.append((name, axis, size, n))
    progress = True
    while later and progress:
        waiting: list[tuple[str, int, Size, int]] = []
        for name, axis, size, n in later:
            known = substitute(size, values)
            if isinstance(known, int):
                if known != n:
                    sources = [f"{s.name} = {values[s.name]} ({where[s.name]})" for s in symbols(size)]
                    raise GuardError(
                        f"axis {axis} of input '{name}' is {n}, expected {size if sources else known}", facts=sources
                    )
            elif (solved := _solve(known, n)) is not None:
                symbol, value = solved
                if value < symbol.low or (symbol.high is not None and value > symbol.high):
                    limit = f"{symbol.low} to {'any' if symbol.high is None else symbol.high}"
                    raise GuardError(f"axis {axis} of input '{name}' makes {symbol.name} = {value}, outside {limit}")
                values[symbol.name], where[symbol.name] = value, f"axis {axis} of input '{name}'"
            else:
                waiting.append((name, axis, size, n))
        progress = len(waiting) < len(later)
        later = waiting
    if later:
        name, axis, size, n = later[0]
        raise GuardError(f"axis {axis} of input '{name}' is {n}, which does not determine '{size}'")
    return values


def _solve(size: Dim, n: int) -> tuple[Symbol, int] | None:
    """The one symbol of a linear size that equals n."""
    linear = [(m[0], c) for m, c in size.terms if len(m) == 1]
    if len(linear) != 1 or any(len(m) > 1 for m, _ in size.terms):
        return None
    symbol, coefficient = linear[0]
    if not isinstance(symbol, Symbol):
        return None
    constant = next((c for m, c in size.terms if not m), 0)
    value, rest = divmod(n - constant, coefficient)
    return (symbol, value) if rest == 0 else None


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
