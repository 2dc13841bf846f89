"""Equivalent forms of operations, and the selection of the fastest."""

from __future__ import annotations

from mithril import PassSpec

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
        after=("kernel-choice",),
        summary="Images with channels last between operations that the backend computes that way.",
    ),
)
