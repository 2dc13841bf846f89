"""Patterns of names (``"encoder.*"``) that users write: one that matches nothing is a mistake."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from mithril.base.errors import OptionError, closest


def matches(name: str, pattern: str) -> bool:
    """Whether a name is the pattern itself (names may hold brackets) or matches it as in a shell."""
    return name == pattern or fnmatchcase(name, pattern)


def require_match(where: str, kind: str, pattern: str, names: Iterable[str]) -> None:
    """Raise unless the pattern of option `where` matches one of the names, which are those of a `kind`."""
    known = sorted(n for n in names if n)
    if any(matches(name, pattern) for name in known):
        return
    near = closest(pattern, known)
    raise OptionError(
        f"'{pattern}' in {where} matches no {kind}",
        facts=[f"the model has: {', '.join([*near, *(n for n in known if n not in near)][:12]) or 'none'}"],
        hint=f"did you mean '{near[0]}'?" if near else None,
    )
