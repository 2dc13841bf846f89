"""What mithril-mlx adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """The mlx backend."""
    return [
        BackendSpec(
            name="mlx",
            class_name="MlxBackend",
            loads="mithril_mlx.backend:MlxBackend",
            requires=("mlx",),
            summary="generated MLX source for Apple silicon, CUDA and the CPU",
        )
    ]
