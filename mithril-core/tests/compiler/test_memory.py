"""The memory plan: nothing that lives at once overlaps, whatever the strategy; limits are said in the user's terms."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from mithril import ops
from mithril.backend.memory_plan import (
    ORDERS,
    STRATEGIES,
    Buffer,
    check_limit,
    find_strategy,
    format_bytes,
    in_place_updates,
    lowest_offsets,
    parse_bytes,
    plan,
    state_updates,
)
from mithril.compiler import format_si
from mithril.graph import Builder, Output
from mithril.graph.dims import Dim
from mithril.graph.errors import MemoryLimitError, OptionError

spans = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 9)).map(
    lambda t: Buffer([], 64 * t[2], t[0], t[0] + t[1])
)


def overlapping(buffers):
    for k, a in enumerate(buffers):
        for b in buffers[:k]:
            together = a.start <= b.end and b.start <= a.end
            if together and a.size and b.size and a.offset < b.offset + b.size and b.offset < a.offset + a.size:
                yield a, b


@pytest.mark.parametrize("name", STRATEGIES)
@settings(deadline=None, max_examples=150)
@given(buffers=st.lists(spans, max_size=30))
def test_live_buffers_do_not_overlap(name, buffers):
    find_strategy(name)(buffers)
    assert not list(overlapping(buffers))
    assert all(b.offset >= 0 for b in buffers)


def chain(rows=Dim("B", 1, 8)):
    with Builder() as b:
        x = b.input("x", (rows, 32))
        h = ops.exp(ops.matmul(x, b.param("w", (32, 32))))
        y = ops.matmul(ops.reshape(h, shape=(rows, 32)), b.param("v", (32, 2))) + 1.0
    return b.build({"y": y})


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_graph_is_planned_near_its_peak(name):
    result = plan(chain(), name, {"B": 8})
    assert not list(overlapping(result.buffers))
    assert result.peak <= result.size <= result.total and result.in_place >= 1
    assert name == "apart" or result.size <= 1.05 * result.peak
    assert all(result.offset(v) % 64 == 0 for v in result.buffer_of)


def placed(strategy, *buffers):
    buffers = [Buffer([], size, start, end) for size, start, end in buffers]
    find_strategy(strategy)(buffers)
    return [b.offset for b in buffers]


def test_best_fit_uses_the_rest_of_a_gap_and_joins_gaps():
    assert placed("best_fit", (128, 0, 1), (64, 0, 9), (64, 2, 9), (64, 3, 9)) == [0, 128, 0, 64]
    assert placed("best_fit", (64, 0, 0), (64, 0, 1), (64, 0, 9), (128, 2, 9)) == [0, 64, 128, 0]
    assert placed("best_fit", (64, 0, 1), (64, 0, 0), (64, 0, 9), (128, 2, 9)) == [0, 64, 128, 0]
    assert placed("best_fit", (64, 0, 9), (64, 0, 1), (128, 2, 9)) == [0, 64, 64]  # the last gap lowers the top


@pytest.mark.parametrize(("number", "seed"), list(enumerate([14, 50, 11, 16, 51])))
def test_each_order_alone_is_the_best_for_some_buffers(number, seed):
    rng = random.Random(seed)
    draws = [(64 * rng.randint(1, 9), rng.randint(0, 12), rng.randint(0, 6)) for _ in range(8)]
    buffers = [Buffer([], size, start, start + steps) for size, start, steps in draws]

    def arena(offsets):
        return max(offset + b.size for offset, b in zip(offsets, buffers, strict=True))

    sizes = [arena(lowest_offsets(buffers, sorted(range(8), key=lambda k: order(buffers[k])))) for order in ORDERS]
    assert sizes.index(min(sizes)) == number and sizes.count(min(sizes)) == 1
    find_strategy("smallest")(buffers)
    assert arena([b.offset for b in buffers]) == sizes[number]


def test_views_of_views_of_inputs_have_no_buffer():
    with Builder() as b:
        x = b.input("x", (4, 6))
        y = ops.exp(ops.reshape(ops.reshape(x, shape=(24,)), shape=(6, 4)))
    result = plan(b.build({"y": y}))
    assert result.buffer_of.keys() == {y} and result.in_place == 0


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ("next", ""),
        ("next before", "it is also an output"),
        ("next next", "it is also an output"),
        ("next sum", "'sum' reads its old value"),
    ],
)
def test_a_state_is_updated_in_place_if_nothing_else_reads_it(outputs, reason):
    with Builder() as b:
        x = b.input("x", (8, 4), role="state")
        update = ops.dynamic_update_slice(x, b.input("u", (2, 4)), b.input("starts", (2,), "int32"))
        values = {"next": update, "before": x, "sum": ops.sum(x) if "sum" in outputs else x}
    state, *more = (values[name] for name in outputs.split())
    graph = b.build([Output(state, "x", "state", "x"), *(Output(v, f"y{k}") for k, v in enumerate(more))])
    ((value, (owner, cause, _)),) = state_updates(graph, {x}).items()
    assert (value is update, owner is x, cause) == (True, True, reason)
    assert (in_place_updates(graph, {x}).get(update) is x) == (not reason)
    assert in_place_updates(graph) == {}  # no input is tagged as donated


def rows_of(buffers):
    """Place buffers in sequence, as a user's strategy."""
    offset = 0
    for buffer in buffers:
        buffer.offset, offset = offset, offset + buffer.size


