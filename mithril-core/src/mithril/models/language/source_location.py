"""The user's own line: the nearest frame outside of mithril, found in about a microsecond."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = str(Path(__file__).parents[2]) + "/"


class Place(NamedTuple):
    """A line of somebody's file."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


NOWHERE = Place()


def here() -> Place:
    """The line of the nearest caller that is not mithril itself."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE):
        outer = frame.f_back
        if outer is None:
            return NOWHERE
        frame = outer
    return Place(frame.f_code.co_filename, frame.f_lineno)


def caller() -> Place | None:
    """The caller's caller, unless that is mithril's own code."""
    frame = sys._getframe(2)
    if frame.f_code.co_filename.startswith(PACKAGE):
        return None
    return Place(frame.f_code.co_filename, frame.f_lineno)
