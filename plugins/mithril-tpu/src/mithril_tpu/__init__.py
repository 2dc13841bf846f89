"""Ahead-of-time compilation for TPUs, and for GPUs of other machines, through the JAX backend."""

from __future__ import annotations

from typing import Any

_HOME = {
    "ahead_of": "mithril_tpu.programs",
    "compile_plan": "mithril_tpu.programs",
    "load_program": "mithril_tpu.aot.artifact",
    "simulate_devices": "mithril_tpu.programs",
    "step_program": "mithril_tpu.programs",
    "training_program": "mithril_tpu.programs",
}


def __getattr__(name: str) -> Any:
    """Import a function on first use, since its module imports JAX."""
    if name not in _HOME:
        raise AttributeError(f"module 'mithril_tpu' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
