"""Warnings about names of the predecessor, once for each name and process, with today's spelling."""

from __future__ import annotations

import warnings
from os.path import dirname

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


def _place() -> tuple[str, int]:
    """Return the file and line of the program, which is the first frame outside of this package."""
    import sys

    frame = sys._getframe(1)
    while frame.f_back is not None and dirname(frame.f_code.co_filename).startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
