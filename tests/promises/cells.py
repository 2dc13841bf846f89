"""The verdict of a probe on one engine, and the ways to reach it from observations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mithril as ml

from . import ENGINES

HOLDS, NOTHING, REFUSED, FAILS = VERDICTS = ("holds", "no effect here", "refused", "does not hold")


class Cell(NamedTuple):
    """A verdict with its figure, reason or error."""

    verdict: str
    text: str


def holds(text: str) -> Cell:
    return Cell(HOLDS, text)


def nothing(reason: str) -> Cell:
    return Cell(NOTHING, reason)


def fails(text: str) -> Cell:
    return Cell(FAILS, text)


def when(is_right: Any, text: str) -> Cell:
    """Return a cell that holds if the condition does."""
    return Cell(HOLDS if is_right else FAILS, text)


def fewer(pairs: Iterable[tuple[float, float]], unit: str, reason: str | None = None) -> Cell:
    """Return a cell that holds if a figure falls on one network or more, and rises on none.

    ``reason`` says why it cannot fall on this engine; without one, a figure that stays is a broken promise.
    """
    pairs = list(pairs)
    text = ", ".join(f"{before:,.0f} to {after:,.0f}" for before, after in pairs) + f" {unit}"
    if all(before == after for before, after in pairs) and reason is not None:
        return nothing(f"{reason} ({text})")
    return when(all(a <= b for b, a in pairs) and any(a < b for b, a in pairs), text)


def error(call: Callable[[], Any]) -> str:
    """Return the first line of the error of mithril that a call must raise."""
    try:
        call()
    except ml.MithrilError as raised:
        return str(getattr(raised, "what", raised)).splitlines()[0]
    raise AssertionError("no error is raised")


def refused(call: Callable[[], Any]) -> Cell:
    return Cell(REFUSED, error(call))


def refused_without_device(call: Callable[[], Any]) -> Cell:
    """Return a cell that holds on machines with a device that this one has not."""
    try:
        call()
    except ml.MithrilError:
        return refused(call)
    return holds("this machine has the device")


def message(compiled: Any, words: str) -> str:
    """Return the recorded decision that contains these words."""
    for decision in compiled.decisions:
        if words in decision.message:
            return str(decision.message).splitlines()[0]
    raise AssertionError(f"no decision says '{words}'")


@dataclass(frozen=True)
class Probe:
    """A function from an engine to a cell; ``elsewhere`` is the reason on engines that the promise is not about."""

    call: Callable[[str], Cell]
    engines: tuple[str, ...]
    elsewhere: str
    timed: bool

    @property
    def name(self) -> str:
        return self.call.__name__

    @property
    def subject(self) -> str:
        text = " ".join((self.call.__doc__ or "").split()).removeprefix("Return ")
        return text[:1].upper() + text[1:]

    def __call__(self, engine: str) -> Cell:
        if engine not in self.engines:
            return nothing(self.elsewhere)
        try:
            return self.call(engine)
        except Exception as raised:  # the ledger records errors that a user would see
            lines = str(raised).splitlines() or [""]
            return fails(f"{type(raised).__name__}: {lines[0]}")


PROBES: dict[str, Probe] = {}


def probe(*engines: str, elsewhere: str = "", timed: bool = False) -> Callable[[Callable[[str], Cell]], Probe]:
    """Register a function as the probe of its name."""

    def register(call: Callable[[str], Cell]) -> Probe:
        PROBES[call.__name__] = subject = Probe(call, engines or ENGINES, elsewhere, timed)
        return subject

    return register


def by_engine(default: str | None = None, **reasons: str) -> Mapping[str, str | None]:
    """Return the reason of each engine."""
    return {engine: reasons.get(engine, default) for engine in ENGINES}
