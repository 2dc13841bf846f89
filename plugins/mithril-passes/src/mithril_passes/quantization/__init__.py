"""Static quantization: ranges of activations from samples, and the pass that inserts quantize and dequantize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril import Export, Option, PassSpec
from mithril.backend import Layers

PASSES = (
    PassSpec(
        "static-quantization",
        "mithril_passes.quantization.static_quantization:static_quantization",
        stage="fuse",
        level=None,
        options=("quantization",),
        after=("operator-fusion", "batch-norm-folding"),
        summary="For inference: weights of 8 or 4 bits, and rounded activations, as operations of the graph.",
    ),
)

OPTIONS = (
    Option(
        "quantization",
        Mapping[str, Any] | None,
        None,
        "Compute products with weights of 8 or 4 bits; ranges: from ml.calibrate_ranges; keep: layers to exclude.",
        keys={
            "ranges": Any,
            "weights": str,
            "group": int,
            "activations": str,
            "per_channel": bool,
            "keep": Layers,
            "observe": Any,
        },
        example='{"weights": "int8", "keep": ["head"]}',
    ),
)

EXPORTS = (
    Export("calibrate_ranges", "mithril_passes.quantization.calibration:calibrate_ranges"),
    Export("Ranges", "mithril_passes.quantization.ranges:Ranges"),
)
