"""``fit`` on arrays: targets, weights, class weights, validation, epochs of a number of steps; losses by output."""

import numpy as np
import pytest
from small import X, Y, arrays, trainer

import mithril as ml
from mithril.graph.errors import InputError, OptionError
from mithril.models import Layer, Linear, Model


def assert_equal_arrays(a, b):
    for n, x in arrays(a).items():
        np.testing.assert_array_equal(arrays(b)[n], x, err_msg=n)


def test_arrays_train_as_a_shuffled_loader_of_them():
    first, second = trainer(), trainer()
    first.fit(X, Y, epochs=2, batch_size=16, validation_data=(X, Y))
    second.fit(ml.DataLoader((X, Y), batch_size=16, shuffle=True), 2, validation=ml.DataLoader((X, Y), batch_size=16))
    assert_equal_arrays(first, second)
    assert first.history.rows == second.history.rows
    third = trainer()
    third.fit({"input": X, "target": Y}, epochs=2, batch_size=16)
    assert_equal_arrays(first, third)


def test_numbers_after_a_loader_are_epochs():
    subject = trainer()
    subject.fit([(X, Y)], 3)
    assert subject.epoch == 3
    subject.fit(X, Y, 2)
    assert subject.epoch == 5


def test_weights_of_samples_are_repetitions():
    """Compare a weight of 2 with a repeated sample, and a weight of 0 with a missing one."""
    repeats = np.arange(96) % 3
    first, second = trainer(), trainer()
    for subject in (first, second):
        subject.begin((X, Y))
    first.fit(X, Y, 3, batch_size=96, shuffle=False, sample_weight=repeats)
    second.fit(np.repeat(X, repeats, axis=0), np.repeat(Y, repeats), 3, batch_size=96, shuffle=False)
    for n, x in arrays(first).items():
        np.testing.assert_allclose(arrays(second)[n], x, atol=1e-5, err_msg=n)
    assert first.history["loss"] == pytest.approx(second.history["loss"], rel=1e-5)
    weighted = first.evaluate(X, Y, sample_weight=repeats, batch_size=40)
    assert weighted == pytest.approx(first.evaluate(np.repeat(X, repeats, axis=0), np.repeat(Y, repeats)), rel=1e-5)


def test_class_weights_equal_those_of_the_loss():
    first, second = trainer(), trainer(loss=ml.models.CrossEntropy(weight=[1.0, 5.0, 0.5]))
    for subject, weights in ((first, {1: 5.0, 2: 0.5}), (second, None)):
        subject.begin((X, Y))
        subject.fit(X, Y, 2, batch_size=24, class_weight=weights)
    for n, x in arrays(first).items():
        np.testing.assert_allclose(arrays(second)[n], x, atol=1e-6, err_msg=n)
    assert "sample_weight" not in str(first.evaluate(X, Y)), "validation is not weighted"


def test_weights_of_a_function_that_returns_a_mean_are_rejected():
    def mean(output, target):
        return ml.ops.cross_entropy(output, target)

    def rows(output, target):
        return ml.ops.cross_entropy(output, target, reduction="none")

    with pytest.raises(OptionError, match="'mean' is one number per batch(?s:.)*return the loss of each sample"):
        trainer(loss=mean).fit(X, Y, sample_weight=np.ones(96))
    first, second = trainer(loss=rows), trainer()
    for subject in (first, second):
        subject.fit(X, Y, sample_weight=np.arange(96))
    assert_equal_arrays(first, second)


def test_masks_are_weights_per_element():
    model = Model()
    model |= Linear(4)(input="input", output="output")
    x = np.random.default_rng(0).normal(size=(6, 5, 3)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, 4, (6, 5)).astype(np.int32)
    mask = np.arange(5) < np.arange(1, 7)[:, None]
    subject = trainer(model)
    loss = subject.evaluate(x, y, sample_weight=mask)["loss"]
    rows = subject.predict(x)[mask]
    picked = rows[np.arange(len(rows)), y[mask]]
    assert loss == pytest.approx(np.mean(np.log(np.exp(rows).sum(1)) - picked), rel=1e-5)


