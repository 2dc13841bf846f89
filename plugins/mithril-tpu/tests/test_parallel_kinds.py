"""Kinds of parallelism on JAX with exchanges of their own: training equals one device, also with odd batches."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pytest

import mithril as ml
from mithril.models import IOKey, LayerNorm, Linear, Model, Relu
from mithril_tpu.aot import analysis

pytest.importorskip("mithril_train")
WAYS = {
    "hsdp": ((2, 2), {"parallelism": "hsdp"}),
    "sequence": ((2, 2), {"parallelism": "sequence"}),
}
ROWS = (8, 8, 1, 8)  # four devices cannot divide one row


def network():
    x = IOKey("x")
    h = x + Linear(16, name="down")(Relu()(Linear(32, name="up")(LayerNorm(16, name="norm")(x))))
    return Model.create(outputs={"y": Linear(16, name="head")(h)})


def batch(rows, seed=0):
    x, target = np.random.default_rng(seed).standard_normal((2, rows, 6, 16), np.float32)
    return {"x": x, "target": target}


def trainer(mesh=None, options=None):
    optimizer = ml.SGD(0.1, momentum=0.9)
    backend = ml.JaxBackend(device_mesh=mesh)
    return ml.Trainer(network(), optimizer, loss="mse_loss", backend=backend, progress=False, seed=0, **(options or {}))


def train(training, numbers=range(len(ROWS))):
    return [float(training.step(batch(ROWS[k], k))["loss"]) for k in numbers]


@lru_cache
def trained_on_one_device():
    one = trainer()
    return train(one), one.engine.to_numpy()


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_one_device_and_resumes_another_way(way, tmp_path):
    ways = [((None, {}), range(1)), (WAYS[way], range(1, 3)), (((4,), {"parallelism": "fsdp"}), range(3, 4))]
    history = []
    for (mesh, options), numbers in ways:
        training = trainer(mesh, options)
        training.begin(batch(ROWS[numbers[0]]))
        if history:
            training.load(tmp_path / "saved")
        history += train(training, numbers)
        training.save(tmp_path / "saved")
    losses, expected = trained_on_one_device()
    np.testing.assert_allclose(history, losses, rtol=1e-5)
    for name, x in training.engine.to_numpy().items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def step_text(training):
    """Return the program that XLA compiles for a step."""
    call = next(iter(training.engine._steps.values())).run.call
    values = {**training.engine.arrays, **batch(8), "learning_rate": np.float32(0.1)}
    arguments = [call.shardings.place(n, values[n], keep=False) for n in (*call.params, *call.inputs)]
    return call.jitted.lower(*arguments).compile().as_text()


def reductions(training):
    """Return for each all-reduce of a step the groups of devices and the elements."""
    history = []
    for shapes, groups in re.findall(r"= (.*?) all-reduce\(.*?replica_groups=(\S+),", step_text(training)):
        sizes = re.findall(r"f32\[([\d,]*)\]", shapes)
        history.append((groups, sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in sizes)))
    return history


def test_groups_of_hsdp_exchange_the_parts_of_gradients_that_they_have():
    training = trainer(*WAYS["hsdp"])
    train(training, [0])
    arrays = [training.engine.arrays[n] for n in training.engine.trained]
    complete = sum(x.size for x in arrays)
    parts = sum(x.addressable_shards[0].data.size for x in arrays)
    assert parts < 0.6 * complete
    between = "{{0,2},{1,3}}"
    assert sum(n for groups, n in reductions(training) if groups == between) <= parts + 1  # and the loss
    assert not [n for groups, n in reductions(training) if groups not in (between, "[2,2]<=[4]")], "in a group"


def test_sequences_are_gathered_for_products_with_split_weights():
    training = trainer(*WAYS["sequence"])
    train(training, [0])
    gathers = analysis.collectives(step_text(training))["all-gather"]
    # The operand of the pair, the cotangent of its result, and, as the backward pass joins rows and positions, the
    # operand of the last product.
    assert (gathers.count, gathers.bytes) == (3, 3 * 4 * 6 * 16 * 4)


def test_sequences_that_cannot_be_divided_are_recorded():
    options = {"shapes": {"x": [8, 5, 16]}, "parallelism": "sequence"}
    compiled = ml.compile(network(), ml.JaxBackend(device_mesh=(2, 2)), **options)
    text = (
        "parallelism='sequence' splits no activation: no product with split weights has results of three or more axes "
        "of which 2 devices can divide the second one, that of positions"
    )
    assert f"choice: {text}" in map(str, compiled.decisions)


REFUSED = {
    "parallelism='hsdp' requires a mesh with a second axis\n  device_mesh=(4,)\nhint: use device_mesh=(1, 4)": (
        (4,),
        "hsdp",
    ),
    "parallelism='sequence' requires a mesh with a second axis\n  device_mesh=(2,)\nhint: use device_mesh=(1, 2)": (
        (2,),
        "sequence",
    ),
    """parallelism='hsdp' conflicts with a pipeline
  pipeline_stages = None, device_mesh has 2 along 'pipeline'
hint: omit parallelism: device_mesh=(data, model, pipeline) combines all three; 'fsdp' is possible, too""": (
        (2, 1, 2),
        "hsdp",
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsuitable_meshes_are_refused(message):
    mesh, parallelism = REFUSED[message]
    with pytest.raises(ml.OptionError) as caught:
        ml.compile(network(), ml.JaxBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, parallelism=parallelism)
    assert str(caught.value) == message
