"""Steps of several passes and optimizers as one graph, on every backend: GAN, SAM, Lookahead, noise, own steps."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import Linear, Model, Relu

DRAW = np.random.default_rng(11)
X = DRAW.normal(size=(16, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [0.0]], np.float32)).astype(np.float32)
BATCH = {"input": X, "target": Y}


def network():
    model = Model()
    model += Linear(8, name="body")(input="input")
    model += Relu()
    model += Linear(1, name="head")
    return model


def trainer(backend="numpy", optimizer=None, kind=ml.Trainer, model=None, **options):
    options = {"loss": "mse", "progress": False, **options}
    return kind(model or network(), optimizer or ml.SGD(0.1), backend=backend, **options)


def parameters(subject):
    return {n: np.array(subject.to_numpy(x)) for n, x in subject.params.items()}


def assert_close(a, b, atol=1e-5):
    theirs = parameters(b)
    for n, x in parameters(a).items():
        np.testing.assert_allclose(x, theirs[n], atol=atol, err_msg=n)


def gan():
    model = Model()
    model |= Linear(4, name="generator")(input="noise", output="fake")
    critic = Linear(1, name="critic")
    model |= critic(input="real", output="real_score")
    model |= critic(input="fake", output="fake_score")
    return model


def critic_loss(real_score, fake_score):
    return ops.mean(ops.softplus(-real_score)) + ops.mean(ops.softplus(fake_score))


def generator_loss(fake_score):
    return ops.mean(ops.softplus(-fake_score))


GAN_BATCH = {"noise": DRAW.normal(size=(16, 2)).astype(np.float32), "real": X}
RATES = {"critic": 0.2, "generator": 0.1}


def gan_by_hand(params, steps):
    """Alternate by two trainers, each with the other's parameters frozen."""
    losses = {"critic": critic_loss, "generator": generator_loss}
    for _ in range(steps):
        for part, other in (("critic", "generator"), ("generator", "critic")):
            one = trainer(
                model=gan(), optimizer=ml.SGD(RATES[part]), loss=losses[part], frozen=f"{other}.*", params=params
            )
            one.step(GAN_BATCH)
            params = parameters(one)
    return params


def test_two_optimizers_alternate_in_one_graph(backend):
    subject = trainer(
        backend,
        model=gan(),
        optimizer={"critic.*": ml.SGD(0.2), "generator.*": ml.SGD(0.1)},
        loss={"critic.*": critic_loss, "generator.*": generator_loss},
    )
    subject.begin(GAN_BATCH)
    expected = gan_by_hand(parameters(subject), 3)
    for _ in range(3):
        report = subject.step(GAN_BATCH)
    for n, x in parameters(subject).items():
        np.testing.assert_allclose(x, expected[n], atol=1e-5, err_msg=n)
    assert {"loss", "critic_loss", "generator_loss"} <= set(report)
    assert len(subject.engine._steps) == 1
    assert subject.learning_rate == {"critic.*": 0.2, "generator.*": 0.1}
    subject.learning_rate = {"critic.*": 0.0}
    before = parameters(subject)
    subject.step(GAN_BATCH)
    updated = {n for n, x in parameters(subject).items() if not np.array_equal(x, before[n])}
    assert {n.split(".")[0] for n in updated} == {"generator"}


def test_penalties_belong_to_the_loss_of_each_part():
    def zero(real_score, fake_score):
        return 0.0 * (ops.mean(real_score) + ops.mean(fake_score))

    subject = trainer(
        model=gan(),
        optimizer={"critic.*": ml.SGD(0.5), "generator.*": ml.SGD(0.5)},
        loss={"critic.*": zero, "generator.*": zero},
        regularizers={"*.weight": ml.L2(0.5)},
    )
    subject.begin(GAN_BATCH)
    before = parameters(subject)
    subject.step(GAN_BATCH)
    for n, x in parameters(subject).items():
        np.testing.assert_allclose(x, before[n] * (0.5 if n.endswith("weight") else 1.0), atol=1e-6, err_msg=n)


