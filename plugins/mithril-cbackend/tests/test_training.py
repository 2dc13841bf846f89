"""Training on C: forward, backward and the optimizer's update are one function."""

import numpy as np
import pytest

import mithril as ml
from mithril.models import Conv2d, Flatten, LayerNorm, Linear, Model, Relu
from mithril.ops.evaluate import evaluate
from mithril_cbackend.executable import Executable

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


def test_a_step_is_one_function_of_one_arena_and_gives_what_the_references_say(engine):
    batch = {"input": X[:16], "target": Y[:16]}
    step = engine.prepare(batch)
    assert isinstance(step.run, Executable)
    assert step.run.program.plan.size <= 1.05 * step.run.program.plan.peak
    kept = {n: np.array(x) for n, x in engine.arrays.items()}
    rates = {i.name: np.float32(1e-2) for i in step.graph.arguments if i.name not in {**kept, **batch}}
    expected = evaluate(step.graph, {**kept, **batch, **rates})
    got = step.run(engine.arrays, {**batch, **rates})
    assert got.keys() == expected.keys()
    for name, reference in expected.items():
        np.testing.assert_allclose(got[name], reference, atol=2e-5, err_msg=name)


def test_steps_after_the_second_allocate_no_arrays(engine):
    batch, rates = {"input": X[:16], "target": Y[:16]}, dict.fromkeys(engine._rates, 1e-2)
    seen = []
    for _ in range(6):
        engine.step(batch, rates)
        seen.append({x.ctypes.data for x in engine.arrays.values()})
    assert set.union(*seen[2:]) <= seen[0] | seen[1]  # what one step writes, the next but one writes over
