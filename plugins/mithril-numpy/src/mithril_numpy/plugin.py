"""Plugin of mithril-numpy; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the numpy backend."""
    return [
        BackendSpec(
            name="numpy",
            class_name="NumpyBackend",
            loads="mithril_numpy.backend:NumpyBackend",
            requires=("numpy",),
            summary="generated NumPy source; the reference for every other backend",
        )
    ]
