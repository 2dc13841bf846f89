"""Plugin of mithril-pass-example; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import PassSpec, hookimpl


@hookimpl
def mithril_passes() -> Sequence[PassSpec]:
    """Return the pass named 'example-fold-batch-norm'."""
    return [
        PassSpec(
            name="example-fold-batch-norm",
            loads="mithril_pass_example.folding:fold_batch_norm",
            stage="fuse",
            level="high",
            before=("batch-norm-folding",),  # the standard pass for inference would leave nothing to fold
            summary="Multiply the scale of a batch norm into the convolution before it.",
        )
    ]
