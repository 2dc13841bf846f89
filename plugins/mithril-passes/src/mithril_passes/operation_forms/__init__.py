"""Equivalent forms of operations, and the selection of the fastest."""

from __future__ import annotations

from typing import Literal

from mithril import Option, PassSpec

PASSES = (
    PassSpec(
        "specialize-operations",
        "mithril_passes.operation_forms.specialization:specialize_operations",
        stage="specialize",
        level="medium",
        after=("linear-activation",),
        summary="Products of one row, convolutions of one pixel or channel: in the form that the backend prefers.",
    ),
    PassSpec(
        "kernel-choice",
        "mithril_passes.operation_forms.kernel_selection:kernel_choice",
        stage="specialize",
        level="high",
        after=("specialize-operations",),
        summary="Large operations in the fastest of several ways: measured here, and remembered.",
    ),
    PassSpec(
        "channels-last",
        "mithril_passes.operation_forms.channels_last:channels_last",
        stage="specialize",
        level="medium",
        options=("memory_format",),
        after=("kernel-choice",),
        summary="Images with channels last between operations that the backend computes that way.",
    ),
)

OPTIONS = (
    Option(
        "memory_format",
        Literal["auto", "channels_first", "channels_last"] | None,
        None,
        "Order of images in memory; auto: the faster one of the backend. Decisions record copies at their boundaries.",
    ),
)
