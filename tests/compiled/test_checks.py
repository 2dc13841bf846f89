"""``checks=True``: an index outside is an error that names the layer, on every backend; without it, it is clamped."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.compiler.index_checks import with_checks
from mithril.graph import Builder
from mithril.graph.evaluation import evaluate
from mithril.models import CrossEntropy, Embedding, Linear, Model


def lookup() -> Model:
    model = Model()
    model |= Embedding(5, 3, name="words")(input="tokens", output="vectors")
    return model


def ints(*values):
    return np.array(values, np.int32)


def test_an_index_outside_names_the_layer(backend, rows):
    size = "T" if rows == "B" else 3
    compiled = ml.compile(lookup(), backend, shapes={"tokens": [size]}, types={"tokens": "int32"}, checks=True)
    params = compiled.randomize_params(seed=0)
    table = compiled.backend.to_numpy(params["words.weight"])
    for _ in range(3):
        good = compiled.evaluate(params, {"tokens": compiled.backend.array(ints(0, 4, -5))})
        assert set(good) == {"vectors"}
        np.testing.assert_allclose(compiled.backend.to_numpy(good["vectors"]), table[[0, 4, 0]], rtol=1e-6)
        for bad, tokens in ((5, ints(0, 5, 1)), (-6, ints(-6, 4, 1))):
            with pytest.raises(ml.InputError, match=f"index {bad} of .* is out of range for 5 elements") as error:
                compiled.evaluate(params, {"tokens": compiled.backend.array(tokens)})
            assert "words" in str(error.value) and "test_checks.py" in str(error.value)


def test_without_checks_it_is_clamped(backend):
    compiled = ml.compile(lookup(), backend, shapes={"tokens": [3]}, types={"tokens": "int32"})
    params = compiled.randomize_params(seed=0)
    table = compiled.backend.to_numpy(params["words.weight"])
    actual = compiled.evaluate(params, {"tokens": ints(0, 7, -9)})["vectors"]
    np.testing.assert_allclose(compiled.backend.to_numpy(actual), table[[0, 4, 0]], rtol=1e-6)


def test_labels_are_checked_when_gradients_are_computed(backend):
    model = Model()
    model |= Linear(4, name="head")(input="x", output="logits")
    model |= CrossEntropy(name="loss")(logits="logits", labels="labels", output="output")
    compiled = ml.compile(model, backend, shapes={"x": [3, 2], "labels": [3]}, checks=True, strict=True)
    params = compiled.randomize_params(seed=0)
    x = np.ones((3, 2), np.float32)
    for _ in range(3):
        outputs, gradients = compiled.evaluate(params, {"x": x, "labels": ints(0, 3, 1)}, "output")
        assert set(outputs) == {"output"} and set(gradients) == set(params)
        with pytest.raises(ml.InputError, match="4 of .* is out of range for 4 "):
            compiled.evaluate(params, {"x": x, "labels": ints(0, 4, 1)}, "output")


def test_a_profile_looks_too():
    compiled = ml.compile(lookup(), "numpy", shapes={"tokens": [None]}, types={"tokens": "int32"}, checks=True)
    params = compiled.randomize_params(seed=0)
    with ml.profile():
        assert set(compiled.evaluate(params, {"tokens": ints(1, 2)})) == {"vectors"}
        with pytest.raises(ml.InputError, match="index 9"):
            compiled.evaluate(params, {"tokens": ints(1, 9)})


def test_an_empty_batch_has_nothing_outside():
    compiled = ml.compile(lookup(), "numpy", shapes={"tokens": [None]}, types={"tokens": "int32"}, checks=True)
    outputs = compiled.evaluate(compiled.randomize_params(seed=0), {"tokens": np.zeros(0, np.int32)})
    assert outputs["vectors"].shape == (0, 3)


def test_several_indices_at_once():
    """Each component has a size of its own."""
    with Builder() as b:
        y = ml.ops.gather_nd(b.input("x", (2, 3)), b.input("at", (4, 2), "int32"))
    graph, checks, in_regions = with_checks(b.build({"y": y}))
    assert [c.size for c in checks] == [2, 3] and not in_regions
    indices = np.array([[0, 0], [1, 2], [-2, 1], [0, 4]], np.int32)
    outputs = evaluate(graph, {"x": np.zeros((2, 3), np.float32), "at": indices})
    with pytest.raises(ml.InputError, match="index 4 of 'gather_nd' is out of range for 3 elements"):
        for check in checks:
            check.raise_if_violated([outputs[name] for name in check.names], {})


def test_ignored_labels_are_not_checked():
    model = Model()
    model |= CrossEntropy(ignore_index=-100, name="loss")(logits="logits", labels="labels", output="output")
    compiled = ml.compile(model, "numpy", shapes={"logits": [3, 4], "labels": [3]}, checks=True)
    logits = np.ones((3, 4), np.float32)
    loss = compiled.evaluate({}, {"logits": logits, "labels": ints(0, -100, 1)})["output"]
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
    with pytest.raises(ml.InputError, match="label -99 of"):
        compiled.evaluate({}, {"logits": logits, "labels": ints(0, -100, -99)})
