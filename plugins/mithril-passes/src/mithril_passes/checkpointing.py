"""``gradient_checkpointing``: forget what the backward graph will need, and compute it again when it does.

The forward part is cut into segments where few bytes cross. What crosses a cut is kept; everything else that the
backward part reads is computed a second time, just before its first reader, from copies that stand behind a barrier:
no later pass, and no compiler of the backend, may merge them with the first computation or move them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from mithril import Graph, Node, Value, ops
from mithril.backend.memory_plan import nbytes
from mithril.base.dims import symbols
from mithril.base.registry import operation
from mithril.passes import PassContext

UNKNOWN = 64  # what an unknown size counts as when cuts are weighed
REMAT = {"phase": "recomputed"}


def gradient_checkpointing(graph: Graph, context: PassContext) -> Graph:
    """The graph with segments of its forward part recomputed; without a backward part, the graph itself."""
    wanted = context.option("checkpoint_segments")
    forward, backward = halves(graph)
    if context.option("inference") or context.option("static_inference"):
        context.record("ignored", "gradient_checkpointing: a program for inference computes no gradients")
    if not backward or len(forward) < 2:
        return graph
    cuts = segment_ends(graph, forward, backward, wanted)
    if not cuts:
        context.record("ignored", "gradient_checkpointing: there is nothing that could be forgotten")
        return graph
    context.record("choice", f"gradient checkpointing in {len(cuts) + 1} segments")
    return Recompute(graph, forward, backward, cuts).run()


def halves(graph: Graph) -> tuple[list[Node], list[Node]]:
    """The nodes that need no gradient, and those that are or follow the backward part."""
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


def segment_ends(graph: Graph, forward: Sequence[Node], backward: Sequence[Node], wanted: int | None) -> list[int]:
    """Positions in the forward part after which a segment ends, chosen where few bytes cross.

    Segments hold about equally many bytes that the backward part reads. Without a number given, there are as many as
    make what is kept and what one segment needs together smallest.
    """
    size = _sizes(graph)
    made = {v: k for k, n in enumerate(forward) for v in n.results}
    last = {v: k for k, n in enumerate(forward) for v in n.operands if v in made}
    last.update((v, len(forward)) for v in graph.outputs if v in made)
    crossing = [0] * (len(forward) + 1)  # bytes alive after each position
    for v, k in made.items():
        crossing[k] += size(v)
        if v in last:
            crossing[min(last[v], len(forward))] -= size(v)
        else:
            crossing[k] -= size(v)
    for k in range(1, len(crossing)):
        crossing[k] += crossing[k - 1]
    read = {v for n in backward for v in n.operands if v in made}
    held = [sum(size(v) for v in n.results if v in read) for n in forward]
    total = sum(held)
    if not total:
        return []
    running = [0]
    for h in held:
        running.append(running[-1] + h)
    candidates = range(2, min(2 * math.isqrt(len(forward)) + 2, len(forward)) + 1)
    best: tuple[int, list[int]] | None = None
    for count in [wanted] if wanted is not None else candidates:
        cuts = _cuts(running, crossing, count)
        bounds = [0, *(c + 1 for c in cuts), len(forward)]
        largest = max(running[b] - running[a] for a, b in pairwise(bounds))
        cost = sum(crossing[c] for c in cuts) + largest
        if best is None or cost < best[0]:
            best = cost, cuts
    return best[1] if best is not None and (wanted is not None or best[0] < total) else []


def _cuts(running: Sequence[int], crossing: Sequence[int], count: int) -> list[int]:
    """One cut near each n-th part of the bytes read, where least crosses."""
    total, n = running[-1], len(running) - 1
    cuts: list[int] = []
    for part in range(1, count):
        low, high = (part - 0.4) * total / count, (part + 0.4) * total / count
        near = [k for k in range(n - 1) if low <= running[k + 1] <= high and (not cuts or k > cuts[-1])]
        if near:
            cuts.append(min(near, key=lambda k: (crossing[k], abs(running[k + 1] - part * total / count))))
    return cuts


class Recompute:
    """Writes the new backward part."""

    def __init__(self, graph: Graph, forward: Sequence[Node], backward: Sequence[Node], cuts: Sequence[int]) -> None:
        self.graph, self.forward, self.backward = graph, list(forward), list(backward)
        self.made = {v: k for k, n in enumerate(forward) for v in n.results}
        self.segment = {}
        bounds = [*cuts, len(forward) - 1]
        at = 0
        for k in range(len(forward)):
            if k > bounds[at]:
                at += 1
            self.segment[k] = at
        self.last = at
        self.kept = self._kept()
        self.pending = set(self.backward)
        self.late: set[Value | None] = {v for v, k in self.made.items() if self.segment[k] == self.last}
        self.late.update(i.value for i in graph.with_role("cotangent"))  # and all that depends on these
        self.copies: dict[Value, Value] = {}
        self.barriers: dict[tuple[Value, int], Value] = {}
        self.out: list[Node] = []

    def _kept(self) -> set[Value]:
        """Values that cross into a later segment, and outputs: these are not forgotten."""
        kept = {v for v in self.graph.outputs if v in self.made}
        for k, node in enumerate(self.forward):
            for v in node.operands:
                if v in self.made and self.segment[self.made[v]] != self.segment[k]:
                    kept.add(v)
        return kept

    def run(self) -> Graph:
        needed = self._needed()
        done: set[int] = set()
        for node in self.backward:
            for segment in sorted({self.segment[self.made[v]] for v in node.operands if v in needed} - done):
                done.add(segment)
                self._again(segment, needed, node)
            operands = tuple(self.copies.get(v, v) if v is not None else None for v in node.operands)
            self.out.append(node if operands == node.operands else node.replaced(operands=operands))
            self.pending.discard(node)
            if any(v in self.late for v in node.operands):
                self.late.update(node.results)
        outputs = tuple(self.copies.get(v, v) if v not in self.made else v for v in self.graph.outputs)
        return self.graph.replaced(nodes=(*self.forward, *self.out), outputs=outputs)

    def _needed(self) -> set[Value]:
        """What the backward part reads of all segments but the last, and what that is computed from."""
        wanted = {
            v
            for n in self.backward
            for v in n.operands
            if v in self.made and v not in self.kept and self.segment[self.made[v]] != self.last
        }
        for k in range(len(self.forward) - 1, -1, -1):
            node = self.forward[k]
            if any(v in wanted for v in node.results):
                wanted.update(v for v in node.operands if v in self.made and v not in self.kept)
        return wanted

    def _again(self, segment: int, needed: set[Value], reader: Node) -> None:
        """The segment's nodes once more, starting from what was kept, behind a barrier with the reader's cotangent."""
        nodes = [
            n for k, n in enumerate(self.forward) if self.segment[k] == segment and any(v in needed for v in n.results)
        ]
        own = {v for n in nodes for v in n.results}
        outside = dict.fromkeys(
            v for n in nodes for v in n.operands if v is not None and v not in own and not self._is_scalar(v)
        )
        # Parameters need no barrier where something else stands behind one.
        given = [v for v in outside if not self._is_input(v, "param", "constant")] or list(outside)
        after = self._after(reader)
        behind: dict[Value, Value] = {}
        if given:
            held = [*given, *(self.copies.get(v, v) for v in after)]
            results = tuple(Value(f"{v.name}_again", v.type) for v in held)
            self.out.append(Node(operation("barrier"), tuple(held), {}, results, (), reader.origin, REMAT))
            behind = dict(zip(given, results, strict=False))
            self.copies.update(zip(after, results[len(given) :], strict=True))  # unread, it would go
        for node in nodes:
            results = tuple(Value(f"{v.name}_again", v.type) for v in node.results)
            self.copies.update((v, r) for v, r in zip(node.results, results, strict=True) if v not in self.kept)
            inside = {**behind, **{v: self.copies[v] for v in own if v in self.copies}}
            operands = tuple(None if v is None else inside.get(v, v) for v in node.operands)
            self.out.append(node.replaced(operands=operands, results=results, tags={**node.tags, **REMAT}))

    def _after(self, reader: Node) -> list[Value]:
        """Return a cotangent that exists only when the reader's turn has come: a transposed weight exists at once."""
        own = [v for v in reader.operands if v is not None and v in self.late and v not in self.made]
        before = [v for n in reversed(self.out) for v in n.results if v in self.late]
        cotangents = [i.value for i in self.graph.with_role("cotangent")]
        awaited = [v for v in dict.fromkeys([*own, *before, *cotangents]) if self._is_awaited(v)]
        return [v for v in awaited if not self._is_turned(v)][:1] or awaited[:1]

    def _is_awaited(self, value: Value) -> bool:
        """Whether something that is still to be written reads the value."""
        return any(user in self.pending for user in self.graph.users.get(value, ()))

    def _is_turned(self, value: Value) -> bool:
        """Whether the value is a transposed one, which a barrier would make a copy of."""
        node = self.graph.producers.get(value)
        return node is not None and node.op is ops.transpose

    def _is_scalar(self, value: Value) -> bool:
        node = self.graph.producers.get(value)
        return node is not None and node.is_constant

    def _is_input(self, value: Value, *roles: str) -> bool:
        found = self.graph.input_of.get(value)
        return found is not None and found.role in roles


def _sizes(graph: Graph) -> Callable[[Value], int]:
    """Bytes of a value, with a guess for unknown sizes."""
    known = {
        s.name: max(s.low, UNKNOWN) for s in symbols(*(d for n in graph.nodes for v in n.results for d in v.shape))
    }

    return lambda value: nbytes(value.type, known)
