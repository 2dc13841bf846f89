"""Watching a model run, by the names that users type."""

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Log, Model
from mithril_backend_example.backend import first_not_finite


def model():
    net = Model()
    net |= Linear(3)(input="input", output="hidden")
    net |= Log()(input="hidden", output="output")
    return net


def test_every_operation_is_shown():
    seen = []
    backend = ml.StepperBackend(on_step=lambda node, results: seen.append(node.op.name))
    compiled = ml.compile(model(), backend, shapes={"input": [2, 3]}, optimization_level="none")
    compiled.evaluate(compiled.randomize_params(seed=0), {"input": np.ones((2, 3), np.float32)})
    assert "matmul" in seen
    assert seen[-1] == "log"


def test_first_value_that_is_not_finite_is_an_error_that_names_it():
    compiled = ml.compile(model(), ml.StepperBackend(on_step=first_not_finite), shapes={"input": [2, 3]})
    params = {name: np.zeros_like(array) for name, array in compiled.randomize_params(seed=0).items()}
    with pytest.raises(ml.BackendError, match="'log' gave 6 values of 6 that are not finite"):
        compiled.evaluate(params, {"input": np.ones((2, 3), np.float32)})


def test_by_name_and_same_results_as_numpy():
    inputs = {"input": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)}
    by_backend = {}
    for backend in ("stepper", "numpy"):
        compiled = ml.compile(model(), backend, shapes={"input": [2, 3]})
        params = {name: abs(array) for name, array in compiled.randomize_params(seed=0).items()}
        by_backend[backend] = compiled.evaluate(params, inputs)["output"]
    np.testing.assert_allclose(by_backend["stepper"], by_backend["numpy"], rtol=1e-6)
