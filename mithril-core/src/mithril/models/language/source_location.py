"""The user's source line: the innermost stack frame outside mithril. The lookup takes about a microsecond."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from mithril.graph import visible

PACKAGE = str(Path(__file__).parents[2]) + "/"


class SourceLocation(NamedTuple):
    """A line of a source file."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return visible(f"{self.file}:{self.line}") if self.file else ""


NOWHERE = SourceLocation()


def user_location() -> SourceLocation:
    """Return the line of the innermost caller outside mithril."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE):
        outer = frame.f_back
        if outer is None:
            return NOWHERE
        frame = outer
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno)


def caller_location() -> SourceLocation | None:
    """Return the line of the caller's caller, or None if it is in mithril itself."""
    frame = sys._getframe(2)
    if frame.f_code.co_filename.startswith(PACKAGE):
        return None
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno)
