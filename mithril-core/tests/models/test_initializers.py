"""Initializers: distributions, keys by seed and name, arguments."""

import numpy as np
import pytest

from mithril.compiler.initializers import INITIALIZERS, initial, initialize, parse
from mithril.graph import Builder
from mithril.graph.dims import Dim, TensorType
from mithril.graph.dtypes import float16, float32, uint32
from mithril.graph.errors import ModelError, ShapeError

PINNED_KEY = [67661388, 3421388485]
PINNED = [0.17460942268371582, 0.8303195834159851, 0.5058397054672241]
N = TensorType(float32, (400, 500))


@pytest.mark.parametrize(
    "init, mean, std, low, high",
    [
        ("normal(std=0.02)", 0, 0.02, -0.12, 0.12),
        ("normal(mean=3.0)", 3, 1, -3, 9),
        ("uniform(low=1.0, high=3.0)", 2, 2 / 12**0.5, 1, 3),
        ("trunc_normal", 0, 0.8796, -2, 2),
        ("fan_in_uniform(fan_in=16)", 0, 0.5 / 12**0.5, -0.25, 0.25),
        ("xavier_uniform", 0, (2 / 900) ** 0.5, -((6 / 900) ** 0.5), (6 / 900) ** 0.5),
        ("xavier_normal", 0, (2 / 900) ** 0.5, -1, 1),
        ("kaiming_uniform", 0, (2 / 500) ** 0.5, -((6 / 500) ** 0.5), (6 / 500) ** 0.5),
        ("kaiming_normal(mode='fan_out')", 0, (2 / 400) ** 0.5, -1, 1),
        ("lecun_normal", 0, (1 / 500) ** 0.5, -1, 1),
        ("zeros", 0, 0, 0, 0),
        ("ones", 1, 0, 1, 1),
        ("constant(value=0.25)", 0.25, 0, 0.25, 0.25),
    ],
)
def test_distributions(init, mean, std, low, high):
    a = initial("w", N, init, 0)
    assert a.dtype == np.float32
    assert a.shape == (400, 500)
    assert abs(a.mean() - mean) < 6 * std / a.size**0.5 + 1e-6
    assert abs(a.std() - std) < 0.01 * std + 1e-6
    assert a.min() >= low - 1e-6
    assert a.max() <= high + 1e-6


def test_normal_numbers_are_normal():
    a = np.sort(initial("w", N, "normal", 0).ravel())
    shares = np.searchsorted(a, [-2.0, -1.0, 0.0, 1.0, 2.0]) / a.size
    np.testing.assert_allclose(shares, [0.02275, 0.15866, 0.5, 0.84134, 0.97725], atol=0.004)


@pytest.mark.parametrize("shape", [(8, 8), (5, 9), (9, 5), (4, 3, 2)])
def test_orthogonal(shape):
    a = initial("w", TensorType(float32, shape), "orthogonal", 0).reshape(shape[0], -1).astype(np.float64)
    small = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-6)


def test_keyed_by_seed_and_name():
    draw = lambda name, seed: initial(name, TensorType(float32, (8,)), "normal", seed)  # noqa: E731
    np.testing.assert_array_equal(draw("a", 1), draw("a", 1))
    assert not np.array_equal(draw("a", 1), draw("b", 1))
    assert not np.array_equal(draw("a", 1), draw("a", 2))
    assert not np.array_equal(draw("a", 1), draw("a", 1 + 2**32))


def test_numbers_do_not_change_from_version_to_version():
    assert initial("rng", TensorType(uint32, (2,)), "key", 0).tolist() == PINNED_KEY
    drawn = initial("layer.weight", TensorType(float32, (3,)), "uniform", 7)
    np.testing.assert_array_equal(drawn, np.array(PINNED, np.float32))


def test_inputs_by_name_and_dtype():
    with Builder() as builder:
        builder.param("w", (2, 3), "float16", init="ones")
        builder.param("n", (2,), "int32")
    result = initialize(builder.inputs, 0)
    assert {n: a.dtype for n, a in result.items()} == {"w": float16.numpy, "n": np.int32}


@pytest.mark.parametrize("init", sorted(set(INITIALIZERS) - {"key", "norms"}))
def test_empty_and_small(init):
    text = init + "(fan_in=1)" if init == "fan_in_uniform" else init
    for shape in ((1, 1), (2, 1), (3, 3)):
        assert initial("w", TensorType(float32, shape), text, 0).shape == shape


@pytest.mark.parametrize("init", ["norml", "normal(2)", "normal(sd=1)", "normal(std=", "uniform(low=f())"])
def test_mistakes(init):
    with pytest.raises(ModelError):
        parse(init)


def test_unknown_shapes():
    with pytest.raises(ShapeError, match="Cannot infer shape for tensor 'w'"):
        initial("w", TensorType(float32, (Dim("B"),)), "zeros", 0)


PARTS = (
    ("normal(std=0.02)", (40, 60)),
    ("trunc_normal", (7, 9)),
    ("uniform(low=1.0, high=3.0)", (33,)),
    ("xavier_uniform", (6, 4, 3)),
    ("identity", (9, 9)),
    ("orthogonal", (8, 12)),
    ("constant(value=2.0)", (5, 3)),
    ("normal", ()),
    ("norms(parameter='v', sizes=[12, 7], init='trunc_normal', axis=1)", (1, 7)),
)


@pytest.mark.parametrize(("init", "shape"), PARTS, ids=[init.partition("(")[0] for init, _ in PARTS])
def test_a_region_has_the_numbers_of_the_complete_array(init, shape):
    t = TensorType(float32, shape)
    complete = initial("w", t, init, 3)
    for index in (tuple(slice(n // 3, n - n // 4) for n in shape), tuple(slice(n // 2, None) for n in shape)):
        np.testing.assert_array_equal(initial("w", t, init, 3, index), complete[index])
