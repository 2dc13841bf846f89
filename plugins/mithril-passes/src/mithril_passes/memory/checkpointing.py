"""``gradient_checkpointing``: discard residuals of the forward pass and recompute them for the backward pass.

The forward pass is split into segments where few bytes cross. Values that cross a cut are saved; all other residuals
are recomputed just before their first use, from operands behind a barrier: no later pass, and no compiler of the
backend, can merge them with the first computation or move them up.

With ``checkpoint_policy`` equal layers are the segments, and results of products can be saved as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from mithril import Graph, Node, Value, ops
from mithril.backend import nbytes
from mithril.graph import axes_of, is_layout, is_product, operation, symbols, types_of
from mithril.passes import PassContext, repeated_segments

UNKNOWN = 64  # assumed value of an unknown size when cuts are compared
REMAT = {"phase": "recomputed"}
SMALLEST = 8  # repeated nodes of a layer
COMPARISONS = frozenset({ops.equal, ops.not_equal, ops.less, ops.less_equal, ops.greater, ops.greater_equal})


def gradient_checkpointing(graph: Graph, context: PassContext) -> Graph:
    """Recompute segments of the forward pass; a graph without a backward pass is unchanged."""
    num_segments, policy = context.option("checkpoint_segments"), context.option("checkpoint_policy")
    forward, backward = split_forward_backward(graph)
    if context.option("inference") or context.option("static_inference"):
        context.record("ignored", "gradient_checkpointing: a program for inference computes no gradients")
    if not backward or len(forward) < 2:
        return graph
    cuts = layer_ends(forward) if policy is not None and num_segments is None else []
    cuts = cuts or segment_ends(graph, forward, backward, num_segments)
    if not cuts:
        context.record("ignored", "gradient_checkpointing: there are no residuals to recompute")
        return graph
    context.record("choice", f"gradient checkpointing in {len(cuts) + 1} segments")
    # A lazy engine computes complete gradients last, and holds their operands until then, unless the next segment
    # waits for them.
    is_lazy = context.backend is not None and context.backend.capabilities.is_lazy
    stored = {v for node in forward if _is_stored(node, policy) for v in node.results}
    return Recompute(graph, forward, backward, cuts, stored, is_lazy=is_lazy).run()


def _is_stored(node: Node, policy: str | None) -> bool:
    """Whether a policy stores the results of a node: of products, or only of those without axes of a batch."""
    if policy in (None, "nothing") or not is_product(node):
        return False
    return policy == "dots" or not _has_batch(node)


def _has_batch(node: Node) -> bool:
    """Whether both factors of a product and its result share an axis."""
    if node.op.composite and node.op.declared_axes is None:
        body = node.op.decompose(types_of(node.operands), node.attributes)
        return any(is_product(inner) and _has_batch(inner) for inner in body.nodes)
    axes = axes_of(node)
    factors = [{f for place in places or () for f in place} for places in (*axes.operands[:2], axes.results[0])]
    return bool(set.intersection(*factors))


def layer_ends(forward: Sequence[Node]) -> list[int]:
    """Return the positions before, between and after equal layers; none if there are no such layers."""
    nodes = [node for node in forward if not node.is_constant]
    runs = repeated_segments(nodes, SMALLEST)
    if not runs:
        return []
    longest = max(runs, key=lambda run: run.length * run.segments)
    position = {node: k for k, node in enumerate(forward)}
    starts = (longest.start + k * longest.length for k in range(longest.segments + 1))
    return [position[nodes[k]] - 1 for k in starts if 0 < k < len(nodes)]


def split_forward_backward(graph: Graph) -> tuple[list[Node], list[Node]]:
    """Return the nodes of the forward part, and those of the backward part and after it."""
    later = {i.value for i in graph.with_role("cotangent")}
    forward: list[Node] = []
    backward: list[Node] = []
    for node in graph.nodes:
        if node.tags.get("phase") == "backward" or any(v in later for v in node.operands):
            backward.append(node)
            later.update(node.results)
        else:
            forward.append(node)
    return forward, backward


def segment_ends(
    graph: Graph, forward: Sequence[Node], backward: Sequence[Node], num_segments: int | None
) -> list[int]:
    """Return the positions in the forward part after which a segment ends, where few bytes cross.

    Segments have about the same bytes of residuals. Without ``num_segments``, their number minimizes the sum of the
    saved bytes and the bytes of the largest segment.
    """
    size = _sizes(graph)
    producers = {v: k for k, n in enumerate(forward) for v in n.results}
    last = {v: k for k, n in enumerate(forward) for v in n.operands if v in producers}
    last.update((v, len(forward)) for v in graph.outputs if v in producers)
    crossing = [0] * (len(forward) + 1)  # bytes alive after each position
    for v, k in producers.items():
        crossing[k] += size(v)
        if v in last:
            crossing[min(last[v], len(forward))] -= size(v)
        else:
            crossing[k] -= size(v)
    for k in range(1, len(crossing)):
        crossing[k] += crossing[k - 1]
    read = {v for n in backward for v in n.operands if v in producers}
    residual_bytes = [sum(size(v) for v in n.results if v in read) for n in forward]
    total = sum(residual_bytes)
    if not total:
        return []
    running = [0]
    for h in residual_bytes:
        running.append(running[-1] + h)
    # About the root of the number of layers minimizes saved bytes plus those of one segment where all
    # are equal.
    candidates = range(2, min(2 * math.isqrt(len(forward)) + 2, len(forward)) + 1)
    best: tuple[int, list[int]] | None = None
    for count in [num_segments] if num_segments is not None else candidates:
        cuts = _cuts(running, crossing, count)
        bounds = [0, *(c + 1 for c in cuts), len(forward)]
        largest = max(running[b] - running[a] for a, b in pairwise(bounds))
        cost = sum(crossing[c] for c in cuts) + largest
        if best is None or cost < best[0]:
            best = cost, cuts
    return best[1] if best is not None and (num_segments is not None or best[0] < total) else []


def _cuts(running: Sequence[int], crossing: Sequence[int], count: int) -> list[int]:
    """Return one cut near each n-th fraction of the residual bytes, where the fewest bytes cross."""
    total, n = running[-1], len(running) - 1
    cuts: list[int] = []
    for part in range(1, count):
        # Less than half a segment to each side, so that the windows of two cuts do not overlap.
        low, high = (part - 0.4) * total / count, (part + 0.4) * total / count
        candidates = [k for k in range(n - 1) if low <= running[k + 1] <= high and (not cuts or k > cuts[-1])]
        if candidates:
            cuts.append(min(candidates, key=lambda k: (crossing[k], abs(running[k + 1] - part * total / count))))
    return cuts


class Recompute:
    """Builder of the new backward pass."""

    def __init__(
        self,
        graph: Graph,
        forward: Sequence[Node],
        backward: Sequence[Node],
        cuts: Sequence[int],
        stored: Collection[Value] = (),
        *,
        is_lazy: bool,
    ) -> None:
        self.is_lazy = is_lazy
        self.graph, self.forward, self.backward = graph, list(forward), list(backward)
        self.node_index = {v: k for k, n in enumerate(forward) for v in n.results}
        self.segment = {}
        bounds = [*cuts, len(forward) - 1]
        segment = 0
        for k in range(len(forward)):
            if k > bounds[segment]:
                segment += 1
            self.segment[k] = segment
        self.last = segment
        self.saved = self._saved_values() | set(stored)
        self.pending = set(self.backward)
        self.late: set[Value | None] = {v for v, k in self.node_index.items() if self.segment[k] == self.last}
        self.late.update(i.value for i in graph.with_role("cotangent"))  # and all values that depend on these
        self.copies: dict[Value, Value] = {}
        self.barriers: dict[tuple[Value, int], Value] = {}
        self.out: list[Node] = []

    def _saved_values(self) -> set[Value]:
        """Return the values that cross into a later segment, and outputs: these are saved."""
        saved = {v for v in self.graph.outputs if v in self.node_index}
        for k, node in enumerate(self.forward):
            for v in node.operands:
                if v in self.node_index and self.segment[self.node_index[v]] != self.segment[k]:
                    saved.add(v)
        return saved

    def run(self) -> Graph:
        needed = self._recomputed_values()
        done: set[int] = set()
        for node in self.backward:
            for segment in sorted({self.segment[self.node_index[v]] for v in node.operands if v in needed} - done):
                done.add(segment)
                self._recompute(segment, needed, node)
            copies = {**self.copies, **self._extremes_again(node)} if node.op in COMPARISONS else self.copies
            operands = tuple(copies.get(v, v) if v is not None else None for v in node.operands)
            self.out.append(node if operands == node.operands else node.replaced(operands=operands))
            self.pending.discard(node)
            if any(v in self.late for v in node.operands):
                self.late.update(node.results)
        outputs = tuple(self.copies.get(v, v) if v not in self.node_index else v for v in self.graph.outputs)
        return self.graph.replaced(nodes=(*self.forward, *self.out), outputs=outputs)

    def _recomputed_values(self) -> set[Value]:
        """Return the residuals of all segments but the last, and the values that they are computed from."""
        needed = {
            v
            for n in self.backward
            for v in n.operands
            if v in self.node_index and v not in self.saved and self.segment[self.node_index[v]] != self.last
        }
        for k in range(len(self.forward) - 1, -1, -1):
            node = self.forward[k]
            if any(v in needed for v in node.results):
                needed.update(v for v in node.operands if v in self.node_index and v not in self.saved)
        return needed

    def _recompute(self, segment: int, needed: set[Value], reader: Node) -> None:
        """Recompute the segment's nodes from saved values behind a barrier with the reader's cotangent."""
        nodes = [
            n for k, n in enumerate(self.forward) if self.segment[k] == segment and any(v in needed for v in n.results)
        ]
        local_values = {v for n in nodes for v in n.results}
        captures = dict.fromkeys(
            v for n in nodes for v in n.operands if v is not None and v not in local_values and not self._is_scalar(v)
        )
        # Parameters need no barrier if another operand is behind one.
        guarded = [v for v in captures if not self._is_input(v, "param", "constant")] or list(captures)
        # Without a cotangent behind the barrier a compiler may start the recomputation while the
        # forward pass runs.
        after = self._after(reader)
        behind: dict[Value, Value] = {}
        if guarded:
            barrier_operands = [*guarded, *(self.copies.get(v, v) for v in after)]
            results = tuple(Value(f"{v.name}_again", v.type) for v in barrier_operands)
            self.out.append(Node(operation("barrier"), tuple(barrier_operands), {}, results, (), reader.origin, REMAT))
            behind = dict(zip(guarded, results, strict=False))
            self.copies.update(zip(after, results[len(guarded) :], strict=True))  # without a use it would be removed
        for node in nodes:
            results = tuple(Value(f"{v.name}_again", v.type) for v in node.results)
            self.copies.update((v, r) for v, r in zip(node.results, results, strict=True) if v not in self.saved)
            replacements = {**behind, **{v: self.copies[v] for v in local_values if v in self.copies}}
            replacements.update(self._extremes_again(node))
            operands = tuple(None if v is None else replacements.get(v, v) for v in node.operands)
            self.out.append(node.replaced(operands=operands, results=results, tags={**node.tags, **REMAT}))

    def _extremes_again(self, comparison: Node) -> dict[Value, Value]:
        """Recompute maxima that a comparison reads from those of its operands that were recomputed.

        A saved maximum may equal no recomputed element: compilers may round the second computation differently.
        """
        again: dict[Value, Value] = {}
        producers = self.graph.producers
        for value in comparison.operands if comparison.op in COMPARISONS else ():
            chain = [producers[value]] if value in producers else []
            while chain and is_layout(chain[-1]) and (source := chain[-1].operands[0]) in producers:
                chain.append(producers[source])
            extreme = chain[-1] if chain and chain[-1].op in (ops.max, ops.min) else None
            if value is None or extreme is None or extreme.result in self.copies:
                continue
            operand = extreme.operands[0]
            latest = self.copies.get(operand) if operand is not None else None
            for node in reversed(chain) if latest is not None else ():
                result = Value(f"{node.result.name}_again", node.result.type)
                self.out.append(node.replaced(operands=(latest,), results=(result,), tags={**node.tags, **REMAT}))
                again[value] = latest = result
        return again

    def _after(self, reader: Node) -> list[Value]:
        """Return a cotangent that is computed just before the reader runs, unlike a transposed weight."""
        late_operands = [v for v in reader.operands if v is not None and v in self.late and v not in self.node_index]
        before = [v for n in reversed(self.out) for v in n.results if v in self.late]
        cotangents = [i.value for i in self.graph.with_role("cotangent")]
        awaited = [v for v in dict.fromkeys([*late_operands, *before, *cotangents]) if self._is_awaited(v)]
        straight = [v for v in awaited if not self._is_turned(v)] or awaited[:1]
        return straight if self.is_lazy else straight[:1]

    def _is_awaited(self, value: Value) -> bool:
        """Whether a pending node uses the value, or a caller of a lazy engine."""
        if self.is_lazy and value in self.graph.outputs and value not in self.node_index:
            return True
        return any(user in self.pending for user in self.graph.users.get(value, ()))

    def _is_turned(self, value: Value) -> bool:
        """Whether the value is a transpose, which a barrier would copy."""
        node = self.graph.producers.get(value)
        return node is not None and node.op is ops.transpose

    def _is_scalar(self, value: Value) -> bool:
        node = self.graph.producers.get(value)
        return node is not None and node.is_constant

    def _is_input(self, value: Value, *roles: str) -> bool:
        source = self.graph.input_of.get(value)
        return source is not None and source.role in roles


def _sizes(graph: Graph) -> Callable[[Value], int]:
    """Return a function for the bytes of a value, with an assumption for unknown sizes."""
    sizes = {
        s.name: max(s.low, UNKNOWN) for s in symbols(*(d for n in graph.nodes for v in n.results for d in v.shape))
    }

    return lambda value: nbytes(value.type, sizes)
