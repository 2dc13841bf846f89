"""Slices, pads, splits and Python indexing against NumPy, and with symbolic sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mithril.graph import Builder, parse, structurally_equal, verify
from mithril.graph.dims import Dim, substitute
from mithril.graph.errors import OperationError, ShapeError
from mithril.graph.evaluation import evaluate
from mithril.ops.padding import pad
from mithril.ops.python_indexing import getitem
from mithril.ops.slicing import END, roll, select, slice as cut, split

X = np.arange(24, dtype=np.float32).reshape(4, 6)
ENDS = [None, -9, -6, -3, -1, 0, 1, 3, 5, 6, 8]


@pytest.mark.parametrize("step", [1, 2, 7, -1, -3, -8])
def test_slices_are_those_of_numpy(step):
    for start, stop in itertools.product(ENDS, ENDS):
        index = (Ellipsis, slice(start, stop, step))
        np.testing.assert_array_equal(getitem(X, index), X[index], err_msg=str(index))


def test_the_one_form_is_a_python_slice_and_stays():
    with Builder() as b:
        x = b.input("x", (4, 6))
        for start, stop, step in itertools.product(ENDS[1:], ENDS[1:], [1, 2, -1, -3]):
            result = cut(x, starts=(start,), stops=(stop,), steps=(step,), axes=(-1,))
            once = dict(b.nodes[-1].attributes)
            assert result.shape[1] == len(range(6)[once["starts"][0] : once["stops"][0] : step]), once
            cut(x, **once)
            assert b.nodes[-1].attributes == once


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        (1, 2),
        (Ellipsis, 3),
        (slice(1, 3), None, 0),
        (None, Ellipsis, None, 2),
        (None, slice(None), None, slice(None), None),
        (Ellipsis, None),
        (2, Ellipsis, slice(None, None, -1)),
        ([3, 0, 0],),
        (slice(1, None), np.array([[0, 5], [1, -1]])),
        (None, 1, np.array([2, 3])),
        (Ellipsis, np.array([2, 3]), None),
        (np.array([2, 3]), None, 1),
        (),
        Ellipsis,
        [],
    ],
)
def test_indexing_is_that_of_numpy(index):
    expected = X[np.asarray(index, np.int32)] if index == [] else X[index]
    np.testing.assert_array_equal(getitem(X, index), expected)


def test_indexing_needs_no_rank():
    """A model's connection knows neither its rank nor its sizes: only operations are called on it."""

    class Lazy:
        def __init__(self, array):
            self.array = array

        def __mithril_apply__(self, op, operands, attributes):
            assert operands[0] is self
            return Lazy(op(self.array, *operands[1:], **attributes))

    for index in [
        (Ellipsis, -1),
        (slice(-3, None), slice(None, -1)),
        (None, Ellipsis, slice(1, 3), None),
        (-1, slice(None, None, -2)),
    ]:
        np.testing.assert_array_equal(getitem(Lazy(X), index).array, X[index])


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (4, ShapeError, "index 4 is out of range for axis 0 of size 4\n  accepted: -4 to 3"),
        ((0, -7), ShapeError, "index -7 is out of range for axis 1 of size 6"),
        ((0, 0, 0), ShapeError, "an index for 3 axes, but the operand has rank 2"),
        ((Ellipsis, Ellipsis), OperationError, "only one '...'"),
        (X > 3, OperationError, "cannot index with a bool mask"),
        (True, OperationError, "cannot index with a bool:"),
        ("a", OperationError, "an index cannot contain a str"),
        (slice("a"), OperationError, "the stop of a slice cannot be a str"),
        (slice(None, None, 0), ShapeError, "the step of axis 0 is 0"),
        (([0], [1]), OperationError, "only one integer array"),
    ],
)
def test_indexing_errors(index, error, text):
    with pytest.raises(error) as caught:
        getitem(X, index)
    assert text in str(caught.value)


def test_values_are_indexed_by_operators():
    n, m = Dim("N", 2), Dim("M")
    with Builder() as b:
        x = b.input("x", (n, m, 6))
        idx = b.input("i", (5,), "int32")
        assert x[0].shape == x[-1].shape == (m, 6)
        assert x[1:].shape == (n - 1, m, 6)
        assert x[:, :, ::-2].shape == (n, m, 3)
        assert x[..., idx].shape == (n, m, 5)
        assert not b.guards
        assert x[:, -1].shape == (n, 6)
        assert [str(g) for g in b.guards] == ["0 <= M-1"]
        assert str(x[:, :3].shape[1]) == "min(3, M)"
        assert x[:, ::2].shape[1] == (m + 1) // 2
        assert x[:, ::-1].shape == x.shape
        assert len(b.guards) == 1
        graph = b.build({"y": x[1:, -1:, ::-1]})
    verify(graph)
    assert structurally_equal(parse(str(graph)), graph)


def test_symbolic_positions_are_guarded():
    n, m = Dim("N"), Dim("M")
    with Builder() as b:
        assert b.input("table", (512, 8))[:n].shape == (n, 8)
        assert b.input("x", (m, 3))[n:].shape == (m - n, 3)
    assert [str(g) for g in b.guards] == ["N <= 512", "N <= M"]


