"""The error hierarchy. Every error has the layout of ``MithrilError``: ``what``, ``facts``, ``hint``."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence


def quoted(text: str) -> str:
    """Return a literal in double quotes, valid in Python and in graph text."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(f"\\{c}" if c in '"\\' else visible(c) for c in text) + '"'


def visible(text: str) -> str:
    """Return one line of printable characters; others are escaped as in Python."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class MithrilError(Exception):
    """Base class of all errors.

    ``what`` is one line with names in quotes, ``facts`` are indented lines (the location, the offending values, the
    accepted ones), ``hint`` is a remedy to type.
    """

    def __init__(self, what: str, *, facts: Iterable[str] = (), hint: str | None = None) -> None:  # english: ok
        self.what = what
        self.facts = tuple(fact for fact in facts if fact)
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what, *("  " + line for fact in self.facts for line in fact.split("\n"))]
        if self.hint:
            lines.append("hint: " + self.hint)
        return "\n".join(map(visible, lines))

    def with_facts(self, *facts: str) -> MithrilError:
        """Add facts that only a caller knows (layer path, pass name) and return the same error."""
        self.facts += tuple(fact for fact in facts if fact and fact not in self.facts)
        return self

    def with_hint(self, hint: str) -> MithrilError:
        """Set the hint, if only a caller knows it, and return the same error."""
        self.hint = hint
        return self


class GraphError(MithrilError):
    """A graph is malformed or used incorrectly."""


class VerificationError(GraphError):
    """The verifier rejected a graph: a bug in the code that built it."""


class ParseError(GraphError):
    """Graph text is malformed."""


class OperationError(MithrilError):
    """An operation is declared or called incorrectly."""


class ShapeError(OperationError):
    """Operand shapes are incompatible."""


class DTypeError(OperationError, TypeError):
    """Operand dtypes are incompatible, or a dtype is unknown or unavailable."""


class GradientError(MithrilError):
    """A requested gradient does not exist."""


class GuardError(MithrilError, ValueError):
    """A condition on symbolic sizes, assumed at compile time, does not hold for the inputs."""


class RewriteError(MithrilError):
    """A rewrite rule is malformed or produced an invalid graph: a bug in the rule."""


class PassError(MithrilError):
    """A pass failed, or passes cannot be ordered."""


class ModelError(MithrilError):
    """A model is connected incorrectly."""


class OptionError(MithrilError, ValueError):
    """An option of compile, a backend or a pass is unknown, malformed or in conflict."""


class InputError(MithrilError, ValueError):
    """An argument of a compiled model is missing, unknown or of the wrong type."""


class BackendError(MithrilError):
    """A backend cannot fulfill a request."""


class UnsupportedError(BackendError):
    """A backend does not support an operation, dtype or device."""


class PluginError(MithrilError):
    """A plugin is missing, broken, incompatible or in conflict with another."""


class MemoryLimitError(MithrilError, MemoryError):
    """A request exceeds the memory limit."""


class CompileTimeoutError(MithrilError, TimeoutError):
    """Compilation ran longer than ``timeout`` allows."""


class OptionWarning(UserWarning):
    """An option has no effect; ``strict=True`` makes this an error."""


class StrictError(MithrilError):
    """A decision that ``strict=True`` does not allow; otherwise it is only recorded in ``decisions``."""


def closest(word: object, candidates: Iterable[object], limit: int = 3) -> list[str]:
    """Return the names most similar to ``word``, best first, ignoring case; empty if none is similar."""
    names: dict[str, str] = {}
    for name in candidates:
        names.setdefault(str(name).casefold(), str(name))
    return [names[n] for n in difflib.get_close_matches(str(word).casefold(), list(names), n=limit, cutoff=0.6)]


LISTED = 16  # maximal number of names that an error lists


def unknown(kind: str, word: str, accepted: Sequence[str]) -> tuple[str, list[str], str | None]:
    """Return the ``what``, ``facts`` and ``hint`` of an error for an unknown name, with similar names first."""
    from mithril.graph.synonyms import ATTRIBUTES, LAYERS, OPERATIONS, expression_here, name_here

    expression = expression_here(word) if kind == "operation" else None
    tables = {"operation": OPERATIONS, "layer": LAYERS, "attribute": ATTRIBUTES}
    synonym = name_here(word, tables.get(kind.partition(" ")[0], {}))
    suggestions = [] if expression else [synonym] if synonym in accepted else closest(word, accepted)
    shown = [*suggestions, *sorted(set(accepted) - set(suggestions))]
    count = (len(suggestions) or 3) if len(shown) > LISTED else len(shown)
    more = f" and {len(shown) - count} others" if len(shown) > count else ""
    facts = [f"known: {', '.join(shown[:count])}{more}"] if accepted else []
    noun, place = re.fullmatch(r"(.*?)( (?:of|in|for) .*?)?:?", kind).groups("")  # type: ignore[union-attr]
    similar = f"did you mean '{suggestions[0]}'?" if suggestions else None
    return f"unknown {noun} '{word}'{place}", facts, f"write {expression}" if expression else similar


def removal(since: str) -> str:
    """Return the version that may remove a name which is deprecated since ``since``: ``"0.1"`` gives ``"0.3"``."""
    major, minor = since.split(".")
    return f"{major}.{int(minor) + 2}"


def deprecated(old: str, new: str, *, since: str) -> None:
    """Warn at the line of the caller, outside of this package, that ``new`` replaces ``old``."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "mithril":
        frame, level = frame.f_back, level + 1
    reason = f"is deprecated since mithril {since} and goes with {removal(since)}"
    warnings.warn(f"{old} {reason}: use {new}", DeprecationWarning, level)
