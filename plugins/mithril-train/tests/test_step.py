"""The step as one graph: its contents, clipping, accumulation, frozen parameters, averages, loss scales."""

import numpy as np
import pytest
from small import X, Y, arrays, classifier, loader, trainer

import mithril as ml
from mithril.graph.errors import GradientError, InputError, OptionError
from mithril.models import Accuracy, Layer, Linear, Model
from mithril_train.engine.nonfinite import NotFiniteError
from mithril_train.step.loss_binding import as_measure
from mithril_train.step.step_config import LossScale

BATCH = {"input": X[:16], "target": Y[:16]}


def step(subject, batch=BATCH):
    subject.step(batch)
    return arrays(subject)


def test_the_step_is_one_executable_with_everything_in_it():
    subject = trainer(metrics=[Accuracy()], clip_norm=1.0)
    subject.begin(BATCH)
    graph = subject.engine.prepare(BATCH).graph
    phases = {n.tags.get("phase", "forward") for n in graph.nodes}
    assert {"forward", "loss", "backward", "update"} <= phases
    assert [i.name for i in graph.with_role("input")] == ["input", "target", "learning_rate"]
    carried = [i.name for i in graph.with_role("param")]
    assert list(graph.output_names) == [
        *carried,
        "report/loss",
        "statistic/accuracy/sum",
        "statistic/accuracy/count",
        "report/gradient_norm",
        "report/finite",
    ]
    assert "one executable on numpy" in subject.summary()


def test_a_loss_and_its_gradient_share_common_parts():
    subject = trainer()
    subject.begin(BATCH)
    lowered = subject.engine.prepare(BATCH).run.graph
    assert [n.op.name for n in lowered.nodes].count("log") == 1


def test_report_is_the_loss_before_the_step():
    subject = trainer(metrics={"hits": Accuracy()})
    report = subject.step(BATCH)
    assert set(report) == {"loss", "hits"}
    assert report["loss"] == pytest.approx(np.log(3), abs=0.5)
    assert report.step == 1
    assert report.learning_rate == 0.01


def test_gradients_are_those_of_the_compiled_model():
    compiled = ml.compile(classifier(), "numpy")
    params = compiled.randomize_params(0, {"input": X[:16]})
    subject = trainer(optimizer=ml.SGD(1.0), params=params)
    after = step(subject)
    outputs = compiled.evaluate(params, {"input": X[:16]})["output"]
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    g = (p - np.eye(3, dtype=np.float32)[Y[:16]]) / 16
    _, expected = compiled.evaluate(params, {"input": X[:16]}, output_gradients={"output": g})
    for name, x in expected.items():
        np.testing.assert_allclose(np.asarray(params[name]) - after[name], x, atol=1e-6)


def test_a_compiled_model_is_trained_as_the_tuning_page_says():
    compiled = ml.compile(classifier(), ml.NumpyBackend())
    subject = ml.Trainer(
        model=compiled,
        optimizer=ml.Adam(learning_rate=0.001),
        gradient_accumulation_steps=4,
        loss="cross_entropy",
        progress=False,
    )
    subject.fit(loader(), 1)
    assert subject.steps == 2, "six batches: four, and the two left over"
    assert compiled({"input": X[:4]})["output"].shape == (4, 3)


@pytest.mark.parametrize("last", [4, 3])
def test_accumulated_batches_are_one_large_batch(last):
    """Means of equal batches; an incomplete group is divided by its number of batches."""
    reference, parts = trainer(optimizer=ml.SGD(0.1)), trainer(optimizer=ml.SGD(0.1), gradient_accumulation_steps=4)
    n = 8 * last
    reference.step({"input": X[:n], "target": Y[:n]})
    parts.fit(ml.DataLoader((X[:n], Y[:n]), batch_size=8), 1)
    assert parts.steps == 1
    actual, theirs = arrays(parts), arrays(reference)
    for name in reference.engine.trained:
        np.testing.assert_allclose(actual[name], theirs[name], atol=1e-6)
    assert actual["training/accumulated"] == 0


