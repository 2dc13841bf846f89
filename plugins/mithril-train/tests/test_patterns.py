"""Patterns of parameters that match nothing are errors: otherwise everything trains, or nothing differs."""

import numpy as np
import pytest
from small import X, Y, arrays, trainer

import mithril as ml
from mithril.graph.errors import OptionError

BATCH = (X[:8], Y[:8])


@pytest.mark.parametrize("frozen", ["frist.*", ["first.*", "frist.*"]])
def test_frozen_pattern_without_a_match_is_rejected(frozen):
    with pytest.raises(OptionError, match=r"'frist.\*' in frozen matches no parameter\n.*first.weight"):
        trainer(frozen=frozen).step(BATCH)


def test_group_without_a_match_is_rejected():
    with pytest.raises(OptionError, match=r"'enc.\*' in groups matches no parameter"):
        trainer(optimizer=ml.Adam(groups={"enc.*": {"learning_rate": 0.1}})).step(BATCH)


def test_group_behind_another_that_takes_its_parameters_is_rejected():
    groups = {"*": {"weight_decay": 0.1}, "*.bias": {"weight_decay": 0.0}}
    with pytest.raises(OptionError, match=r"write '\*.bias' before '\*'"):
        trainer(optimizer=ml.Adam(groups=groups)).step(BATCH)
    trainer(optimizer=ml.Adam(groups=dict(reversed(groups.items())))).step(BATCH)


def test_patterns_that_match_have_their_effect():
    subject = trainer(optimizer=ml.SGD(0.1, groups={"first.weight": {"learning_rate": 0.0}}), frozen="first.b*")
    subject.begin(BATCH)
    old = arrays(subject)
    subject.step(BATCH)
    new = arrays(subject)
    changed = {n for n in subject.engine.parameters if not np.array_equal(old[n], new[n])}
    assert changed == {"last.weight", "last.bias"}
