"""Decisions of the compiler on the user's behalf, recorded so that nothing is silent."""

from __future__ import annotations

import html
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from mithril.graph.errors import OptionWarning, StrictError, visible
from mithril.graph.logs import log

# Kinds that strict=True turns into errors: the behavior deviates from the user's request or expectation.
STRICT_KINDS = frozenset({"fallback", "ignored", "downgrade", "observer"})
KINDS = STRICT_KINDS | {"choice", "cast", "assumed", "deferred", "evicted", "plugin", "specialized"}


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision: its kind, a message with the reason, and the affected part of the model."""

    kind: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        return visible(f"{self.kind}: {self.message}" + (f" ({self.where})" if self.where else ""))


class Decisions:
    """The decisions of one compiled model, each once, in order; iterable and printable.

    Ignored options also issue an ``OptionWarning`` at the user's line.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._entries: dict[Decision, None] = {}

    def record(
        self,
        kind: str,
        message: str,
        where: object = "",
        *,
        warning: type[Warning] = OptionWarning,
        warn: bool | None = None,
    ) -> None:
        """Record a decision, or raise it under ``strict`` if its kind is strict; ignored things warn by default."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of decision '{kind}'; known: {', '.join(sorted(KINDS))}")
        decision = Decision(kind, message, str(where))
        if self.strict and kind in STRICT_KINDS:
            raise StrictError(
                f"strict=True: {kind}: {message}",
                facts=[str(where)],
                hint="resolve the cause above, or compile without strict=True to only record this decision",
            )
        if (kind == "ignored" if warn is None else warn) and decision not in self._entries:
            warnings.warn(visible(f"{message}{f' ({where})' if str(where) else ''}"), warning, _level())
        if decision not in self._entries:
            log("info" if kind in STRICT_KINDS else "debug", decision)
        self._entries[decision] = None

    def of(self, kind: str) -> list[Decision]:
        return [d for d in self._entries if d.kind == kind]

    def __iter__(self) -> Iterator[Decision]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self._entries)) or "no decisions were needed"

    def __repr__(self) -> str:
        return f"<Decisions: {len(self)}>"

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(str(self))}</pre>'


def _level() -> int:
    """Return the ``stacklevel`` of the nearest caller of ``record`` outside of this project."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0].startswith("mithril"):
        frame, level = frame.f_back, level + 1
    return level


# The stages of passes, in the order in which they run.
STAGES = ("clean", "canonical", "fuse", "specialize", "precision", "layout", "memory", "final")
# Values of optimization_level, lowest first.
LEVELS = ("none", "low", "medium", "high")
PASS_LEVELS = LEVELS[1:]  # the lowest level that includes a pass
