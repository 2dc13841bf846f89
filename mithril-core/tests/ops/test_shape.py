"""Shape operations against NumPy, their edge cases and errors, and symbolic sizes."""

from __future__ import annotations

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder, parse, structurally_equal, verify
from mithril.graph.dims import Dim
from mithril.graph.errors import DTypeError, ShapeError
from mithril.graph.registry import operation

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def values(shape, dtype="float32"):
    return Builder.current().input("x", shape, dtype)


@pytest.fixture
def graph():
    with Builder() as builder:
        yield builder


def test_reshape_finds_out_one_size():
    np.testing.assert_array_equal(ops.reshape(X, shape=(4, -1)), X.reshape(4, 6))
    assert ops.reshape(np.float32(3), shape=(1, 1)).shape == (1, 1)
    assert ops.reshape(np.zeros((0, 3)), shape=(3, -1)).shape == (3, 0)


def test_reshape_errors_say_what_does_not_fit():
    with pytest.raises(ShapeError) as caught:
        ops.reshape(X, shape=(5, 5))
    assert str(caught.value) == (
        "cannot reshape [2, 3, 4] to [5, 5]\n  24 elements cannot fill 25\n  in reshape(x: f32[2, 3, 4], shape=[5, 5])"
    )
    with pytest.raises(ShapeError, match="24 elements are not a multiple of 5"):
        ops.reshape(X, shape=(5, -1))
    with pytest.raises(ShapeError, match="can contain only one -1"):
        ops.reshape(X, shape=(-1, -1))
    with pytest.raises(ShapeError, match="cannot contain -2"):
        ops.reshape(X, shape=(-2, 12))
    with pytest.raises(ShapeError, match="cannot infer the -1 in .*: another size is 0"):
        ops.reshape(np.zeros((0, 3)), shape=(0, -1))


def test_reshape_of_symbolic_sizes_divides_or_guards(graph):
    b, h = Dim("B", 1), Dim("H", 1)
    x = values((b, 4, h))
    assert ops.reshape(x, shape=(b, -1)).shape == (b, 4 * h)
    assert ops.reshape(x, shape=(-1, 2)).shape == (2 * b * h, 2)
    assert not graph.guards
    assert ops.reshape(x, shape=(3, -1)).shape[0] == 3
    assert [str(g) for g in graph.guards] == ["3 divides 4*B*H"]
    ops.reshape(x, shape=(4, b * h))
    assert len(graph.guards) == 1
    built = graph.build({"y": ops.reshape(x, shape=(-1,))})
    verify(built)
    assert structurally_equal(parse(str(built)), built)


def test_transpose_reverses_by_default_and_takes_negative_axes():
    np.testing.assert_array_equal(ops.transpose(X), X.T)
    np.testing.assert_array_equal(ops.transpose(X, perm=(-1, 0, 1)), X.transpose(2, 0, 1))
    with pytest.raises(
        ShapeError, match=r"\[0, 0, 1\] is not a permutation of the axes of rank 3\n  accepted: each of 0 to 2 once"
    ):
        ops.transpose(X, perm=(0, 0, 1))
    with pytest.raises(ShapeError, match="accepted: -3 to 2"):
        ops.transpose(X, perm=(0, 1, 3))
    with pytest.raises(ShapeError, match="not a permutation"):
        ops.transpose(X, perm=(0, 1))


def test_broadcast_to():
    np.testing.assert_array_equal(
        ops.broadcast_to(X[:, :1], shape=(5, 2, 3, 4)), np.broadcast_to(X[:, :1], (5, 2, 3, 4))
    )
    for shape in [(2, 3), (2, 3, 5), (3, 4)]:
        with pytest.raises(ShapeError, match=r"cannot broadcast \[2, 3, 4\] to"):
            ops.broadcast_to(X, shape=shape)


def test_concat_promotes_and_checks():
    result = ops.concat(np.ones((1, 2), np.int32), np.zeros((2, 2), np.float16), axis=0)
    assert result.dtype == np.float16
    assert result.shape == (3, 2)
    with pytest.raises(ShapeError, match="axis 1 of operands 0 and 1: 2 and 3 differ"):
        ops.concat(np.ones((1, 2)), np.ones((1, 3)), axis=0)
    with pytest.raises(ShapeError, match="operand 1 has rank 1, the first has rank 2"):
        ops.concat(np.ones((1, 2)), np.ones(2))


def test_concat_adds_symbolic_sizes(graph):
    n, m = Dim("N"), Dim("M")
    x, y = values((n, 3)), graph.input("y", (m, 3))
    assert ops.concat(x, y, x).shape == (2 * n + m, 3)


