"""The C backend of mithril: machine code scheduled with TVM, and readable C that runs without Python."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``mithril_cbackend.export``, imported when it is used."""
    if name == "export":
        import importlib

        return importlib.import_module("mithril_cbackend.bundle").export
    raise AttributeError(f"module 'mithril_cbackend' has no attribute '{name}'")
