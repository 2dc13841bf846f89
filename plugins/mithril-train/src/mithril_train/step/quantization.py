"""Quantization-aware training: linear layers compute with the rounding of int8 kernels.

The grid is that of ggml's ``q8_0``: blocks of 32 numbers along the contracted axis, each with one scale (its largest
magnitude divided by 127, stored in 16 bits), for weights and activations. Gradients use the straight-through estimator,
so that the weights adapt to the rounding; ``ml.GGMLBackend(quantize="q8_0")`` then runs the trained parameters with the
accuracy measured in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import Graph, Node, OptionError, Value, ops
from mithril.backend import covers
from mithril.passes import PassContext, pass_

TAG = "quantized"


@dataclass(frozen=True)
class Grid:
    """``quantization_aware=``: the number of bits, the block size, and the excluded layers."""

    bits: int = 8
    block: int = 32
    activations: bool = True
    keep: tuple[str, ...] = ()

    @staticmethod
    def of(setting: Any) -> Grid:
        if not isinstance(setting, Mapping):
            return Grid()
        values = dict(setting)
        keep = values.get("keep", ())
        values["keep"] = (keep,) if isinstance(keep, str) else tuple(keep)
        grid = Grid(**values)
        if not 2 <= grid.bits <= 16 or grid.block < 1:
            raise OptionError(f"quantization_aware: {grid.bits} bits in blocks of {grid.block} make no grid")
        return grid

    def keeps(self, path: str) -> bool:
        return any(covers(pattern, path) for pattern in self.keep)


@pass_(name="quantization-aware", exact=False, tolerance=2.0)  # two bits move a number by half of the largest
def quantization_aware(graph: Graph, context: PassContext) -> Graph:
    """Round weights and inputs of linear layers to the grid."""
    grid = Grid.of(context.option("quantization_aware"))
    editor = graph.edit()
    rounded: dict[tuple[Value | None, bool], Value] = {}
    for node in editor.nodes():
        w, input_major = _weight(node, graph)
        if w is None:
            continue
        x = node.operands[0]
        size = w.shape[0 if input_major else -1]
        path = node.origin.path or w.name
        if grid.keeps(path):
            continue
        if not isinstance(size, int) or size % grid.block:
            context.record(
                "choice", f"'{path}' is not trained for {grid.bits} bits: {size} is not a multiple of the block size"
            )
            editor.replace_node(node, _mark_processed(node, node.operands))
            continue
        with editor.before(node):
            for value, is_input_major in ((w, input_major), (x, False)) if grid.activations else ((w, input_major),):
                if (value, is_input_major) not in rounded:
                    rows = ops.transpose(value, perm=(1, 0)) if is_input_major else value
                    rounded[value, is_input_major] = round_to_grid(rows, grid)
            weight = rounded[w, input_major]
            if node.op is ops.matmul:
                weight = ops.transpose(weight, perm=(1, 0))
        operands = (rounded.get((x, False), x), weight, *node.operands[2:])
        editor.replace_node(node, _mark_processed(node, operands))
    return editor.freeze()  # type: ignore[no-any-return]


def _weight(node: Node, graph: Graph) -> tuple[Value | None, bool]:
    """Return the weight of a linear layer, and whether its first axis is the contracted one, as in ``x @ w``.

    At low levels no pass has made ``x @ transpose(w)``, which importers write, a ``linear``.
    """
    if node.op not in (ops.linear, ops.matmul) or TAG in node.tags or node.tags.get("phase") == "backward":
        return None, False
    w, input_major = node.operands[1], node.op is ops.matmul
    assert w is not None
    producer = graph.producers.get(w)
    if input_major and producer is not None and producer.op is ops.transpose and producer.attributes["perm"] == (1, 0):
        w, input_major = producer.operands[0], False
    is_weight = w in graph.input_of and graph.input_of[w].role == "param" and w.ndim == 2 and w.dtype.is_float
    return (w, input_major) if is_weight else (None, False)


def _mark_processed(node: Node, operands: tuple[Value | None, ...]) -> Node:
    """Tag the node as processed: the pass runs before and after the backward part is built."""
    return node.replaced(operands=operands, tags={**node.tags, TAG: True})


def round_to_grid(x: Value, grid: Grid) -> Value:
    """Round x block by block along its last axis."""
    blocks = ops.reshape(x, shape=(-1, grid.block))
    top = ops.max(ops.abs(ops.stop_gradient(blocks)), axis=-1)
    largest = float((1 << (grid.bits - 1)) - 1)
    scale = ops.cast(ops.cast(top * (1.0 / largest), dtype="float16"), dtype=x.dtype)
    scale = ops.where(ops.greater(scale, 0.0), scale, 1.0)  # a block of zeros stays zero
    rounded = ops.fake_quantize(blocks, scale, bits=grid.bits, axis=0)
    return ops.reshape(rounded, shape=x.shape)
