"""Plugin of mithril-openvino; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the OpenVINO backend."""
    return [
        BackendSpec(
            name="openvino",
            class_name="OpenVINOBackend",
            loads="mithril_openvino.backend:OpenVINOBackend",
            requires=("openvino",),
            summary="models of OpenVINO, compiled for each size; inference and training in float32",
        )
    ]
