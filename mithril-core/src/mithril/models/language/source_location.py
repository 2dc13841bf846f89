"""The user's source line: the innermost stack frame outside mithril. The lookup takes about a microsecond."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

from mithril.graph import visible

OURS = ("mithril.", "mithril_")  # importers and other distributions create layers for their callers


class SourceLocation(NamedTuple):
    """A line of a source file."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return visible(f"{self.file}:{self.line}") if self.file else ""


NOWHERE = SourceLocation()


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(OURS)


def user_location() -> SourceLocation:
    """Return the line of the innermost caller outside mithril."""
    frame = sys._getframe(1)
    # _is_ours, without a call: every layer asks, from some ten frames below the caller.
    while frame.f_globals.get("__name__", "").startswith(OURS):
        outer = frame.f_back
        if outer is None:
            return NOWHERE
        frame = outer
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno)


def caller_location() -> SourceLocation | None:
    """Return the line of the caller's caller, or None if it is in mithril itself."""
    frame = sys._getframe(2)
    if _is_ours(frame):
        return None
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno)
