"""One seed gives one learning curve: initial weights, dropout, order and losses on every backend."""

import functools

import numpy as np
import pytest
from small import X, Y, arrays, everywhere

import mithril as ml
from mithril.models import BatchNorm1d, Dropout, Linear, Model, Relu

STEPS = 102


@functools.cache
def curve(backend):
    model = Model()
    model += Linear(8, 32, name="first")(input="input")
    model += BatchNorm1d(32, name="norm")
    model += Relu()
    model += Dropout(0.3)
    model += Linear(32, 3, name="last")
    trainer = ml.Trainer(
        model,
        ml.AdamW(ml.Cosine(0.01, STEPS)),
        loss="cross_entropy",
        backend=backend,
        clip_norm=1.0,
        seed=7,
        progress=False,
    )
    trainer.begin((X[:16], Y[:16]))
    start = arrays(trainer)
    history = trainer.fit(ml.DataLoader((X, Y), batch_size=16, shuffle=True, seed=1), STEPS // 6)
    return history.steps, start


@pytest.mark.parametrize("backend", everywhere("numpy"))
def test_the_same_losses_everywhere(backend, usable):
    usable(backend)
    expected, start = curve("numpy")
    steps, begun = curve(backend)
    for name, x in start.items():
        np.testing.assert_array_equal(begun[name], x)
    assert len(steps) == STEPS
    assert expected[-1] < 0.5 * expected[0]
    np.testing.assert_allclose(steps, expected, atol=1e-4)


def test_twice_the_same_bits():
    a, _ = curve("numpy")
    curve.cache_clear()
    b, _ = curve("numpy")
    assert a == b
