"""Experts divided over devices of JAX: rows travel to them and back, and training equals one device."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import IOKey, Layer, Linear, MixtureOfExperts, Model

pytest.importorskip("mithril_train")
EXPERT = {"parallelism": "expert"}


class OneSided(Layer):
    """All experts have the same share of each token, so that the first two compute all tokens."""

    def build(self, x):
        width = x.shape[-1]
        logits = ops.linear(x, self.param("router", (4, width), "zeros"))
        _, indices, used = MixtureOfExperts.routed(logits, 2, normalized=True)
        up, down = (self.param(n, (4, width, width), "normal(std=0.3)") for n in ("up", "down"))
        return ops.expert_mixture(x, used, indices, up, down, activation="gelu")


def network(mixture):
    h = Linear(8, name="first")(IOKey("x"))
    return Model.create(outputs={"y": h + mixture(h)})


def trainer(mixture, mesh=None, **options):
    optimizer, backend = ml.SGD(0.5, momentum=0.9), ml.JaxBackend(device_mesh=mesh)
    return ml.Trainer(network(mixture), optimizer, loss="mse_loss", backend=backend, progress=False, seed=0, **options)


def step(training, rows):
    x, target = np.random.default_rng(rows).standard_normal((2, rows, 6, 8), np.float32)
    return float(training.step({"x": x, "target": target})["loss"])


def test_training_equals_one_device_and_resumes_there(tmp_path):
    mixture = OneSided(name="mixture")
    one, many = trainer(mixture), trainer(mixture, (2,), **EXPERT)
    expected = [step(one, rows) for rows in (8, 3, 8)]  # two devices cannot divide three rows
    losses = [step(many, rows) for rows in (8, 3)]
    assert many.engine.arrays["mixture.up"].addressable_shards[0].data.shape == (2, 8, 8)
    graph = next(iter(many.engine._steps.values())).run.forward.local.graph
    exchanges = [n.op.name for n in graph.nodes if n.op.name.startswith("mesh.") and n.op.name != "mesh.all_reduce"]
    assert exchanges == ["mesh.to_experts", "mesh.from_experts"] * 2, "hidden features stay at their experts"
    many.save(tmp_path / "saved")
    single = trainer(mixture)
    single.load(tmp_path / "saved")
    losses.append(step(single, 8))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    right = one.engine.to_numpy()
    for name, x in single.engine.to_numpy().items():
        np.testing.assert_allclose(x, right[name], rtol=1e-4, atol=1e-6, err_msg=name)


REFUSED = {
    """parallelism='expert' requires a mesh of one axis on JAX
  device_mesh=(2, 2); experts are divided over the devices of the batch
hint: use device_mesh=(4,), or ml.TorchBackend""": (OneSided(name="mixture"), (2, 2)),
    """parallelism='expert': no weight holds a number of experts that 3 devices can divide
  it has weights of 4 experts
hint: use a mesh whose first number divides 4, or omit 'expert'""": (OneSided(name="mixture"), (3,)),
    """parallelism='expert': no weight holds a number of experts that 2 devices can divide
  the weight of experts is [experts, in, out], for a product that is computed for each expert
hint: stack the weights of the experts in one parameter, or omit 'expert'""": (Linear(8, name="last"), (2,)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_cannot_be_divided_are_refused(message):
    layer, mesh = REFUSED[message]
    with pytest.raises(ml.OptionError) as caught:
        ml.compile(network(layer), ml.JaxBackend(device_mesh=mesh), shapes={"x": [12, 6, 8]}, **EXPERT)
    assert str(caught.value) == message
