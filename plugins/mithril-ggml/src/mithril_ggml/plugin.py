"""Plugin of mithril-ggml; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, Export, FileFormat, OpsSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the ggml backend."""
    return [
        BackendSpec(
            name="ggml",
            class_name="GGMLBackend",
            loads="mithril_ggml.backend:GGMLBackend",
            requires=("ggml", "gguf"),
            summary="GGML graphs in one planned arena; quantized weights; GGUF files",
        )
    ]


@hookimpl
def mithril_ops() -> Sequence[OpsSpec]:
    """Weights of three values."""
    return [OpsSpec("mithril_ggml.ops", ("ternarize",))]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """``compiled.export("model.gguf")`` and ``ml.load("model.gguf")``."""
    return [
        FileFormat(
            "gguf",
            (".gguf",),
            saves="mithril_ggml.gguf.export:export_gguf",
            loads="mithril_ggml.gguf.load:load_gguf",
            models="mithril_ggml.gguf.load:from_gguf",
            summary="one file with quantized weights and the graph",
        )
    ]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return the layer of ternary weights and the quantization report."""
    return [
        Export("TernaryLinear", "mithril_ggml.weights.ternary_layer:TernaryLinear"),
        Export("quantization_report", "mithril_ggml.weights.quantization_report:quantization_report"),
    ]
