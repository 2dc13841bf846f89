"""Operations by name, for whoever meets a name before the operation: the text parser, operators, rules.

``mithril.ops`` fills this table when it is imported; a name it does not declare is looked for among the plugins, whose
module is imported at that first mention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from mithril.base.errors import OperationError, unknown

Rule = TypeVar("Rule")
_operations: dict[str, Any] = {}
# Called in order for a name that nobody has declared yet, or with None for all names; each may declare operations.
# The composition root fills this list: this floor knows neither the core's operations nor plugins.
sources: list[Callable[[str | None], object]] = []
# The core's own names on the public face, which plugins cannot take; filled by the face.
face_names: Callable[[], Iterable[str]] = tuple
# Module of the built-in plugin, which declares the core's own options; filled by the face.
core_plugin = ""
# Indexing of symbolic tensors, ``x[index]``; filled by ``mithril.ops.slicing``.
indexing: Callable[[Any, Any], Any] | None = None


def register(op: Any) -> None:
    """Enter an operation; two different ones of one name are an error that shows where both were declared."""
    known = _operations.get(op.name)
    if known is not None and known.declared_at != op.declared_at:
        raise OperationError(
            f"operation '{op.name}' is declared twice",
            facts=[f"first at {known.declared_at}", f"then at {op.declared_at}"],
            hint="rename one; third parties' names look like 'vendor.name'",
        )
    _operations[op.name] = op


def operation(name: str, declared: Iterable[str] = ()) -> Any:
    """Return the operation of a name; an error for another one suggests those ``declared`` elsewhere, too."""
    found = _operations.get(name)
    if found is not None:
        return found
    for source in sources:
        source(name)
        if name in _operations:
            return _operations[name]
    what, facts, hint = unknown("operation", name, [*operations(), *declared])
    raise OperationError(what, facts=facts, hint=hint)


def named(op: Any, declared: Collection[str] = ()) -> str:
    """Return the name of an operation given by itself or by name; a name that no operation has is an error.

    A name with a dot is another distribution's, ``"acme.lookup"``: where nothing of ``acme`` is known, it may be absent
    here, and the name is accepted unchanged. ``declared`` are names of operations that are not imported yet.
    """
    if not isinstance(op, str):
        return str(op.name)
    vendor, dot, _ = op.partition(".")
    is_foreign = dot and not any(name.startswith(vendor + dot) for name in (*_operations, *declared))
    return op if is_foreign or op in _operations or op in declared else str(operation(op, declared).name)


def names(*ops: Any) -> tuple[str, ...]:
    """Return the names of some operations, each given by itself or by name, checked as those of a ``Registry`` are."""
    return tuple(map(named, ops))


class Registry(dict[str, Rule]):
    """Rules by operation: of lowering, placing, differentiating. Keys are operations or their names, checked at once.

    ``@registry(ops.take)`` or ``@registry("acme.lookup")`` enters a rule. ``none`` states that an operation has no
    rule, so that ``missing`` lists only the forgotten ones.
    """

    def __init__(self, purpose: str, rules: Mapping[Any, Rule] = MappingProxyType({})) -> None:
        super().__init__()
        self.purpose = purpose
        self.absent: dict[str, str] = {}
        for op, rule in rules.items():
            self[op] = rule

    def __call__(self, *ops: Any) -> Callable[[Rule], Rule]:
        def enter(rule: Rule) -> Rule:
            for op in ops:
                self[op] = rule
            return rule

        return enter

    def __setitem__(self, op: Any, rule: Rule) -> None:
        super().__setitem__(named(op), rule)

    def none(self, *ops: Any, why: str) -> None:
        """State that operations have no rule, and why."""
        self.absent |= dict.fromkeys(map(named, ops), why)

    def missing(self) -> list[str]:
        """Return the primitives that have neither a rule nor a reason."""
        known = self.keys() | self.absent.keys()
        return sorted(name for name, op in operations().items() if not op.composite and name not in known)


def index(x: Any, positions: Any) -> Any:
    """Return ``x[positions]`` of a symbolic tensor."""
    if indexing is None:
        operation("slice")  # declared beside the indexing, whose module fills the slot
    assert indexing is not None
    return indexing(x, positions)


def operations() -> dict[str, Any]:
    """All operations declared so far, by name."""
    for source in sources:
        source(None)
    return dict(_operations)
