"""A trainer as people use it: data in several forms, fits in a row, parameters and rates that change under way."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import BatchNorm1d, Linear, Model, Relu, Sequential

DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(24, 5)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


def classifier():
    model = Model()
    model += Linear(4, name="body")(input="input")
    model += Relu()
    model += Linear(3, name="head")
    return model


def trainer(backend="numpy", model=None, **options):
    options = {"optimizer": ml.SGD(0.1), "loss": "cross_entropy", "progress": False, **options}
    return ml.Trainer(model or classifier(), backend=backend, **options)


def parameters(subject):
    return {n: np.array(subject.to_numpy(x)) for n, x in subject.params.items()}


def test_predict_takes_the_data_of_fit(backend):
    subject = trainer(backend)
    loader = ml.DataLoader((X, Y), batch_size=10)
    subject.fit(loader, 1)
    expected = subject.predict(X)
    assert expected.shape == (24, 3)
    forms = [
        X.tolist(),
        X.astype(np.float64),
        (X, Y),
        (X.tolist(), Y.tolist()),
        {"input": X, "target": Y},
        {"input": X.astype(np.float64)},
        loader,
        [(X[:10], Y[:10]), (X[10:], Y[10:])],
        [X[:10], X[10:]],
        [X[:10].astype(np.float64), X[10:]],
    ]
    for form in forms:
        np.testing.assert_allclose(subject.predict(form), expected, atol=1e-5)
    assert subject.evaluate((X.tolist(), Y.tolist())) == pytest.approx(subject.evaluate((X, Y)), rel=1e-5)


def test_predict_takes_several_inputs_as_a_tuple():
    model = Model()
    model |= ml.models.Add()(left="a", right="b", output="s")
    model |= Linear(3)(input="s", output="logits")
    subject = trainer(model=model)
    subject.fit([(X, X, Y)], 1)
    np.testing.assert_array_equal(subject.predict((X, X)), subject.predict({"a": X, "b": X}))
    np.testing.assert_array_equal(subject.predict((X, X, Y)), subject.predict({"a": X, "b": X}))


def test_each_fit_trains_its_epochs(backend):
    subject = trainer(backend)
    loader = ml.DataLoader((X, Y), batch_size=12)
    for _ in range(2):
        subject.fit(loader, epochs=2)
    assert (subject.epoch, subject.steps, len(subject.history)) == (4, 8, 4)
    subject.fit(loader, epochs=0)
    assert subject.epoch == 4


@pytest.mark.parametrize("stopped", [False, True])
def test_early_stopping_restores_the_best(backend, stopped):
    """Restore even if the epochs run out before the patience does."""
    subject = trainer(backend)
    best = {}

    class Worse(ml.Callback):
        def epoch_end(self, trainer, row):
            row["watched"] = [3.0, 1.0, 2.0, 4.0][trainer.epoch - 1]
            if trainer.epoch == 2:
                best.update(parameters(trainer))

    stopping = ml.EarlyStopping("watched", patience=2 if stopped else 9)
    subject.fit(ml.DataLoader((X, Y), batch_size=8), 4, callbacks=[Worse(), stopping])
    assert bool(subject.stopped) == stopped
    assert stopping.best_epoch == 2
    for name, x in parameters(subject).items():
        np.testing.assert_array_equal(x, best[name])
        np.testing.assert_array_equal(subject.to_numpy(subject.compiled.params[name]), best[name])


def test_parameters_of_a_running_trainer_can_be_set(backend):
    """Train two models alternately, as for a generative adversarial network; arrays that were read stay valid."""
    first, second = trainer(backend), trainer(backend, seed=5)
    for subject in (first, second):
        subject.step((X, Y))
    copies = first.params
    second.params = {n: x for n, x in copies.items() if n.startswith("body")}
    first.step((X, Y))
    for name, x in parameters(second).items():
        is_equal = np.array_equal(x, second.to_numpy(copies[name]))
        assert is_equal == name.startswith("body"), name
    second.step((X, Y))
    with pytest.raises(ml.InputError, match="(?s)unknown parameter 'hed.bias'.*did you mean 'head.bias'"):
        second.params = {"hed.bias": np.zeros(3)}
    with pytest.raises(ml.InputError, match=r"'head.bias' has shape \[4\], expected \[3\]"):
        second.params = {"head.bias": np.zeros(4)}
    second.params = {"head.bias": np.full(3, 2.0)}
    np.testing.assert_array_equal(second.to_numpy(second.params["head.bias"]), np.full(3, 2.0, np.float32))


def test_some_parameters_may_be_given_to_begin_with():
    """Draw the others from the seed and record it: transfer learning."""
    body = {"body.weight": np.ones((4, 5), np.float32)}
    subject, fresh = trainer(params=body), trainer()
    for t in (subject, fresh):
        t.begin((X, Y))
    assert parameters(subject)["body.weight"].min() == 1.0
    np.testing.assert_array_equal(parameters(subject)["head.weight"], parameters(fresh)["head.weight"])
    assert any("drawn from the seed: body.bias, head.weight, head.bias" in d.message for d in subject.engine.decisions)
    with pytest.raises(ml.InputError, match="unknown parameter 'bdy.weight'"):
        trainer(params={"bdy.weight": body["body.weight"]}).begin((X, Y))
    normed = Sequential(Linear(3), BatchNorm1d())
    with pytest.raises(ml.InputError, match="(?s)unknown parameter '1.running_mean'.*hint: pass states in state="):
        ml.Trainer(normed, "sgd", loss="cross_entropy", backend="numpy", params={"1.running_mean": np.ones(3)}).begin(
            (X, Y)
        )
    with pytest.raises(ml.InputError, match="unknown state 'x'"):
        trainer(state={"x": body["body.weight"]}).begin((X, Y))
    early = trainer()
    early.params = body
    early.begin((X, Y))
    assert parameters(early)["body.weight"].min() == 1.0


def test_state_can_be_set_and_frozen_norms_follow_the_data():
    model = Model()
    model += BatchNorm1d(name="norm")(input="input")
    model += Linear(3, name="head")
    subject = trainer(model=model, frozen="norm.*")
    subject.step((X, Y))
    mean = np.array(subject.to_numpy(subject.state["norm.running_mean"]))
    assert np.abs(mean).max() > 0, "running statistics are no parameters: frozen= does not hold them"
    subject.state = {"norm.running_mean": np.zeros(5)}
    assert np.abs(subject.to_numpy(subject.state["norm.running_mean"])).max() == 0


def test_learning_rate_can_be_read_and_set(backend):
    subject = trainer(backend, optimizer=ml.SGD(0.5))
    assert subject.optimizer.learning_rate == 0.5
    subject.step((X, Y))
    executables = len(subject.engine._steps)
    subject.learning_rate = 0.0
    old = parameters(subject)
    report = subject.step((X, Y))
    assert report.learning_rate == subject.learning_rate == 0.0
    for name, x in parameters(subject).items():
        np.testing.assert_array_equal(x, old[name])
    assert len(subject.engine._steps) == executables
    subject.learning_rate = ml.Cosine(0.1, steps=10)
    assert subject.learning_rate == pytest.approx(ml.Cosine(0.1, steps=10)(2))
    with pytest.raises(ml.OptionError, match="learning_rate: expected"):
        subject.learning_rate = "fast"


def test_learning_rate_set_by_a_callback_survives_a_resume(tmp_path):
    class Halve(ml.Callback):
        def epoch_end(self, trainer, row):
            trainer.learning_rate = trainer.learning_rate / 2

    def data():
        return ml.DataLoader((X, Y), batch_size=8)

    full, first, second = (trainer(callbacks=[Halve(), ml.Checkpoint(tmp_path)]) for _ in range(3))
    full.fit(data(), 3)
    first.fit(data(), 1)
    second.fit(data(), 3, resume=tmp_path)
    assert second.learning_rate == full.learning_rate == 0.1 / 8
    assert second.history.rows == full.history.rows


def test_things_show_themselves():
    subject = trainer(callbacks=[ml.EarlyStopping(patience=4)])
    loader = ml.DataLoader((X, Y), batch_size=10, shuffle=True)
    subject.fit(loader, 2, validation=(X, Y))
    assert repr(subject).startswith("<Trainer of 'model' on numpy with SGD(")
    assert repr(subject).endswith(": 2 epochs, 6 steps>")
    assert repr(subject.history) == "<History of 2 epochs: loss, val_loss>"
    assert repr(loader) == "<DataLoader: 3 batches of 10, shuffled>"
    assert repr(subject.callbacks[0]).startswith("EarlyStopping(monitor='val_loss', patience=4")


def test_initial_parameters_take_the_precision_of_the_program(backend):
    """C read the bytes of a float32 array as 16-bit numbers."""
    model = Model(Linear(3))
    weights = {"linear.weight": np.eye(3, dtype="float32"), "linear.bias": np.ones(3, "float32")}
    trainer = ml.Trainer(
        model, ml.SGD(0.0), loss="mse", backend=backend, params=weights, precision="float16", progress=False
    )
    x = np.arange(12, dtype="float32").reshape(4, 3)
    trainer.fit(x, x + 1, batch_size=4)
    assert trainer.history["loss"] == [0.0]
    assert "float16" in str(trainer.params["linear.weight"].dtype)
