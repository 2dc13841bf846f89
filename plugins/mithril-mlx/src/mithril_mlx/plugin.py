"""Plugin of mithril-mlx; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, Export, hookimpl
from mithril_mlx import UTILITIES


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the mlx backend."""
    return [
        BackendSpec(
            name="mlx",
            class_name="MlxBackend",
            loads="mithril_mlx.backend:MlxBackend",
            requires=("mlx",),
            summary="generated MLX source for Apple silicon, CUDA and the CPU",
        )
    ]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.MlxProfiler`` and the other utilities around MLX."""
    return [
        Export(name, f"mithril_mlx.{module}:{name}")
        for module, names in UTILITIES.items()
        for name in names
        if name.startswith("Mlx")
    ]
