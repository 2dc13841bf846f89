"""Every error mithril raises: one hierarchy, one layout (what, facts, hint)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MithrilError(Exception):
    """Base of all errors.

    ``what`` is one line with names in quotes, ``facts`` are indented lines (where it happened, what was given, what
    would have been accepted), ``hint`` says what to type.
    """

    def __init__(self, what: str, *, facts: Iterable[str] = (), hint: str | None = None) -> None:
        self.what = what
        self.facts = tuple(fact for fact in facts if fact)
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what, *("  " + line for fact in self.facts for line in fact.splitlines())]
        if self.hint:
            lines.append("hint: " + self.hint)
        return "\n".join(lines)

    def with_facts(self, *facts: str) -> MithrilError:
        """Add facts known only further out (layer path, pass name) and return the same error."""
        self.facts += tuple(fact for fact in facts if fact and fact not in self.facts)
        return self

    def with_hint(self, hint: str) -> MithrilError:
        """Say what to type, where only somebody further out knows it, and return the same error."""
        self.hint = hint
        return self


class GraphError(MithrilError):
    """The graph is malformed or was used wrongly."""


class VerificationError(GraphError):
    """The verifier found a graph that breaks its rules: a bug of whoever made the graph."""


class ParseError(GraphError):
    """Graph text that cannot be read."""


class OperationError(MithrilError):
    """An operation was declared or called wrongly."""


class ShapeError(OperationError):
    """Operand shapes do not fit."""


class DTypeError(OperationError, TypeError):
    """Operand dtypes do not fit, or a dtype is unknown or unavailable."""


class GradientError(MithrilError):
    """A gradient was asked for that does not exist."""


class GuardError(MithrilError, ValueError):
    """A condition on symbolic dimensions, assumed when compiling, does not hold for these inputs."""


class RewriteError(MithrilError):
    """A rewrite rule is malformed or broke the graph: the rule author's bug."""


class PassError(MithrilError):
    """A pass failed, or passes cannot be ordered."""


class ModelError(MithrilError):
    """A model is wired wrongly."""


class OptionError(MithrilError, ValueError):
    """An option of compile, a backend or a pass is unknown, malformed or in conflict."""


class InputError(MithrilError, ValueError):
    """What was given to a compiled model does not fit it."""


class BackendError(MithrilError):
    """A backend cannot do what was asked."""


class UnsupportedError(BackendError):
    """A backend has no way to run an operation, dtype or device."""


class PluginError(MithrilError):
    """A plugin is missing, broken, incompatible or in conflict with another."""


class MemoryLimitError(MithrilError, MemoryError):
    """What was asked for does not fit the stated memory."""


class CompileTimeoutError(MithrilError, TimeoutError):
    """Compilation ran longer than ``timeout`` allows."""


class OptionWarning(UserWarning):
    """An option that was given has no effect here; ``strict=True`` makes it an error."""


class StrictError(MithrilError):
    """Under ``strict=True``: something that would otherwise only be recorded in ``decisions``."""


def closest(word: object, known: Iterable[object], limit: int = 3) -> list[str]:
    """Return the names most like ``word``, best first, whatever their case; empty if none is near."""
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(str(name).casefold(), str(name))
    return [names[n] for n in difflib.get_close_matches(str(word).casefold(), list(names), n=limit, cutoff=0.6)]


LISTED = 60  # names that an error lists in full


def unknown(kind: str, word: str, known: Sequence[str]) -> tuple[str, list[str], str | None]:
    """The ``what``, ``facts`` and ``hint`` for a name nobody knows, with the nearest names first."""
    near = closest(word, known)
    rest = [name for name in sorted(known) if name not in near]
    if len(known) > LISTED:  # nobody finds a name in a hundred others
        shown = ", ".join(near) + " and " if near else ""
        facts = [f"known: {shown}{len(rest)} {'others' if near else 'names'}"]
    else:
        facts = ["known: " + ", ".join([*near, *rest])] if known else []
    return f"unknown {kind} '{word}'", facts, f"did you mean '{near[0]}'?" if near else None
