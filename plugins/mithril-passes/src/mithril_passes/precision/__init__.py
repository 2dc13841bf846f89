"""Mixed precision: products in a 16-bit dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from mithril import Option, PassSpec
from mithril.backend import Layers
from mithril.compiler import Readable


def _dtype(value: Any) -> None:
    from mithril_passes.precision.mixed_precision import small_dtype

    small_dtype(value)


def _operations(names: str | Sequence[str]) -> None:
    from mithril_passes.precision.mixed_precision import operation_names

    operation_names(names)


OPERATIONS = Annotated[str | Sequence[str], Readable(_operations)]

PASSES = (
    PassSpec(
        "mixed-precision",
        "mithril_passes.precision.mixed_precision:mixed_precision",
        stage="precision",
        level=None,
        options=("mixed_precision",),
        summary="Products in 16 bits, operations that need range or accuracy in 32.",
    ),
)

OPTIONS = (
    Option(
        "mixed_precision",
        bool | Mapping[str, Any],
        False,
        "Compute matrix products in a 16-bit dtype; keep: layers to exclude; low, full: operations by precision.",
        aliases=("torch_options.enable_amp",),
        keys={"dtype": Annotated[Any, Readable(_dtype)], "keep": Layers, "low": OPERATIONS, "full": OPERATIONS},
        example='{"dtype": "bfloat16", "keep": ["head"]}',
    ),
)
