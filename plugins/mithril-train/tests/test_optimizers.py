"""Update rules: equal to torch.optim's over 100 steps; groups, weight decay, settings."""

import numpy as np
import pytest
from small import everywhere

import mithril as ml
from mithril.graph.errors import OptionError
from mithril.models import Layer
from mithril_train.optim import optimizers

STEPS = 100
SHAPES = {"w": (5, 4), "b": (4,), "k": (2, 3, 2, 2)}


class Fed(Layer):
    """Its gradients are its inputs, so that a test decides them."""

    inputs = tuple(SHAPES)

    def build(self, *gradients):
        total = None
        for name, g in zip(SHAPES, gradients):
            part = ml.ops.sum(self.param(f"p_{name}", SHAPES[name], init="normal(std=0.5)") * g)
            total = part if total is None else total + part
        return total


def run(optimizer, backend="numpy", **options):
    """Parameters before and after 100 steps, and the gradients fed."""
    draw = np.random.default_rng(3)
    fed = [{n: draw.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(STEPS)]
    trainer = ml.Trainer(Fed(), optimizer, backend=backend, progress=False, **options)
    trainer.begin(fed[0])
    read = trainer.engine.backend.to_numpy
    first = {n: np.array(read(x)) for n, x in trainer.params.items()}
    for batch in fed:
        trainer.step(batch)
    return first, {n: np.array(read(x)) for n, x in trainer.params.items()}, fed


RULES = {
    "sgd": (ml.SGD(0.05), "SGD", {"lr": 0.05}),
    "sgd-momentum": (
        ml.SGD(0.05, momentum=0.9, weight_decay=0.01),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "sgd-nesterov": (ml.SGD(0.05, 0.9, nesterov=True), "SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (ml.Adam(0.01), "Adam", {"lr": 0.01}),
    "adam-decay": (
        ml.Adam(0.01, 0.8, 0.99, weight_decay=0.1),
        "Adam",
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    ),
    "adamw": (ml.AdamW(0.01, weight_decay=0.1), "AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (
        ml.Adagrad(0.1, lr_decay=0.05, initial=0.1),
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.1},
    ),
    "rmsprop": (ml.RMSprop(0.01), "RMSprop", {"lr": 0.01}),
    "rmsprop-all": (
        ml.RMSprop(0.01, momentum=0.5, centered=True, weight_decay=0.1),
        "RMSprop",
        {"lr": 0.01, "momentum": 0.5, "centered": True, "weight_decay": 0.1},
    ),
    "adamax": (ml.Adamax(0.02, weight_decay=0.1), "Adamax", {"lr": 0.02, "weight_decay": 0.1}),
    "radam": (ml.RAdam(0.02, weight_decay=0.1), "RAdam", {"lr": 0.02, "weight_decay": 0.1}),
    "radam-rectified": (ml.RAdam(0.05, 0.9, 0.7), "RAdam", {"lr": 0.05, "betas": (0.9, 0.7)}),
    "adadelta": (ml.Adadelta(10.0, 0.8, weight_decay=0.1), "Adadelta", {"lr": 10.0, "rho": 0.8, "weight_decay": 0.1}),
    "adafactor": (ml.Adafactor(0.05, weight_decay=0.1), "Adafactor", {"lr": 0.05, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("rule", RULES)
def test_equals_torch(rule):
    torch = pytest.importorskip("torch")
    optimizer, name, settings = RULES[rule]
    first, updated, fed = run(optimizer)
    theirs = {n: torch.tensor(x, requires_grad=True) for n, x in first.items()}
    other = getattr(torch.optim, name)(list(theirs.values()), **settings)
    for batch in fed:
        for n, p in theirs.items():
            p.grad = torch.tensor(batch[n.removeprefix("fed.").removeprefix("p_")])
        other.step()
    for n, p in theirs.items():
        change = np.abs(updated[n] - first[n]).max()
        assert change > 0.05
        np.testing.assert_allclose(updated[n], p.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_lion_is_the_papers():
    first, updated, fed = run(ml.Lion(0.01, weight_decay=0.1))
    for n, p in first.items():
        p, m = p.astype(np.float64), np.zeros(p.shape)
        for batch in fed:
            g = batch[n.removeprefix("fed.").removeprefix("p_")]
            direction = np.sign(0.9 * m + 0.1 * g)
            p = p - 0.01 * (direction + 0.1 * p)
            m = 0.99 * m + 0.01 * g
        np.testing.assert_allclose(updated[n], p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", everywhere("numpy"))
@pytest.mark.parametrize("rule", ["adam", "adafactor", "rmsprop-all"])
def test_the_same_on_every_backend(rule, backend, usable):
    usable(backend)
    _, expected, _ = run(RULES[rule][0])
    _, updated, _ = run(RULES[rule][0], backend)
    for n in expected:
        np.testing.assert_allclose(updated[n], expected[n], rtol=2e-6, atol=2e-6)


def test_groups_change_fields_by_name_pattern():
    optimizer = ml.SGD(0.05, groups={"*p_b": {"learning_rate": 0.0}, "*p_w": {"momentum": 0.9}})
    first, updated, fed = run(optimizer)
    name = {n[-1]: n for n in first}
    np.testing.assert_array_equal(updated[name["b"]], first[name["b"]])
    plain = first[name["k"]] - 0.05 * sum(b["k"].astype(np.float64) for b in fed)
    np.testing.assert_allclose(updated[name["k"]], plain, atol=1e-5)
    assert np.abs(updated[name["w"]] - (first[name["w"]] - 0.05 * sum(b["w"] for b in fed))).max() > 0.1


def test_weight_decay_masks():
    optimizer = ml.AdamW(0.01, weight_decay=0.5, groups={"*p_b": {"weight_decay": 0.0}})
    _, masked, _ = run(optimizer)
    _, plain, _ = run(ml.AdamW(0.01, weight_decay=0.0))
    _, decayed, _ = run(ml.AdamW(0.01, weight_decay=0.5))
    for n in masked:
        np.testing.assert_array_equal(masked[n], plain[n] if n.endswith("b") else decayed[n])


def test_bias_correction_is_exact_from_the_first_step():
    """1 - 0.999 in float32 would be wrong in the fifth place."""
    root = float(ml.ops.expm1(np.float32(1.0) * np.float32(np.log(0.999))))
    assert abs(-root - 0.001) < 1e-10


def test_wrong_settings():
    with pytest.raises(OptionError, match="nesterov=True needs a momentum"):
        ml.SGD(nesterov=True)
    with pytest.raises(OptionError, match="beta1=1.5"):
        ml.Adam(beta1=1.5)
    with pytest.raises(OptionError, match="learning_rate=-1"):
        ml.Adam(-1.0)
    with pytest.raises(OptionError) as caught:
        ml.SGD(groups={"*.bias": {"beta1": 0.5}})
    assert str(caught.value) == (
        "group '*.bias' sets 'beta1', which SGD does not have\n  known: learning_rate, momentum, nesterov, weight_decay"
    )
    with pytest.raises(OptionError, match="no update rule"):
        optimizers.Optimizer.update(ml.SGD(), None, None, {}, {})