def test_clipping_by_norm_and_value():
    before = trainer(optimizer=ml.SGD(1.0))
    before.begin(BATCH)
    start = arrays(before)
    free, short = step(trainer(optimizer=ml.SGD(1.0))), step(trainer(optimizer=ml.SGD(1.0), clip_norm=0.05))
    names = before.engine.trained
    norm = np.sqrt(sum(((free[n] - start[n]) ** 2).sum() for n in names))
    assert norm > 0.05
    clipped = np.sqrt(sum(((short[n] - start[n]) ** 2).sum() for n in names))
    assert clipped == pytest.approx(0.05, rel=1e-3)
    bounded = step(trainer(optimizer=ml.SGD(1.0), clip_value=0.01))
    for n in names:
        expected = start[n] - np.clip(start[n] - free[n], -0.01, 0.01)
        np.testing.assert_allclose(bounded[n], expected, atol=1e-6)


def test_frozen_parameters_stay():
    subject = trainer(frozen="first.*")
    subject.begin(BATCH)
    start = arrays(subject)
    after = step(subject)
    np.testing.assert_array_equal(after["first.weight"], start["first.weight"])
    assert np.abs(after["last.weight"] - start["last.weight"]).max() > 0
    assert not [n for n in after if n.startswith("optimizer/") and "first" in n], "no slots are kept for them"
    with pytest.raises(GradientError, match="nothing to train"):
        trainer(frozen="*").step(BATCH)


def test_moving_averages():
    subject = trainer(ema=0.5)
    subject.begin(BATCH)
    average = arrays(subject)["first.weight"].copy()
    for t in range(1, 15):
        share = max(0.5, 9 / (t + 9))
        average = (1 - share) * average + share * step(subject)["first.weight"]
    np.testing.assert_allclose(subject.averaged["first.weight"], average, atol=1e-6)
    assert subject.evaluate([BATCH], ema=True)["loss"] != subject.evaluate([BATCH])["loss"]
    with pytest.raises(OptionError, match="no moving average"):
        trainer_without = trainer()
        trainer_without.begin(BATCH)
        _ = trainer_without.averaged


def test_averages_of_short_trainings_forget_the_initial_parameters():
    subject = trainer(ema=0.99, metrics="accuracy")
    subject.fit(loader(), 22)
    assert subject.steps == 132
    accuracy = [subject.evaluate(loader(), ema=ema)["accuracy"] for ema in (False, True)]
    assert accuracy[1] > accuracy[0] - 0.03 > 0.8


@pytest.mark.parametrize("attribute", ["params", "averaged"])
def test_values_of_a_trainer_are_copies(attribute):
    subject = trainer(ema=0.5)
    subject.begin(BATCH)
    step(subject)
    values = {n: subject.to_numpy(x) for n, x in getattr(subject, attribute).items()}
    live = [subject.to_numpy(x) for x in subject.engine.arrays.values()]
    assert [n for n, x in values.items() if any(np.shares_memory(x, a) for a in live)] == []


def test_a_loss_scale_changes_nothing_but_the_range():
    free, scaled = step(trainer(optimizer=ml.SGD(0.1))), step(trainer(optimizer=ml.SGD(0.1), loss_scale=1024.0))
    for n in ("first.weight", "last.bias"):
        np.testing.assert_allclose(scaled[n], free[n], atol=1e-6)


def test_a_dynamic_loss_scale_skips_and_halves_then_grows():
    subject = trainer(optimizer=ml.SGD(0.1), loss_scale=LossScale(2.0**127, patience=2))
    subject.begin(BATCH)
    start = arrays(subject)
    for _ in range(2):
        subject.step({"input": X[:16] * 100, "target": Y[:16]})
    skipped = arrays(subject)
    assert skipped["training/loss_scale"] < 2.0**127
    scale = float(skipped["training/loss_scale"])
    np.testing.assert_array_equal(skipped["first.weight"], start["first.weight"])
    assert skipped["training/step"] == 0, "bias correction does not count skipped steps"
    subject.engine.restore({**skipped, "training/loss_scale": np.float32(8.0).reshape(())})
    for _ in range(2):
        subject.step(BATCH)
    assert arrays(subject)["training/loss_scale"] == 16.0, scale