def two_heads():
    model = Model()
    model |= Linear(8, name="body")(input="input", output="hidden")
    model |= Linear(3, name="kind")(input="hidden", output="kind")
    model |= Linear(1, name="size")(input="hidden", output="size")
    return model


SIZE = X.sum(1, keepdims=True)


@pytest.mark.parametrize("y", [{"kind": Y, "size": SIZE}, (Y, SIZE)])
def test_losses_by_output(y):
    subject = trainer(
        two_heads(),
        loss={"kind": "cross_entropy", "size": "mse"},
        loss_weights={"size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    subject.fit(X, y, epochs=30, validation_data=(X, y))
    row = subject.history.rows[-1]
    assert row["loss"] == pytest.approx(row["kind_loss"] + 0.5 * row["size_loss"], rel=1e-5)
    assert row["val_kind_accuracy"] > 0.9
    assert row["val_size_loss"] < 1.0
    assert row["val_size_mae"] == pytest.approx(np.abs(subject.predict(X)["size"] - SIZE).mean(), rel=1e-4)


def test_a_missing_target_is_named():
    subject = trainer(two_heads(), loss={"kind": "cross_entropy", "size": "mse"})
    with pytest.raises(OptionError, match="the batch has no target for the output 'size'(?s:.)*add a column 'size'"):
        subject.fit(X, {"kind": Y})
    with pytest.raises(InputError, match="'input' is both an input and a target"):
        subject.fit(X, {"input": Y})


def test_epochs_of_a_number_of_steps_continue_in_the_data(tmp_path):
    """Four epochs of three batches read the same batches as two epochs of six, also if training is interrupted."""
    uninterrupted, parts = trainer(), trainer(callbacks=[ml.Checkpoint(tmp_path)])
    uninterrupted.fit(X, Y, 2, batch_size=16)
    parts.fit(X, Y, 3, batch_size=16, steps_per_epoch=3)
    assert len(parts.history) == 3
    resumed = trainer()
    resumed.fit(X, Y, 4, batch_size=16, steps_per_epoch=3, resume=tmp_path)
    assert_equal_arrays(uninterrupted, resumed)
    assert resumed.history.steps == uninterrupted.history.steps


def test_an_endless_generator_has_epochs_of_a_number_of_steps():
    def endless():
        while True:
            yield X[:8], Y[:8]

    class Batches:
        def __iter__(self):
            return endless()

    subject = trainer()
    subject.fit(Batches(), 2, steps_per_epoch=5)
    assert (subject.steps, len(subject.history)) == (10, 2)
    with pytest.raises(InputError, match="the loader gave no batch"):
        subject.fit(ml.DataLoader((X, Y), batch_size=200, drop_last=True), steps_per_epoch=5)


def test_regularizers_add_penalties_by_pattern():
    plain, subject = (
        trainer(optimizer=ml.SGD(0.0)),
        trainer(optimizer=ml.SGD(0.0), regularizers={"*.weight": ml.L2(0.5), "last.*": ml.L1(0.25)}),
    )
    a, b = plain.step((X, Y)), subject.step((X, Y))
    p = arrays(subject)
    squares = sum((p[n] ** 2).sum() for n in ("first.weight", "last.weight"))
    magnitudes = sum(np.abs(p[n]).sum() for n in ("last.weight", "last.bias"))
    assert b["regularization"] == pytest.approx(0.5 * squares + 0.25 * magnitudes, rel=1e-5)
    assert b["loss"] == pytest.approx(a["loss"] + b["regularization"], rel=1e-5)


class Sparse(Layer):
    """Penalize activations."""

    def build(self, x):
        self.add_loss(0.1 * ml.ops.mean(ml.ops.abs(x)))
        return x


def test_layers_add_losses_that_other_programs_do_not_compute():
    model = Model()
    model += Linear(8, 16, name="first")(input="input")
    model += Sparse()
    model += Linear(16, 3, name="last")
    subject = trainer(model, optimizer=ml.SGD(0.0))
    report = subject.step((X, Y))
    p = arrays(subject)
    expected = 0.1 * np.abs(X @ p["first.weight"].T + p["first.bias"]).mean()
    assert report["added_loss"] == pytest.approx(expected, rel=1e-5)
    assert subject.evaluate(X, Y)["loss"] == pytest.approx(report["loss"], rel=1e-6)
    compiled = ml.compile(model, "numpy", shapes={"input": [4, 8]})
    assert list(compiled.evaluate(compiled.randomize_params(), {"input": X[:4]})) == ["output"]
    assert not [n for n in compiled.programs[0].graph.nodes if n.op.name == "abs"]


def test_batches_and_validation_have_events():
    seen = []

    class Watch(ml.Callback):
        def batch_begin(self, trainer, batch):
            seen.append(("begin", sorted(batch)))

        def batch_end(self, trainer, report):
            seen.append(("end", report.step))

        def validation_begin(self, trainer):
            seen.append("validation")

        def validation_end(self, trainer, row):
            seen.append(sorted(row))

    subject = trainer(callbacks=[Watch()], gradient_accumulation_steps=2)
    subject.fit(X, Y, batch_size=48, validation=(X, Y))
    batch = ("begin", ["input", "target"])
    assert seen == [batch, ("end", 0), batch, ("end", 1), "validation", ["val_loss"]]


def test_outputs_of_several_lengths_are_rows():
    model = Model()
    model |= Linear(2)(input="input", output="output")
    subject = trainer(model, loss="mse")
    short, long = np.ones((3, 4, 5), np.float32), np.ones((2, 7, 5), np.float32)
    subject.fit([(short, short[..., :2]), (long, long[..., :2])])
    assert [row.shape for row in subject.predict([short, long])] == [(4, 2)] * 3 + [(7, 2)] * 2
    np.testing.assert_allclose(subject.predict(short, batch_size=2), subject.predict(short), atol=1e-6)


def test_the_last_samples_are_kept_for_validation():
    first, second = trainer(), trainer()
    first.fit(X, Y, 2, validation_split=0.25, sample_weight=np.linspace(0.5, 1.5, 96))
    weights = np.linspace(0.5, 1.5, 96)
    validation = {"input": X[72:], "target": Y[72:], "sample_weight": weights[72:]}
    second.fit(X[:72], Y[:72], 2, validation=validation, batch_size=32, sample_weight=weights[:72])
    assert_equal_arrays(first, second)
    assert first.history.rows == second.history.rows
    assert "val_loss" in first.history.columns


@pytest.mark.parametrize("name", ["pandas", "pyarrow", "datasets"])
def test_tables_are_split(name):
    module = pytest.importorskip(name)
    columns = {"input": list(X), "target": list(Y)}
    table = {
        "pandas": lambda: module.DataFrame(X),
        "pyarrow": lambda: module.table(columns),
        "datasets": lambda: module.Dataset.from_dict(columns),
    }[name]()
    subject, plain = trainer(), trainer()
    subject.fit(table, Y if name == "pandas" else None, 1, validation_split=0.25)
    plain.fit(X, Y, 1, validation_split=0.25)
    assert subject.history["val_loss"] == pytest.approx(plain.history["val_loss"])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 0.001, float("nan")])
