"""Training on C: forward, backward and the optimizer's update are one function."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

import mithril as ml
import mithril_cbackend
from mithril.graph.evaluation import evaluate
from mithril.models import Conv2d, Flatten, LayerNorm, Linear, Model, Relu
from mithril_cbackend.program.executable import Executable

pytest.importorskip("mithril_train", reason="mithril-train is not installed")
draw = np.random.default_rng(0)
X = draw.normal(size=(32, 3, 8, 8)).astype(np.float32)
Y = draw.integers(0, 4, 32).astype(np.int32)


def classifier():
    model = Model()
    model += Conv2d(4, kernel_size=3, padding=1, name="conv")
    model += Relu()
    model += Flatten()
    model += LayerNorm(name="norm")
    model += Linear(4, name="head")
    return model


@pytest.fixture
def engine():
    trainer = ml.Trainer(classifier(), ml.AdamW(1e-2), loss="cross_entropy", backend="c", progress=False)
    trainer.fit(ml.DataLoader((X, Y), batch_size=16), 1)
    return trainer.engine


def test_a_step_is_one_function_with_one_arena_and_matches_the_references(engine):
    batch = {"input": X[:16], "target": Y[:16]}
    step = engine.prepare(batch)
    assert isinstance(step.run, Executable)
    assert step.run.program.plan.size <= 1.05 * step.run.program.plan.peak
    initial = {n: np.array(x) for n, x in engine.arrays.items()}
    rates = {i.name: np.float32(1e-2) for i in step.graph.arguments if i.name not in {**initial, **batch}}
    expected = evaluate(step.graph, {**initial, **batch, **rates})
    outputs = step.run(engine.arrays, {**batch, **rates})
    assert outputs.keys() == expected.keys()
    for name, reference in expected.items():
        np.testing.assert_allclose(outputs[name], reference, atol=2e-5, err_msg=name)


def test_steps_after_the_second_allocate_no_arrays(engine):
    batch, rates = {"input": X[:16], "target": Y[:16]}, dict.fromkeys(engine._rates, 1e-2)
    seen = []
    for _ in range(6):
        engine.step(batch, rates)
        seen.append({x.ctypes.data for x in engine.arrays.values()})
    assert set.union(*seen[2:]) <= seen[0] | seen[1]  # the buffers of a step are reused two steps later


@pytest.mark.skipif(None in (shutil.which("gcc"), shutil.which("make")), reason="there is no gcc")
def test_a_step_trains_in_exported_c(engine, tmp_path):
    """Three steps of the C give the loss of three steps here, and the weights that they leave."""
    batch = {"input": X[:16], "target": Y[:16]}
    inputs = {**batch, "learning_rate": np.float32(1e-2)}
    step = engine.prepare(batch)
    exported = mithril_cbackend.export_program(
        step.run, tmp_path, engine.arrays, inputs, name="trainer", library="shared"
    )
    process = subprocess.run(["make", "-C", tmp_path, "check"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "report/loss: largest difference" in process.stdout
    carried = dict(engine.arrays)
    for _ in range(5):
        outputs = step.run(carried, inputs)
        carried = {n: np.array(outputs[n]) for n in carried}
    library = ctypes.CDLL(str(exported.library))
    library.trainer_get.restype = ctypes.c_void_p
    library.trainer_instance_size.restype = ctypes.c_size_t
    model = np.zeros(library.trainer_instance_size() // 8 + 1, np.int64)
    arena = np.zeros(exported.contents.arena_bytes, np.uint8)
    rate = np.float32([1e-2])
    weights = np.frombuffer(exported.contents.weights, np.uint8)
    self, *addresses = (ctypes.c_void_p(a.ctypes.data) for a in (model, X, Y, rate))
    loss, finite = np.zeros(1, np.float32), np.zeros(1, np.uint8)
    library.trainer_init(self, ctypes.c_void_p(arena.ctypes.data))
    library.trainer_set_weights(self, ctypes.c_void_p(weights.ctypes.data))
    for _ in range(5):
        library.trainer_run(self, *addresses, ctypes.c_void_p(loss.ctypes.data), ctypes.c_void_p(finite.ctypes.data))
    assert finite[0] == 1
    np.testing.assert_allclose(loss[0], outputs["report/loss"], rtol=1e-4)
    for name in ("conv.weight", "head.bias", "optimizer/v/norm.weight"):
        x = carried[name]
        address = library.trainer_get(self, name.encode())
        actual = np.ctypeslib.as_array((ctypes.c_float * x.size).from_address(address)).reshape(x.shape)
        np.testing.assert_allclose(actual, x, rtol=1e-3, atol=1e-5, err_msg=name)
