"""What the compiler decided on the user's behalf, so that nothing is silent."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from mithril.base.errors import OptionWarning, StrictError

# Kinds that strict=True turns into errors: something the user asked for, or would expect, is not what happens.
STRICT_KINDS = frozenset({"fallback", "ignored", "downgrade"})
KINDS = STRICT_KINDS | {"choice", "cast", "assumed", "deferred", "evicted", "specialized"}


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice: its kind, what was decided and why, and where in the model it matters."""

    kind: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" ({self.where})" if self.where else "")


class Decisions:
    """The record of one compiled model, each decision once, in order. Iterate it, or print it.

    What is ignored is a warning as well, ``OptionWarning`` at the user's line.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._made: dict[Decision, None] = {}

    def record(
        self, kind: str, message: str, where: object = "", *, warning: type[Warning] = OptionWarning, warn: bool = False
    ) -> None:
        """Record a decision; under ``strict`` those of ``STRICT_KINDS`` raise instead; ``warn`` shows any kind."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of decision '{kind}'; known: {', '.join(sorted(KINDS))}")
        decision = Decision(kind, message, str(where))
        if self.strict and kind in STRICT_KINDS:
            raise StrictError(
                f"strict=True does not allow this {kind}: {message}",
                facts=[str(where)],
                hint="change what is said above, or compile without strict=True to have it only recorded",
            )
        if (kind == "ignored" or warn) and decision not in self._made:
            warnings.warn(f"{message}{f' ({where})' if str(where) else ''}", warning, _level())
        self._made[decision] = None

    def of(self, kind: str) -> list[Decision]:
        return [d for d in self._made if d.kind == kind]

    def __iter__(self) -> Iterator[Decision]:
        return iter(list(self._made))

    def __len__(self) -> int:
        return len(self._made)

    def __str__(self) -> str:
        return "\n".join(map(str, self._made)) or "no decisions were needed"

    def __repr__(self) -> str:
        return f"<Decisions: {len(self)}>"


def _level() -> int:
    """The ``stacklevel`` of the nearest caller of ``record`` that is no module of this project."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0].startswith("mithril"):
        frame, level = frame.f_back, level + 1
    return level