def test_a_split_that_leaves_nothing_is_refused(share):
    with pytest.raises(OptionError, match="validation_split"):
        trainer().fit(X, Y, validation_split=share)


def test_a_split_needs_arrays_and_excludes_validation_data():
    with pytest.raises(OptionError, match="validation_split belongs to arrays"):
        trainer().fit([(X, Y)], validation_split=0.2)
    with pytest.raises(OptionError, match="exclude"):
        trainer().fit(X, Y, validation=(X, Y), validation_split=0.2)


def test_verbose_decides_what_is_shown(capsys):
    subject = trainer(progress=None)
    for verbose, shown in ((0, 0), (2, 3), (False, 0)):
        subject.fit(X, Y, 3, verbose=verbose)
        assert len(capsys.readouterr().err.splitlines()) == shown
    with pytest.raises(OptionError, match="verbose"):
        subject.fit(X, Y, verbose=3)


@pytest.mark.parametrize(
    "kind", [ml.SGD, ml.Adam, ml.AdamW, ml.Adagrad, ml.RMSprop, ml.Lion, ml.Adafactor, ml.Adamax, ml.RAdam, ml.Adadelta]
)
def test_optimizers_have_names(kind):
    for name in (kind.__name__, kind.__name__.lower()):
        assert trainer(optimizer=name).optimizer == kind()


