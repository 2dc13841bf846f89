"""Weights of three values where they are not packed: in training, and on float32."""

from __future__ import annotations

import numpy as np

from mithril.graph import Node
from mithril_ggml.lowering.table import Array, is_single, row
from mithril_ggml.ops import EPS
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Tensor


def ternary(w: Array, out: Array) -> None:
    """Compute the operation without temporaries."""
    np.absolute(w, out)
    s = np.maximum(np.float32(out.mean()), np.float32(EPS))
    np.divide(w, s, out)
    np.rint(out, out)
    np.maximum(out, -1, out=out)
    np.minimum(out, 1, out=out)
    np.multiply(out, s, out)


@row("ternarize", when=is_single)
def _ternarize(draft: ProgramBuilder, node: Node, w: Tensor) -> Tensor:
    out = draft.like(node.result)
    draft.numpy("ternarize", ternary, [w], [out])
    return out