def test_optimizers_over_parts_of_one_loss(backend):
    subject = trainer(backend, {"body.*": ml.SGD(0.1, momentum=0.9), "*": ml.Adam(0.01)})
    body, head = (
        trainer(backend, ml.SGD(0.1, momentum=0.9), frozen="head.*"),
        trainer(backend, ml.Adam(0.01), frozen="body.*"),
    )
    for one in (subject, body, head):
        one.step(BATCH)
    expected = {**{n: x for n, x in parameters(body).items() if "body" in n},
                **{n: x for n, x in parameters(head).items() if "head" in n}}  # fmt: skip
    for n, x in parameters(subject).items():
        np.testing.assert_allclose(x, expected[n], atol=1e-6, err_msg=n)


def test_an_own_train_step_is_one_graph(backend):
    class Twice(ml.Trainer):
        """Two updates per batch."""

        def train_step(self, step):
            step.update(step.gradients())
            gradients = step.gradients()
            step.report("second_norm", step.norm(gradients))
            step.update(gradients)

    subject, reference = trainer(backend, kind=Twice), trainer("numpy")
    for _ in range(2):
        report = subject.step(BATCH)
    losses = [reference.step(BATCH)["loss"] for _ in range(4)]
    assert_close(subject, reference)
    assert report["loss"] == pytest.approx(losses[2], rel=1e-4)
    assert report["second_norm"] > 0
    assert len(subject.engine._steps) == 1


def test_sharpness_aware_minimization(backend):
    subject = trainer(backend, ml.SAM(ml.SGD(0.1), radius=0.05))
    subject.begin(BATCH)
    start = parameters(subject)
    subject.step(BATCH)

    def gradients(params):
        one = trainer(optimizer=ml.SGD(1.0), params=params)
        one.step(BATCH)
        return {n: params[n] - x for n, x in parameters(one).items()}

    ascent = gradients(start)
    norm = np.sqrt(sum((g**2).sum() for g in ascent.values()))
    descent = gradients({n: (x + 0.05 * ascent[n] / norm).astype(np.float32) for n, x in start.items()})
    for n, x in parameters(subject).items():
        np.testing.assert_allclose(x, start[n] - 0.1 * descent[n], atol=1e-5, err_msg=n)


def test_lookahead(backend):
    subject, fast = trainer(backend, ml.Lookahead(ml.SGD(0.1), every=2, share=0.25)), trainer(backend)
    for one in (subject, fast):
        one.begin(BATCH)
    start = parameters(fast)
    for _ in range(2):
        subject.step(BATCH)
        fast.step(BATCH)
    for n, x in parameters(fast).items():
        np.testing.assert_allclose(parameters(subject)[n], start[n] + 0.25 * (x - start[n]), atol=1e-6, err_msg=n)


def test_noise_is_portable_and_differs_between_parameters(backend):
    def moves(name):
        noisy, plain = trainer(name, ml.GradientNoise(ml.SGD(1.0), scale=0.5)), trainer(name, ml.SGD(1.0))
        for one in (noisy, plain):
            one.step(BATCH)
        noisy_moves, theirs = parameters(noisy), parameters(plain)
        return {n: theirs[n] - x for n, x in noisy_moves.items()}

    noisy_moves, reference = moves(backend), moves("numpy")
    for n, x in noisy_moves.items():
        np.testing.assert_allclose(x, reference[n], atol=1e-5, err_msg=n)
    assert 0.2 < noisy_moves["body.weight"].std() < 0.8
    assert not np.allclose(noisy_moves["body.weight"].ravel()[:8], noisy_moves["head.weight"].ravel()[:8])


def test_the_frozen_set_can_change(backend):
    subject, reference = trainer(backend, ml.Adam(0.05)), trainer("numpy", ml.Adam(0.05), frozen="body.*")
    subject.frozen = "body.*"
    for one in (subject, reference):
        one.step(BATCH)
    assert_close(subject, reference)
    frozen_weight = parameters(subject)["body.weight"]
    subject.frozen = ()
    subject.step(BATCH)
    assert not np.array_equal(parameters(subject)["body.weight"], frozen_weight)
    programs = len(subject.engine._steps)
    before = parameters(subject)
    subject.frozen = ["body.*"]
    subject.step(BATCH)
    np.testing.assert_array_equal(parameters(subject)["body.weight"], before["body.weight"])
    assert len(subject.engine._steps) == programs, "a set used before is not compiled again"
    with pytest.raises(ml.OptionError, match="matches no parameter"):
        subject.frozen = "bdoy.*"
    assert subject.frozen == ("body.*",)