def test_several_optimizers_have_names_and_unknown_ones_a_hint():
    subject = trainer(optimizer={"first.*": "adam", "last.*": ml.SGD(0.1)})
    subject.fit(X, Y)
    with pytest.raises(OptionError, match="did you mean 'rmsprop'"):
        trainer(optimizer="rmspropp")


def test_rates_are_searched_and_the_trainer_is_as_before():
    subject, other = trainer(ema=0.9), trainer(ema=0.9)
    for fitted in (subject, other):
        fitted.fit(X, Y, 1, batch_size=16)
    rates = subject.find_learning_rate(X, Y, lowest=1e-5, highest=100.0, steps=60, batch_size=16)
    assert 1e-3 < rates.suggestion < 3.0
    assert rates.rates[0] == 1e-5
    assert list(rates.rates) == sorted(rates.rates)
    assert "suggestion" in repr(rates)
    assert "<svg" in rates._repr_html_()
    assert subject.learning_rate == other.learning_rate
    assert list(subject.engine.decisions) == list(other.engine.decisions), "the checkpoint is one of this trainer"
    for fitted in (subject, other):
        fitted.fit(X, Y, 1, batch_size=16)
    assert_equal_arrays(subject, other)
    assert subject.history.rows == other.history.rows


def test_the_position_of_a_loader_and_a_scheduled_rate_survive_a_search():
    subject = trainer(optimizer=ml.SGD(ml.StepDecay(0.1, every=2, gamma=0.5)))
    loader = ml.DataLoader((X, Y), batch_size=16, shuffle=True)
    before = loader.state_dict()
    subject.find_learning_rate(loader, lowest=1e-3, highest=1e30, steps=20)
    assert loader.state_dict() == before
    assert (subject.steps, subject.epoch, subject.learning_rate) == (0, 0, 0.1)
    subject.fit(loader, 1)
    assert subject.learning_rate == 0.1 * 0.5**3


def test_a_search_without_a_falling_loss_says_so():
    subject = trainer()
    for options in ({"lowest": 1e3, "highest": 1e6}, {"lowest": 1e38, "highest": 3e38}):
        rates = subject.find_learning_rate(X, Y, steps=10, **options)
        assert "no suggestion" in repr(rates) and "no suggestion" in rates._repr_html_()
        with pytest.raises(InputError, match="falls at none"):
            rates.suggestion
    with pytest.raises(OptionError, match="not below"):
        subject.find_learning_rate(X, Y, lowest=1.0, highest=0.1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_search_restores_the_trainer(error):
    subject, other = trainer(), trainer()

    class Batches:
        def __iter__(self):
            yield from [(X[:16], Y[:16])] * 7
            raise error

    with pytest.raises(error):
        subject.find_learning_rate(Batches(), steps=50)
    assert (subject.steps, subject.learning_rate) == (0, 0.01)
    for fitted in (subject, other):
        fitted.fit(X, Y, 2)
    assert_equal_arrays(subject, other)


def test_negative_losses_are_searched_to_the_end():
    def gain(output, target):
        return ml.ops.cross_entropy(output, target) - 10.0

    rates = trainer(loss=gain).find_learning_rate(X, Y, lowest=1e-5, highest=1e-2, steps=20)
    assert len(rates.rates) == 20
