"""Own steps, several optimizers, wrappers: composition, checkpoints, errors."""

import numpy as np
import pytest
from small import X, Y, arrays, classifier, trainer

import mithril as ml
from mithril.graph.errors import OptionError
from mithril_train.engine.nonfinite import NotFiniteError

BATCH = {"input": X[:16], "target": Y[:16]}


class Plain(ml.Trainer):
    def train_step(self, step):
        step.update(step.gradients())


def make(kind=Plain, **options):
    options = {"loss": "cross_entropy", "backend": "numpy", "progress": False, **options}
    return kind(classifier(dropout=0.2), options.pop("optimizer", None) or ml.AdamW(0.01), **options)


def test_an_own_step_with_everything_equals_the_built_in_one():
    options = {"clip_norm": 0.1, "ema": 0.9, "metrics": "accuracy", "frozen": "first.bias"}
    subject, reference = make(**options), make(ml.Trainer, **options)
    for one in (subject, reference):
        one.fit(X, Y, 3, batch_size=16, validation=(X, Y))
    for n, x in arrays(reference).items():
        np.testing.assert_allclose(arrays(subject)[n], x, atol=1e-6, err_msg=n)
    for a, b in zip(subject.history.rows, reference.history.rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_wrappers_nest_and_resume_to_the_bit(tmp_path):
    def fresh():
        inner = ml.Lookahead(ml.GradientNoise(ml.Adam(0.01, groups={"*.bias": {"learning_rate": 0.1}})), every=4)
        return make(optimizer={"first.*": ml.SAM(inner), "*": ml.SGD(0.1, momentum=0.5)}, kind=ml.Trainer)

    first, second, uninterrupted = fresh(), fresh(), fresh()
    uninterrupted.fit(X, Y, 3, batch_size=16)
    first.fit(X, Y, 2, batch_size=16, callbacks=[ml.Checkpoint(tmp_path)])
    second.fit(X, Y, 3, batch_size=16, resume=tmp_path)
    for n, x in arrays(uninterrupted).items():
        np.testing.assert_array_equal(arrays(second)[n], x, err_msg=n)
    assert uninterrupted.history["loss"][-1] < uninterrupted.history["loss"][0]


def test_frozen_sets_are_part_of_a_checkpoint(tmp_path):
    def run(subject, first):
        for k in range(first, 4):
            subject.frozen = "first.*" if k % 2 else ()
            subject.step(BATCH)
            if k == 1:
                subject.save(tmp_path / "a.safetensors")
        return arrays(subject)

    expected = run(trainer(), 0)
    resumed = trainer()
    resumed.load(tmp_path / "a.safetensors")
    assert resumed.frozen == ("first.*",)
    for n, x in run(resumed, 2).items():
        np.testing.assert_array_equal(x, expected[n], err_msg=n)


def test_random_keys_differ_between_steps_and_draws():
    seen = []

    class Noisy(ml.Trainer):
        def train_step(self, step):
            step.update(step.gradients())
            for name in ("a", "b"):
                step.report(name, ml.ops.sum(ml.ops.uniform(step.key(), shape=(3,))))

    subject = make(Noisy)
    for _ in range(3):
        report = subject.step(BATCH)
        seen += [report["a"], report["b"]]
    assert len(set(seen)) == 6


def test_a_step_that_is_not_finite_changes_nothing():
    subject = make()
    subject.step(BATCH)
    before = arrays(subject)
    subject.step({"input": np.full((16, 8), np.inf, np.float32), "target": Y[:16]})
    with pytest.raises(NotFiniteError):
        subject.check_finite()
    for n in subject.engine.trained:
        np.testing.assert_array_equal(arrays(subject)[n], before[n])


def step_of(body):
    return make(type("Own", (ml.Trainer,), {"train_step": body}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_of(lambda self, step: None).step(BATCH), "train_step computed no gradients"),
        (lambda: step_of(lambda self, step: step.gradients("los")).step(BATCH), "unknown loss 'los'"),
        (lambda: step_of(lambda self, step: step.gradients(wrt="frist.*")).step(BATCH), "unknown parameter"),
        (lambda: step_of(lambda self, step: step.update({"x": None})).step(BATCH), "unknown trained parameter 'x'"),
        (
            lambda: step_of(lambda self, step: step.report("a", 3)).step(BATCH),
            "the report 'a' is int, expected a scalar",
        ),
        (lambda: make(gradient_accumulation_steps=2), "gradient_accumulation_steps needs a step of one forward"),
        (lambda: make(loss_scale="dynamic"), "loss_scale needs a step of one forward"),
        (lambda: trainer(optimizer={"first.*": ml.SGD()}).step(BATCH), "no optimizer for the parameter 'last.weight'"),
        (lambda: trainer(optimizer={"frist.*": ml.SGD()}).step(BATCH), "'frist.\\*' in optimizer matches no parameter"),
        (lambda: trainer(optimizer={"*": 3}), "optimizer: (?s:.)*expected"),
        (lambda: setattr(trainer(optimizer={"*": ml.SGD()}), "learning_rate", 0.1), "there are several optimizers"),
        (lambda: ml.SAM(ml.SGD(), radius=0.0), "radius: expected float above 0"),
        (lambda: ml.Lookahead(ml.SGD(), weight_decay=0.1), "set them on the inner optimizer"),
        (lambda: ml.Lookahead("adam"), "inner: expected Optimizer"),
    ],
)
def test_wrong_steps_are_explained(call, message):
    with pytest.raises(OptionError, match=message):
        call()
