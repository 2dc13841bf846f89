"""Plugin of mithril-onnx; importing this module does not import onnx."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, FileFormat, FrontendSpec, hookimpl


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.from_onnx``."""
    return [Export("from_onnx", "mithril_onnx.model:from_onnx")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """``ml.load("model.onnx")``, ``ml.compile("model.onnx", backend)`` and ``compiled.export("model.onnx")``."""
    loads, models = "mithril_onnx.model:load", "mithril_onnx.model:from_onnx"
    saves = "mithril_onnx.export.model:export"
    return [FileFormat("onnx", (".onnx",), loads=loads, models=models, saves=saves, summary="ONNX models")]


@hookimpl
def mithril_frontends() -> Sequence[FrontendSpec]:
    """``ml.compile`` of an ``onnx.ModelProto``."""
    accepts = ("onnx.onnx_ml_pb2.ModelProto", "onnx.onnx_pb2.ModelProto")
    return [FrontendSpec("onnx", accepts, "mithril_onnx.model:source")]
