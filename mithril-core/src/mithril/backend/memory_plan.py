"""The memory plan: how long each value lives, which may share a buffer, and where each buffer stands in one arena."""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from mithril import ops
from mithril.base import MemoryLimitError, OptionError, TensorType, numel, substitute, unknown
from mithril.ir import Graph, Node, Value, is_view

ALIGNMENT = 64


def overwrites(node: Node) -> bool:
    """Whether the result may be written over an operand."""
    return node.op.elementwise


@dataclass(slots=True)
class Buffer:
    """Bytes that one value, or several that follow each other in place, live in."""

    values: list[Value]
    size: int
    start: int  # the step that fills it
    end: int  # the last step that reads it
    offset: int = 0


@dataclass
class MemoryPlan:
    """Buffers with offsets. ``peak`` is the most bytes alive at any step: no plan can be smaller."""

    buffers: list[Buffer]
    size: int
    peak: int
    total: int  # bytes without any reuse
    strategy: str
    in_place: int  # results that took over an operand's buffer
    place: dict[Value, Buffer] = field(default_factory=dict)

    def offset(self, value: Value) -> int:
        return self.place[value].offset


Strategy = Callable[[list[Buffer]], None]


def nbytes(t: TensorType, sizes: Mapping[str, int] | None = None) -> int:
    """Bytes of a value, unknown sizes taken from ``sizes``."""
    count = numel(tuple(substitute(d, sizes or {}) for d in t.shape))
    return int(count) * t.dtype.itemsize


def columns(node: Node, sizes: Mapping[str, int] | None = None) -> int:
    """Return the bytes of a convolution's windows laid out as columns, and of its padded input; 0 for other nodes."""
    places = {ops.conv: (0, 1, None), ops.conv_input_grad: (None, 1, 0), ops.conv_weight_grad: (0, None, 1)}
    if node.op not in places:
        return 0
    data, weight, result = (node.result if k is None else node.operands[k] for k in places[node.op])
    assert data is not None
    assert weight is not None
    assert result is not None

    def shape(v: Value) -> tuple[int, ...]:
        return tuple(int(substitute(d, sizes or {})) for d in v.shape)

    window = math.prod(shape(weight)[2:])
    if window == 1:
        return 0
    x, y = shape(data), shape(result)
    padded = math.prod(x[:2]) * math.prod(n + sum(p) for n, p in zip(x[2:], node.attributes["padding"], strict=True))
    return int(x[0] * x[1] * window * math.prod(y[2:]) + padded) * data.dtype.itemsize


def lifetimes(
    graph: Graph,
    sizes: Mapping[str, int] | None = None,
    *,
    in_place: Callable[[Node], bool] = overwrites,
    views: Callable[[Node], bool] = is_view,
) -> list[Buffer]:
    """Return a buffer for each value: in-place results and views join that of an operand, views of inputs have none."""
    last: dict[Value, int] = {}
    for step, node in enumerate(graph.nodes):
        for v in node.operands:
            if v is not None:
                last[v] = step
    for v in graph.outputs:
        last[v] = len(graph.nodes)
    place: dict[Value, Buffer] = {}
    buffers: list[Buffer] = []
    outer = {i.value for i in graph.inputs}
    for step, node in enumerate(graph.nodes):
        for k, value in enumerate(node.results):
            end = last.get(value, step)
            size = nbytes(value.type, sizes)
            view = views(node)
            source = node.operands[k if len(node.results) == len(node.operands) else 0] if view else None
            if view and source in outer:
                outer.add(value)
                continue
            donor = place[source] if source is not None else None
            if not view and k == 0 and in_place(node):
                donor = _donor(node, step, size, place)
            if donor is not None:
                donor.values.append(value)
                donor.end = max(donor.end, end)
                place[value] = donor
            else:
                place[value] = Buffer([value], size, step, end)
                buffers.append(place[value])
    return buffers


def _donor(node: Node, step: int, size: int, place: Mapping[Value, Buffer]) -> Buffer | None:
    """Return the buffer of an operand that a result may take over."""
    for v in node.operands:
        buffer = place.get(v) if v is not None else None
        if buffer is not None and buffer.end == step and buffer.size == size:
            return buffer
    return None


