"""What mithril-jax adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """The jax backend."""
    return [
        BackendSpec(
            name="jax",
            class_name="JaxBackend",
            loads="mithril_jax.backend:JaxBackend",
            requires=("jax",),
            summary="generated JAX source, compiled by XLA for CPU, GPU and TPU",
        )
    ]
