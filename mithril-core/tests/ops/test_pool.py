"""Pooling against loops over every window; ties, nan and padding; adaptive windows that do not divide."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from mithril.graph import Builder
from mithril.graph.dims import Dim
from mithril.graph.errors import DTypeError, ShapeError
from mithril.ops import pool as ops

nan, inf = float("nan"), float("inf")
CASES = {
    "1d": ((2, 3, 9), {"kernel": (2,), "stride": (2,)}),
    "uneven": ((2, 2, 7, 5), {"kernel": (3, 2), "stride": (2, 1), "padding": ((1, 2), (0, 1))}),
    "overlap": ((1, 2, 6, 6), {"kernel": (3,), "padding": ((1, 1),)}),
    "3d": ((1, 2, 4, 5, 3), {"kernel": (2, 3, 1), "stride": (2, 1, 2)}),
}


def windows(x, kernel, stride=(1,), padding=((0, 0),), dilation=(1,)):
    """Yield every window: the index of its result, and its positions within the image."""
    rank = x.ndim - 2
    kernel, stride, padding, dilation = (v if len(v) == rank else v * rank for v in (kernel, stride, padding, dilation))
    rows = list(zip(x.shape[2:], kernel, stride, padding, dilation))
    sizes = [(n + a + b - (k - 1) * d - 1) // s + 1 for n, k, s, (a, b), d in rows]
    for position in np.ndindex(*sizes):
        axes = [[o * s - a + j * d for j in range(k)] for o, (n, k, s, (a, b), d) in zip(position, rows)]
        yield position, [p for p in itertools.product(*axes) if all(0 <= i < n for i, n in zip(p, x.shape[2:]))]


def image(case, seed=0):
    return np.random.default_rng(seed).normal(size=CASES[case][0]).astype(np.float32)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_max_pool(case, dilation):
    x, attributes = image(case), {**CASES[case][1], "dilation": (dilation,)}
    if case == "3d" and dilation == 2:
        attributes["kernel"] = (2, 2, 1)
    result = ops.max_pool(x, **attributes)
    positions = ops.max_pool_positions(x, **attributes)
    g = np.random.default_rng(1).normal(size=result.shape).astype(np.float32)
    dx = np.zeros_like(x)
    for place, window in windows(x, **attributes):
        for lead in np.ndindex(*x.shape[:2]):
            best = max(window, key=lambda p: x[(*lead, *p)])
            assert result[(*lead, *place)] == x[(*lead, *best)]
            assert positions[(*lead, *place)] == np.ravel_multi_index(best, x.shape[2:])
            dx[(*lead, *best)] += g[(*lead, *place)]
    np.testing.assert_allclose(ops.max_pool_grad(g, x, **attributes), dx, rtol=1e-5, atol=1e-6)


def test_the_first_of_equal_ones_and_the_first_nan_win():
    x = np.array([[[3, 3, 1, nan, nan, 5, -inf, -inf]]], np.float32)
    result = ops.max_pool(x, kernel=(2,), stride=(2,))
    np.testing.assert_array_equal(result[0, 0], [3, nan, nan, -inf])
    assert ops.max_pool_positions(x, kernel=(2,), stride=(2,))[0, 0].tolist() == [0, 3, 4, 6]
    g = np.array([[[1, 2, 3, 4]]], np.float32)
    result = ops.max_pool_grad(g, x, kernel=(2,), stride=(2,))
    assert result[0, 0].tolist() == [1, 0, 0, 2, 3, 0, 4, 0]


def test_padding_never_wins():
    x = np.full((1, 1, 2), -inf, np.float32)
    attributes = {"kernel": (2,), "padding": ((1, 1),)}
    assert ops.max_pool_positions(x, **attributes)[0, 0].tolist() == [0, 0, 1]
    assert ops.max_pool(np.full((1, 1, 2), -128, np.int8), **attributes)[0, 0].tolist() == [-128] * 3
    assert ops.max_pool(np.zeros((1, 1, 2), np.uint8), **attributes)[0, 0].tolist() == [0] * 3


def test_a_window_between_the_elements_contributes_nothing():
    attributes = {"kernel": (2,), "padding": ((2, 2),), "dilation": (3,)}
    x = np.array([[[7.0]]], np.float32)
    positions = ops.max_pool_positions(x, **attributes)[0, 0].tolist()
    g = np.ones((1, 1, len(positions)), np.float32)
    assert ops.max_pool_grad(g, x, **attributes)[0, 0].tolist() == [float(sum(p == 0 for p in positions))]
    assert -1 in positions


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_avg_pool(case, include):
    x, attributes = image(case), CASES[case][1]
    result = ops.avg_pool(x, **attributes, count_include_pad=include)
    g = np.random.default_rng(1).normal(size=result.shape).astype(np.float32)
    dx = np.zeros_like(x)
    kernel = attributes["kernel"] if len(attributes["kernel"]) == x.ndim - 2 else attributes["kernel"] * (x.ndim - 2)
    for place, window in windows(x, **attributes):
        count = np.prod(kernel) if include else len(window)
        for lead in np.ndindex(*x.shape[:2]):
            expected = sum(x[(*lead, *p)] for p in window) / count
            np.testing.assert_allclose(result[(*lead, *place)], expected, rtol=1e-4, atol=1e-6)
            for p in window:
                dx[(*lead, *p)] += g[(*lead, *place)] / count
    result = ops.avg_pool_grad(g, shape=x.shape, **attributes, count_include_pad=include)
    np.testing.assert_allclose(result, dx, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_floats_accumulate_in_float32(kind):
    x = np.full((1, 1, 4096), 32, kind)
    assert float(ops.avg_pool(x, kernel=(4096,))[0, 0, 0]) == 32.0
    assert ops.max_pool(x, kernel=(2,)).dtype == kind
    result = ops.avg_pool_grad(np.ones((1, 1, 4095), kind), shape=(1, 1, 4096), kernel=(2,))
    assert result[0, 0, :3].tolist() == [0.5, 1, 1]


def test_adaptive_windows():
    for n, m in [(8, 4), (7, 3), (5, 5), (2, 3), (10, 7), (6, 1)]:
        x = np.random.default_rng(n).normal(size=(2, 3, n)).astype(np.float32)
        pieces = [x[..., i * n // m : -(-(i + 1) * n // m)] for i in range(m)]
        average = ops.adaptive_avg_pool(x, size=(m,))
        np.testing.assert_allclose(average, np.stack([p.mean(-1) for p in pieces], -1), rtol=1e-5, atol=1e-6)
        maximum = ops.adaptive_max_pool(x, size=(m,))
        np.testing.assert_array_equal(maximum, np.stack([p.max(-1) for p in pieces], -1))


def test_adaptive_in_two_axes():
    x = np.random.default_rng(0).normal(size=(1, 2, 7, 5))
    average, maximum = ops.adaptive_avg_pool(x, size=(3, 2)), ops.adaptive_max_pool(x, size=(3, 2))
    for i, j in itertools.product(range(3), range(2)):
        box = x[:, :, i * 7 // 3 : -(-(i + 1) * 7 // 3), j * 5 // 2 : -(-(j + 1) * 5 // 2)]
        np.testing.assert_allclose(average[..., i, j], box.mean((2, 3)), rtol=1e-12)
        np.testing.assert_array_equal(maximum[..., i, j], box.max((2, 3)))
    assert ops.adaptive_avg_pool(x.astype(np.float16), size=(3, 2)).dtype == np.float16


def test_global_pools_keep_the_axes():
    x = image("uneven")
    np.testing.assert_allclose(ops.global_avg_pool(x), x.mean((2, 3), keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(ops.global_max_pool(x), x.max((2, 3), keepdims=True))


def test_empty_batch():
    assert ops.max_pool(np.zeros((0, 2, 4), np.float32), kernel=(2,)).shape == (0, 2, 3)
    assert ops.avg_pool(np.zeros((0, 2, 4), np.float32), kernel=(2,)).shape == (0, 2, 3)
    assert ops.max_pool_positions(np.zeros((0, 2, 4), np.float32), kernel=(2,)).shape == (0, 2, 3)


X = np.zeros((1, 2, 5, 5), np.float32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ops.max_pool(X, kernel=(6,)), "a window of 6 does not fit spatial axis 0 of size 5"),
        (lambda: ops.max_pool(X[0, 0], kernel=(2,)), "pooling requires spatial axes, but the operand has rank 2"),
        (lambda: ops.avg_pool(X, kernel=(2, 2, 2)), "'kernel' has 3 entries for 2 spatial axes"),
        (lambda: ops.avg_pool(X, kernel=(0,)), "'kernel' must be at least 1"),
        (
            lambda: ops.avg_pool(X, kernel=(2,), padding=((2, 0),)),
            "padding 2 and 0 of spatial axis 0 contains an entire window of 2\n  accepted: at most 1 on each side",
        ),
        (lambda: ops.adaptive_avg_pool(X, size=(0,)), "'size' must be at least 1"),
        (lambda: ops.adaptive_max_pool(X[:, :, :0], size=(2,)), "cannot pool spatial axis 0: its size is 0"),
        (lambda: ops.global_avg_pool(X[0, 0]), "pooling requires spatial axes"),
        (
            lambda: ops.avg_pool_grad(X, shape=(1, 2, 5, 6), kernel=(1,)),
            "the cotangent has shape [1, 2, 5, 5], expected [1, 2, 5, 6]",
        ),
        (
            lambda: ops.max_pool_grad(X, X, kernel=(2,)),
            "the cotangent has shape [1, 2, 5, 5], expected [1, 2, 4, 4]",
        ),
    ],
)
def test_errors(call, text):
    with pytest.raises(ShapeError) as caught:
        call()
    assert text in str(caught.value)


def test_bools_have_no_maximum():
    with pytest.raises(DTypeError, match="is not accepted"):
        ops.max_pool(np.zeros((1, 1, 2), bool), kernel=(2,))


def test_symbolic_sizes():
    n, h = Dim("N"), Dim("H", 4)
    with Builder() as b:
        x = b.input("x", (n, 3, h, 6))
        assert ops.max_pool(x, kernel=(2,), stride=(2,)).shape == (n, 3, (h - 2) // 2 + 1, 3)
        assert ops.adaptive_avg_pool(x, size=(1,)).shape == (n, 3, 1, 1)
        assert ops.adaptive_max_pool(x, size=(1,)).shape == (n, 3, 1, 1)
        assert not b.guards
        with pytest.raises(ShapeError, match="adaptive pooling to 2 requires a static size of spatial axis 0, got 'H'"):
            ops.adaptive_avg_pool(x, size=(2,))
