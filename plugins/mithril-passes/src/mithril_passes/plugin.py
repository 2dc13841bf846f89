"""Plugin of mithril-passes: the declarations of its packages; importing it imports no framework and no pass."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, Option, PassSpec, hookimpl
from mithril_passes import cleaning, fusion, memory, operation_forms, precision, quantization, sparsity


@hookimpl
def mithril_passes() -> Sequence[PassSpec]:
    """Return the standard passes."""
    packages = (cleaning, fusion, quantization, operation_forms, precision, memory)
    return [spec for package in packages for spec in package.PASSES]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.calibrate_ranges``, ``ml.Ranges`` and ``ml.sparsify``."""
    return [*quantization.EXPORTS, *sparsity.EXPORTS]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options of ``ml.compile`` that the passes implement."""
    return [*memory.OPTIONS, *operation_forms.OPTIONS, *precision.OPTIONS, *quantization.OPTIONS]
