"""Warnings about names of the predecessor, once for each name and process, with today's spelling."""

from __future__ import annotations

import sys
import warnings
from os.path import dirname
from types import FrameType
from typing import Any

from mithril_compat.spellings import SPELLINGS

_PACKAGE = dirname(__file__)
_warned: set[str] = set()


class PredecessorWarning(FutureWarning):  # Python shows it by default, unlike DeprecationWarning
    """A program uses a name of the predecessor; ``mithril migrate`` writes today's."""


def old_name(name: str) -> None:
    """Warn once that the program uses this name, unless mithril has the same one."""
    instead = SPELLINGS.get(name, "")
    if not instead or name in _warned:
        return
    _warned.add(name)
    text = f"'{name}' is the predecessor's: today, {instead}"
    warnings.warn_explicit(text, PredecessorWarning, *_place())


def is_called_by_program(constructed: Any) -> bool:
    """Whether the program constructs an object, in whose constructor this is called, not a layer of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is constructed:
        frame = frame.f_back
    return frame is not None and not dirname(frame.f_code.co_filename).startswith(_PACKAGE)


def _place() -> tuple[str, int]:
    """Return the file and line of the program, which is the first frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and dirname(frame.f_code.co_filename).startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
