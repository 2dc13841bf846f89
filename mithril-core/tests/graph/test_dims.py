"""Sizes: canonical polynomials, known relations, guards, and binding to real shapes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from mithril.graph.dims import (
    Dim,
    at_most,
    bounds,
    equal,
    floordiv,
    maximum,
    minimum,
    mod,
    numel,
    parse_dim,
    product,
    substitute,
    symbols,
)
from mithril.graph.errors import GuardError, MithrilError
from mithril.graph.guards import Guard, assume, bind, collect_guards

B, L = Dim("B", 1, 32), Dim("L", 0)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (B * L, "B*L"),
        (L * B, "B*L"),
        (L + 1, "L + 1"),
        (1 + L, "L + 1"),
        (2 * B - B, "B"),
        (B - B, "0"),
        (B * 0, "0"),
        ((L - 3) // 2 + 1, "(L + 1)//2 - 1"),
        ((B + 1) * (B - 1), "B*B - 1"),
        (B * L // B, "L"),
        (4 * L // 2, "2*L"),
        (6 * L % 3, "0"),
        (-B + L, "-B + L"),
    ],
)
def test_canonical_form(size, text):
    assert str(size).replace(" ", "") == text.replace(" ", "")


def test_equal_polynomials_are_equal():
    assert B * (L + 2) == L * B + 2 * B
    assert hash(B * (L + 2)) == hash(L * B + 2 * B)
    assert B + 1 != B
    assert B != L
    assert isinstance(B - B + 3, int)


def test_a_size_is_neither_a_bool_nor_a_number():
    with pytest.raises(MithrilError):
        bool(L)
    assert B  # it is at least 1
    with pytest.raises(MithrilError):
        int(B)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (B, (1, 32)),
        (B + 1, (2, 33)),
        (2 * B - 1, (1, 63)),
        (-B, (-32, -1)),
        (B * B, (1, 1024)),
        (B // 2, (0, 16)),
        (B % 4, (0, 3)),
        (L, (0, None)),
        (L - B, (-32, None)),
        (minimum(B, L), (0, 32)),
        (maximum(B, L), (1, None)),
        (maximum(B, Dim("C", 4, 8)), (4, 32)),
        (B * minimum(B - 5, L), (None, None)),  # a factor may be negative
        (5, (5, 5)),
    ],
)
def test_bounds(size, expected):
    assert bounds(size) == expected


def test_comparisons_use_bounds():
    assert equal(B, B) is True
    assert equal(B, 40) is False
    assert equal(B, L) is None
    assert at_most(B, 32) is True
    assert at_most(33, B) is False
    assert at_most(B, L) is None


def test_larger_and_smaller():
    assert maximum(B, 40) == 40
    assert maximum(B, 1) == maximum(1, B) == B
    assert minimum(B, 40) == B
    assert maximum(B, B) == B
    assert substitute(maximum(B, L), {"B": 3, "L": 5}) == 5


def test_products_and_counts():
    assert product([2, B, L]) == 2 * B * L
    assert numel((B, 3)) == 3 * B
    assert numel(()) == 1


def test_division_by_zero_is_rejected():
    with pytest.raises(MithrilError):
        floordiv(4, 0)
    with pytest.raises(MithrilError):
        mod(B, 0)
    with pytest.raises(MithrilError):
        substitute(12 // L, {"L": 0})
    with pytest.raises(MithrilError):
        substitute(12 % L, {"L": 0})


def test_symbols_and_substitution():
    assert [s.name for s in symbols(B * L, L + 1)] == ["B", "L"]
    assert substitute(B * L + 1, {"B": 2, "L": 3}) == 7
    assert substitute(B * L + 1, {"B": 2}) == 2 * L + 1
    assert substitute(7, {}) == 7


# -- guards -------------------------------------------------------------------------------------------------------
def test_known_relations_need_no_guard():
    with collect_guards() as guards:
        assert assume(B, "==", B)
        assert assume(B, "<=", 32)
        assert not assume(B, "==", 50)
    assert guards == []


def test_unknown_relations_become_guards():
    with collect_guards() as guards:
        assert assume(B, "==", L, "add needs equal sizes")
    (guard,) = guards
    assert guard.holds({"B": 4, "L": 4})
    assert not guard.holds({"B": 4, "L": 5})
    with pytest.raises(GuardError) as caught:
        guard.check({"B": 4, "L": 5}, {"B": "axis 0 of input 'x'", "L": "axis 1 of input 'y'"})
    text = str(caught.value)
    for part in ("B", "L", "4", "5", "axis 0 of input 'x'", "axis 1 of input 'y'", "add needs equal sizes"):
        assert part in text


@pytest.mark.parametrize(
    ("relation", "pairs"),
    [("==", {(2, 2)}), ("<=", {(0, 2), (0, 3), (0, 0), (2, 2), (2, 3)}), ("divides", {(2, 2), (2, 0), (3, 0)})],
)
def test_a_guard_holds_for_these_sizes_only(relation, pairs):
    guard = Guard(B, relation, L)
    for left, right in [(0, 2), (0, 3), (2, 2), (2, 3), (3, 2), (2, 0), (3, 0)]:
        assert guard.holds({"B": left, "L": right}) is ((left, right) in pairs)
    with pytest.raises(GuardError, match="contains sizes without a value"):
        guard.holds({"B": 1})


def test_a_guard_that_divides_by_zero_does_not_hold():
    with pytest.raises(MithrilError):
        Guard(12 % L, "==", 0, "").check({"L": 0}, {})


# -- binding ------------------------------------------------------------------------------------------------------
def test_binding_reads_sizes_from_shapes():
    assert bind({"x": (B, 3), "y": (B, L)}, {"x": (4, 3), "y": (4, 7)}) == {"B": 4, "L": 7}
    assert bind({"x": (2 * L + 1,)}, {"x": (9,)}) == {"L": 4}
    assert bind({"x": (B * L, B)}, {"x": (12, 3)}) == {"B": 3, "L": 4}


@pytest.mark.parametrize(
    ("declared", "actual", "words"),
    [
        ({"x": (B, 3)}, {"x": (4, 5)}, ["x", "axis 1", "5", "3"]),
        ({"x": (B, 3)}, {"x": (4,)}, ["x"]),
        ({"x": (B,)}, {"x": (40,)}, ["x", "40", "32"]),
        ({"x": (B,)}, {"x": (0,)}, ["x", "0", "1"]),
        ({"x": (B,), "y": (B,)}, {"x": (4,), "y": (5,)}, ["y", "4", "5"]),
        ({"x": (2 * L,)}, {"x": (9,)}, ["x", "9"]),
    ],
)
def test_mismatches_are_named(declared, actual, words):
    with pytest.raises(GuardError) as caught:
        bind(declared, actual)
    for word in words:
        assert word in str(caught.value)


# -- text ---------------------------------------------------------------------------------------------------------
@st.composite
def sizes(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([B, L, Dim("n")])) if draw(st.booleans()) else draw(st.integers(-4, 9))
    a, b = draw(sizes(depth - 1)), draw(sizes(depth - 1))
    kind = draw(st.integers(0, 6))
    if kind == 3:
        return floordiv(a, draw(st.integers(1, 5)))
    if kind == 4:
        return mod(a, draw(st.integers(1, 5)))
    if kind == 5:
        return maximum(a, b)
    if kind == 6:
        return minimum(a, b)
    return (a + b, a - b, a * b)[kind]


VALUES = st.fixed_dictionaries({"B": st.integers(1, 32), "L": st.integers(0, 50), "n": st.integers(0, 50)})


@settings(max_examples=300, deadline=None)
@given(sizes())
def test_sizes_round_trip(size):
    limits = {"B": (1, 32), "L": (0, None)}
    assert parse_dim(str(size), limits) == size


@settings(max_examples=300, deadline=None)
@given(sizes(), sizes(), VALUES)
def test_arithmetic_is_that_of_numbers(a, b, values):
    x, y = substitute(a, values), substitute(b, values)
    assert substitute(a + b, values) == x + y
    assert substitute(a - b, values) == x - y
    assert substitute(a * b, values) == x * y
    assert substitute(floordiv(a, 3), values) == x // 3
    assert substitute(mod(a, 3), values) == x % 3
    assert substitute(maximum(a, b), values) == max(x, y)


@settings(max_examples=300, deadline=None)
@given(sizes(), VALUES)
def test_bounds_hold(size, values):
    low, high = bounds(size)
    value = substitute(size, values)
    assert low is None or low <= value
    assert high is None or value <= high


@settings(max_examples=200, deadline=None)
@given(sizes(), sizes(), VALUES)
def test_comparisons_are_valid(a, b, values):
    x, y = substitute(a, values), substitute(b, values)
    assert equal(a, b) in (None, x == y) or (equal(a, b) is False and x != y)
    answer = at_most(a, b)
    assert answer is None or answer == (x <= y)


@pytest.mark.parametrize("text", ["", "B +", "f(B)", "B ** 2", "B / 2", "'B'", "B.x", "[B]", "1.5", "__import__('os')"])
def test_malformed_text_is_rejected(text):
    with pytest.raises(MithrilError):
        parse_dim(text)
