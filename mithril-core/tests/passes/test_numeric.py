"""The numeric check of passes: its random arguments, and the differences that it accepts."""

from __future__ import annotations

import numpy as np
import pytest

from mithril.graph import Builder, Dim, rounding_spread
from mithril.graph.errors import PassError
from mithril.ops import add, mul
from mithril.passes import as_pass
from mithril.passes.numeric import check_results, random_arguments

TOLERANCE = 0.1


def graph(function):
    with Builder() as b:
        y = function(b.input("x", (2, 3)))
    return b.build({"y": y})


def is_accepted(before, after):
    one = as_pass(lambda source: source, exact=False, tolerance=TOLERANCE)
    try:
        check_results(one, before, after, ())
    except PassError:
        return False
    return True


def test_random_arguments():
    """Symbolic sizes differ and are small, within their bounds; the numbers of each dtype have its usual range."""
    with Builder() as b:
        for name, low, high in (("free", 0, None), ("next", 0, None), ("large", 9, None), ("small", 0, 1)):
            b.input(name, (Dim(name, low, high), 64))
        b.input("numbers", (200,), "int32")
        b.input("flags", (200,), "bool")
        b.input("half", (200,), "float16")
    arguments = random_arguments(b.build({}))
    assert [len(arguments[n]) for n in ("free", "next", "large", "small")] == [2, 3, 9, 1]
    for name, dtype in (("free", np.float32), ("half", np.float16)):
        x = arguments[name]
        assert x.dtype == dtype and -1 <= x.min() < -0.9 and 0.9 < x.max() <= 1
    assert arguments["numbers"].dtype == np.int32 and set(arguments["numbers"]) == {0, 1, 2}
    assert arguments["flags"].dtype == bool and 0.3 < arguments["flags"].mean() < 0.7


def test_sizes_satisfy_the_guards():
    with Builder() as b:
        x, y = b.input("x", (Dim("B", 1), Dim("T", 1))), b.input("y", (Dim("P", 1), Dim("Q", 1, 4)))
        z = b.input("z", (Dim("R", 20),))
        total = add(x, y)  # guards: P is B, and Q is T
    graph = b.build({"y": total, "z": z})
    assert len(graph.guards) == 2
    shapes = {name: array.shape for name, array in random_arguments(graph).items()}
    assert shapes == {"x": (2, 3), "y": (2, 3), "z": (20,)}


def test_the_seed_selects_the_arguments():
    source = graph(lambda x: x)
    again, default, other = (random_arguments(source, *seed)["x"] for seed in ((0,), (), (1,)))
    np.testing.assert_array_equal(again, default)
    assert not np.array_equal(other, default)


def test_small_results_may_differ_by_a_tenth_of_the_tolerance():
    """Accept 0.1 * 0.1 * 1, and 0.1 of the other value; zeros do not round."""
    before = graph(lambda x: mul(x, 0.0))
    assert is_accepted(before, graph(lambda x: add(mul(x, 0.0), 0.0105)))
    with pytest.raises(PassError) as raised:
        one = as_pass(lambda source: source, exact=False, tolerance=TOLERANCE)
        check_results(one, before, graph(lambda x: add(mul(x, 0.0), 0.0125)), ("from the test",))
    assert str(raised.value) == (
        f"pass '{one.name}' changes the value of output 'y'\n"
        "  largest difference 0.0125\n"
        "  on random inputs\n"
        "  from the test\n"
        "hint: declare exact=False if rounding may change; otherwise the pass has a bug"
    )


def test_results_may_differ_by_three_times_their_rounding():
    def cancelled(x):
        return add(add(x, 1000.0), -1000.0)

    before = graph(cancelled)
    spread = rounding_spread(before, random_arguments(before), 0.04 * TOLERANCE)["y"]
    assert is_accepted(before, graph(lambda x: add(cancelled(x), -2.9 * spread)))
    assert not is_accepted(before, graph(lambda x: add(cancelled(x), -3.9 * spread)))


def test_the_largest_difference_of_an_exact_pass():
    before, one = graph(lambda x: x), as_pass(lambda source: source, exact=True)
    check_results(one, before, before, ())
    largest = 2 * np.abs(random_arguments(before)["x"]).max()
    with pytest.raises(PassError, match=f"largest difference {largest:.3g}\n"):
        check_results(one, before, graph(lambda x: mul(x, -1.0)), ())
