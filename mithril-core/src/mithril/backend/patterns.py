"""Patterns of names (``"encoder.*"``) written by users; a pattern without a match is an error."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from mithril.base import OptionError, closest


def matches(name: str, pattern: str) -> bool:
    """Whether a name equals the pattern (names may contain brackets) or matches it as in a shell."""
    return name == pattern or fnmatchcase(name, pattern)


def require_match(where: str, kind: str, pattern: str, names: Iterable[str]) -> None:
    """Raise unless the pattern of option ``where`` matches one of the names; ``kind`` describes them."""
    candidates = sorted(n for n in names if n)
    if any(matches(name, pattern) for name in candidates):
        return
    suggestions = closest(pattern, candidates)
    listed = [*suggestions, *(n for n in candidates if n not in suggestions)][:12]
    raise OptionError(
        f"'{pattern}' in {where} matches no {kind}",
        facts=[f"the model has: {', '.join(listed) or 'none'}"],
        hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
    )
