"""Guards: relations between symbolic sizes, assumed at compile time and checked at run time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from mithril.graph.dims import Dim, Shape, Size, Symbol, at_most, equal, mod, shape_text, substitute, symbols
from mithril.graph.errors import GuardError, ShapeError


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes, assumed at compile time and checked at run time."""

    left: Size
    relation: str  # "==", "<=" or "divides": left divides right
    right: Size
    reason: str = field(default="", compare=False)

    def holds(self, values: Mapping[str, int]) -> bool:
        left, right = substitute(self.left, values), substitute(self.right, values)
        if not isinstance(left, int) or not isinstance(right, int):
            raise GuardError(f"'{self}' contains sizes without a value")
        if self.relation == "==":
            return left == right
        return left <= right if self.relation == "<=" else left != 0 and right % left == 0

    def check(self, values: Mapping[str, int], origins: Mapping[str, str]) -> None:
        """Raise unless the guard holds; ``origins`` names the input and axis that defined each symbol."""
        if not self.holds(values):
            facts = [
                f"{s.name} = {values[s.name]} ({origins.get(s.name, 'given')})" for s in symbols(self.left, self.right)
            ]
            raise GuardError(f"these sizes must satisfy {self}", facts=[self.reason, *facts])

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"


# Per thread: threads that trace at the same time must not see each other's assumptions.
class _Collecting(threading.local):
    guards: list[Guard] | None = None


_collecting = _Collecting()


@contextmanager
def collect_guards() -> Iterator[list[Guard]]:
    """Collect the guards that shape rules assume in the block."""
    outer, _collecting.guards = _collecting.guards, []
    try:
        yield _collecting.guards
    finally:
        _collecting.guards = outer


def assume(left: Size, relation: str, right: Size, reason: str = "") -> bool:
    """Whether a relation holds; an undecidable one is recorded as a guard and assumed to hold."""
    if relation == "==":
        decided = equal(left, right)
    elif relation == "<=":
        decided = at_most(left, right)
    else:
        rest = mod(right, left)
        # A remainder that stays symbolic may still be 0, so that only a number decides.
        decided = rest == 0 if isinstance(rest, int) else None
    if decided is None:
        if _collecting.guards is None:
            # Nothing would check the assumption at run time here, so that it must not be made.
            raise ShapeError(f"cannot decide whether {left} {relation} {right}", facts=[reason])
        _collecting.guards.append(Guard(left, relation, right, reason))
        return True
    return decided


# -- symbols from actual shapes -----------------------------------------------------------------------------------
def bind(declared: Mapping[str, Shape], actual: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Solve for the symbols that make the declared shapes equal the actual ones; errors name input and axis."""
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    later: list[tuple[str, int, Size, int]] = []
    for name, shape in declared.items():
        actual_shape = actual[name]
        if len(actual_shape) != len(shape):
            raise GuardError(
                f"input '{name}' has rank {len(actual_shape)}, expected {len(shape)}",
                facts=[f"expected {shape_text(shape)}", f"given    {shape_text(actual_shape)}"],
            )
        for axis, (size, n) in enumerate(zip(shape, actual_shape, strict=True)):
            later.append((name, axis, size, n))
    # A size such as L//2 + H determines H only when L is known from another axis, in whatever order
    # the axes come; the loop ends when a round solves nothing.
    progress = True
    while later and progress:
        waiting: list[tuple[str, int, Size, int]] = []
        for name, axis, size, n in later:
            expected = substitute(size, values)
            if isinstance(expected, int):
                if expected != n:
                    sources = [f"{s.name} = {values[s.name]} ({origins[s.name]})" for s in symbols(size)]
                    raise GuardError(
                        f"axis {axis} of input '{name}' is {n}, expected {size if sources else expected}", facts=sources
                    )
            elif (solved := _solve(expected, n)) is not None:
                symbol, value = solved
                if value < symbol.low or (symbol.high is not None and value > symbol.high):
                    limit = f"{symbol.low} to {'any' if symbol.high is None else symbol.high}"
                    raise GuardError(f"axis {axis} of input '{name}' makes {symbol.name} = {value}, outside {limit}")
                values[symbol.name], origins[symbol.name] = value, f"axis {axis} of input '{name}'"
            else:
                waiting.append((name, axis, size, n))
        progress = len(waiting) < len(later)
        later = waiting
    if later:
        name, axis, size, n = later[0]
        raise GuardError(f"axis {axis} of input '{name}' is {n}, which does not determine '{size}'")
    return values


def _solve(size: Dim, n: int) -> tuple[Symbol, int] | None:
    """Return the symbol of a size linear in one symbol and its value for ``size == n``, or None."""
    linear = [(m[0], c) for m, c in size.terms if len(m) == 1]
    # Other equations have no solution, or several, among the integers.
    if len(linear) != 1 or any(len(m) > 1 for m, _ in size.terms):
        return None
    symbol, coefficient = linear[0]
    if not isinstance(symbol, Symbol):
        return None
    constant = next((c for m, c in size.terms if not m), 0)
    value, rest = divmod(n - constant, coefficient)
    return (symbol, value) if rest == 0 else None