def test_custom_strategies():
    custom = plan(chain(), rows_of, {"B": 8})
    assert custom.strategy == "rows_of" and custom.size == sum(b.size for b in custom.buffers)
    assert find_strategy("mithril.backend.memory_plan:best_fit") is STRATEGIES["best_fit"]
    with pytest.raises(OptionError, match="cannot be loaded: No module named 'nowhere'"):
        find_strategy("nowhere:plan")
    with pytest.raises(OptionError, match="cannot be loaded: .*'nothing'"):
        find_strategy("mithril.backend.memory_plan:nothing")
    with pytest.raises(OptionError, match="did you mean 'greedy'"):
        find_strategy("gredy")


def test_a_limit_names_the_two_numbers_and_the_largest():
    graph = chain()
    result = plan(graph, "greedy", {"B": 8})
    check_limit(graph, result, 1 << 20, {"B": 8})
    with pytest.raises(MemoryLimitError) as error:
        check_limit(graph, result, 2000, {"B": 8})
    assert str(error.value).splitlines()[0] == "this program needs 6.46 kB, but max_memory_gb allows 2 kB"
    assert "largest: 'w' f32[32, 32] 4.1 kB; " in str(error.value)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8, 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("0.5 GB", 5 * 10**8),
        (0.5, 5 * 10**8),
        (1e-5, 10**4),
        (".5 kB", 500),
        ("7B", 7),
        ("3 KiB", 3072),
        ("2MB", 2 * 10**6),
        (0, 0),
    ],
)
def test_memory_limits_are_parsed(limit, expected):
    assert parse_bytes(limit) == expected


@pytest.mark.parametrize("limit", ["eight", "8XB", "-1GB", "", -1, float("nan"), float("inf")])
def test_invalid_limits_are_rejected(limit):
    with pytest.raises(OptionError):
        parse_bytes(limit)


def test_numbers_are_formatted():
    numbers = {0: "0", 999: "999", 999_600: "1M", 1234567: "1.23M", 5e9: "5G", 7e15: "7e+03T"}
    assert {n: format_si(n) for n in numbers} == numbers


def test_byte_sizes_are_formatted():
    assert [format_bytes(n) for n in (0, 999, 999_600, 1234567, 5e12)] == ["0 B", "999 B", "1 MB", "1.23 MB", "5 TB"]
