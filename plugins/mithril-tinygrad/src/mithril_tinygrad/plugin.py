"""Plugin of mithril-tinygrad; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the tinygrad backend."""
    return [
        BackendSpec(
            name="tinygrad",
            class_name="TinygradBackend",
            loads="mithril_tinygrad.backend:TinygradBackend",
            requires=("tinygrad",),
            summary="kernels of tinygrad, captured by its TinyJit for each size; inference and training on the CPU",
        )
    ]
