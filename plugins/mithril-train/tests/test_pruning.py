"""``ml.Pruning``: masks that grow during training, and hold against moments, averages and checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import OptionError
from mithril.backend import SparseWeight
from mithril.models import Linear, Relu

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 32)).astype(np.float32)
Y = (X[:, :4].argmax(axis=1)).astype(np.int32)


class Zeros(ml.Callback):
    """The fraction of zeros after each step, and whether a zero became another number."""

    def __init__(self) -> None:
        self.rows: list[float] = []
        self.last: Any = None

    def step_end(self, trainer: Any, report: Any) -> None:
        zeros = np.asarray(trainer.engine.arrays["first.weight"]) == 0
        assert self.last is None or zeros[self.last].all()
        self.last = zeros
        self.rows.append(float(zeros.mean()))


def trainer(pruning: Any, **options: Any) -> Any:
    model = ml.Model()
    model += Linear(32, 48, name="first")
    model += Relu()
    model += Linear(48, 4, name="head")
    settings = {"backend": "numpy", "progress": False, "seed": 1, "loss": "cross_entropy", **options}
    return ml.Trainer(model, settings.pop("optimizer", ml.Adam(0.02)), callbacks=[pruning], **settings)


def test_zeros_grow_by_the_schedule_and_stay() -> None:
    zeros = Zeros()
    pruning = ml.Pruning("first.weight", 0.8, start=4, steps=12, every=3)
    train = trainer(pruning, ema=0.9)
    train.callbacks.append(zeros)
    train.fit(X, Y, batch_size=16, epochs=6)
    expected, reached = [], 0.0
    for step in range(1, 25):
        if step >= 4 and (step % 3 == 0 or step >= 16) and reached < 0.8:
            reached = pruning.wanted(step)
        expected.append(reached)
    assert np.allclose(zeros.rows, expected, atol=1 / (32 * 48))
    assert zeros.rows[-1] == pytest.approx(0.8, abs=1e-3)
    masked = np.asarray(train.engine.arrays["first.weight"]) == 0
    slots = [n for n, e in train.engine.extra.items() if e.parameter == "first.weight"]
    assert len(slots) >= 3  # two moments and an average
    assert all((np.asarray(train.engine.arrays[n])[masked] == 0).all() for n in slots)
    assert np.count_nonzero(train.engine.arrays["head.weight"]) == 48 * 4
    compiled = ml.compile(train.compiled.model, "numpy", shapes={"input": [8, 32]}, static_inference=True)
    compiled.bind(train.compiled.params)
    ml.sparsify(compiled, pattern="first.*")
    assert isinstance(compiled.params["first.weight"], SparseWeight)


@pytest.mark.parametrize("format", ["block1x16", "2:4"])
def test_formats_and_learning(format: Any) -> None:
    train = trainer(ml.Pruning("first.weight", 0.5, format=format, steps=8, every=2))
    history = train.fit(X, Y, batch_size=32, epochs=40)
    losses = [row["loss"] for row in history.rows]
    assert losses[-1] < 0.3 * losses[0]
    weights = np.asarray(train.engine.arrays["first.weight"])
    unit = 16 if format == "block1x16" else 4
    zeros = (weights == 0).reshape(-1, unit)
    counts = zeros.all(axis=1).mean() if format == "block1x16" else zeros.sum(axis=1).min() / 4
    assert counts == 0.5


def test_a_checkpoint_continues_with_the_masks(tmp_path: Any) -> None:
    def run(epochs: int, resume: Any = None) -> Any:
        train = trainer(ml.Pruning("first.weight", 0.8, steps=12, every=3))
        folder = tmp_path / ("uninterrupted" if epochs == 6 and resume is None else "parts")
        train.fit(X, Y, batch_size=32, epochs=epochs, callbacks=[ml.Checkpoint(folder)], resume=resume)
        return np.asarray(train.engine.arrays["first.weight"])

    uninterrupted = run(6)
    run(3)
    assert np.array_equal(run(6, "auto"), uninterrupted)


def test_an_unfinished_schedule_and_wrong_settings_say_so(capsys: Any) -> None:
    train = trainer(ml.Pruning(steps=1000), progress=True)
    train.fit(X, Y, batch_size=32, epochs=1)
    assert "pruning reached 0% of zeros: 90% takes 1000 steps" in "".join(capsys.readouterr())
    with pytest.raises(OptionError, match=r"sparsity=1.0 must be less than 1"):
        ml.Pruning(sparsity=1.0)
    with pytest.raises(OptionError, match="'.*nothing' in pattern= matches no parameter"):
        trainer(ml.Pruning("*.nothing")).fit(X, Y, batch_size=32)
    with pytest.raises(OptionError, match="'head.weight' has 50"):
        model = ml.Model(Linear(32, 50, name="a"), Linear(50, 4, name="head"))
        pruned = ml.Pruning(format="block1x16", steps=1, every=1)
        ml.Trainer(model, ml.SGD(0.1), loss="cross_entropy", backend="numpy", progress=False, callbacks=[pruned]).fit(
            X, Y, batch_size=32
        )
