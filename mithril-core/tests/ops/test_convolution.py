"""Convolutions against loops over every window, adjointness of the three primitives, shapes and errors."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from mithril.graph import Builder, flops, parse, structurally_equal, verify
from mithril.graph.dims import Dim
from mithril.graph.errors import OperationError, ShapeError
from mithril.ops import convolution as ops

CASES = {
    "1d": ((2, 3, 9), (4, 3, 3), {"stride": (2,), "padding": ((1, 2),), "dilation": (2,)}),
    "plain": ((2, 3, 5, 6), (4, 3, 3, 2), {}),
    "uneven": (
        (2, 4, 7, 6),
        (6, 2, 3, 2),
        {"stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2), "groups": 2},
    ),
    "depthwise": ((1, 4, 6, 5), (8, 1, 3, 3), {"padding": ((1, 1),), "groups": 4, "stride": (2,)}),
    "leftover": ((1, 1, 8, 8), (1, 1, 2, 3), {"stride": (3, 2)}),
    "pointwise": ((3, 5, 4, 4), (2, 5, 1, 1), {"stride": (2, 3)}),
    "3d": ((1, 2, 4, 3, 5), (2, 2, 2, 1, 3), {"stride": (1, 1, 2), "padding": ((0, 1), (1, 0), (1, 1))}),
}


def attributes_of(case):
    x, _, settings = CASES[case]
    rank = len(x) - 2
    filled = {"stride": (1,), "padding": ((0, 0),), "dilation": (1,), "groups": 1, **settings}
    return {k: v if k == "groups" or len(v) == rank else v * rank for k, v in filled.items()}


def operands(case, seed=0):
    rng = np.random.default_rng(seed)
    x, w, _ = CASES[case]
    return rng.normal(size=x), rng.normal(size=w)


def by_loops(x, w, stride, padding, dilation, groups):
    """Compute the definition, one result element at a time."""
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    sizes = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation)]
    out = np.zeros((x.shape[0], w.shape[0], *sizes))
    share_in, share_out = w.shape[1], w.shape[0] // groups
    for n, o, *position in itertools.product(*map(range, out.shape)):
        first = o // share_out * share_in
        window = tuple(
            slice(a * s, a * s + (k - 1) * d + 1, d) for a, s, k, d in zip(position, stride, w.shape[2:], dilation)
        )
        out[(n, o, *position)] = np.sum(x[(n, slice(first, first + share_in), *window)] * w[o])
    return out


@pytest.mark.parametrize("case", CASES)
def test_conv_is_its_definition(case):
    x, w = operands(case)
    np.testing.assert_allclose(ops.conv(x, w, **CASES[case][2]), by_loops(x, w, **attributes_of(case)), rtol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_the_adjoints(case):
    """``<g, conv(x, w)>`` may be read as linear in x or in w: the same number each time."""
    x, w = operands(case)
    attributes = CASES[case][2]
    y = ops.conv(x, w, **attributes)
    g = np.random.default_rng(1).normal(size=y.shape)
    total = np.sum(g * y)
    dx = ops.conv_input_grad(g, w, shape=x.shape, **attributes)
    dw = ops.conv_weight_grad(x, g, shape=w.shape, **attributes)
    assert dx.shape == x.shape
    assert dw.shape == w.shape
    np.testing.assert_allclose([np.sum(dx * x), np.sum(dw * w)], total, rtol=1e-10)
    other = np.random.default_rng(2).normal(size=x.shape)
    np.testing.assert_allclose(np.sum(dx * other), np.sum(g * ops.conv(other, w, **attributes)), rtol=1e-10)


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 4, 5), (4, 3, 3), {"stride": (2,), "padding": ((1, 1),), "output_padding": (1,)}),
        ((1, 4, 3, 4), (4, 2, 3, 2), {"stride": (2, 3), "padding": ((1, 0), (0, 1)), "dilation": (1, 2), "groups": 2}),
        ((1, 4, 3, 4), (4, 2, 3, 2), {"stride": (2, 3), "output_padding": (1, 2)}),
        ((1, 1, 2, 2, 2), (1, 1, 2, 2, 2), {"stride": (2,)}),
    ],
)
def test_conv_transpose_spreads_each_element(x, w, attributes):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=x), rng.normal(size=w)
    rank = x.ndim - 2
    filled = {"stride": (1,), "padding": ((0, 0),), "output_padding": (0,), "dilation": (1,), **attributes}
    groups = filled.pop("groups", 1)
    stride, padding, extra, dilation = (v if len(v) == rank else v * rank for v in filled.values())
    share_in, share_out = x.shape[1] // groups, w.shape[1]
    kernel = w.shape[2:]
    reach = [(n - 1) * s + (k - 1) * d + 1 + e for n, s, k, d, e in zip(x.shape[2:], stride, kernel, dilation, extra)]
    out = np.zeros((x.shape[0], share_out * groups, *reach))
    for n, c, *position in itertools.product(*map(range, x.shape)):
        first = c // share_in * share_out
        for k in itertools.product(*map(range, kernel)):
            target = tuple(a * s + j * d for a, s, j, d in zip(position, stride, k, dilation))
            out[(n, slice(first, first + share_out), *target)] += x[(n, c, *position)] * w[(c, slice(None), *k)]
    out = out[(..., *(slice(a, n - b) for n, (a, b) in zip(reach, padding)))]
    np.testing.assert_allclose(ops.conv_transpose(x, w, **attributes), out, rtol=1e-10)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_floats_accumulate_in_float32(kind):
    x, w = np.full((1, 4096, 1), 1, kind), np.full((1, 4096, 1), 1, kind)
    assert float(ops.conv(x, w)[0, 0, 0]) == 4096.0
    g = np.full((1, 4096, 1), 1, kind)
    result = ops.conv_input_grad(g, np.full((4096, 1, 1), 1, kind), shape=(1, 1, 1))
    assert float(result[0, 0, 0]) == 4096.0
    assert result.dtype == kind
    result = ops.conv_weight_grad(np.ones((1, 1, 4096), kind), np.ones((1, 1, 4096), kind), shape=(1, 1, 1))
    assert float(result[0, 0, 0]) == 4096.0


def test_integers_keep_their_dtype():
    result = ops.conv(np.arange(8, dtype=np.int32).reshape(1, 1, 8), np.array([[[1, 2]]], np.int32))
    assert result.dtype == np.int32
    assert result.ravel().tolist() == [2, 5, 8, 11, 14, 17, 20]


def test_empty_batch_and_no_channels():
    assert ops.conv(np.zeros((0, 3, 5)), np.zeros((4, 3, 2))).shape == (0, 4, 4)
    np.testing.assert_array_equal(ops.conv(np.zeros((1, 0, 5)), np.zeros((2, 0, 2))), np.zeros((1, 2, 4)))
    assert ops.conv_input_grad(np.zeros((0, 4, 4)), np.zeros((4, 3, 2)), shape=(0, 3, 5)).shape == (0, 3, 5)
    np.testing.assert_array_equal(
        ops.conv_weight_grad(np.zeros((0, 3, 5)), np.zeros((0, 4, 4)), shape=(4, 3, 2)), np.zeros((4, 3, 2))
    )


X, W = np.zeros((1, 4, 5, 5), np.float32), np.zeros((6, 4, 3, 3), np.float32)


@pytest.mark.parametrize(
    ("x", "w", "attributes", "error", "text"),
    [
        (
            X,
            W[:, :3],
            {},
            ShapeError,
            (
                "the image has 4 channels, the kernel takes 3 in each of 1 groups\n"
                "  accepted: a kernel [out channels, 4, ...]"
            ),
        ),
        (X, W[:, :1], {"groups": 3}, ShapeError, "hint: groups must divide the 4 channels of the image"),
        (X, W[:3, :2], {"groups": 2}, ShapeError, "2 groups do not divide the 3 output channels\n"),
        (
            X,
            W,
            {"dilation": (3,)},
            ShapeError,
            (
                "a window of 7 does not fit spatial axis 0 of size 5\n"
                "  size 5 with padding 0 and 0\n  kernel 3 with dilation 3"
            ),
        ),
        (X[0, 0], W, {}, ShapeError, "requires 1, 2 or 3 spatial axes, but the operand has rank 2"),
        (X[0], W, {}, ShapeError, "the kernel [6, 4, 3, 3] has rank 4, the image [4, 5, 5] has rank 3"),
        (
            X,
            W,
            {"stride": (1, 2, 3)},
            ShapeError,
            "'stride' has 3 entries for 2 spatial axes\n  got (1, 2, 3)\n  accepted: 1 or 2",
        ),
        (X, W, {"stride": (0,)}, ShapeError, "'stride' must be at least 1 for all axes, got (0, 0)"),
        (X, W, {"padding": ((-1, 0),)}, ShapeError, "'padding' must be at least 0"),
        (X, W, {"groups": 0}, OperationError, "'groups' must be at least 1, got 0"),
    ],
)
def test_errors(x, w, attributes, error, text):
    with pytest.raises(error) as caught:
        ops.conv(x, w, **attributes)
    assert text in str(caught.value)
    assert "in conv(x: " in str(caught.value)


def test_errors_of_the_gradients_and_the_transpose():
    with pytest.raises(ShapeError, match=r"the cotangent has shape \[1, 6, 2, 3\], expected \[1, 6, 3, 3\]"):
        ops.conv_input_grad(np.zeros((1, 6, 2, 3), np.float32), W, shape=X.shape)
    with pytest.raises(ShapeError, match=r"the cotangent has shape \[1, 5, 3, 3\], expected \[1, 6, 3, 3\]"):
        ops.conv_weight_grad(X, np.zeros((1, 5, 3, 3), np.float32), shape=W.shape)
    with pytest.raises(ShapeError, match="output_padding 2 of spatial axis 1 must be smaller than its stride 2"):
        ops.conv_transpose(X, np.zeros((4, 2, 3, 3), np.float32), stride=(2, 2), output_padding=(1, 2))
    with pytest.raises(ShapeError, match="the image has 4 channels, the kernel takes 6"):
        ops.conv_transpose(X, W)
    with pytest.raises(ShapeError, match="is too large for spatial axis 0\n  its size would be -1"):
        ops.conv_transpose(X, np.zeros((4, 2, 3, 3), np.float32), padding=((4, 4),))


def test_symbolic_sizes():
    n, h = Dim("N", 1), Dim("H", 8)
    with Builder() as b:
        x, w = b.input("x", (n, 4, h, 6)), b.param("w", (6, 2, 3, 2))
        y = ops.conv(x, w, stride=(2, 1), padding=((1, 1), (0, 0)), groups=2)
        assert y.shape == (n, 6, (h - 1) // 2 + 1, 5)
        dx = ops.conv_input_grad(y, w, shape=x.shape, stride=(2, 1), padding=((1, 1), (0, 0)), groups=2)
        assert ops.conv_transpose(y, b.param("v", (6, 2, 3, 3)), stride=2).shape[0] == n
        assert not b.guards
        ops.conv(b.input("z", (n, 4, Dim("L"), 6)), w, groups=2)
        graph = b.build({"dx": dx})
    assert [str(g) for g in graph.guards] == ["3 <= L"]
    verify(graph)
    assert structurally_equal(parse(str(graph)), graph)


def test_cost():
    with Builder() as b:
        x, w = b.input("x", (2, 4, 5, 5)), b.param("w", (6, 2, 3, 3))
        y = ops.conv(x, w, groups=2)
        ops.conv_input_grad(y, w, shape=x.shape, groups=2)
        ops.conv_weight_grad(x, y, shape=w.shape, groups=2)
    for node in b.nodes:
        assert flops(node) == 2 * (2 * 6 * 3 * 3) * (2 * 3 * 3)
