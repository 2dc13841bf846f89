"""The pass ``channels-last``: equal values, and no transpose but those around operations that cancel them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder
from mithril.graph.evaluation import evaluate
from mithril.passes import PassContext, random_arguments
from mithril_numpy.backend import NumpyBackend
from mithril_passes.operation_forms.channels_last import channels_last

PAD = {"padding": ((1, 1), (1, 1))}


class ChannelsLastBackend(NumpyBackend):
    """NumPy's backend with the claim that it transposes the images of convolutions."""

    @property
    def capabilities(self):
        return replace(super().capabilities, channels_last=frozenset({ops.conv}))


def between(x, weights, middle):
    """Return two convolutions with operations between and after them, with channels first."""
    y = ops.conv(x, weights[0], **PAD)
    return ops.relu(ops.conv(middle(y, x), weights[1], **PAD))


def shuffled(y):
    groups = ops.reshape(y, shape=(2, 2, 4, 6, 6))
    return ops.reshape(ops.transpose(groups, perm=(0, 2, 1, 3, 4)), shape=(2, 8, 6, 6))


MIDDLES = {
    "activation": lambda y, x: ops.relu(y),
    "two of them": lambda y, x: ops.gelu(y) * ops.sigmoid(y),
    "residual": lambda y, x: ops.relu(y + ops.conv(y, np.ones((8, 8, 1, 1), np.float32) / 8)),
    "residual of the input": lambda y, x: y + x,
    "channel bias": lambda y, x: y + ops.reshape(ops.mean(x, axis=(0, 2, 3)), shape=(8, 1, 1)),
    "number": lambda y, x: y * 2.0 + 1.0,
    "row": lambda y, x: y * np.arange(6, dtype=np.float32),
    "normalized": lambda y, x: ops.batch_norm(y, *np.full((4, 8), 0.5, np.float32)),
    "group norm": lambda y, x: ops.instance_norm(y, *np.full((2, 8), 0.5, np.float32)),
    "maximum": lambda y, x: ops.max_pool(y, kernel=(3, 3), stride=(1, 1), **PAD),
    "average": lambda y, x: ops.avg_pool(y, kernel=(3, 3), stride=(1, 1), count_include_pad=False, **PAD),
    "gate": lambda y, x: y * ops.sigmoid(ops.mean(y, axis=(2, 3), keepdims=True)),
    "concatenation": lambda y, x: ops.concat(
        ops.slice(y, starts=(0,), stops=(4,), steps=(1,), axes=(1,)), ops.relu(y), axis=1
    )[:, :8],
    "padding": lambda y, x: ops.pad(y, widths=((0, 0), (0, 0), (1, 0), (0, 2)), value=1.5)[:, :, :6, :6],
    "transposed by the model": lambda y, x: ops.transpose(
        ops.relu(ops.transpose(y, perm=(0, 2, 3, 1))), perm=(0, 3, 1, 2)
    ),
}


def traced(middle):
    with Builder() as b:
        x = b.input("x", (2, 8, 6, 6))
        weights = [b.param(f"w{k}", (8, 8, 3, 3)) for k in range(2)]
        return b.build({"y": between(x, weights, middle)})


def misplaced(graph):
    """Return the transposes of images that no operation with channels last cancels."""
    uncanceled = []
    for node in graph.nodes:
        if node.op is not ops.transpose or node.result.ndim != 4:
            continue
        source = graph.producers.get(node.operands[0])
        users = graph.users.get(node.result, ())
        cancels = source is not None and source.op is ops.conv
        read = bool(users) and all(user.op is ops.conv for user in users)
        if not cancels and not read and source is not None and node.result not in graph.outputs:
            uncanceled.append(node)
    return uncanceled


@pytest.mark.parametrize("name", MIDDLES)
def test_images_between_convolutions_have_channels_last(name):
    graph = traced(MIDDLES[name])
    after = channels_last(graph, PassContext(backend=ChannelsLastBackend()))
    assert after is not graph
    assert not [node for node in misplaced(after) if node.operands[0].shape[1] == 8]
    arguments = random_arguments(graph, 0)
    np.testing.assert_allclose(evaluate(graph, arguments)["y"], evaluate(after, arguments)["y"], rtol=1e-4, atol=1e-5)


def test_a_shuffle_of_channels_interrupts_the_order():
    graph = traced(lambda y, x: shuffled(ops.relu(y)))
    after = channels_last(graph, PassContext(backend=ChannelsLastBackend()))
    arguments = random_arguments(graph, 0)
    np.testing.assert_allclose(evaluate(graph, arguments)["y"], evaluate(after, arguments)["y"], rtol=1e-4, atol=1e-5)


def test_other_backends_and_single_convolutions_are_unchanged():
    graph = traced(MIDDLES["activation"])
    assert channels_last(graph, PassContext(backend=NumpyBackend())) is graph
    with Builder() as b:
        y = ops.relu(ops.conv(b.input("x", (1, 2, 5, 5)), b.param("w", (2, 2, 3, 3))))
        graph = b.build({"y": y})
    assert channels_last(graph, PassContext(backend=ChannelsLastBackend())) is graph


@pytest.mark.parametrize("rank", [3, 5])
def test_images_of_other_ranks(rank):
    with Builder() as b:
        x, w = b.input("x", (2, 3, *(5,) * (rank - 2))), b.param("w", (3, 3, *(1,) * (rank - 2)))
        y = ops.conv(ops.max_pool(ops.relu(ops.conv(x, w)), kernel=(2,), stride=(2,)), w)
        graph = b.build({"y": ops.mean(y, axis=(2,))})
    after = channels_last(graph, PassContext(backend=ChannelsLastBackend()))
    arguments = random_arguments(graph, 0)
    np.testing.assert_allclose(evaluate(graph, arguments)["y"], evaluate(after, arguments)["y"], rtol=1e-4, atol=1e-5)


def test_constant_kernels_are_stored_with_channels_last():
    with Builder() as b:
        x, w = b.input("x", (2, 3, 6, 6)), b.constant(np.ones((3, 3, 2, 2), np.float32))
        graph = b.build({"y": ops.conv(ops.relu(ops.conv(x, w)), w)})
    after = channels_last(graph, PassContext(backend=ChannelsLastBackend()))
    stored = [i.type.shape for i in after.with_role("constant") if i.value in after.users]
    assert stored == [(3, 2, 2, 3)]
