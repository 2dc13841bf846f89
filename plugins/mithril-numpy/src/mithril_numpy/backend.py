"""``ml.NumpyBackend``: generate and run NumPy source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mithril import ops
from mithril.backend import (
    BuildOptions,
    Capabilities,
    Form,
    Forward,
    Lowerings,
    SourceBackend,
    columns,
    nbytes,
    numpy_threads,
    openblas,
)
from mithril.graph import Graph, Node, float32, float64
from mithril.ops import conv, conv_input_grad
from mithril_numpy.diagnosis import facts
from mithril_numpy.lowering import table

UNFOLDED = 2**20  # bytes of the images that a convolution unfolds at once
ERF_BLOCK = 16384  # elements whose erf is computed at once
ERF_STEPS = {float32: 17.35, float64: 54.0}  # bytes for each of them: the most that tracemalloc counts


class NumpyBackend(SourceBackend):
    """Backend whose arrays are NumPy arrays; operations run one by one, without compilation."""

    name = "numpy"
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table}

    @property
    def capabilities(self) -> Capabilities:
        forms = (Form.POINTWISE_MATMUL,)
        return replace(
            super().capabilities,
            donates=True,
            threads=openblas() is not None,
            estimate_error=(-0.49, 0.01),
            prefers={conv: forms, conv_input_grad: (*forms, Form.DEPTHWISE_SHIFTS)},
        )

    def branches(self, options: BuildOptions) -> bool:
        return True

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        """Run the function without NumPy's warnings: inf and nan are ordinary results."""

        count = options.num_threads

        def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            with np.errstate(all="ignore"):
                return forward(params, inputs)

        def call_with_threads(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            with numpy_threads(count):
                return call(params, inputs)

        if count is None:
            return call
        if openblas() is None:
            options.decisions.record(
                "ignored",
                f"num_threads={count}: this NumPy multiplies by a library that is not asked here",
            )
            return call
        return call_with_threads

    def workspace(self, node: Node, sizes: Mapping[str, int]) -> int:
        if node.op is ops.erf:
            count = min(nbytes(node.result.type, sizes) // node.result.dtype.itemsize, ERF_BLOCK)
            return int(count * ERF_STEPS.get(node.result.dtype, ERF_STEPS[float32]))  # 16-bit floats compute in float32
        return max(columns(node, sizes, UNFOLDED), super().workspace(node, sizes))

    @classmethod
    def diagnose(cls) -> dict[str, str]:
        """Return facts for ``mithril doctor``."""
        return facts()
