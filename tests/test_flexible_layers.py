"""Options of layers beyond the usual ones, and random integers, with the numbers of NumPy on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import (
    MLP,
    Concat,
    Flatten,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Relu,
    Split,
    Stack,
    Tanh,
    TransformerDecoderLayer,
    WeightNorm,
)

BACKENDS = sorted(ml.plugins.backends())
X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)


class Drawn(Layer):
    def build(self, x):
        return ops.randint(ops.fold_in(np.array([0, 7], np.uint32), 3), shape=(1000,), low=-2, high=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_layers_and_random_integers(backend: str) -> None:
    model = Model()
    model |= Flatten(1, 2)(input="x", output="flat")
    model |= Concat(axis=None)(input0="x", input1="flat", output="all")
    model |= LayerNorm(5, scale=False, name="norm")(input="x", output="normed")
    model |= MLP([6, 3], activation=["relu", "tanh"], name="mlp")(input="x", output="mixed")
    model |= Drawn()(input="x", output="drawn")
    model.set_outputs("flat", "all", "normed", "mixed", "drawn")
    compiled = ml.compile(model, backend, shapes={"x": list(X.shape)})
    params = compiled.randomize_params(seed=0)
    params["norm.bias"] = compiled.backend.array(np.arange(5, dtype=np.float32))
    assert "norm.weight" not in params
    outputs = {n: compiled.backend.to_numpy(y) for n, y in compiled.evaluate(params, {"x": X}).items()}
    np.testing.assert_array_equal(outputs["flat"], X.reshape(2, 12, 5))
    np.testing.assert_array_equal(outputs["all"], np.concatenate([X.ravel(), X.ravel()]))
    centered = X - X.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) + np.arange(5)
    np.testing.assert_allclose(outputs["normed"], expected, rtol=1e-4, atol=1e-5)
    seeds = {"normed": np.ones_like(X)}
    _, gradients = compiled.evaluate(params, {"x": X}, output_gradients=seeds, wrt=["norm.bias"])
    np.testing.assert_allclose(compiled.backend.to_numpy(gradients["norm.bias"]), np.full(5, 24.0), rtol=1e-5)
    weights = {n: compiled.backend.to_numpy(p) for n, p in params.items() if n.startswith("mlp")}
    hidden = np.maximum(X @ weights["mlp.layers.0.weight"].T + weights["mlp.layers.0.bias"], 0)
    last = np.tanh(hidden @ weights["mlp.layers.1.weight"].T + weights["mlp.layers.1.bias"])
    np.testing.assert_allclose(outputs["mixed"], last, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(outputs["drawn"], Drawn()(X))  # the same numbers everywhere
    assert outputs["drawn"].dtype == np.int32 and set(outputs["drawn"]) == set(range(-2, 5))


def test_activations_by_layer_equal_separate_layers() -> None:
    parts = MLP([6, 6, 3], activation=["relu", "tanh"])
    assert [path for path, _ in parts.walk()] == ["layers.0", "layers.1", "layers.2", "activation.0", "activation.1"]
    assert [path for path, _ in MLP([6, 3]).walk()] == ["layers.0", "layers.1", "activation"]
    separate = Model(Linear(6), Relu(), Linear(6), Tanh(), Linear(3))
    first, second = (ml.compile(model, "numpy", shapes={"input": [4, 5]}) for model in (parts, separate))
    params = first.randomize_params(seed=0)
    renamed = dict(zip(second.randomize_params(seed=1), params.values(), strict=True))
    results = [next(iter(c.evaluate(p, {"input": X[0, 0]}).values())) for c, p in ((first, params), (second, renamed))]
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_wrong_options_of_layers() -> None:
    with pytest.raises(ml.ModelError, match=r"3 sizes has 1 activations(.|\n)*a list of 2 or 3"):
        MLP([4, 4, 2], activation=["relu"])
    with pytest.raises(ml.ModelError, match="did you mean 'relu'"):
        MLP([4, 2], activation=["rely"])
    with pytest.raises(ml.ShapeError, match=r"Flatten\(2, 1\) ends before it starts(.|\n)*write Flatten\(1, 2\)"):
        Flatten(2, 1)(X)
    with pytest.raises(ml.ShapeError, match=r"Flatten\(1, 6\) .*rank 4: there is no axis 6(.|\n)*accepted: -4 to 3"):
        Flatten(1, 6)(X)
    assert Flatten()(X[0, 0, 0]).shape == (5,)
    for layer in (Concat(axis=-5), Stack(axis=-6)):
        with pytest.raises(ml.ShapeError, match="out of range for rank"):
            layer(X, X)
    with pytest.raises(ml.ShapeError, match="axis 4 is out of range for rank 4"):
        Split(2, axis=4)(X)
    with pytest.raises(ml.ModelError, match=r"causal=False with cache=4(.|\n)*omit causal=False"):
        TransformerDecoderLayer(8, 2, causal=False, cache=4)
    with pytest.raises(ml.ShapeError, match="axis 2 is out of range for rank 2"):
        ml.compile(WeightNorm(Linear(3), axis=2), "numpy", shapes={"input": [2, 4]})
    with pytest.raises(ml.OperationError, match=r"randint: \[3, 3\) is not a range of int32"):
        ops.randint(np.array([0, 1], np.uint32), shape=(2,), low=3, high=3)
