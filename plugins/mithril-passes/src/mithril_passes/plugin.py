"""Plugin of mithril-passes; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from mithril import Export, Option, PassSpec, hookimpl
from mithril.backend import Layers, Positive
from mithril.compiler import Readable

NOTHING: Mapping[str, Any] = MappingProxyType({})
FUSION = ("fusion", "operator_fusion")  # the names that select all fusion passes


def _dtype(value: Any) -> None:
    from mithril_passes.mixed_precision import small_dtype

    small_dtype(value)


def _operations(names: str | Sequence[str]) -> None:
    from mithril_passes.mixed_precision import operation_names

    operation_names(names)


OPERATIONS = Annotated[str | Sequence[str], Readable(_operations)]


@hookimpl
def mithril_passes() -> Sequence[PassSpec]:
    """Return the standard passes."""
    cleaning = "mithril_passes.cleanup:"
    return [
        PassSpec(
            "dead-code",
            cleaning + "dead_code_elimination",
            stage="clean",
            level="low",
            aliases=("dead_code_elimination", "dead_code"),
            summary="Drop unused operations, constants and region results.",
        ),
        PassSpec(
            "constant-folding",
            cleaning + "constant_folding",
            stage="clean",
            level="low",
            aliases=("constant_folding",),
            after=("dead-code",),
            summary="Evaluate expressions of constants.",
        ),
        PassSpec(
            "common-subexpression",
            cleaning + "common_subexpression",
            stage="clean",
            level="low",
            aliases=("common_subexpression", "common_subexpression_elimination", "cse"),
            after=("constant-folding",),
            summary="Compute equal expressions once.",
        ),
        PassSpec(
            "simplify",
            "mithril_passes.simplify:EXACT",
            stage="canonical",
            level="low",
            aliases=("algebraic_simplification",),
            summary="Algebra that holds bit for bit: reshapes, transposes, casts, neutral elements.",
        ),
        PassSpec(
            "fast-math",
            "mithril_passes.simplify:APPROXIMATE",
            stage="canonical",
            level="high",
            aliases=("fast_math",),
            after=("simplify",),
            summary="Algebra that may change the last places.",
        ),
        PassSpec(
            "operator-fusion",
            "mithril_passes.composite_matching:operator_fusion",
            stage="fuse",
            level="medium",
            aliases=("operator_fusion", "fusion"),
            groups=FUSION,
            summary="Raise parts written out to activations, softmax, norms, linear, attention.",
        ),
        PassSpec(
            "batch-norm-folding",
            "mithril_passes.batch_norm:RULES",
            stage="fuse",
            level=None,
            options=("inference", "static_inference"),
            aliases=("batch_norm_folding",),
            groups=FUSION,
            after=("operator-fusion",),
            summary="For inference: a batch norm goes into the weights of the product before it.",
        ),
        PassSpec(
            "static-quantization",
            "mithril_passes.quantization.static_quantization:static_quantization",
            stage="fuse",
            level=None,
            options=("quantization",),
            aliases=("static_quantization",),
            after=("operator-fusion", "batch-norm-folding"),
            summary="For inference: int8 weights and 8-bit activations, as quantize and dequantize pairs.",
        ),
        PassSpec(
            "quantize-pairs",
            "mithril_passes.simplify:QUANTIZE_PAIRS",
            stage="canonical",
            level=None,
            aliases=("quantize_pairs",),
            summary="Drop dequantize(quantize(x)): changes values, so only on request.",
        ),
        PassSpec(
            "sibling-products",
            "mithril_passes.horizontal_fusion:sibling_products",
            stage="specialize",
            level="high",
            aliases=("sibling_products",),
            favors="throughput",
            groups=FUSION,
            summary="Products of one operand with several weights as one product.",
        ),
        PassSpec(
            "linear-activation",
            "mithril_passes.epilogue_fusion:RULES",
            stage="specialize",
            level="medium",
            aliases=("linear_activation",),
            groups=FUSION,
            after=("sibling-products",),
            summary="Merge an activation into the linear before it.",
        ),
        PassSpec(
            "specialize-operations",
            "mithril_passes.specialization:specialize_operations",
            stage="specialize",
            level="medium",
            aliases=("operation_specialization", "specialize_operations", "operation_specialisation"),
            former={"specialise-operations": "0.1", "specialise_operations": "0.1"},
            after=("linear-activation",),
            summary="Products of one row, convolutions of one pixel or channel: in the form that the backend prefers.",
        ),
        PassSpec(
            "kernel-choice",
            "mithril_passes.kernel_selection:kernel_choice",
            stage="specialize",
            level="high",
            aliases=("kernel_selection", "kernel_choice"),
            after=("specialize-operations",),
            summary="Large operations in the fastest of several ways: measured here, and remembered.",
        ),
        PassSpec(
            "mixed-precision",
            "mithril_passes.mixed_precision:mixed_precision",
            stage="precision",
            level=None,
            options=("mixed_precision",),
            aliases=("mixed_precision",),
            summary="Products in 16 bits, operations that need range or accuracy in 32.",
        ),
        PassSpec(
            "gradient-checkpointing",
            "mithril_passes.checkpointing:gradient_checkpointing",
            stage="memory",
            level=None,
            options=("gradient_checkpointing",),
            aliases=("gradient_checkpointing", "rematerialization", "rematerialisation"),
            summary="Forget values the backward part needs, and compute them again.",
        ),
        PassSpec(
            "late-constant-folding",
            cleaning + "late_constant_folding",
            stage="final",
            level=None,
            options=("static_inference",),
            aliases=("late_constant_folding",),
            summary="Fold expressions of bound parameters that other passes introduced.",
        ),
    ]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.calibrate_ranges`` and ``ml.Ranges``."""
    package = "mithril_passes.quantization"
    return [
        Export("calibrate_ranges", f"{package}.calibration:calibrate_ranges"),
        Export("Ranges", f"{package}.ranges:Ranges"),
    ]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options of ``ml.compile`` that the passes implement."""
    return [
        Option("gradient_checkpointing", bool, False, "Recompute values in the backward pass instead of storing them."),
        Option(
            "checkpoint_segments",
            Positive | None,
            None,
            "Number of segments to recompute; None selects the number that minimizes memory.",
        ),
        Option(
            "mixed_precision",
            bool | Mapping[str, Any],
            False,
            "Compute matrix products in a 16-bit dtype; keep: layers to exclude; low, full: operations by precision.",
            aliases=("torch_options.enable_amp",),
            keys={"dtype": Annotated[Any, Readable(_dtype)], "keep": Layers, "low": OPERATIONS, "full": OPERATIONS},
        ),
        Option(
            "quantization",
            Mapping[str, Any] | None,
            None,
            "Compute products in 8-bit integers; ranges: from ml.calibrate_ranges; keep: layers to exclude.",
            keys={
                "ranges": Any,
                "weights": str,
                "activations": str,
                "per_channel": bool,
                "keep": Layers,
                "observe": Any,
            },
        ),
    ]