def plan(
    graph: Graph,
    strategy: str | Strategy = "greedy",
    sizes: Mapping[str, int] | None = None,
    *,
    alignment: int = ALIGNMENT,
    in_place: Callable[[Node], bool] = overwrites,
    views: Callable[[Node], bool] = is_view,
) -> MemoryPlan:
    """Give every buffer its place in one arena so that no two that live at once overlap."""
    chosen = find_strategy(strategy)
    buffers = lifetimes(graph, sizes, in_place=in_place, views=views)
    for buffer in buffers:
        buffer.size = -(-buffer.size // alignment) * alignment
    chosen(buffers)
    place = {value: buffer for buffer in buffers for value in buffer.values}
    name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "custom")
    return MemoryPlan(
        buffers,
        size=max((b.offset + b.size for b in buffers), default=0),
        peak=peak_bytes(buffers, len(graph.nodes)),
        total=sum(-(-nbytes(v.type, sizes) // alignment) * alignment for b in buffers for v in b.values),
        strategy=name,
        in_place=sum(len(b.values) - 1 for b in buffers),
        place=place,
    )


def peak_bytes(buffers: list[Buffer], steps: int) -> int:
    """The most bytes alive at any one step."""
    change = np.zeros(steps + 2, dtype=np.int64)
    for b in buffers:
        change[b.start] += b.size
        change[b.end + 1] -= b.size
    return int(np.cumsum(change).max(initial=0))


def greedy(buffers: list[Buffer]) -> None:
    """Largest first, each at the lowest offset where it meets no buffer alive at the same time."""
    order = sorted(buffers, key=lambda b: (-b.size, b.start))
    n = len(order)
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)
    low, high = np.empty(n, np.int64), np.empty(n, np.int64)
    for k, buffer in enumerate(order):
        alive = np.flatnonzero((start[:k] <= buffer.end) & (end[:k] >= buffer.start))
        offset = 0
        for j in alive[np.argsort(low[alive], kind="stable")]:
            if low[j] - offset >= buffer.size:
                break
            offset = max(offset, int(high[j]))
        buffer.offset = offset
        start[k], end[k], low[k], high[k] = buffer.start, buffer.end, offset, offset + buffer.size


def best_fit(buffers: list[Buffer]) -> None:
    """In order of time, each into the smallest gap that holds it; much faster than greedy for huge graphs."""
    ends: list[tuple[int, int, int]] = []  # (end, offset, size) of what is alive
    gaps: list[tuple[int, int]] = []  # (offset, size), sorted, none touching
    top = 0
    for buffer in sorted(buffers, key=lambda b: b.start):
        while ends and ends[0][0] < buffer.start:
            _, offset, size = ends.pop(0)
            _give_back(gaps, offset, size)
        if gaps and gaps[-1][0] + gaps[-1][1] == top:
            top = gaps.pop()[0]  # free space at the end is no gap
        fitting = [g for g in gaps if g[1] >= buffer.size]
        if fitting:
            gap = min(fitting, key=lambda g: (g[1], g[0]))
            gaps.remove(gap)
            buffer.offset = gap[0]
            if gap[1] > buffer.size:
                insort(gaps, (gap[0] + buffer.size, gap[1] - buffer.size))
        else:
            buffer.offset, top = top, top + buffer.size
        insort(ends, (buffer.end, buffer.offset, buffer.size))


def _give_back(gaps: list[tuple[int, int]], offset: int, size: int) -> None:
    if not size:
        return
    insort(gaps, (offset, size))
    at = gaps.index((offset, size))
    if at + 1 < len(gaps) and gaps[at][0] + gaps[at][1] == gaps[at + 1][0]:
        gaps[at : at + 2] = [(gaps[at][0], gaps[at][1] + gaps[at + 1][1])]
    if at and gaps[at - 1][0] + gaps[at - 1][1] == gaps[at][0]:
        gaps[at - 1 : at + 1] = [(gaps[at - 1][0], gaps[at - 1][1] + gaps[at][1])]


ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.size, b.start),
    lambda b: (b.start - b.end, -b.size, b.start),
    lambda b: (b.size * (b.start - b.end - 1), b.start),
    lambda b: (b.start, -b.size),
    lambda b: (-b.end, -b.size),
)


def smallest(buffers: list[Buffer]) -> None:
    """Try a few orders, each buffer at the lowest place where it meets none alive; take the smallest arena."""
    if not buffers:
        return
    least = peak_bytes(buffers, max(b.end for b in buffers) + 1)
    best: tuple[int, list[int]] | None = None
    for order in ORDERS:
        numbers = sorted(range(len(buffers)), key=lambda k, order=order: order(buffers[k]))  # type: ignore[misc]
        offsets = placed(buffers, numbers)
        top = max(o + b.size for o, b in zip(offsets, buffers, strict=True))
        if best is None or top < best[0]:
            best = top, offsets
        if top == least:
            break
    assert best is not None
    for buffer, offset in zip(buffers, best[1], strict=True):
        buffer.offset = offset


