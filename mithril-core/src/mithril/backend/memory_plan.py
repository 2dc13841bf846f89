"""Memory planning: lifetimes of values, shared buffers, and the offset of each buffer in one arena."""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from mithril import ops
from mithril.graph import (
    Graph,
    MemoryLimitError,
    Node,
    OptionError,
    TensorType,
    Value,
    is_view,
    numel,
    substitute,
    unknown,
)

# A cache line, and the widest vector of the supported CPUs (AVX-512).
ALIGNMENT = 64


def overwrites(node: Node) -> bool:
    """Whether the node can write its result in place."""
    return node.op.elementwise


@dataclass(slots=True)
class Buffer:
    """The memory of one value, or of several that replace each other in place or alias."""

    values: list[Value]
    size: int  # bytes
    start: int  # the step that writes it
    end: int  # the last step that reads it
    offset: int = 0  # bytes


@dataclass
class MemoryPlan:
    """Buffers with their offsets; sizes in bytes. ``peak``, the maximal live bytes of a step, is a lower bound."""

    buffers: list[Buffer]
    size: int
    peak: int
    total: int  # bytes without any reuse
    strategy: str
    in_place: int  # number of results that reuse the buffer of an operand
    buffer_of: dict[Value, Buffer] = field(default_factory=dict)

    def offset(self, value: Value) -> int:
        return self.buffer_of[value].offset


# A function that gives each buffer its offset in the arena.
Strategy = Callable[[list[Buffer]], None]


UPDATES = (ops.dynamic_update_slice, ops.dynamic_update_rows)  # of their first operand, of which they write a part


def in_place_updates(graph: Graph, inputs: Collection[Value] | None = None) -> dict[Value, Value]:
    """Return the input that each next state replaces: an update of an input that has no other reader.

    The default inputs are those tagged ``donated``. A backend can write such a state into the memory of the input.
    """
    if inputs is None:
        inputs = {i.value for i in graph.inputs if i.tags.get("donated")}
    return {value: owner for value, (owner, reason, _) in state_updates(graph, inputs).items() if not reason}


def state_updates(graph: Graph, inputs: Collection[Value]) -> dict[Value, tuple[Value, str, Node]]:
    """Return the input that each next state updates; if it has to be copied, why, and the node that causes it."""
    owners = {i.name: i.value for i in graph.inputs if i.value in inputs}
    outputs = list(graph.outputs)
    updates = {}
    for state in graph.results_of("state"):
        node, owner = graph.producers.get(state.value), owners.get(state.of)
        if node is None or owner is None or node.op not in UPDATES or node.operands[0] is not owner:
            continue
        # Any other reader counts, wherever it is: a backend may order nodes by itself.
        readers = [n for n in graph.users[owner] if n is not node or n.operands.count(owner) > 1]
        reason = "it is also an output" if owner in outputs or outputs.count(state.value) > 1 else ""
        reason = f"'{readers[0].op.name}' reads its old value" if readers else reason
        updates[state.value] = owner, reason, (*readers, node)[0]
    return updates


def nbytes(t: TensorType, sizes: Mapping[str, int] | None = None) -> int:
    """Return the bytes of a value, with symbolic sizes from ``sizes``."""
    count = numel(tuple(substitute(d, sizes or {}) for d in t.shape))
    return int(count) * t.dtype.itemsize


