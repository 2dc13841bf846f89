"""``hints={"input_batch_size_range": ...}``: few sizes are compiled, and results do not depend on the rounding."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril import plugins
from mithril.models import BatchNorm1d, Linear, Model, Relu, Softmax

HINTS = {"input_batch_size_range": (1, 12)}
RNG = np.random.default_rng(0)


def net() -> Model:
    model = Model()
    model |= Linear(8, name="first")(input="x", output="h")
    model += BatchNorm1d(8, name="norm")
    model += Relu(name="act")
    model += Linear(3, name="last")
    model += Softmax(name="out")
    return model


def chosen(compiled):
    return [d.message for d in compiled.decisions.of("choice") if "batch" in d.message]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 12])
def test_results_do_not_depend_on_the_rounding(backend, rows):
    plain = ml.compile(net(), "numpy", shapes={"x": [None, 4]})
    params = plain.randomize_params(seed=0)
    compiled = ml.compile(net(), backend, shapes={"x": [None, 4]}, hints=HINTS)
    x = RNG.normal(size=(rows, 4)).astype(np.float32)
    arguments = {n: compiled.backend.array(a) for n, a in params.items()}
    for _ in range(3):  # the second and third take the short way
        (actual,) = compiled.evaluate(arguments, {"x": compiled.backend.array(x)}).values()
        (expected,) = plain.evaluate(params, {"x": x}).values()
        np.testing.assert_allclose(compiled.backend.to_numpy(actual), expected, rtol=2e-5, atol=1e-6)


def test_few_sizes_are_compiled(backend):
    compiled = ml.compile(net(), backend, shapes={"x": [None, 4]}, hints=HINTS)
    params = compiled.randomize_params(seed=0)
    for rows in range(1, 13):
        compiled.evaluate(params, {"x": np.zeros((rows, 4), np.float32)})
    assert len(compiled.programs) <= 5
    assert bool(chosen(compiled)) == plugins.backend_class(backend)().capabilities.recompiles
    if chosen(compiled):
        assert chosen(compiled) == ["batches are padded to 1, 2, 4, 8, 12 rows, so that few sizes are compiled"]


@pytest.mark.parametrize("rows", [0, 3])
def test_gradients_and_empty_batches_keep_their_size(backend, rows):
    compiled = ml.compile(net(), backend, shapes={"x": [None, 4]}, hints={"input_batch_size_range": (0, 12)})
    plain = ml.compile(net(), "numpy", shapes={"x": [None, 4]})
    params = plain.randomize_params(seed=0)
    arguments = {n: compiled.backend.array(a) for n, a in params.items()}
    x = {"x": RNG.normal(size=(rows, 4)).astype(np.float32)}
    (name,) = plain.evaluate(params, x)
    assert tuple(compiled.evaluate(arguments, x)[name].shape) == (rows, 3)
    if rows == 0:
        return
    slope = {name: np.ones((rows, 3), np.float32) * np.arange(3, dtype=np.float32)}
    _, expected = plain.evaluate(params, x, slope)[:2]
    _, gradients = compiled.evaluate(arguments, x, {name: compiled.backend.array(slope[name])})[:2]
    for key, array in expected.items():
        np.testing.assert_allclose(compiled.backend.to_numpy(gradients[key]), array, rtol=1e-3, atol=1e-5)


def test_a_model_that_mixes_rows_keeps_every_size(backend):
    model = Model()
    model |= Linear(2, name="last")(input="x", output="h")
    model |= ml.models.Mean(name="all")(input="h", output="output")
    compiled = ml.compile(model, backend, shapes={"x": [None, 4]}, hints=HINTS)
    params = compiled.randomize_params(seed=0)
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    actual = compiled.backend.to_numpy(compiled.evaluate(params, {"x": x})["output"])
    w, b = (compiled.backend.to_numpy(params[f"last.{n}"]) for n in ("weight", "bias"))
    np.testing.assert_allclose(actual, (x @ w.T + b).mean(), rtol=1e-5)
    if plugins.backend_class(backend)().capabilities.recompiles:
        (message,) = chosen(compiled)
        assert message.startswith("batch bucketing disabled: 'mean' in layer 'all' at ")


def test_a_u_net_is_bucketed(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    unet = importlib.import_module("unet").unet
    shapes = {"input": [None, 1, 4, 4]}
    compiled = ml.compile(unet(channels=1, width=2, depth=1), "jax", shapes=shapes, hints=HINTS)
    plain = ml.compile(unet(channels=1, width=2, depth=1), "numpy", shapes=shapes)
    params = compiled.randomize_params(seed=0)
    for rows in (3, 4):
        x = {"input": RNG.normal(size=(rows, 1, 4, 4)).astype(np.float32)}
        (output,) = compiled.evaluate(params, x).values()
        (expected,) = plain.evaluate({n: np.asarray(p) for n, p in params.items()}, x).values()
        np.testing.assert_allclose(np.asarray(output), expected, rtol=1e-4, atol=1e-5)
    assert len(compiled.programs) == 1
    assert chosen(compiled) == ["batches are padded to 1, 2, 4, 8, 12 rows, so that few sizes are compiled"]


def test_a_profile_sees_the_bucket():
    compiled = ml.compile(net(), "jax", shapes={"x": [None, 4]}, hints=HINTS)
    params = compiled.randomize_params(seed=0)
    with ml.profile() as prof:
        (actual,) = compiled.evaluate(params, {"x": np.zeros((3, 4), np.float32)}).values()
    assert actual.shape == (3, 3) and "first" in prof.summary()
