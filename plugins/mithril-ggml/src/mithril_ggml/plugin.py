"""What mithril-ggml adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """The ggml backend."""
    return [
        BackendSpec(
            name="ggml",
            class_name="GGMLBackend",
            loads="mithril_ggml.backend:GGMLBackend",
            requires=("ggml", "gguf"),
            summary="GGML graphs in one planned arena; quantized weights; GGUF files",
        )
    ]
