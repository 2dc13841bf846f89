"""A pattern: the ``before`` function of a rule, called with placeholders instead of values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mithril.graph import MithrilError, Op, Operators, RewriteError


class Placeholder(Operators):
    """A symbolic value for calling ``before``; operations on placeholders become part of the pattern."""

    __slots__ = ()

    def __mithril_apply__(self, op: Op, operands: tuple[Any, ...], attributes: Mapping[str, Any]) -> Any:
        return apply(op, operands, attributes)

    def __getattr__(self, name: str) -> Any:
        raise RewriteError(
            f"a placeholder has no '{name}': patterns are built without types",
            hint="check it in the condition of the rule: when=lambda x: ...",
        )


class Variable(Placeholder):
    """An operand of ``before``: matches any value, and the same value at each occurrence."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Capture(Placeholder):
    """A keyword of ``before``: matches any value of an attribute, or any constant scalar as an operand."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PatternOp:
    """An operation in a pattern."""

    __slots__ = ("attributes", "op", "operands")

    def __init__(self, op: Op, operands: tuple[Any, ...], attributes: Mapping[str, Any]) -> None:
        self.op = op
        self.operands = operands  # placeholders, numbers, None
        self.attributes = attributes  # as written, with captures


class PatternResult(Placeholder):
    """A result of an operation in a pattern."""

    __slots__ = ("applied", "index")

    def __init__(self, applied: PatternOp, index: int) -> None:
        self.applied = applied
        self.index = index


class Pattern:
    """The expression that ``before`` returns, rooted at its result."""

    def __init__(self, before: Callable[..., Any], name: str) -> None:
        self.variables, self.captures = signature_of(before, name)
        try:
            root = before(*map(Variable, self.variables), **{n: Capture(n) for n in self.captures})
        except RewriteError as error:
            raise error.with_facts(f"in rule '{name}'") from None
        if not isinstance(root, PatternResult):
            raise RewriteError(
                f"rule '{name}': before() must return a single result of an operation",
                facts=[f"got a {type(root).__name__}"],
            )
        self.root = root
        self.op: str = root.applied.op.name
        self.size = sum(1 for _ in operations(root.applied))
        self.depth = depth(root.applied)
        used = {v.name for a in operations(root.applied) for v in a.operands if isinstance(v, Variable)}
        if unbound := set(self.variables) - used:
            raise RewriteError(f"rule '{name}': before() never uses its operand '{sorted(unbound)[0]}'")


def signature_of(before: Callable[..., Any], name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the operands, and the keywords with their defaults, which tests of the rule use (None if missing)."""
    operands, captures = [], {}
    for p in inspect.signature(before).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty:
            operands.append(p.name)
        elif p.kind is p.KEYWORD_ONLY:
            captures[p.name] = None if p.default is p.empty else p.default
        else:
            raise RewriteError(
                f"rule '{name}': '{p.name}' is neither an operand nor a keyword",
                hint="declare operands first, without defaults, and captured attributes after a *: before(x, *, axis)",
            )
    return tuple(operands), captures


def apply(op: Op, operands: tuple[Any, ...], attributes: Mapping[str, Any]) -> Any:
    """Apply an operation to placeholders and return its results as placeholders."""
    try:
        slots = tuple(op.all_operands(operands))
    except MithrilError as error:
        raise RewriteError(error.what, facts=error.facts) from None
    for operand in slots:
        if operand is not None and not isinstance(operand, (Placeholder, bool, int, float)):
            raise RewriteError(
                f"a pattern cannot contain a {type(operand).__name__} as an operand of '{op.name}'",
                hint="make it an operand of before()",
            )
    unknown = [n for n in attributes if n not in op.attributes]
    missing = [n for n in op.attributes if n not in attributes and n not in op.defaults]
    if unknown or missing:
        problem = f"has no attribute '{unknown[0]}'" if unknown else f"requires the attribute '{missing[0]}'"
        raise RewriteError(
            f"operation '{op.name}' {problem}", hint="a keyword of before() captures one: before(x, *, axis)"
        )
    applied = PatternOp(op, slots, dict(attributes))
    if len(op.results) == 1:
        return PatternResult(applied, 0)
    if not op.results:
        raise RewriteError(f"'{op.name}' has no fixed number of results and cannot be part of a pattern")
    return tuple(PatternResult(applied, k) for k in range(len(op.results)))


def operations(root: PatternOp) -> Iterator[PatternOp]:
    """Yield each operation of a pattern once, starting at the root."""
    seen: dict[PatternOp, None] = {root: None}
    pending = [root]
    while pending:
        current = pending.pop()
        yield current
        for operand in current.operands:
            if isinstance(operand, PatternResult) and operand.applied not in seen:
                seen[operand.applied] = None
                pending.append(operand.applied)


def depth(root: PatternOp) -> int:
    """Return the number of operations on the longest path of the pattern."""
    return 1 + max((depth(v.applied) for v in root.operands if isinstance(v, PatternResult)), default=0)
