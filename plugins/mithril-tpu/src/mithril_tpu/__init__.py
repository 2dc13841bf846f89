"""The compiler of TPUs, and of GPUs that are elsewhere: programs ahead of time through the JAX backend."""

from __future__ import annotations

from typing import Any

_HOME = {
    "ahead_of": "mithril_tpu.programs",
    "load_program": "mithril_tpu.aot.artifact",
    "simulate_devices": "mithril_tpu.programs",
    "stages_of": "mithril_tpu.programs",
    "training_program": "mithril_tpu.programs",
}


def __getattr__(name: str) -> Any:
    """Functions come from modules that import JAX, so these are imported when one is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'mithril_tpu' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
