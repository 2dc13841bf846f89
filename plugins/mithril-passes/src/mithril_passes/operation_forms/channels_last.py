"""Layout of images: channels last between operations for which the backend transposes them; transposes cancel.

The backend computes some operations (``Capabilities.channels_last``) with channels last, and transposes their images
on both sides. Everything between two of them is rewritten to channels last as well: element-wise operations, pools,
reductions, concatenations, padding, slices. Transposes that remain, around such an operation, are views that cancel
with its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import Graph, OptionError, ops, pass_
from mithril.graph import Editor, Node, Value, decompose, emit, is_fold, iterate, types_of
from mithril.passes import PassContext
from mithril_passes.operation_forms.specialization import targets_own_device

RANKS = (3, 4, 5)  # of images
MEMBERS = 2  # operations with channels last below which nothing cancels


@pass_(name="channels-last", exact=False)
def channels_last(graph: Graph, context: PassContext) -> Graph:
    """Compute images with channels last between operations that the backend computes that way."""
    wish = context.option("memory_format")
    if wish is not None and not any(reads_images(node) for node, _ in iterate(graph)):
        raise OptionError(
            f"memory_format='{wish}' is for networks of images, but this one has no convolution and no pool",
            hint="omit memory_format=",
        )
    if context.backend is None or not targets_own_device(context):
        return graph
    anchors = context.backend.capabilities.channels_last
    if sum(node.op in anchors for node in graph.nodes) < MEMBERS or wish == "channels_first":
        result = graph
    else:
        norms = decompose(graph, lambda node: not is_image_composite(node) or context.backend.lowers(node))
        result = ChannelsLast(norms, anchors).run()
    if wish is not None:
        record_order(result, context, wish)
    return result


REASONS = {
    "planes": "its convolutions read images as planes of channels",
    "compiler": "its compiler selects the order of images, and loses by transposes that it did not select",
}
CONVOLUTIONS = (ops.conv, ops.conv_input_grad, ops.conv_weight_grad)


def reads_images(node: Node) -> bool:
    """Whether a node is a convolution or a pool of images, or is composed of some."""
    if node.op in (*CONVOLUTIONS, ops.max_pool, ops.avg_pool):
        return True
    inner = node.op.decompose(types_of(node.operands), node.attributes).nodes if is_image_composite(node) else ()
    return any(map(reads_images, inner))


def record_order(graph: Graph, context: PassContext, wish: str) -> None:
    """Record the order of images in memory, and the copies that it costs where it changes."""
    name, order = context.backend.name, context.backend.capabilities.images
    if order in REASONS:
        kind = "ignored" if wish == "channels_last" else "choice"
        context.record(kind, f"memory_format='{wish}' has no effect on backend '{name}': {REASONS[order]}")
        return
    if order == "channels":  # a backend of images in either order records them itself
        copies = boundary_transposes(graph, context.backend.capabilities.channels_last)
        first = "first, which each convolution transposes" if wish == "channels_first" else "last"
        context.record("choice", f"memory_format='{wish}': images have channels {first}: {copies} transposes")


def boundary_transposes(graph: Graph, anchors: frozenset[Any]) -> int:
    """Return how many images change their order between an operation with channels last and another one."""
    count = 0
    for node in graph.nodes:
        x = node.operands[0] if node.op is ops.transpose else None
        if x is None or x.ndim not in RANKS:
            continue
        producer, perm = graph.producers.get(x), tuple(node.attributes["perm"])
        users = graph.users.get(node.result, ())
        is_read_first = node.result in graph.outputs or any(user.op not in anchors for user in users)
        enters = perm == last_order(x.ndim) and (producer is None or producer.op not in anchors)
        count += enters or (perm == first_order(x.ndim) and is_read_first)
    return count + sum(_outer_images(graph, node) for node in graph.nodes if node.op in anchors)


def _outer_images(graph: Graph, node: Node) -> int:
    """Return how many images an operation transposes itself: its own, and its result."""
    x = node.operands[0]
    producer = None if x is None else graph.producers.get(x)
    is_view = producer is not None and producer.op is ops.transpose
    users = graph.users.get(node.result, ())
    is_read_last = bool(users) and all(user.op is ops.transpose for user in users)
    return (not is_view) + (not is_read_last or node.result in graph.outputs)


def is_image_composite(node: Node) -> bool:
    """Whether a node is divided into operations on images: norms and global pools."""
    x = node.operands[0] if node.operands else None
    return node.op.composite and not node.op.elementwise and not node.regions and x is not None and x.ndim in RANKS


def last_order(rank: int) -> tuple[int, ...]:
    """Return the permutation from [batch, channels, *spatial] to channels last."""
    return (0, *range(2, rank), 1)


def first_order(rank: int) -> tuple[int, ...]:
    """Return the permutation from channels last to [batch, channels, *spatial]."""
    return (0, rank - 1, *range(1, rank - 1))


def moved(axis: int, rank: int) -> int:
    """Return the position of an axis with channels last."""
    return last_order(rank).index(axis)


class ChannelsLast:
    """The rewriting of one graph; ``last`` maps an image to its value with channels last."""

    def __init__(self, graph: Graph, anchors: frozenset[Any]) -> None:
        self.editor: Editor = graph.edit()
        self.anchors = anchors
        self.last: dict[Value, Value] = {}

    def run(self) -> Graph:
        for node in self.editor.nodes():
            if node.op in self.anchors:
                self.weights(node)
            elif len(node.results) == 1 and not node.regions and "backend" not in node.tags:
                self.follow(node)
        for value in self.last:
            producer = self.editor.producer(value)
            if producer is not None:
                self.editor.erase_dead(producer)
        return self.editor.freeze()

    # -- values ----------------------------------------------------------------------------------------------------
    def is_image(self, value: Value | None) -> bool:
        """Whether a value exists, or is computed, with channels last."""
        if value is None or value.ndim not in RANKS:
            return False
        producer = self.editor.producer(value)
        return value in self.last or (producer is not None and producer.op in self.anchors)

    def with_channels_last(self, value: Value) -> Value:
        """Return a value with channels last, emitted into the current builder if it is new."""
        if value not in self.last:
            order = last_order(value.ndim)
            if value.shape[1] == 1 or all(n == 1 for n in value.shape[2:]):  # the same order of elements
                self.last[value] = ops.reshape(value, shape=tuple(value.shape[k] for k in order))
            else:
                self.last[value] = ops.transpose(value, perm=order)
        return self.last[value]

    def operand(self, value: Value | None, rank: int) -> Value | None:
        """Return an operand of an element-wise operation on images with channels last."""
        if value is None or not value.ndim:
            return value
        if value.ndim < rank:
            value = ops.reshape(value, shape=(*(1,) * (rank - value.ndim), *value.shape))
        return self.with_channels_last(value)

    # -- operations ------------------------------------------------------------------------------------------------
    def weights(self, node: Node) -> None:
        """Store constant kernels with channels last; the barrier keeps the transpose from being folded."""
        kernel = node.operands[1] if node.op is ops.conv else None
        data = None if kernel is None else self.editor.data_of(kernel)
        if kernel is None or data is None:
            return
        with self.editor.before(node) as b:
            stored = np.asarray(np.asarray(data).transpose(last_order(kernel.ndim)), order="C")
            (constant,) = ops.barrier(b.constant(stored, name=kernel.name))
            view = ops.transpose(constant, perm=first_order(kernel.ndim))
        self.editor.replace_value(kernel, view)

    def follow(self, node: Node) -> None:
        """Compute a node on values with channels last if one of its operands is an image."""
        images = [v for v in node.operands if self.is_image(v)]
        if node.op is ops.transpose and self.permuted(node):
            return
        rank = images[0].ndim if images and images[0] is not None else 0
        if not images or any(v is not None and v.ndim > rank for v in node.operands):
            return
        with self.editor.before(node):
            result = self.computed(node, rank)
            if result is None:
                return
            if isinstance(result, tuple):  # without axes that the reduction removed
                replacement = result[0]
            else:
                replacement = ops.transpose(result, perm=first_order(rank))
                self.last[replacement] = result
        self.editor.replace_value(node.result, replacement)
        self.editor.erase_dead(node)

    def permuted(self, node: Node) -> bool:
        """Cancel a transpose of the model with the layout; return whether it is done with."""
        x = node.operands[0]
        assert x is not None
        perm = tuple(node.attributes["perm"])
        if x.ndim not in RANKS:
            return True
        if perm == first_order(x.ndim):
            self.last[node.result] = x
        elif perm == last_order(x.ndim) and x in self.last:
            self.editor.replace_value(node.result, self.last[x])
            self.editor.erase_dead(node)
        return True

    def computed(self, node: Node, rank: int) -> Value | tuple[Value] | None:
        """Return the node's result with channels last; in a tuple if it has fewer axes; None if it cannot follow."""
        op, attributes = node.op, dict(node.attributes)
        x = node.operands[0]
        assert x is not None
        if op.elementwise:
            if node.result.ndim != rank:
                return None
            return emit(op, [self.operand(v, rank) for v in node.operands], attributes)  # type: ignore[no-any-return]
        if op in (ops.max_pool, ops.avg_pool):
            return self.pooled(node, self.with_channels_last(x))
        if is_fold(node) and "keepdims" in attributes:
            axes = attributes["axis"]
            remaining = [k for k in last_order(rank) if k not in axes]
            attributes["axis"] = tuple(sorted(moved(k, rank) for k in axes))
            result = emit(op, [self.with_channels_last(x)], attributes)
            if attributes["keepdims"]:
                return result  # type: ignore[no-any-return]
            order = tuple(sorted(range(len(remaining)), key=remaining.__getitem__))
            return (ops.transpose(result, perm=order) if order != tuple(range(len(remaining))) else result,)
        if op is ops.concat:
            attributes["axis"] = moved(attributes["axis"], rank)
            return emit(op, [self.with_channels_last(v) for v in node.operands if v is not None], attributes)  # type: ignore[no-any-return]
        if op is ops.pad:
            attributes["widths"] = tuple(attributes["widths"][k] for k in last_order(rank))
            return emit(op, [self.with_channels_last(x)], attributes)  # type: ignore[no-any-return]
        if op is ops.slice:
            attributes["axes"] = tuple(moved(k, rank) for k in attributes["axes"])
            return emit(op, [self.with_channels_last(x)], attributes)  # type: ignore[no-any-return]
        return None

    def pooled(self, node: Node, x: Value) -> Value:
        """Pool an image whose channels are one more spatial axis, with windows of one element."""
        attributes = dict(node.attributes)
        for name, one in (("kernel", 1), ("stride", 1), ("padding", (0, 0)), ("dilation", 1)):
            if name in attributes:
                attributes[name] = (*attributes[name], one)
        inner = ops.reshape(x, shape=(x.shape[0], 1, *x.shape[1:]))
        result = emit(node.op, [inner], attributes)
        return ops.reshape(result, shape=(result.shape[0], *result.shape[2:]))  # type: ignore[no-any-return]
