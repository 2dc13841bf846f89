"""The notation of axes in the declaration of an operation; ``mithril.graph`` resolves it for each call.

``"operands -> results | clauses"``: terms are separated by commas, axes by spaces. An axis is ``m``, ``m?`` (present if
the rank allows it), ``*h`` (any number; ``*b:batch_dims`` takes the number from an attribute, ``*t:d`` from the size of
axis ``d``), ``...`` (leading broadcast axes), ``t@axis`` (at the position that an attribute holds), ``(g:groups c)`` (a
product of factors, outermost first), ``*x~axis`` (without those that an attribute names) or ``x[perm]`` (permuted). A
clause is factors and their role, such as ``k sum``, ``x[axis] whole``, ``t index indices``, ``k sum into x``;
``shape=result`` names the attribute that holds the result's shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from mithril.graph.errors import OperationError

REDUCING = ("sum", "mean", "max", "min", "prod", "any", "all")
ROLES = (*REDUCING, "whole", "window", "index", "count", "mixed")

_TOKEN = re.compile(r"\([^)]*\)|\S+")
_NAME = r"[A-Za-z_]\w*"
_ATOM = re.compile(rf"(?P<star>\*)?(?P<name>{_NAME})(?P<optional>\?)?(?::(?P<count>{_NAME}))?"
                   rf"(?:@(?P<at>{_NAME}))?(?:~(?P<without>{_NAME}))?(?:\[(?P<order>{_NAME})\])?")  # fmt: skip
_SELECTOR = re.compile(rf"(?P<name>{_NAME}|\.\.\.)(?:\[(?P<by>{_NAME}|~)\])?")


@dataclass(frozen=True, slots=True)
class Atom:
    """One axis of a term, or the axes of a star or an ellipsis."""

    kind: str  # "axis" "optional" "star" "order" "dots" "product"
    names: tuple[str, ...] = ()
    count: str = ""  # a star's length: an attribute or a factor; of a product the attribute that is its first size
    at: str = ""  # the attribute that holds the position of the axis
    without: str = ""  # the attribute that names the axes of a star to leave out
    order: str = ""  # the attribute that holds the permutation of a star's axes


@dataclass(frozen=True, slots=True)
class Clause:
    selectors: tuple[tuple[str, str], ...]  # (name, attribute or "~" or "")
    kind: str
    operand: str = ""


@dataclass(frozen=True)
class Declaration:
    """A parsed declaration of axes."""

    text: str
    operands: tuple[tuple[Atom, ...], ...]
    results: tuple[tuple[Atom, ...], ...]
    clauses: tuple[Clause, ...]
    shape_attribute: str = ""

    @property
    def attributes(self) -> set[str]:
        """The names that must be attributes of the operation or factors."""
        atoms = [a for term in (*self.operands, *self.results) for a in term]
        names = {n for a in atoms for n in (a.count, a.at, a.without, a.order)}
        names |= {by for clause in self.clauses for _, by in clause.selectors if by != "~"} | {self.shape_attribute}
        return (names | {"keepdims" for a in atoms if a.without}) - {""}


@lru_cache(maxsize=4096)
def parse_axes(text: str) -> Declaration:
    """Parse a declaration; a factor that is in no result must have a role."""
    terms, _, roles = text.partition("|")
    left, arrow, right = terms.partition("->")
    if not arrow:
        raise axes_error(text, "it has no '->'")
    operands = tuple(_term(text, t) for t in left.split(",")) if left.strip() else ()
    results = tuple(_term(text, t) for t in right.split(","))
    shape, clauses = "", []
    for part in filter(None, (p.strip() for p in roles.split(","))):
        if part.endswith("=result"):
            shape = part.removesuffix("=result")
        else:
            clauses.append(_clause(text, part))
    names = {n for term in (*operands, *results) for a in term for n in a.names}
    selected = {name for clause in clauses for name, _ in clause.selectors}
    if selected - names - {"..."}:
        raise axes_error(text, f"no operand or result has the factor '{min(selected - names)}'")
    lost = names - {n for term in results for a in term for n in a.names} - selected
    if lost:
        raise axes_error(text, f"factor '{min(lost)}' is in no result and has no role: is it summed?")
    return Declaration(text, operands, results, tuple(clauses), shape)


def axes_error(text: str, reason: str) -> OperationError:
    """Return the error for a declaration of axes that is not valid, or does not fit a call."""
    return OperationError(f"axes '{text}': {reason}", hint="an example is '... m k, ... k n -> ... m n | k sum'")


def _term(text: str, term: str) -> tuple[Atom, ...]:
    return tuple(_atom(text, token) for token in _TOKEN.findall(term))


def _atom(text: str, token: str) -> Atom:
    if token == "...":
        return Atom("dots")
    if token.startswith("("):
        parts = [p.partition(":") for p in token[1:-1].split()]
        if len(parts) < 2 or any(count for _, _, count in parts[1:]):
            raise axes_error(text, f"'{token}' is not a product of factors such as '(g:groups c)'")
        return Atom("product", tuple(name for name, _, _ in parts), parts[0][2])
    match = _ATOM.fullmatch(token)
    if match is None:
        raise axes_error(text, f"'{token}' is not an axis")
    entries = {k: v or "" for k, v in match.groupdict().items()}
    kind = "star" if entries["star"] else "optional" if entries["optional"] else "order" if entries["order"] else "axis"
    return Atom(kind, (entries["name"],), entries["count"], entries["at"], entries["without"], entries["order"])


def _clause(text: str, part: str) -> Clause:
    words = part.split()
    k = next((k for k, word in enumerate(words) if word in ROLES), None)
    selectors = [_SELECTOR.fullmatch(word) for word in words[: k or 0]]
    if k is None or not selectors or None in selectors:
        raise axes_error(text, f"'{part}' is not a clause such as 'k sum', 'x[axis] whole' or 't index indices'")
    rest = words[k + 1 :]
    if words[k] == "index" and len(rest) != 1:
        raise axes_error(text, f"'{part}' does not name its operand of indices")
    if words[k] != "index" and rest and (words[k] != "sum" or rest[:-1] != ["into"]):
        raise axes_error(text, f"'{part}' has too many words")
    entries = tuple((m["name"], m["by"] or "") for m in selectors if m is not None)
    return Clause(entries, words[k], rest[-1] if rest else "")
