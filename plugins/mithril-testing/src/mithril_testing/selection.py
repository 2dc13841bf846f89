"""Which operations a run of the kit is about, and at the end how many of them it has checked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

import mithril.ops
import mithril_testing_summary as summary
from mithril import plugins
from mithril.graph import Op, OperationError, operation, operations, unknown

CORE = str(Path(mithril.ops.__file__).parent)


def core_operations() -> dict[str, Op]:
    """Return the operations that mithril itself declares."""
    return {name: op for name, op in sorted(operations().items()) if op.declared_at.startswith(CORE)}


def selected(names: Collection[str | Op] | None = None) -> dict[str, Op]:
    """Return operations by name; None selects mithril's own and those that installed plugins declare (``mithril_ops``).

    A module that happens to be imported adds nothing, and one that is not imported misses nothing. An unknown name is
    an error with the nearest names, and so is an empty selection.
    """
    if names is None:
        return {**core_operations(), **{name: operation(name) for name in plugins.op_names()}}
    if isinstance(names, str):
        raise OperationError(f"ops is the text '{names}'", hint=f"ops = ('{names}',)")
    if not names:
        raise OperationError("no operation is selected", hint="name some in ops, or set ops = None for all")
    return {op.name: op for op in (o if isinstance(o, Op) else _named(o) for o in names)}


def _named(name: str) -> Op:
    declared = {*operations(), *plugins.op_names()}
    if name not in declared:
        message, facts, hint = unknown("operation", name, sorted(declared))
        raise OperationError(message, facts=facts, hint=hint)
    op: Op = operation(name)
    return op


def begin(
    cls: type, operations: Collection[str], config: pytest.Config, exempt: Callable[[], dict[str, str]] = dict
) -> None:
    """Start the tally of a class, which is printed when the run ends."""
    if not config.pluginmanager.is_registered(summary):  # where pytest loads no plugins on its own
        config.pluginmanager.register(summary, summary.KEY)
    if _key(cls) not in summary.tallies:
        summary.tallies[_key(cls)] = summary.Tally(cls.__qualname__, list(operations), exempt())


def record(cls: type, names: Collection[str]) -> None:
    """Count a check of some operations that has run. Without a run of pytest there is no tally."""
    tally = summary.tallies.get(_key(cls))
    if tally is not None:
        tally.add(names)


def record_way(cls: type, operation: str, way: str) -> None:
    """Note how the backend runs an operation: ``lowered`` or ``by their bodies``."""
    tally = summary.tallies.get(_key(cls))
    if tally is not None:
        tally.ways[operation] = way


def record_excluded(cls: type) -> None:
    """Count a case that was skipped, as the condition of a lowering excludes a call of it."""
    tally = summary.tallies.get(_key(cls))
    if tally is not None:
        tally.excluded += 1


def _key(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
