"""The check that comes before an import: the list of all operators that have no meaning here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

FEW = 3  # places that are all listed


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in its form: ``1 operator``, ``2 operators``."""
    return f"{number} {noun}{'s' if number > 1 else ''}"


def missing_lines(
    missing: Mapping[str, Sequence[str]], reason: Callable[[str], str | None] = lambda name: None
) -> list[str]:
    """Return a line per operator with the number of its uses and their places: all of few, the first of many."""
    lines = []
    for name, places in sorted(missing.items()):
        count = "once" if len(places) == 1 else f"{len(places)} times{', first' if len(places) > FEW else ''}"
        shown = ", ".join(places if len(places) <= FEW else places[:1])
        lines.append(f"{name}, {count}: {shown}" + (f" ({text})" if (text := reason(name)) else ""))
    return lines
