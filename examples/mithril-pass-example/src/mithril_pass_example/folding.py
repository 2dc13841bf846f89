"""Batch norm after a convolution is another convolution: its scale goes into the weights, its shift into the bias."""

from __future__ import annotations

from typing import Any

import mithril as ml
from mithril import Graph, Node, Value
from mithril.graph import Editor, is_static, numel
from mithril.passes import PassContext


@ml.pass_(exact=False)
def fold_batch_norm(graph: Graph, context: PassContext) -> Graph:
    """Multiply the scale of a batch norm into the convolution before it."""
    editor = graph.edit()
    for node in editor.nodes():
        source = match(editor, node) if node.op.name == "batch_norm" else None
        if source is not None:
            fold(editor, node, *source)
            context.record("choice", "batch norm folded into the convolution before it", node.origin)
    return editor.freeze()


def match(editor: Editor, norm: Node) -> tuple[Node, Value | None] | None:
    """Return the convolution that only this batch norm uses, and the per-channel bias added in between."""
    normalized = norm.operands[0]
    before = editor.producer(normalized)
    if before is None or editor.use_count(normalized) > 1:
        return None
    added = None
    if before.op.name == "add":
        for data, other in (before.operands, before.operands[::-1]):
            source = editor.producer(data)
            if source is not None and source.op.name == "conv" and is_per_channel(other, data):
                if editor.use_count(data) > 1:
                    return None
                before, added = source, other
                break
    if before.op.name != "conv" or not is_profitable(before):
        return None
    return before, added


def is_per_channel(value: Value, data: Value) -> bool:
    """Whether a value is one number per channel (axis 1), ready to broadcast."""
    return value.shape == (1, data.shape[1], *[1] * (data.ndim - 2))


def is_profitable(conv: Node) -> bool:
    """Estimate the benefit: scaling costs one pass over the weights and saves one over the activations."""
    weights, result = conv.operands[1], conv.result
    return not is_static((*weights.shape, *result.shape)) or numel(weights.shape) < numel(result.shape)


def fold(editor: Editor, norm: Node, conv: Node, added: Value | None) -> None:
    """Write the folded convolution in place of both."""
    x, weights = conv.operands
    _, scale, bias, mean, variance = norm.operands
    data, ops = norm.result, ml.ops
    with editor.before(norm):
        factor = scale * ops.rsqrt(variance + norm.attributes["eps"])
        per_channel = (1, data.shape[1], *[1] * (data.ndim - 2))
        per_output = (data.shape[1], *[1] * (weights.ndim - 1))
        folded = ops.conv(x, weights * shaped(factor, per_output), **conv.attributes)
        shift = shaped(bias - mean * factor, per_channel)
        if added is not None:
            shift = shift + added * shaped(factor, per_channel)
        result = folded + shift
    editor.replace_value(data, result)
    editor.erase_dead(norm)


def shaped(value: Any, shape: tuple[Any, ...]) -> Any:
    return ml.ops.reshape(value, shape=shape)
