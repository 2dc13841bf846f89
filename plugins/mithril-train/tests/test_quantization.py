"""Quantization-aware training: rounded values, gradients, and equal accuracy of int8 on ggml."""

import numpy as np
import pytest
from small import trainer

import mithril as ml
from mithril import ops
from mithril.graph.errors import OptionError
from mithril.models import Accuracy, Layer, Linear, Model, Relu

DRAW = np.random.default_rng(1)
X = DRAW.normal(size=(256, 64)).astype(np.float32)
Y = X[:, :4].argmax(1).astype(np.int32)


def network():
    model = Model()
    model += Linear(64, 96, name="first")(input="input")
    model += Relu()
    model += Linear(96, 4, name="last")
    return model


def q8(x, largest=127):
    """Blocks of 32 along the last axis, the scale in 16 bits: ggml's q8_0, by NumPy."""
    blocks = x.reshape(-1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(largest)).astype(np.float16).astype(np.float32)
    steps = np.clip(np.round(blocks / np.where(scale > 0, scale, 1)), -largest - 1, largest)
    return (steps * scale).reshape(x.shape)


def test_outputs_are_those_of_rounded_weights_and_inputs():
    subject = trainer(network(), quantization_aware=True)
    subject.begin((X[:8], Y[:8]))
    p = {n: np.asarray(x) for n, x in subject.params.items()}
    hidden = np.maximum(q8(X[:8]) @ q8(p["first.weight"]).T + p["first.bias"], 0)
    expected = q8(hidden) @ q8(p["last.weight"]).T + p["last.bias"]
    np.testing.assert_allclose(subject.predict(X[:8]), expected, atol=2e-3)
    assert (
        np.abs(subject.predict(X[:8]) - (np.maximum(X[:8] @ p["first.weight"].T, 0) @ p["last.weight"].T)).max() > 1e-3
    )


def test_it_learns_and_everything_is_rounded_once():
    subject = trainer(network(), ml.Adam(3e-3), quantization_aware=True, metrics=[Accuracy()])
    history = subject.fit(ml.DataLoader((X, Y), batch_size=32, shuffle=True), 10)
    assert history["accuracy"][-1] > 0.9
    graph = subject.engine.prepare({"input": X[:32], "target": Y[:32]}).graph
    assert sum(n.op.name == "fake_quantize" for n in graph.nodes if n.tags.get("phase") != "backward") == 4


def test_layers_may_stay_and_blocks_must_fit():
    subject = trainer(network(), quantization_aware={"keep": "last", "bits": 4})
    subject.begin((X[:8], Y[:8]))
    graph = subject.engine.prepare({"input": X[:8], "target": Y[:8]}).graph
    assert sum(n.op.name == "fake_quantize" for n in graph.nodes if n.tags.get("phase") != "backward") == 2
    odd = trainer(network(), quantization_aware={"block": 64})
    odd.begin((X[:8], Y[:8]))
    assert any("'last' is not trained for 8 bits: 96" in d.message for d in odd.engine.decisions)
    with pytest.raises(OptionError, match="unknown key 'bit' of quantization_aware"):
        trainer(network(), quantization_aware={"bit": 8}).begin((X[:8], Y[:8]))


@pytest.mark.parametrize("layout", [lambda w: w, lambda w: ops.transpose(w, perm=(1, 0))])
def test_products_are_rounded_at_each_level(layout):
    class Product(Layer):
        """A linear layer as importers write it."""

        def build(self, x):
            return ops.matmul(x, layout(self.param("weight", (64, 64), "xavier_uniform")))

    outputs = []
    for level in ("none", "medium"):
        model = Model()
        model += Product(name="only")(input="input")
        subject = trainer(model, quantization_aware={"bits": 4}, optimization_level=level, seed=1)
        subject.begin((X[:8], Y[:8]))
        outputs.append(subject.predict(X[:8]))
    w = np.asarray(subject.params["only.weight"])
    rows = w.T if layout(w) is w else w  # [out, in]: blocks are along the contracted axis
    np.testing.assert_allclose(outputs[0], q8(X[:8], 7) @ q8(rows, 7).T, atol=2e-3)
    np.testing.assert_allclose(outputs[0], outputs[1], atol=2e-3)


@pytest.mark.parametrize("bits", [8, 2])
def test_the_numeric_check_of_passes_allows_the_rounding(bits):
    trainer(network(), quantization_aware={"bits": bits}, verify="numeric").begin((X[:8], Y[:8]))


def test_ggml_int8_shows_the_accuracy_of_training(usable):
    if "ggml" not in ml.plugins.backends():
        pytest.skip("mithril-ggml is not installed")
    usable("ggml")
    subject = trainer(network(), ml.Adam(3e-3), quantization_aware=True, metrics=[Accuracy()])
    subject.fit(ml.DataLoader((X, Y), batch_size=32, shuffle=True), 10)
    shown = subject.evaluate((X, Y))["accuracy"]
    backend = ml.plugins.backend_class("ggml")(quantize={"last.weight": "q8_0", "first.weight": "q8_0"})
    deployed = ml.compile(network(), backend, shapes={"input": [256, 64]}, inference=True)
    deployed.load_state_dict({n: np.asarray(x) for n, x in subject.params.items()})
    logits = np.asarray(deployed({"input": X})["output"])
    assert abs((logits.argmax(1) == Y).mean() - shown) <= 1 / 256 + 1e-6
    difference = np.abs(logits - subject.predict(X))
    plain = trainer(network(), params=subject.params)
    plain.begin((X, Y))
    unrounded = np.abs(logits - plain.predict(X))
    assert difference.mean() < 0.5 * unrounded.mean(), "a step of rounding may fall to the other side, but not many do"
    assert difference.max() < 0.1


def test_gradients_pass_where_the_nearest_integer_is_in_range():
    """Train the largest number of a block, whose scale of 16 bits may be a little below its magnitude / 127."""
    x = ml.IOKey("x")
    model = ml.models.Model.create(inputs=x, y=ml.ops.fake_quantize(x, 1.0))
    compiled = ml.compile(model, "numpy", shapes={"x": [5]}, trainable=["x"])
    values = {"x": np.float32([126.0, 127.3, 127.6, -128.4, -128.6])}
    np.testing.assert_array_equal(compiled.evaluate({}, values, {"y": np.ones(5, np.float32)})[1]["x"], [1, 1, 0, 1, 0])
