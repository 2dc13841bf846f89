"""The C backend of mithril: machine code compiled by TVM, and readable C that runs without Python."""

from __future__ import annotations

from typing import Any

PUBLIC = {  # name -> module
    "export": "bundle.c_export",
    "export_program": "bundle.c_export",
    "save_schedules": "schedule.schedules",
    "tune_offline": "schedule.offline_tuning",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in PUBLIC:
        import importlib

        return getattr(importlib.import_module(f"mithril_cbackend.{PUBLIC[name]}"), name)
    raise AttributeError(f"module 'mithril_cbackend' has no attribute '{name}'")