def test_flip_squeeze_unsqueeze_stack():
    np.testing.assert_array_equal(ops.flip(X, axis=None), X[::-1, ::-1, ::-1])
    np.testing.assert_array_equal(ops.flip(X, axis=-1), X[..., ::-1])
    assert ops.squeeze(X[:1, :, :1]).shape == (3,)
    assert ops.squeeze(X[:1, :, :1], axis=(-1,)).shape == (1, 3)
    with pytest.raises(ShapeError, match="cannot squeeze axis 0: its size is 2, not 1"):
        ops.squeeze(X, axis=0)
    assert ops.unsqueeze(X, axis=(0, -1)).shape == (1, 2, 3, 4, 1)
    with pytest.raises(ShapeError, match="duplicate axis"):
        ops.unsqueeze(X, axis=(0, -4 - 1))
    np.testing.assert_array_equal(ops.stack(X, X + 1, axis=-2), np.stack([X, X + 1], -2))
    with pytest.raises(ShapeError, match="operand 1"):
        ops.stack(X, X[0])


@pytest.mark.parametrize("repeats", [(2,), (2, 1, 3), (2, 1, 1, 2), (0, 1, 1), (1, 1, 1)])
def test_tile(repeats):
    np.testing.assert_array_equal(ops.tile(X, repeats=repeats), np.tile(X, repeats))


@pytest.mark.parametrize(("repeats", "axis"), [(2, 0), (3, -1), (0, 1), (1, 2)])
def test_repeat(repeats, axis):
    np.testing.assert_array_equal(ops.repeat(X, repeats=repeats, axis=axis), np.repeat(X, repeats, axis))


@pytest.mark.parametrize(("shift", "axis"), [((1,), (0,)), ((-5, 2), (1, 2)), ((0,), (1,)), ((7, 7, 7), (0, 1, -1))])
def test_roll(shift, axis):
    np.testing.assert_array_equal(ops.roll(X, shift=shift, axis=axis), np.roll(X, shift, axis))


def test_roll_of_an_empty_axis():
    assert ops.roll(np.zeros((0, 2)), shift=(1,), axis=(0,)).shape == (0, 2)


@pytest.mark.parametrize("k", [-4, -1, 0, 1, 5])
def test_triangles(k):
    np.testing.assert_array_equal(ops.tril(X, k=k), np.tril(X, k))
    np.testing.assert_array_equal(ops.triu(X, k=k), np.triu(X, k))


def test_triangles_keep_nan_out_and_need_a_matrix():
    assert ops.tril(np.full((2, 2), np.nan, np.float32))[0, 1] == 0
    with pytest.raises(ShapeError, match="require a matrix, got rank 1"):
        ops.tril(np.ones(3))


def test_full_checks_its_value():
    assert ops.full(shape=(2,), value=200, dtype="uint8").tolist() == [200, 200]
    assert ops.full(shape=(), value=float("inf")).dtype == np.float32
    for value in (300, -1, 2.5, float("nan")):
        with pytest.raises(DTypeError, match="is not a valid uint8\n  accepted: integers from 0 to 255"):
            ops.full(shape=(2,), value=value, dtype="uint8")
    with pytest.raises(ShapeError, match="cannot contain -1"):
        ops.full(shape=(-1,), value=0)


def test_iota_and_eye():
    np.testing.assert_array_equal(ops.iota(shape=(2, 3), axis=-1), [[0, 1, 2]] * 2)
    assert ops.iota(shape=(3,), dtype="bfloat16").dtype.name == "bfloat16"
    assert ops.iota(shape=(0,)).shape == (0,)
    with pytest.raises(ShapeError, match="axis 0 is out of range for rank 0"):
        ops.iota(shape=())
    with pytest.raises(DTypeError, match="iota does not support bool"):
        ops.iota(shape=(2,), dtype="bool")
    for n, m, k in [(3, None, 0), (2, 4, 1), (4, 2, -2), (0, 3, 0)]:
        np.testing.assert_array_equal(ops.eye(n=n, m=m, k=k), np.eye(n, m, k))


def test_shapes_as_values(graph):
    x = values((2, Dim("N")))
    assert ops.shape_of(x).type == ops.shape_of(X[0]).dtype or str(ops.shape_of(x).type) == "i32[2]"
    assert str(ops.size_of(x, axis=-1).type) == "i32[]"


def test_shapes_of_arrays():
    assert ops.shape_of(X).tolist() == [2, 3, 4]
    assert ops.shape_of(np.float32(1)).shape == (0,)
    assert ops.size_of(X, axis=1) == 3


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float64"])
def test_every_dtype_passes_through(dtype):
    x = operation("cast")(X > 5, dtype=dtype)
    for result in [
        ops.reshape(x, shape=(-1,)),
        ops.transpose(x),
        ops.concat(x, x),
        ops.flip(x, axis=0),
        ops.tril(x),
        ops.tile(x, repeats=(2,)),
        ops.pad(x, widths=((1, 1),) * 3),
        ops.getitem(x, (0, slice(None, None, -2))),
    ]:
        assert result.dtype == x.dtype
