"""Hook implementations of mithril-jax; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mithril import BackendSpec, Export, FileFormat, Option, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the jax backend."""
    return [
        BackendSpec(
            name="jax",
            class_name="JaxBackend",
            loads="mithril_jax.backend:JaxBackend",
            requires=("jax",),
            summary="generated JAX source, compiled by XLA for CPU, GPU and TPU",
        )
    ]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.from_jax`` and ``ml.from_stablehlo``."""
    return [
        Export("from_jax", "mithril_jax.importing.entry:from_jax"),
        Export("from_stablehlo", "mithril_jax.importing.stablehlo:from_stablehlo"),
    ]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """``ml.load("model.mlir")``, ``ml.compile("model.mlir", backend)`` and ``compiled.export("model.mlir")``."""
    module = "mithril_jax.importing.stablehlo"
    return [
        FileFormat(
            "stablehlo",
            (".mlir", ".stablehlo"),
            loads=f"{module}:load",
            models=f"{module}:from_stablehlo",
            saves=f"{module}:export",
            summary="programs of StableHLO",
            backends=("jax",),
        )
    ]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options that control how the generated function is compiled and vectorized."""
    empty: Mapping[str, Any] = MappingProxyType({})
    return [
        Option(
            "jax_options",
            Mapping[str, Any],
            empty,
            "XLA flags for this program only, precision of matrix products, donated arguments, unroll factor of loops.",
            keys={"xla_flags": Any, "precision": Any, "donate_argnums": Any, "unroll": Any},
            backends=("jax",),
            example='{"precision": "highest", "unroll": 4}',
        ),
        Option(
            "pjit",
            bool,
            False,
            "Shard batches over the backend's device_mesh, or over all devices if it has none.",
            backends=("jax",),
        ),
        Option(
            "scan_layers",
            bool,
            False,
            "Compile equal layers that follow each other once, as a loop over their stacked parameters.",
            backends=("jax",),
        ),
        Option(
            "vectorize",
            bool,
            False,
            "Compile the program for one example and map it over the leading axis (vmap).",
            backends=("jax",),
        ),
        Option(
            "xla_optimization_level",
            int | None,
            None,
            "XLA's optimization level for this program, 0 to 3; None selects XLA's default.",
            backends=("jax",),
            example="1",
        ),
    ]
