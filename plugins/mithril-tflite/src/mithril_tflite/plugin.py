"""Plugin of mithril-tflite."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, FileFormat, hookimpl


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.from_tflite``."""
    return [Export("from_tflite", "mithril_tflite.model:from_tflite")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """``ml.load("model.tflite")`` and ``ml.compile("model.tflite", backend)``."""
    loads, models = "mithril_tflite.model:load", "mithril_tflite.model:from_tflite"
    return [FileFormat("tflite", (".tflite",), loads=loads, models=models, summary="TensorFlow Lite models")]
