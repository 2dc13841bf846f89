"""Deprecation: a name that is replaced still works for two minor versions, with a warning."""

from __future__ import annotations

import sys
import warnings


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
