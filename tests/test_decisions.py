"""Decisions of a compiled model, which tell users where it departs from their request."""

from __future__ import annotations

import numpy as np

import mithril as ml
from mithril.models import Dropout, Linear, Model


def compiled(**options):
    return ml.compile(Model(Linear(2)), "numpy", **{"shapes": {"input": [3, 2]}, **options})


def decided(model):
    return [(d.kind, d.message) for d in model.decisions]


def test_programs_with_checks_are_not_cached():
    message = ("ignored", "cache=True: programs with checks are not cached")
    assert message in decided(compiled(cache=True, checks=True))
    assert message not in decided(compiled(cache=True))


def test_training_without_a_state_is_named():
    message = "training without state=: every call starts from the initial state (same dropout, old statistics)"
    model = ml.compile(Model(Dropout(0.5)), "numpy", shapes={"input": [3, 2]})
    inputs = {"input": np.ones((3, 2), np.float32)}
    model.evaluate({}, inputs, training=False)
    assert message not in [text for _, text in decided(model)]
    model.evaluate({}, inputs, training=True)
    assert message in [text for _, text in decided(model)]
