"""Which operations a run of the kit is about, and at the end how many of them it has checked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mithril.ops
from mithril import plugins
from mithril.base import OperationError, operation, operations, unknown
from mithril.ir import Op

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


@dataclass
class Tally:
    """The operations that one class of the kit is about, and the checks that have run."""

    title: str
    operations: Collection[str]
    checked: set[str] = field(default_factory=set)
    cases: int = 0
    exempt: dict[str, str] = field(default_factory=dict)  # operations the class does not try, and why

    def __str__(self) -> str:
        missed = [n for n in self.operations if n not in self.checked]
        line = f"{self.title}: checked {len(self.checked)} of {len(self.operations)} operations, {self.cases} cases"
        if not missed:
            return line
        shown = [f"{n} ({self.exempt[n]})" if n in self.exempt else n for n in missed[:12]]
        more = f" and {len(missed) - 12} more" if len(missed) > 12 else ""
        return f"{line}; not checked: {', '.join(shown)}{more}"


class Summary:
    """A pytest plugin that ends a run with one line for each class of the kit."""

    NAME = "mithril-conformance"

    def __init__(self) -> None:
        self.tallies: dict[type, Tally] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("conformance")
        for tally in self.tallies.values():
            terminalreporter.line(str(tally))


_summary = Summary()


def begin(
    cls: type, operations: Collection[str], config: pytest.Config, exempt: Callable[[], dict[str, str]] = dict
) -> None:
    """Start the tally of a class, which is printed when the run ends."""
    if not config.pluginmanager.has_plugin(Summary.NAME):
        config.pluginmanager.register(_summary, Summary.NAME)
    if cls not in _summary.tallies:
        _summary.tallies[cls] = Tally(cls.__qualname__, operations, exempt=exempt())


def record(cls: type, names: Collection[str]) -> None:
    """Count a check of some operations that has run. Without a run of pytest there is no tally."""
    tally = _summary.tallies.get(cls)
    if tally is not None:
        tally.cases += 1
        tally.checked.update(n for n in names if n in tally.operations)
