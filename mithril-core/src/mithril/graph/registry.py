"""Registry of operations by name, for the text parser, operators and rules.

``mithril.ops`` registers its operations at import; an unknown name is looked up among the plugins, whose module is
imported at this first use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from mithril.graph.errors import OperationError, unknown

Rule = TypeVar("Rule")
_operations: dict[str, Any] = {}


@dataclass(frozen=True)
class Host:
    """Functions and names by which the kernel uses the packages above it; it cannot import them."""

    # Called in order for an undeclared name, or with None for all names; each may declare operations.
    sources: tuple[Callable[[str | None], object], ...]
    index: Callable[[Any, Any], Any]  # ``x[index]`` of a symbolic tensor
    public_names: Callable[[], Iterable[str]]  # of the core, which plugins cannot override
    project_packages: Callable[[], Collection[str]]  # top-level packages, which versions identify
    core_plugin: str  # module of the built-in plugin, which declares the options of the core


host: Host = None  # type: ignore[assignment]  # ``mithril`` constructs it before any other module is imported


def register(op: Any) -> None:
    """Register an operation; raise with both source locations if another one has the same name."""
    existing = _operations.get(op.name)
    if existing is not None and existing.declared_at != op.declared_at:
        raise OperationError(
            f"operation '{op.name}' is declared twice",
            facts=[f"first at {existing.declared_at}", f"then at {op.declared_at}"],
            hint="rename one; names of third parties have the form 'vendor.name'",
        )
    _operations[op.name] = op


def operation(name: str, declared: Iterable[str] = ()) -> Any:
    """Return the operation of this name; the error for an unknown name also suggests the names ``declared``."""
    existing = _operations.get(name)
    if existing is not None:
        return existing
    for source in host.sources:
        source(name)
        if name in _operations:
            return _operations[name]
    message, facts, hint = unknown("operation", name, [*operations(), *declared])
    raise OperationError(message, facts=facts, hint=hint)


def operation_name(op: Any, declared: Collection[str] = ()) -> str:
    """Return the name of an operation, passed as an object or by name; raise if the name is unknown.

    A name with a dot, ``"acme.lookup"``, belongs to another distribution: if no operation of ``acme`` is registered, it
    may not be installed, and the name is returned unchecked. ``declared`` are names of operations not imported yet.
    """
    if not isinstance(op, str):
        return str(op.name)
    vendor, dot, _ = op.partition(".")
    is_foreign = dot and not any(name.startswith(vendor + dot) for name in (*_operations, *declared))
    return op if is_foreign or op in _operations or op in declared else str(operation(op, declared).name)


def operation_names(*ops: Any) -> tuple[str, ...]:
    """Return the names of operations, each passed as an object or by name, checked as keys of a ``Registry``."""
    return tuple(map(operation_name, ops))


class Registry(dict[str, Rule]):
    """Rules by operation, for example lowerings. Keys are operations or their names, checked when inserted.

    ``@registry(ops.take)`` or ``@registry("acme.lookup")`` registers a rule. ``none`` declares that an operation has no
    rule, so that ``missing`` lists only forgotten ones.
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
        super().__setitem__(operation_name(op), rule)

    def none(self, *ops: Any, reason: str) -> None:
        """Declare that operations have no rule, for this reason."""
        self.absent |= dict.fromkeys(map(operation_name, ops), reason)

    def missing(self) -> list[str]:
        """Return the primitives that have neither a rule nor a reason."""
        covered = self.keys() | self.absent.keys()
        return sorted(name for name, op in operations().items() if not op.composite and name not in covered)


def index(x: Any, positions: Any) -> Any:
    """Return ``x[positions]`` of a symbolic tensor."""
    return host.index(x, positions)


def operations() -> dict[str, Any]:
    """Return all operations declared so far, by name."""
    for source in host.sources:
        source(None)
    return dict(_operations)