def columns(node: Node, sizes: Mapping[str, int] | None = None, at_once: int | None = None) -> int:
    """Return the bytes of a convolution's im2col matrix and padded input; 0 for other nodes.

    ``at_once``: bytes up to which several images are unfolded at once, instead of all.
    """
    # Operand numbers of image, kernel and output; None is the node's result.
    roles = {ops.conv: (0, 1, None), ops.conv_input_grad: (None, 1, 0), ops.conv_weight_grad: (0, None, 1)}
    if node.op not in roles:
        return 0
    data, weight, result = (node.result if k is None else node.operands[k] for k in roles[node.op])
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
    image = x[1] * window * math.prod(y[2:]) * data.dtype.itemsize
    images = x[0] if at_once is None else min(x[0], max(1, at_once // max(1, image)))
    return int(images * image + padded * data.dtype.itemsize)


def lifetimes(
    graph: Graph,
    sizes: Mapping[str, int] | None = None,
    *,
    in_place: Callable[[Node], bool] = overwrites,
    views: Callable[[Node], bool] = is_view,
) -> list[Buffer]:
    """Return the buffers: in-place results and views share the buffer of an operand, views of inputs have none."""
    last: dict[Value, int] = {}
    for step, node in enumerate(graph.nodes):
        for v in node.operands:
            if v is not None:
                last[v] = step
    for v in graph.outputs:
        last[v] = len(graph.nodes)
    buffer_of: dict[Value, Buffer] = {}
    buffers: list[Buffer] = []
    outer = {i.value for i in graph.inputs}
    for step, node in enumerate(graph.nodes):
        for k, value in enumerate(node.results):
            end = last.get(value, step)
            size = nbytes(value.type, sizes)
            view = views(node)
            source = node.operands[k if len(node.results) == len(node.operands) else 0] if view else None
            # The caller owns the memory of inputs, and views of them.
            if view and source in outer:
                outer.add(value)
                continue
            reused = buffer_of[source] if source is not None else None
            # Only the first result: two results in one operand's memory would overwrite each other.
            if not view and k == 0 and in_place(node):
                reused = _reusable_buffer(node, step, size, buffer_of)
            if reused is not None:
                reused.values.append(value)
                reused.end = max(reused.end, end)
                buffer_of[value] = reused
            else:
                buffer_of[value] = Buffer([value], size, step, end)
                buffers.append(buffer_of[value])
    return buffers


def _reusable_buffer(node: Node, step: int, size: int, buffer_of: Mapping[Value, Buffer]) -> Buffer | None:
    """Return the buffer of an operand that the result can reuse, or None."""
    for v in node.operands:
        buffer = buffer_of.get(v) if v is not None else None
        # Of equal size only: a smaller result would leave a rest that no other buffer can use until the
        # end of the result.
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
    """Assign every buffer an offset in one arena such that live buffers do not overlap."""
    assign_offsets = find_strategy(strategy)
    buffers = lifetimes(graph, sizes, in_place=in_place, views=views)
    for buffer in buffers:
        buffer.size = -(-buffer.size // alignment) * alignment
    assign_offsets(buffers)
    buffer_of = {value: buffer for buffer in buffers for value in buffer.values}
    name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "custom")
    return MemoryPlan(
        buffers,
        size=max((b.offset + b.size for b in buffers), default=0),
        peak=peak_bytes(buffers, len(graph.nodes)),
        total=sum(-(-nbytes(v.type, sizes) // alignment) * alignment for b in buffers for v in b.values),
        strategy=name,
        in_place=sum(len(b.values) - 1 for b in buffers),
        buffer_of=buffer_of,
    )


def peak_bytes(buffers: list[Buffer], steps: int) -> int:
    """Return the maximal live bytes of any step."""
    change = np.zeros(steps + 2, dtype=np.int64)
    for b in buffers:
        change[b.start] += b.size
        change[b.end + 1] -= b.size
    return int(np.cumsum(change).max(initial=0))


def greedy(buffers: list[Buffer]) -> None:
    """Place the largest buffers first, each at the lowest offset that is free during its lifetime."""
    order = sorted(buffers, key=lambda b: (-b.size, b.start))
    n = len(order)
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)
    low, high = np.empty(n, np.int64), np.empty(n, np.int64)
    for k, buffer in enumerate(order):
        # Arrays of the placed buffers instead of a loop: the search is quadratic in the number of
        # buffers.
        alive = np.flatnonzero((start[:k] <= buffer.end) & (end[:k] >= buffer.start))
        offset = 0
        for j in alive[np.argsort(low[alive], kind="stable")]:
            if low[j] - offset >= buffer.size:
                break
            offset = max(offset, int(high[j]))
        buffer.offset = offset
        start[k], end[k], low[k], high[k] = buffer.start, buffer.end, offset, offset + buffer.size


def best_fit(buffers: list[Buffer]) -> None:
    """Place buffers in order of their start, each into the smallest free gap; faster than greedy for huge graphs."""
    ends: list[tuple[int, int, int]] = []  # (end, offset, size) of live buffers
    gaps: list[tuple[int, int]] = []  # (offset, size), sorted, not adjacent
    top = 0
    for buffer in sorted(buffers, key=lambda b: b.start):
        while ends and ends[0][0] < buffer.start:
            _, offset, size = ends.pop(0)
            _insert_gap(gaps, offset, size)
        if gaps and gaps[-1][0] + gaps[-1][1] == top:
            top = gaps.pop()[0]  # free space at the end lowers the top instead
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


def _insert_gap(gaps: list[tuple[int, int]], offset: int, size: int) -> None:
    """Insert a gap and merge it with adjacent ones."""
    if not size:
        return
    insort(gaps, (offset, size))
    index = gaps.index((offset, size))
    if index + 1 < len(gaps) and gaps[index][0] + gaps[index][1] == gaps[index + 1][0]:
        gaps[index : index + 2] = [(gaps[index][0], gaps[index][1] + gaps[index + 1][1])]
    if index and gaps[index - 1][0] + gaps[index - 1][1] == gaps[index][0]:
        gaps[index - 1 : index + 1] = [(gaps[index - 1][0], gaps[index - 1][1] + gaps[index][1])]


# No order is best for all graphs. Largest first alone was twelve percent above the smallest arena
# for an encoder (commit 59faa88c); each order costs one placement, and the first that reaches the
# lower bound ends the search.
ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.size, b.start),
    lambda b: (b.start - b.end, -b.size, b.start),
    lambda b: (b.size * (b.start - b.end - 1), b.start),
    lambda b: (b.start, -b.size),
    lambda b: (-b.end, -b.size),
)


def smallest(buffers: list[Buffer]) -> None:
    """Try a few orders, each with buffers at the lowest free offset, and take the smallest arena."""
    if not buffers:
        return
    lower_bound = peak_bytes(buffers, max(b.end for b in buffers) + 1)
    best: tuple[int, list[int]] | None = None
    for order in ORDERS:
        numbers = sorted(range(len(buffers)), key=lambda k, order=order: order(buffers[k]))  # type: ignore[misc]
        offsets = lowest_offsets(buffers, numbers)
        top = max(o + b.size for o, b in zip(offsets, buffers, strict=True))
        if best is None or top < best[0]:
            best = top, offsets
        # The bytes alive in one step are a lower bound of every arena, so that no other order can be
        # better.
        if top == lower_bound:
            break
    assert best is not None
    for buffer, offset in zip(buffers, best[1], strict=True):
        buffer.offset = offset


def lowest_offsets(buffers: Sequence[Buffer], order: Sequence[int]) -> list[int]:
    """Return the offsets when each buffer, in this order, gets the lowest offset free during its lifetime."""
    offsets = [0] * len(buffers)
    done: list[int] = []  # placed buffers, sorted by offset
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


def place_without_reuse(buffers: list[Buffer]) -> None:
    """Place all buffers one after another, without reuse: the arena of a program without planning."""
    offset = 0
    for buffer in buffers:
        buffer.offset, offset = offset, offset + buffer.size


STRATEGIES: dict[str, Strategy] = {
    "smallest": smallest,
    "greedy": greedy,
    "best_fit": best_fit,
    "apart": place_without_reuse,
}


def find_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy of a name, of ``"module:function"``, or a function unchanged.

    A strategy sets the ``offset`` of every buffer to a multiple of 64; the offsets of custom strategies are checked.
    """
    if callable(strategy):
        return _checked(strategy)
    module, colon, name = strategy.partition(":")
    if colon:
        try:
            function = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"memory planning strategy '{strategy}' cannot be loaded: {error}") from None
        return _checked(function)
    if strategy not in STRATEGIES:
        message, facts, hint = unknown("memory planning strategy", strategy, list(STRATEGIES))
        raise OptionError(message, facts=facts, hint=hint)
    return STRATEGIES[strategy]


def _checked(strategy: Strategy) -> Strategy:
    """Wrap a custom strategy, so that offsets with overlapping live buffers raise."""
    if strategy in STRATEGIES.values():
        return strategy
    name = getattr(strategy, "__name__", "custom")

    def run(buffers: list[Buffer]) -> None:
        strategy(buffers)
        for b in buffers:
            if not isinstance(b.offset, int) or b.offset < 0 or b.offset % ALIGNMENT:
                raise OptionError(
                    f"memory planning strategy '{name}' returned the invalid offset {b.offset!r}",
                    facts=[f"expected a non-negative multiple of {ALIGNMENT}"],
                )
        # Overlaps of two live buffers are wrong results without an error, and the strategy is code of
        # the user.
        order = sorted((b for b in buffers if b.size), key=lambda b: b.offset)
        # Sorted by offset, so that each buffer is compared with the few that follow within its bytes.
        for k, low in enumerate(order):
            for high in order[k + 1 :]:
                if high.offset >= low.offset + low.size:
                    break
                if high.start <= low.end and low.start <= high.end:
                    raise OptionError(
                        f"memory planning strategy '{name}' returned overlapping offsets of two live buffers",
                        facts=[f"{b.size} bytes at {b.offset}, steps {b.start} to {b.end}" for b in (low, high)],
                    )

    run.__name__ = name
    return run


UNITS = {"": 10**9, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_bytes(limit: float | str) -> int:
    """Convert an amount of memory to bytes: ``8`` and ``"8GB"`` are 8e9, ``"8GiB"`` is 8 * 2**30."""
    if not isinstance(limit, str) and 0 <= limit < math.inf:
        return int(limit * UNITS[""])
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(\w*)", str(limit).strip())
    if match is None or match[2] not in UNITS:
        raise OptionError(f"'{limit}' is not an amount of memory", hint='pass 8, "8GB", "8GiB" or "512MiB"')
    return int(float(match[1]) * UNITS[match[2]])


def check_limit(graph: Graph, plan: MemoryPlan, limit: int, sizes: Mapping[str, int] | None = None) -> None:
    """Raise if parameters, inputs and the arena exceed the limit; the error lists the largest values."""
    input_bytes = sum(nbytes(i.type, sizes) for i in graph.inputs)
    needed = input_bytes + plan.size
    if needed <= limit:
        return
    values = [(nbytes(v.type, sizes), v) for b in plan.buffers for v in b.values]
    values += [(nbytes(i.type, sizes), i.value) for i in graph.inputs]
    largest = sorted(values, key=lambda row: -row[0])[:5]
    raise MemoryLimitError(
        f"this program needs {format_bytes(needed)}, but max_memory_gb allows {format_bytes(limit)}",
        facts=[
            (
                f"parameters and inputs {format_bytes(input_bytes)}, "
                f"intermediate values {format_bytes(plan.size)} (peak {format_bytes(plan.peak)})"
            ),
            "largest: " + "; ".join(f"'{v.name}' {v.type} {format_bytes(size)}" for size, v in largest),
        ],
    )


def format_bytes(size: float) -> str:
    """Format a number of bytes: 1234567 as 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # more is 1e+03 with three digits
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
