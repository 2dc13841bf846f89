"""Computed positions against plain loops: negative and outside ones, the last of several, sums in float32."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder, TensorType, call_axes, float32, int32
from mithril.graph.dims import Dim
from mithril.graph.errors import DTypeError, ShapeError

X = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
POSITIONS = np.array([[0, -1, 9], [-9, 2, 1]], np.int32)


def place(i, n):
    """Return the position that an index addresses."""
    return min(max(i + n if i < 0 else i, 0), n - 1)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
def test_take(axis, kind):
    positions = (np.abs(POSITIONS) if np.dtype(kind).kind == "u" else POSITIONS).astype(kind)
    result = ops.take(X, positions, axis=axis)
    n = X.shape[axis]
    flat = [X.take(place(int(i), n), axis) for i in positions.ravel()]
    expected = np.stack(flat, axis).reshape(*X.shape[: axis % 3], 2, 3, *X.shape[axis % 3 + 1 :])
    np.testing.assert_array_equal(result, expected)


def test_take_of_huge_unsigned_positions():
    assert ops.take(X, np.array([2**64 - 1], np.uint64), axis=0)[0, 0, 0] == X[2, 0, 0]
    assert ops.take(np.arange(300), np.array([255], np.uint8)).tolist() == [255]


def test_take_with_empty_indices():
    assert ops.take(X, np.zeros((0,), np.int32), axis=1).shape == (3, 0, 5)
    assert ops.take(X[:, :0], np.zeros((2, 0), np.int32), axis=1).shape == (3, 2, 0, 5)
    with pytest.raises(ShapeError) as caught:
        ops.take(X[:, :0], np.zeros((2,), np.int32), axis=1)
    assert str(caught.value) == (
        "cannot index axis 1: its size is 0\n  operand [3, 0, 5], positions [2]\n"
        "  in take(x: f32[3, 0, 5], indices: i32[2], axis=1)"
    )


def test_positions_must_be_integers():
    with pytest.raises(DTypeError, match="positions must be integers, not float32") as caught:
        ops.take(X, np.ones(2, np.float32))
    assert "hint: cast them" in str(caught.value)
    with pytest.raises(DTypeError, match="one_hot requires integers, got float32"):
        ops.one_hot(np.ones(2, np.float32), depth=3)


def loop_scatter(x, positions, updates, axis, add):
    out = np.moveaxis(x.copy(), axis, 0)
    count = positions.ndim
    moved_updates = np.moveaxis(updates, range(axis, axis + count), range(count))
    for position in np.ndindex(positions.shape):
        k = place(int(positions[position]), x.shape[axis])
        out[k] = out[k] + moved_updates[position] if add else moved_updates[position]
    return np.moveaxis(out, 0, axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_scatter_rows(axis, shape):
    rng = np.random.default_rng(0)
    positions = rng.integers(-6, 6, shape).astype(np.int32)
    updates = rng.normal(size=(*X.shape[:axis], *shape, *X.shape[axis + 1 :])).astype(np.float32)
    result = ops.scatter(X, positions, updates, axis=axis)
    np.testing.assert_array_equal(result, loop_scatter(X, positions, updates, axis, add=False))
    result = ops.scatter_add(X, positions, updates, axis=axis)
    np.testing.assert_allclose(result, loop_scatter(X, positions, updates, axis, add=True), rtol=1e-6)


def test_scatter_does_not_write_into_its_operand():
    before = X.copy()
    ops.scatter(X, np.array([0]), np.zeros((1, 4, 5), np.float32))
    ops.scatter_add(X, np.array([0]), np.ones((1, 4, 5), np.float32))
    ops.dynamic_update_slice(X, np.zeros((1, 1, 1), np.float32), np.array([0, 0, 0]))
    np.testing.assert_array_equal(X, before)


def test_the_last_of_several_wins_in_index_order():
    positions = np.asfortranarray(np.array([[1, 1], [0, 1]], np.int32))  # memory order must not matter
    updates = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert ops.scatter(np.zeros(2, np.float32), positions, updates).tolist() == [3.0, 4.0]


def test_scatter_promotes_and_checks_updates():
    result = ops.scatter(np.zeros(3, np.int32), np.array([1]), np.array([2.5], np.float32))
    assert result.dtype == np.float32
    with pytest.raises(ShapeError, match=r"updates have shape \[2\], expected \[1, 4, 5\]"):
        ops.scatter(X, np.array([1]), np.zeros(2, np.float32))
    with pytest.raises(DTypeError, match="cannot add bool elements"):
        ops.scatter_add(np.zeros(3, bool), np.array([1]), np.ones(1, bool))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_updates_add_up_in_float32(kind):
    result = ops.scatter_add(np.zeros(1, kind), np.zeros(4096, np.int32), np.full(4096, 1.0, kind))
    assert float(result[0]) == 4096.0  # in float16 itself 2048 + 1 stays 2048


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_along_axis(axis):
    rng = np.random.default_rng(1)
    shape = list(X.shape)
    shape[axis] = 6
    positions = rng.integers(-8, 8, shape).astype(np.int64)
    updates = rng.normal(size=shape).astype(np.float32)
    expected_rows = np.empty(shape, np.float32)
    written, added = X.copy(), X.copy()
    for position in np.ndindex(*shape):
        source = list(position)
        source[axis] = place(int(positions[position]), X.shape[axis])
        expected_rows[position] = X[tuple(source)]
        written[tuple(source)] = updates[position]
        added[tuple(source)] += updates[position]
    np.testing.assert_array_equal(ops.take_along_axis(X, positions, axis=axis), expected_rows)
    np.testing.assert_array_equal(ops.scatter_along_axis(X, positions, updates, axis=axis), written)
    np.testing.assert_allclose(ops.scatter_add_along_axis(X, positions, updates, axis=axis), added, rtol=1e-5)


def test_positions_along_an_axis_broadcast():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 1, 5))
    positions = rng.integers(-5, 5, (2, 1, 4, 6))
    expected = np.take_along_axis(x, positions % 5, 3)
    np.testing.assert_array_equal(ops.take_along_axis(x, positions, axis=3), expected)
    assert ops.take_along_axis(x, positions[:, :, :0], axis=3).shape == (2, 3, 0, 6)
    types = [TensorType(float32, (2, 3, 1, 5)), TensorType(int32, (2, 1, 4, 6))]
    axes = call_axes(ops.take_along_axis, types, {"axis": 3})
    assert set(axes.parallel) == {"i0", "i1", "i2", "k"}
    assert {"x2", "p1"} < axes.roles.keys(), "the axes of size 1 that broadcast"


def test_narrow_positions_reach_along_wide_axes():
    x = np.zeros((300, 2), np.float32)
    result = ops.scatter_add_along_axis(x, np.ones((300, 1), np.int8), np.ones((300, 1), np.float32), axis=1)
    np.testing.assert_array_equal(result[:, 1], 1)


def test_along_axis_errors():
    with pytest.raises(ShapeError, match="must have the rank 3 of the operand, got rank 1"):
        ops.take_along_axis(X, np.array([1]), axis=0)
    with pytest.raises(ShapeError, match="axis 1 of the operand and of the positions: 4 and 2 differ"):
        ops.take_along_axis(X, np.zeros((1, 2, 5), np.int32), axis=0)
    with pytest.raises(ShapeError, match=r"updates have shape \[1, 4, 4\], expected \[1, 4, 5\]"):
        ops.scatter_along_axis(X, np.zeros((1, 4, 5), np.int32), np.zeros((1, 4, 4), np.float32), axis=0)


@pytest.mark.parametrize(("batch", "depth"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)])
def test_gather_nd(batch, depth):
    rng = np.random.default_rng(2)
    lead = (*X.shape[:batch], 2)
    positions = rng.integers(-7, 7, (*lead, depth)).astype(np.int32)
    result = ops.gather_nd(X, positions, batch_dims=batch)
    assert result.shape == (*lead, *X.shape[batch + depth :])
    for position in np.ndindex(*lead):
        source = (*position[:batch], *(place(int(i), n) for i, n in zip(positions[position], X.shape[batch:])))
        np.testing.assert_array_equal(result[position], X[source])


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_scatter_nd(depth):
    rng = np.random.default_rng(3)
    positions = rng.integers(-7, 7, (5, 2, depth)).astype(np.int32)
    updates = rng.normal(size=(5, 2, *X.shape[depth:])).astype(np.float32)
    written, added = X.copy(), X.copy()
    for position in itertools.product(range(5), range(2)):
        target = tuple(place(int(i), n) for i, n in zip(positions[position], X.shape))
        written[target] = updates[position]
        added[target] += updates[position]
    np.testing.assert_array_equal(ops.scatter_nd(X, positions, updates), written)
    np.testing.assert_allclose(ops.scatter_nd_add(X, positions, updates), added, rtol=1e-5)


def test_several_axes_with_nothing_to_do():
    none = np.zeros((0, 2), np.int32)
    assert ops.gather_nd(X, none).shape == (0, 5)
    np.testing.assert_array_equal(ops.scatter_nd(X, none, np.zeros((0, 5), np.float32)), X)
    np.testing.assert_array_equal(ops.scatter_nd_add(X, none, np.zeros((0, 5), np.float32)), X)
    assert ops.gather_nd(X[:0], np.zeros((0, 1), np.int32)).shape == (0, 4, 5)


def test_several_axes_errors():
    with pytest.raises(ShapeError, match="one entry per indexed axis\n  got a scalar"):
        ops.gather_nd(X, np.int32(1))
    with pytest.raises(ShapeError, match="address more axes than the operand"):
        ops.gather_nd(X, np.zeros((2, 4), np.int32))
    with pytest.raises(ShapeError, match="batch axis 0 of the operand and of the positions: 3 and 2 differ"):
        ops.gather_nd(X, np.zeros((2, 2, 1), np.int32), batch_dims=1)
    with pytest.raises(ShapeError, match="batch_dims from 0 to 1"):
        ops.gather_nd(X, np.zeros((3, 1), np.int32), batch_dims=2)
    with Builder() as b, pytest.raises(ShapeError, match="must have a static size, got 'K'"):
        ops.gather_nd(b.input("x", (3, 4)), b.input("i", (2, Dim("K")), "int32"))


@pytest.mark.parametrize("starts", [(0, 3), (2, -1), (9, -9)])
@pytest.mark.parametrize("axis", [1, -1])
def test_rows_are_updated_from_their_starts(starts, axis):
    sizes = [2, 4, 5]
    sizes[axis] = 2
    update, expected = np.random.default_rng(1).normal(size=sizes).astype(np.float32), X[:2, :4, :5].copy()
    x = expected.copy()
    for row, start in enumerate(starts):
        n = x.shape[axis]
        begin = min(max(start + n if start < 0 else start, 0), n - 2)
        np.moveaxis(expected[row], axis - 1 if axis > 0 else -1, 0)[begin : begin + 2] = np.moveaxis(
            update[row], axis - 1 if axis > 0 else -1, 0
        )
    result = ops.dynamic_update_rows(x, update, np.array(starts, np.int32), axis=axis)
    np.testing.assert_array_equal(result, expected)


def test_updates_of_rows_must_fit():
    x, start = np.zeros((2, 4), np.float32), np.zeros(2, np.int32)
    for update, starts, axis, match in (
        (x[:1, :1], start, 1, "updates have shape"),
        (x[:, :1], start[:1], 1, "starts have shape"),
        (x, start, 0, "axis 0 is that of the rows"),
        (np.zeros((2, 5), np.float32), start, 1, "does not fit axis 1"),
    ):
        with pytest.raises(ShapeError, match=match):
            ops.dynamic_update_rows(x, update, starts, axis=axis)
    assert ops.dynamic_update_rows(x, x[:, :0], start, axis=1).shape == (2, 4)


@pytest.mark.parametrize("starts", [(0, 0, 0), (1, 2, 3), (9, 9, 9), (-1, -2, -9), (-3, 1, -2)])
def test_dynamic_slices(starts):
    sizes = (2, 1, 4)
    begin = [min(max(s + n if s < 0 else s, 0), n - k) for s, n, k in zip(starts, X.shape, sizes)]
    index = tuple(slice(b, b + k) for b, k in zip(begin, sizes))
    start_array = np.array(starts, np.int32)
    np.testing.assert_array_equal(ops.dynamic_slice(X, start_array, sizes=sizes), X[index])
    expected = X.copy()
    expected[index] = -1
    result = ops.dynamic_update_slice(X, np.full(sizes, -1, np.float32), start_array)
    np.testing.assert_array_equal(result, expected)


def test_dynamic_slice_errors():
    with pytest.raises(ShapeError, match=r"starts have shape \[2\], expected \[3\]: one per axis"):
        ops.dynamic_slice(X, np.array([0, 0]), sizes=(1, 1, 1))
    with pytest.raises(ShapeError, match="a slice of 5 elements does not fit axis 1 of size 4"):
        ops.dynamic_slice(X, np.array([0, 0, 0]), sizes=(1, 5, 1))
    with pytest.raises(ShapeError, match="the ranks differ"):
        ops.dynamic_update_slice(X, np.zeros((1, 1), np.float32), np.array([0, 0, 0]))


def test_one_hot():
    result = ops.one_hot(np.array([[0, 2], [-1, 7]], np.int8), depth=200)
    assert result.shape == (2, 2, 200)
    assert result.dtype == np.float32
    assert [tuple(map(int, i)) for i in np.argwhere(result)] == [(0, 0, 0), (0, 1, 2), (1, 1, 7)]
    assert ops.one_hot(np.int32(1), depth=2, dtype="bool").tolist() == [False, True]
    with pytest.raises(ShapeError, match="requires a depth of at least 0, got -1"):
        ops.one_hot(np.int32(1), depth=-1)


def test_composites_compute_on_arrays_while_a_graph_is_built():
    with Builder() as b:
        assert isinstance(ops.one_hot(np.array([1]), depth=3), np.ndarray)
        assert not b.nodes


def test_symbolic_shapes():
    n, m = Dim("N", 1), Dim("M")
    with Builder() as b:
        x, i = b.input("x", (n, 4)), b.input("i", (m,), "int32")
        assert ops.take(x, i).shape == (m, 4)
        assert ops.scatter_add(x, i, ops.take(x, i)).shape == (n, 4)
        assert ops.one_hot(i, depth=3).shape == (m, 3)
        assert ops.dynamic_slice(x, b.input("s", (2,), "int32"), sizes=(1, 2)).shape == (1, 2)
        assert not b.guards
        ops.take(b.input("y", (m, 4)), i)  # empty together
        assert not b.guards
        ops.take(b.input("z", (Dim("K"), 4)), i)
    assert [str(g) for g in b.guards] == ["1 <= K"]
