"""The C backend of mithril: machine code scheduled with TVM, and readable C that runs without Python."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``export`` and ``export_program``, imported when they are used."""
    if name in ("export", "export_program"):
        import importlib

        return getattr(importlib.import_module("mithril_cbackend.bundle"), name)
    raise AttributeError(f"module 'mithril_cbackend' has no attribute '{name}'")