def test_float16_learns_with_a_dynamic_loss_scale():
    subject = trainer(backend=ml.NumpyBackend(dtype="float16"), loss_scale="dynamic", optimizer=ml.Adam(0.01))
    history = subject.fit(ml.DataLoader((X.astype(np.float16), Y), batch_size=32), 8)
    assert arrays(subject)["first.weight"].dtype == np.float16
    assert arrays(subject)["optimizer/m/first.weight"].dtype == np.float32
    assert history["loss"][-1] < 0.9 * history["loss"][0]


def test_losses_by_name_function_layer_and_output():
    def weighted(output, target, weight):
        return ml.ops.mean(ml.ops.cross_entropy(output, target, reduction="none") * weight)

    plain = trainer().step(BATCH)["loss"]
    batch = {**BATCH, "weight": np.full(16, 2.0, np.float32)}
    assert trainer(loss=weighted).step(batch)["loss"] == pytest.approx(2 * plain, rel=1e-6)
    assert trainer(loss=ml.models.CrossEntropy()).step(BATCH)["loss"] == plain
    assert trainer(loss=ml.ops.cross_entropy).step(BATCH)["loss"] == plain

    class Own(Layer):
        inputs = ("input", "target")
        outputs = ("logits", "cost")

        def __init__(self):
            self.body = Linear(8, 3)

        def build(self, x, target):
            logits = self.body(x)
            return logits, ml.ops.cross_entropy(logits, target)

    assert trainer(Own(), loss=None).step(BATCH)["loss"] > 0
    assert trainer(Own(), loss="cost").step(BATCH)["loss"] > 0


def test_wrong_losses():
    with pytest.raises(OptionError, match="which value is the loss"):
        trainer(loss=None).step(BATCH)
    with pytest.raises(OptionError, match="unknown loss or metric 'cross_entropi'"):
        trainer(loss="cross_entropi")
    with pytest.raises(OptionError, match="not a scalar"):
        trainer(loss=lambda output, target: output).step(BATCH)
    with pytest.raises(OptionError) as caught:
        trainer(loss=lambda output, truth, mask: output).step(BATCH)
    assert str(caught.value).splitlines()[:3] == [
        "'<lambda>' reads 'truth', which is neither an output of the model nor in the batch",
        "  outputs: output",
        "  batch: input, target",
    ]
    with pytest.raises(InputError, match="the batch lacks 'input'"):
        trainer().step({"x": X, "target": Y})


def test_wrong_arguments():
    with pytest.raises(OptionError, match="needs a backend"):
        ml.Trainer(classifier(), ml.SGD(), loss="cross_entropy")
    with pytest.raises(OptionError, match="compiled already"):
        ml.Trainer(ml.compile(classifier(), "numpy"), ml.SGD(), backend="numpy")
    with pytest.raises(OptionError, match="no argument 'clip'(?s:.)*did you mean 'clip_norm'"):
        ml.Trainer(ml.compile(classifier(), "numpy"), ml.SGD(), clip=1.0)
    with pytest.raises(OptionError, match="clip_norm: expected float above 0 or None, got 0"):
        trainer(clip_norm=0)
    with pytest.raises(OptionError, match="inference=True"):
        trainer(inference=True)
    with pytest.raises(
        OptionError,
        match=r"optimizer: expected Optimizer or str or a mapping (?s:.)*got 3 \(int\)\nhint: optimizer=ml.Adam",
    ):
        trainer(optimizer=3)


def test_a_batch_of_another_size_gets_its_own_executable_and_it_is_said():
    subject = trainer()
    subject.step(BATCH)
    subject.step({"input": X[:5], "target": Y[:5]})
    assert any(d.kind == "specialized" for d in subject.engine.decisions)


