"""The graph that XLA compiles, without XLA: its operations, and the variants of them that are faster on XLA.

A backend whose programs can only be inspected. Plans use its graphs, and the ahead-of-time backend takes its
preferences from here, so that a plan describes the program that is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import Backend, BuildOptions, Capabilities, Form, Prefers, as_numpy
from mithril.graph import BackendError, Graph, Node

SHIFTED = (Form.POINTWISE_MATMUL, Form.DEPTHWISE_SHIFTS)
PREFERS: Prefers = {ops.linear: (Form.MATVEC,)} | dict.fromkeys(
    (ops.conv, ops.conv_input_grad, ops.conv_weight_grad), SHIFTED
)
COMPOSITES = frozenset(  # operations of XLA, and of the backend
    {ops.isfinite, ops.isinf, ops.log2, ops.max_pool_grad, ops.rsqrt, ops.square, ops.tan}
)


@dataclass(frozen=True)
class InspectedProgram:
    """A program that can be inspected but not called."""

    graph: Graph
    source: str | None = None

    @property
    def lowered(self) -> frozenset[str]:
        return frozenset(node.op.name for node in self.graph.nodes)

    def __call__(self, params: Any, inputs: Any) -> dict[str, Any]:
        raise BackendError("a program of a plan cannot be called", hint="compile the model for another backend")


class XlaGraphs(Backend):
    """A backend that builds only graphs; its arrays are NumPy arrays."""

    name = "xla"

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities, local=False, symbolic=False, recompiles=True, memory="library", prefers=PREFERS
        )

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        return not node.op.composite or node.op in COMPOSITES

    def build(self, graph: Graph, options: BuildOptions | None = None) -> InspectedProgram:
        return InspectedProgram(graph)

    def array(self, data: Any, dtype: Any = None) -> Any:
        return as_numpy(data, dtype if dtype is not None else self.dtype)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)
