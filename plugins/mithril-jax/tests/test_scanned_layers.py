"""``scan_layers``: equal layers as one loop, with equal results and a program whose size does not follow the depth."""

from __future__ import annotations

import numpy as np

import mithril as ml
from mithril.models import Dropout, IOKey, Linear, Model, Relu

X = np.random.default_rng(0).standard_normal((2, 8), np.float32)
FAST = {"xla_optimization_level": 0}
OUT = np.random.default_rng(1).standard_normal((2, 4), np.float32)


def network(layers: int) -> Model:
    """Return residual blocks between a first layer and a last one."""
    h = Relu()(Linear(6, name="first")(IOKey("x")))
    for k in range(layers):
        h = h + Dropout(0.2)(Linear(6, name=f"b{k}")(Relu()(Linear(6, name=f"a{k}")(h))))
    return Model.create(outputs={"y": Linear(4, name="last")(h)})


def assert_equal(actual, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, atol=2e-6, err_msg=name)


def test_jax_differentiates_the_loop():
    results = []
    for scanned in (False, True):
        options = {"autodiff": "native", "scan_layers": scanned, "shapes": {"x": X.shape}, **FAST}
        compiled = ml.compile(network(4), ml.JaxBackend(device="cpu"), **options)
        outputs, gradients = compiled.evaluate(compiled.randomize_params(3), {"x": X}, {"y": OUT})
        results.append({**outputs, **gradients})
    assert "lax.scan(" in compiled.source
    assert_equal(results[1], results[0])


def test_the_program_does_not_repeat_layers():
    def products(layers: int) -> int:
        compiled = ml.compile(network(layers), "jax", scan_layers=True, shapes={"x": X.shape})
        return compiled.source.count("jnp.matmul(")

    assert products(3) == products(6)


def test_a_program_without_equal_layers_says_so():
    model = Model.create(outputs={"y": Linear(4)(Relu()(Linear(7)(IOKey("x"))))})
    compiled = ml.compile(model, ml.JaxBackend(device="cpu"), scan_layers=True, shapes={"x": [2, 8]})
    assert [d.message for d in compiled.decisions if d.kind == "ignored"] == [
        "scan_layers=True: no equal layers follow each other"
    ]
