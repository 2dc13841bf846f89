"""A pattern: the ``before`` function of a rule, called with placeholders instead of values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mithril.base import MithrilError, Operators, RewriteError
from mithril.ir import Op


class Placeholder(Operators):
    """Stands for a value while ``before`` is called; an operation applied to one becomes part of the pattern."""

    __slots__ = ()

    def __mithril_apply__(self, op: Op, operands: tuple[Any, ...], attributes: Mapping[str, Any]) -> Any:
        return apply(op, operands, attributes)

    def __getattr__(self, name: str) -> Any:
        raise RewriteError(
            f"a pattern has no '{name}': it is matched before anything is known of its values",
            hint="say what must hold in the rule's condition: when=lambda x: ...",
        )


class Variable(Placeholder):
    """An operand of ``before``: any value, the same one wherever it appears."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Capture(Placeholder):
    """A keyword of ``before``: as an attribute any setting, as an operand any constant number."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Applied:
    """An operation of the pattern."""

    __slots__ = ("attributes", "op", "operands")

    def __init__(self, op: Op, operands: tuple[Any, ...], attributes: Mapping[str, Any]) -> None:
        self.op = op
        self.operands = operands  # placeholders, numbers, None
        self.attributes = attributes  # as written; captures among them


class Made(Placeholder):
    """A result of an operation of the pattern."""

    __slots__ = ("applied", "index")

    def __init__(self, applied: Applied, index: int) -> None:
        self.applied = applied
        self.index = index


class Pattern:
    """What ``before`` describes, from its result down."""

    def __init__(self, before: Callable[..., Any], name: str) -> None:
        self.variables, self.captures = signature_of(before, name)
        try:
            root = before(*map(Variable, self.variables), **{n: Capture(n) for n in self.captures})
        except RewriteError as error:
            raise error.with_facts(f"in rule '{name}'") from None
        if not isinstance(root, Made):
            raise RewriteError(
                f"rule '{name}': before() must return the one result of an operation",
                facts=[f"it returned a {type(root).__name__}"],
            )
        self.root = root
        self.size = sum(1 for _ in operations(root.applied))
        self.depth = depth(root.applied)
        unbound = set(self.variables) - {
            v.name for a in operations(root.applied) for v in a.operands if isinstance(v, Variable)
        }
        if unbound:
            raise RewriteError(f"rule '{name}': before() never uses its operand '{sorted(unbound)[0]}'")

    @property
    def op(self) -> str:
        """The operation at the root: where a match can begin."""
        return self.root.applied.op.name


def signature_of(before: Callable[..., Any], name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Operands, and keywords with the values to try the rule with (None where it gives none)."""
    operands, captures = [], {}
    for p in inspect.signature(before).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty:
            operands.append(p.name)
        elif p.kind is p.KEYWORD_ONLY:
            captures[p.name] = None if p.default is p.empty else p.default
        else:
            raise RewriteError(
                f"rule '{name}': '{p.name}' is neither an operand nor a keyword",
                hint="operands come first and have no default; what is to be captured follows a *: before(x, *, axis)",
            )
    return tuple(operands), captures


def apply(op: Op, operands: tuple[Any, ...], attributes: Mapping[str, Any]) -> Any:
    """What calling an operation with placeholders gives."""
    try:
        slots = tuple(op.all_operands(operands))
    except MithrilError as error:
        raise RewriteError(error.what, facts=error.facts) from None
    for operand in slots:
        if operand is not None and not isinstance(operand, (Placeholder, bool, int, float)):
            raise RewriteError(
                f"a pattern cannot hold a {type(operand).__name__} as operand of '{op.name}'",
                hint="make it an operand of before()",
            )
    unknown = [n for n in attributes if n not in op.attributes]
    missing = [n for n in op.attributes if n not in attributes and n not in op.defaults]
    if unknown or missing:
        said = f"has no attribute '{unknown[0]}'" if unknown else f"needs the attribute '{missing[0]}'"
        raise RewriteError(
            f"operation '{op.name}' {said}", hint="a keyword of before() captures one: before(x, *, axis)"
        )
    made = Applied(op, slots, dict(attributes))
    if len(op.results) == 1:
        return Made(made, 0)
    if not op.results:
        raise RewriteError(f"'{op.name}' has no fixed number of results and cannot be part of a pattern")
    return tuple(Made(made, k) for k in range(len(op.results)))


def operations(root: Applied) -> Iterator[Applied]:
    """Every operation of a pattern once, the root first."""
    seen: dict[Applied, None] = {root: None}
    pending = [root]
    while pending:
        current = pending.pop()
        yield current
        for operand in current.operands:
            if isinstance(operand, Made) and operand.applied not in seen:
                seen[operand.applied] = None
                pending.append(operand.applied)


def depth(root: Applied) -> int:
    """Operations on the longest path down the pattern."""
    return 1 + max((depth(v.applied) for v in root.operands if isinstance(v, Made)), default=0)
