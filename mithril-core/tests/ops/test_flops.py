"""Counts of floating-point operations that are derived from a declaration without ``flops=``."""

from __future__ import annotations

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder, Dim, composite, flops, op
from mithril.graph.registry import _operations
from mithril.graph.type_rules import numeric


@pytest.fixture
def declared():
    """Restore the registry, as these operations have no plugin."""
    before = dict(_operations)
    yield
    _operations.clear()
    _operations.update(before)


def count(function, *shapes):
    with Builder() as b:
        y = function(*(b.input(f"x{k}", shape) for k, shape in enumerate(shapes)))
    (node,) = b.build({"y": y}).nodes
    return flops(node)


def primitive(**facts):
    @op(name="acme.bump", shape=lambda x: x, dtype=numeric, samples=[], **facts)
    def bump(x):
        """A bump at zero."""
        return np.exp(-x * x)

    return bump


@pytest.mark.parametrize(("facts", "expected"), [({}, 6), ({"flops": 4}, 24), ({"flops": 0}, 0), ({"moves": True}, 0)])
def test_primitive(declared, facts, expected):
    assert count(primitive(**facts), (2, 3)) == expected


def test_composite_is_the_sum_of_its_body(declared):
    bump = primitive()

    @composite(name="acme.activated", samples=[])
    def activated(x, w):
        """Bumps of a product."""
        return bump(ops.relu(ops.matmul(x, w)))

    @composite(name="acme.twice", samples=[])
    def twice(x, w):
        """Bumps of a product."""
        return activated(activated(x, w), w)

    @composite(name="acme.free", flops=0, samples=[])
    def free(x, w):
        """Bumps of a product."""
        return activated(x, w)

    single = 2 * 2 * 3 * 3 + 6 + 6
    assert count(activated, (2, 3), (3, 3)) == single
    assert count(twice, (2, 3), (3, 3)) == 2 * single
    assert count(free, (2, 3), (3, 3)) == 0
    batch = Dim("B")
    assert count(activated, (batch, 3), (3, 3)) == 24 * batch
    assert count(ops.mse_loss, (2, 3), (2, 3)) > 0
    assert count(ops.stack, (2, 3), (2, 3)) == 0
