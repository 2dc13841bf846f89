"""Operations by name, for whoever meets a name before the operation: the text parser, operators, rules.

``mithril.ops`` fills this table when it is imported; a name it does not declare is looked for among the plugins, whose
module is imported at that first mention.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mithril.base.errors import OperationError, unknown

_operations: dict[str, Any] = {}


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


def operation(name: str) -> Any:
    """The operation of a name."""
    found = _operations.get(name)
    if found is not None:
        return found
    import mithril.ops  # noqa: F401  (declares the core's operations)

    if name not in _operations:
        import_module("mithril.plugins").import_op(name)  # by name: this floor knows no plugins
    if name not in _operations:
        what, facts, hint = unknown("operation", name, list(_operations))
        raise OperationError(what, facts=facts, hint=hint)
    return _operations[name]


def operations() -> dict[str, Any]:
    """All operations declared so far, by name."""
    import mithril.ops  # noqa: F401

    return dict(_operations)
