"""The meaning of operations at nan, negative bases, certain predictions and axes without elements."""

import math

import numpy as np
import pytest

from mithril import ops
from mithril.derivatives import gradients
from mithril.graph import Builder
from mithril.graph.dims import Dim
from mithril.graph.errors import GuardError, ShapeError
from mithril.graph.evaluation import evaluate

NAN, INF = math.nan, math.inf


def value_and_slopes(write, *arrays):
    """Return the result for float32 arrays, and its gradients for a cotangent of ones."""
    arguments = {f"x{k}": np.array(a, np.float32) for k, a in enumerate(arrays)}
    with Builder() as builder:
        y = write(*[builder.input(name, a.shape) for name, a in arguments.items()])
    graph = gradients(builder.build({"y": y}), ["y"], list(arguments))
    (cotangent,) = [i for i in graph.arguments if i.name not in arguments]
    with np.errstate(all="ignore"):
        results = evaluate(graph, {**arguments, cotangent.name: np.ones(y.shape, np.float32)})
    return results["y"], [results[f"grad/{name}"] for name in arguments]


def test_a_wrong_prediction_that_is_certain_still_learns():
    def loss(p, t):
        return ops.binary_cross_entropy(p, t, reduction="none")

    value, (slope, _) = value_and_slopes(loss, [1e-20, 0.0, 1.0, 0.5, -0.5, 1.5], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(value, [46.0517, 100.0, 100.0, math.log(2), NAN, NAN], rtol=1e-5)
    np.testing.assert_allclose(slope, [-1e12, -1e12, 1e12, -2.0, NAN, NAN], rtol=1e-5)


def test_powers_of_negative_bases():
    value, (base, exponent) = value_and_slopes(lambda b, e: b**e, [-2.0, -2.0, 0.0, 2.0], [1.5, 2.0, 2.0, 3.0])
    np.testing.assert_allclose(value, [NAN, 4.0, 0.0, 8.0])
    np.testing.assert_allclose(base, [NAN, -4.0, 0.0, 12.0])
    np.testing.assert_allclose(exponent, [NAN, NAN, 0.0, 8 * math.log(2)], rtol=1e-6)


def test_a_root_written_as_a_power():
    value, _ = value_and_slopes(lambda x: x**0.5, [-INF, 4.0, -1.0, -0.0])
    np.testing.assert_array_equal(value, [INF, 2.0, NAN, 0.0])
    assert not np.signbit(value[3])


def test_softshrink_keeps_nan():
    value, _ = value_and_slopes(lambda x: ops.softshrink(x), [NAN, 1.0, -1.0, 0.25, INF, -INF])
    np.testing.assert_array_equal(value, [NAN, 0.5, -0.5, 0.0, INF, -INF])


def test_gelu_of_the_largest_numbers():
    for approximate in ("none", "tanh"):
        value, _ = value_and_slopes(lambda x: ops.gelu(x, approximate=approximate), [3e38, INF])
        np.testing.assert_allclose(value, [3e38, INF])


def test_the_variance_of_one_element_with_a_degree_of_freedom_less():
    value, _ = value_and_slopes(lambda x: ops.var(x, axis=1, ddof=1), [[3.0], [4.0]])
    assert np.isnan(value).all()


@pytest.mark.parametrize("op", [ops.argmax, ops.argmin])
def test_no_element_is_the_largest_of_none(op):
    with Builder() as builder:
        x, y = builder.input("x", (2, 0)), builder.input("y", (2, Dim("N")))
        with pytest.raises(ShapeError, match="axis 1 has size 0"):
            op(x, axis=1)
        graph = builder.build({"at": op(y, axis=1)})
    (guard,) = graph.guards
    guard.check({"N": 1}, {})
    with pytest.raises(GuardError):
        guard.check({"N": 0}, {})


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64")


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integer_casts_discard_high_bits(source, target):
    limits = np.iinfo(source)
    x = np.array([limits.min, limits.min + 1, 0, 1, 127, limits.max // 3, limits.max - 1, limits.max], source)
    expected = [(int(n) - np.iinfo(target).min) % 2 ** np.iinfo(target).bits + np.iinfo(target).min for n in x]
    result = ops.cast(x, dtype=target)
    assert result.dtype == target and result.tolist() == expected


def test_bincount_leaves_out_integers_beyond_32_bits():
    assert ops.bincount(np.array([2**32 + 1, 1, -1, 3]), size=3).tolist() == [0, 1, 0]
    assert ops.bincount(np.array([-1, 3, 100], np.int8), size=300).tolist()[3:101:97] == [1, 1]