def test_dropout_differs_in_every_step_and_is_off_in_evaluation():
    subject = trainer(classifier(dropout=0.5), optimizer=ml.SGD(0.0))
    losses = [subject.step(BATCH)["loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    assert subject.evaluate([BATCH]) == subject.evaluate([BATCH])


def test_memory_limits_hold_for_the_whole_step():
    with pytest.raises(ml.MemoryLimitError, match="max_memory_gb"):
        trainer(max_memory_gb="3kB").step(BATCH)


def test_gradient_checkpointing_changes_no_bit():
    plain, again = trainer(), trainer(gradient_checkpointing=True)
    for _ in range(3):
        a, b = step(plain), step(again)
    for n in plain.engine.trained:
        np.testing.assert_array_equal(a[n], b[n])


def test_mixed_precision_keeps_parameters_and_moments_in_float32():
    subject = trainer(mixed_precision=True)
    graph = subject.begin(BATCH) or subject.engine.prepare(BATCH).graph
    small = [n for n in graph.nodes if n.result.dtype.name == "bfloat16"]
    assert small
    assert all(n.tags.get("phase") != "update" for n in small if n.op.name != "cast")
    history = subject.fit(loader(), 5)
    assert history["loss"][-1] < history["loss"][0]


def test_metrics_by_word():
    model = Model()
    model |= Linear(3, name="l")(input="input", output="output")
    x = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    trainer = ml.Trainer(
        model, ml.SGD(0.1), loss="cross_entropy", metrics=["accuracy"], backend="numpy", progress=False
    )
    report = trainer.step((x, np.arange(12, dtype=np.int32) % 3))
    assert 0 <= report["accuracy"] <= 1


def test_labels_outside_of_the_classes():
    model = Model()
    model |= Linear(3, name="l")(input="input", output="output")
    trainer = ml.Trainer(model, ml.SGD(0.1), loss="cross_entropy", backend="numpy", progress=False)
    x, y = np.ones((4, 2), np.float32), np.array([0, 3, 2, 0], np.int64)
    for run in (lambda: trainer.step((x, y)), lambda: trainer.evaluate([(x, y)])):
        with pytest.raises(InputError, match="label 3 of 'cross_entropy' is out of range for 3 classes") as error:
            run()
        assert "in 'target'" in str(error.value)
    trainer.step((x, y % 3))


def test_labels_that_count_for_nothing():
    loss = ml.ops.cross_entropy
    model = Model()
    model |= Linear(3, name="l")(input="input", output="output")
    trainer = ml.Trainer(
        model,
        ml.SGD(0.1),
        loss=lambda output, target: loss(output, target, ignore_index=-100),
        backend="numpy",
        progress=False,
    )
    x, y = np.ones((4, 2), np.float32), np.array([0, -100, 2, 0], np.int64)
    trainer.step((x, y))
    with pytest.raises(InputError, match="label -7 of"):
        trainer.step((x, np.array([0, -100, 2, -7])))


def test_tokens_outside_of_the_table():
    model = Model()
    model += ml.models.Embedding(5, 4)
    model += Linear(3, name="l")
    trainer = ml.Trainer(model, ml.SGD(0.1), loss="cross_entropy", backend="numpy", progress=False)
    tokens, y = np.array([[1, 5]]), np.array([[0, 1]])
    with pytest.raises(InputError, match=r"(?s)index 5 of 'embedding'.*layer 'embedding'.*in 'input'"):
        trainer.step({"input": tokens, "target": y})


def test_checks_that_a_step_does_not_make_are_said():
    trainer = ml.Trainer(
        ml.models.MLP([4, 3]), ml.SGD(0.1), loss="cross_entropy", backend="numpy", progress=False, checks=True
    )
    x, y = np.ones((4, 2), np.float32), np.array([0, 1, 2, 0], np.int32)
    trainer.fit(ml.DataLoader((x, y), batch_size=4), epochs=1)
    assert "checks=True: a training step looks at labels and tokens" in str(trainer.compiled.decisions)


def test_numpy_writes_new_values_over_the_old():
    subject = trainer(clip_norm=1.0)
    subject.step(BATCH)
    before = dict(subject.engine.arrays)
    subject.step(BATCH)
    copied = [n for n, x in subject.engine.arrays.items() if x.shape and not np.shares_memory(x, before[n])]
    assert copied == []
    values = arrays(subject)
    with pytest.raises(NotFiniteError):
        subject.step({**BATCH, "input": BATCH["input"] * np.nan})
        subject.check_finite()
    assert all((values[n] == x).all() for n, x in arrays(subject).items() if n != "training/finite")


def test_a_loss_of_another_framework_names_the_layer_to_write():
    class CrossEntropyLoss:
        def __call__(self, *args, **kwargs):
            raise TypeError("expected tensors")

    with pytest.raises(OptionError, match="CrossEntropyLoss .* cannot be a loss or metric") as caught:
        as_measure(CrossEntropyLoss())
    assert caught.value.hint == "write ml.models.CrossEntropy()"
