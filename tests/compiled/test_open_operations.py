"""Operations along an axis whose size is open, against the same programs of static sizes."""

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import AveragePrecision, Layer, Model

SIZES = (1, 2, 5, 8)
OPERATIONS = {
    "cummax": lambda x: ops.cummax(x, axis=0),
    "cummax, reversed": lambda x: ops.cummax(x, axis=0, reverse=True),
    "cummin of int32": lambda x: ops.cummin(ops.cast(x * 9.0, dtype="int32"), axis=0),
    "logcumsumexp": lambda x: ops.logcumsumexp(x, axis=0),
    "searchsorted": lambda x: ops.searchsorted(ops.sort(x[:, 0]), x),
    "searchsorted, right": lambda x: ops.searchsorted(ops.sort(x[:, 0]), x, right=True),
    "diag": lambda x: ops.diag(x, k=1),
    "diag, below": lambda x: ops.diag(x, k=-1),
}


def model_of(function):
    class Applied(Layer):
        def build(self, input):
            return function(input)

    model = Model()
    model |= Applied()(input="x", output="y")
    return model


@pytest.mark.parametrize("name", OPERATIONS)
def test_open_sizes_give_the_results_of_static_ones(name, backend):
    model = model_of(OPERATIONS[name])
    compiled = ml.compile(model, backend, shapes={"x": ["n", 3]}, inference=True)
    for n in SIZES:
        x = np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
        expected = ml.compile(model, "numpy", shapes={"x": [n, 3]}, inference=True)({"x": x})["y"]
        result = np.asarray(compiled({"x": x})["y"])
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cummax", "logcumsumexp"])
def test_gradients(name):
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    slope = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    results = []
    for size in ("n", 5):
        model = model_of(OPERATIONS[name])
        compiled = ml.compile(model, "numpy", shapes={"x": [size, 3]})
        results.append(compiled.evaluate({}, {"x": x}, {"y": slope}, wrt=("x",))[1]["x"])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_average_precision_of_any_number_of_scores():
    model = Model()
    model |= AveragePrecision()(predictions="p", labels="l", output="y")
    compiled = ml.compile(model, "numpy", shapes={"p": ["n"], "l": ["n"]})
    for n in SIZES:
        rng = np.random.default_rng(n)
        p, labels = rng.integers(0, 4, n).astype(np.float32), (rng.random(n) < 0.7).astype(np.float32)
        labels[0] = 1.0
        static = ml.compile(model, "numpy", shapes={"p": [n], "l": [n]})
        arrays = {"p": p, "l": labels}
        np.testing.assert_allclose(compiled(arrays)["y"], static(arrays)["y"], rtol=1e-6)