def placed(buffers: Sequence[Buffer], order: Sequence[int]) -> list[int]:
    """Return offsets where each buffer in turn goes to the lowest place free during its lifetime."""
    offsets = [0] * len(buffers)
    done: list[int] = []  # by offset
    for k in order:
        buffer, offset = buffers[k], 0
        for j in done:
            other = buffers[j]
            if other.start <= buffer.end and other.end >= buffer.start:
                if offsets[j] - offset >= buffer.size:
                    break
                offset = max(offset, offsets[j] + other.size)
        offsets[k] = offset
        done.append(k)
        done.sort(key=offsets.__getitem__)
    return offsets


def apart(buffers: list[Buffer]) -> None:
    """Give every buffer a place of its own: the arena of a program without planning."""
    offset = 0
    for buffer in buffers:
        buffer.offset, offset = offset, offset + buffer.size


STRATEGIES: dict[str, Strategy] = {"smallest": smallest, "greedy": greedy, "best_fit": best_fit, "apart": apart}


def find_strategy(given: str | Strategy) -> Strategy:
    """A strategy by name, one of somebody else's as ``"module:function"``, or the function itself.

    It gives every buffer its ``offset``, a multiple of 64; the offsets of one that is not built in are checked.
    """
    if callable(given):
        return _checked(given)
    module, colon, name = given.partition(":")
    if colon:
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"memory planning strategy '{given}' cannot be loaded: {error}") from None
        return _checked(found)
    if given not in STRATEGIES:
        what, facts, hint = unknown("memory planning strategy", given, list(STRATEGIES))
        raise OptionError(what, facts=facts, hint=hint)
    return STRATEGIES[given]


def _checked(strategy: Strategy) -> Strategy:
    """Wrap a strategy: raise where its offsets would let a value overwrite another one."""
    if strategy in STRATEGIES.values():
        return strategy
    name = getattr(strategy, "__name__", "custom")

    def run(buffers: list[Buffer]) -> None:
        strategy(buffers)
        for b in buffers:
            if not isinstance(b.offset, int) or b.offset < 0 or b.offset % ALIGNMENT:
                raise OptionError(
                    f"memory planning strategy '{name}' gives the offset {b.offset!r}",
                    facts=[f"expected a multiple of {ALIGNMENT} that is not negative"],
                )
        order = sorted((b for b in buffers if b.size), key=lambda b: b.offset)
        for k, low in enumerate(order):
            for high in order[k + 1 :]:
                if high.offset >= low.offset + low.size:
                    break
                if high.start <= low.end and low.start <= high.end:
                    raise OptionError(
                        f"memory planning strategy '{name}' gives two values that live at once the same memory",
                        facts=[f"{b.size} bytes at {b.offset}, steps {b.start} to {b.end}" for b in (low, high)],
                    )

    run.__name__ = name
    return run


UNITS = {"": 10**9, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_bytes(limit: float | str) -> int:
    """``8`` and ``"8GB"`` are 8e9 bytes, ``"8GiB"`` 8 * 2**30."""
    if not isinstance(limit, str) and 0 <= limit < math.inf:
        return int(limit * UNITS[""])
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(\w*)", str(limit).strip())
    if found is None or found[2] not in UNITS:
        raise OptionError(f"'{limit}' is no amount of memory", hint='write 8, "8GB", "8GiB" or "512MiB"')
    return int(float(found[1]) * UNITS[found[2]])


def check_limit(graph: Graph, made: MemoryPlan, limit: int, sizes: Mapping[str, int] | None = None) -> None:
    """Raise where parameters, inputs and the arena do not fit, naming the largest values."""
    outside = sum(nbytes(i.type, sizes) for i in graph.inputs)
    needed = outside + made.size
    if needed <= limit:
        return
    values = [(nbytes(v.type, sizes), v) for b in made.buffers for v in b.values]
    values += [(nbytes(i.type, sizes), i.value) for i in graph.inputs]
    largest = sorted(values, key=lambda row: -row[0])[:5]
    raise MemoryLimitError(
        f"this program needs {human(needed)}, but max_memory_gb allows {human(limit)}",
        facts=[
            f"parameters and inputs {human(outside)}, intermediate values {human(made.size)} (peak {human(made.peak)})",
            "largest: " + "; ".join(f"'{v.name}' {v.type} {human(size)}" for size, v in largest),
        ],
    )


def human(size: float) -> str:
    """1234567 as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