def test_slice_errors():
    with pytest.raises(ShapeError, match="got 1 starts, 2 stops, 1 steps, 1 axes"):
        cut(X, starts=(0,), stops=(1, 2), steps=(1,), axes=(0,))
    with pytest.raises(ShapeError, match="duplicate axis"):
        cut(X, starts=(0, 0), stops=(1, 2), steps=(1, 1), axes=(1, -1))
    np.testing.assert_array_equal(cut(X, starts=(END,), stops=(-END,), steps=(-1,), axes=(0,)), X[::-1])


@pytest.mark.parametrize("mode", ["constant", "reflect", "symmetric", "wrap", "edge"])
@pytest.mark.parametrize("widths", [((0, 0), (0, 0)), ((1, 0), (0, 5)), ((3, 3), (2, 1))])
def test_pad_is_that_of_numpy(mode, widths):
    extra = {"constant_values": 2.5} if mode == "constant" else {}
    np.testing.assert_array_equal(pad(X, widths=widths, mode=mode, value=2.5), np.pad(X, widths, mode=mode, **extra))


def test_pad_errors():
    with pytest.raises(
        OperationError, match="unknown mode 'mirror' of pad\n  known: constant, reflect, symmetric, wrap, edge"
    ):
        pad(X, widths=((1, 1), (1, 1)), mode="mirror")
    with pytest.raises(ShapeError, match="widths for 1 axes, but the operand has rank 2"):
        pad(X, widths=((1, 1),))
    with pytest.raises(ShapeError, match="pad width -1 of axis 0 is negative"):
        pad(X, widths=((-1, 1), (0, 0)))
    with pytest.raises(ShapeError, match="too large to reflect 4 elements\n  accepted: at most 3"):
        pad(X, widths=((4, 0), (0, 0)), mode="reflect")
    with pytest.raises(ShapeError, match="cannot repeat the edge of axis 0: its size is 0"):
        pad(X[:0], widths=((1, 0), (0, 0)), mode="edge")


def test_pad_of_empty_and_scalar():
    assert pad(X[:0], widths=((2, 0), (0, 0))).tolist() == [[0] * 6] * 2
    assert pad(np.float32(3), widths=()).shape == ()


def test_split():
    parts = split(X, sizes=(1, 0, 5), axis=1)
    for result, expected in zip(parts, np.split(X, [1, 1], axis=1), strict=True):
        np.testing.assert_array_equal(result, expected)
    with pytest.raises(ShapeError, match=r"split sizes \[1, 2\] add up to 3, but axis 0 has 4"):
        split(X, sizes=(1, 2))
    with pytest.raises(ShapeError, match=r"split sizes \[3, 2\] add up to 5, but axis 0 has 4"):
        split(X, sizes=(3, 2))


def test_split_of_a_symbolic_axis_guards_the_total():
    n, m = Dim("N"), Dim("M")
    with Builder() as b:
        first, second = split(b.input("x", (n, 3)), sizes=(m, m))
    assert first.shape == second.shape == (m, 3)
    assert "2*M == N" in [str(g) for g in b.guards]


def test_select_errors():
    with pytest.raises(ShapeError, match="2 positions for 1 axes"):
        select(X, index=(0, 1), axes=(0,))
    with pytest.raises(ShapeError, match="accepted: none, as the axis is empty"):
        select(X[:0], index=(0,), axes=(0,))


def test_bounds_of_one_name_do_not_mix():
    """Two models of a process may use a name with different bounds."""
    for low, size in [(0, "min(1, Q)"), (2, "1"), (0, "min(1, Q)")]:
        with Builder() as b:
            x = b.input("x", (Dim("Q", low), 3))
            first = split(x, sizes=(1, Dim("Q", low) - 1))[0]
            graph = b.build({"y": first})
        assert str(first.shape[0]) == size
        verify(graph)


def test_backward_slices_of_symbolic_axes_are_clamped_when_the_size_is_known():
    for low in (0, 2, 7):
        for start, stop, step in itertools.product(ENDS, ENDS, [-1, -3]):
            with Builder() as b:
                graph = b.build({"y": b.input("x", (2, Dim("L", low)))[:, slice(start, stop, step)]})
            verify(graph)
            for size in (0, 1, 2, 4, 7, 12):
                if size < low:
                    continue
                x = np.arange(2.0 * size, dtype=np.float32).reshape(2, size)
                result = evaluate(graph, {"x": x})["y"]
                np.testing.assert_array_equal(result, x[:, start:stop:step], err_msg=f"{size}: {graph}")
                if all(g.holds({"L": size}) for g in graph.guards):
                    shape = [substitute(d, {"L": size}) for d in graph.outputs[0].shape]
                    assert list(result.shape) == shape, graph


def test_rolling_a_symbolic_axis():
    for shift in (2, -2, 0):
        with Builder() as b:
            graph = b.build({"y": roll(b.input("x", (Dim("L"), 2)), shift=(shift,), axis=(0,))})
        assert ("2 <= L" in map(str, graph.guards)) is (shift != 0)
        x = np.arange(10, dtype=np.float32).reshape(5, 2)
        np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], np.roll(x, shift, 0))
