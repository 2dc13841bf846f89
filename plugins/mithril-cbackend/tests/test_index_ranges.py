"""Gathers whose positions are known to be within bounds have no clamps; others read as the operation says."""

import numpy as np
import pytest

import mithril as ml
from mithril import ops

TABLE = np.array([[1.0], [2.0], [4.0], [8.0]], np.float32)
NEXT = np.array([2, 0, 1, 2], np.int32)
BEYOND = np.array([2, -1, 1, 9], np.int32)


def compiled(follow):
    class Walk(ml.models.Layer):
        inputs = ("x", "start")

        def build(self, x, start):
            node = ops.take(np.array([1, 3, 0], np.int32), start)
            return x * ops.squeeze(ops.take(TABLE, follow(node, x), axis=0), axis=1)

    model = ml.Model()
    model |= Walk()(x="x", start="start", output="y")
    shapes, types = {"x": [5], "start": [5]}, {"start": "int32"}
    return ml.compile(model, "c", inference=True, shapes=shapes, types=types)


CASES = {
    "table": (lambda node, x: ops.take(NEXT, node), 1),
    "sum with a test": (lambda node, x: ops.take(NEXT, node) + ops.cast(x > 0.0, dtype="int32"), 1),
    "sum beyond the end": (lambda node, x: ops.take(NEXT, node) + ops.cast(x > 0.0, dtype="int32") * 2, 2),
    "product": (lambda node, x: ops.cast(x > 0.0, dtype="int32") * 3, 0),
    "table of other positions": (lambda node, x: ops.take(BEYOND, node), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_positions_with_and_without_clamps(name):
    follow, clamped = CASES[name]
    model = compiled(follow)
    x, start = np.array([1.0, -2.0, 3.0, -4.0, 5.0], np.float32), np.array([0, 1, 2, -1, 7], np.int32)
    expected = np.asarray(ops.take(np.array([1, 3, 0], np.int32), start))
    expected = x * np.asarray(ops.take(TABLE, follow(expected, x), axis=0))[:, 0]
    assert model.source.count(" < 0 ? 0 : ") == clamped
    np.testing.assert_array_equal(model({"x": x, "start": start})["y"], expected)
