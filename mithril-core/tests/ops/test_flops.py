"""Counts of floating-point operations that are derived from a declaration without ``flops=``."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.compiler import format_flops, unknown_flops
from mithril.compiler.program_summary import layer_rows
from mithril.graph import Builder, Dim, composite, counted_flops, flops, op
from mithril.graph.registry import _operations
from mithril.graph.type_rules import numeric

REMEDY = "unknown flops: acme.bump (declare flops= with the operation)"


@pytest.fixture
def declared():
    """Restore the registry, as these operations have no plugin."""
    before = dict(_operations)
    yield
    _operations.clear()
    _operations.update(before)


def single_node(function, *shapes):
    with Builder() as b:
        y = function(*(b.input(f"x{k}", shape) for k, shape in enumerate(shapes)))
    (node,) = b.build({"y": y}).nodes
    return node


def count(function, *shapes):
    return flops(single_node(function, *shapes))


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


def test_flops_of_a_primitive_that_declares_none_are_unknown(declared):
    bump = primitive()

    @composite(name="acme.activated", samples=[])
    def activated(x, w):
        """Bumps of a product."""
        return bump(ops.matmul(x, w))

    assert counted_flops(single_node(bump, (2, 3))) == (0, ("acme.bump",))
    assert counted_flops(single_node(activated, (2, 3), (3, 3))) == (36, ("acme.bump",))
    assert counted_flops(single_node(ops.matmul, (2, 3), (3, 3))) == (36, ())


def test_summaries_say_which_flops_are_unknown(declared):
    bump = primitive()

    class Bumps(ml.models.Layer):
        """Bumps of a product."""

        def build(self, x):
            return bump(ops.matmul(x, np.ones((3, 3), np.float32)))

    summary = Bumps().summary(shapes={"input": (2, 3)})
    assert f"at least 36 operations\n{REMEDY}" in summary
    with Builder() as b:
        y = bump(b.input("x", (2, 3)))
    assert [(r.flops, r.unknown) for r in layer_rows(b.build({"y": y}))] == [(0, {"acme.bump"})]
    assert unknown_flops([]) == []
    assert unknown_flops(["acme.bump"]) == [REMEDY]


@pytest.mark.parametrize(
    ("count", "unknown", "text"), [(0, (), "0"), (1500, (), "1.5k"), (36, "f", "at least 36"), (0, "f", "unknown")]
)
def test_flops_as_text(count, unknown, text):
    assert format_flops(count, unknown) == text
