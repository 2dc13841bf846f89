"""The split of every value of a graph, from those of its inputs; and the exchanges between devices this implies.

A value that is a sum still to be made stays so through what is linear in it: two such values are added before they are
summed over devices, not after, which halves the exchange. It is summed where something else first reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from mithril.ir import Graph, Node, Value, is_addition, is_permutation, is_source
from mithril.ops import scan_op
from mithril_parallel.mesh import Mesh, Split, whole
from mithril_parallel.placing.rules import Passage, as_part, passage, sizes

_FAR = 100  # operations on the longest way, after which XLA gathers anew


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective: ``bytes`` is one device's part of its result. ``times`` is how often a loop repeats it.

    ``whole`` is the value that is gathered, where one is.
    """

    kind: str
    axis: str
    bytes: int
    node: Node
    times: int = 1
    whole: Value | None = None


@dataclass
class Placed:
    """A graph on a mesh."""

    mesh: Mesh
    splits: dict[Value, Split] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)
    pending: dict[Value, frozenset[str]] = field(default_factory=dict)  # sums over these axes are still to be made
    summed: set[tuple[Value, str]] = field(default_factory=set)  # values that an exchange made whole sums of
    moved: dict[tuple[Value, Split], int] = field(default_factory=dict)  # at what depth
    roots: dict[Value, Value] = field(default_factory=dict)  # what transposed and reshaped values are made of
    gathered: dict[tuple[Value, str], int] = field(default_factory=dict)  # at what depth
    depths: dict[Value, int] = field(default_factory=dict)  # operations on the longest way to a value
    needs: dict[Node, tuple[Split | None, ...]] = field(default_factory=dict)
    passages: dict[Node, tuple[tuple[Split | None, ...], Passage]] = field(default_factory=dict)

    def passage(self, node: Node) -> Passage:
        """Return the passage of a node's operands in their present splits; unknown ones are whole."""
        have = tuple(None if v is None else self.splits.get(v) or whole(v.ndim) for v in node.operands)
        known = self.passages.get(node)
        if known is None or known[0] != have:
            known = self.passages[node] = have, passage(node, have, self.mesh)
        return known[1]

    def local(self, v: Value) -> tuple[int, ...]:
        """The shape of one device's part of a value."""
        return self.mesh.local(sizes(v), self.splits.get(v) or whole(v.ndim))

    def bytes(self, v: Value) -> int:
        """Bytes of one device's part of a value."""
        return prod(self.local(v)) * v.dtype.itemsize


def propagate(graph: Graph, mesh: Mesh, given: Mapping[str, Split], carries: int = 0) -> Placed:
    """Walk the graph once, in order; inputs that ``given`` does not name are whole everywhere.

    With ``carries`` the graph is a loop's body, whose first inputs become its first outputs at the next step.
    """
    placed = Placed(mesh)
    for i in graph.inputs:
        placed.splits[i.value] = given.get(i.name, whole(i.value.ndim))
    readers = _readers(graph)
    sums = {node for v in _collected(graph, carries) if (node := graph.producers.get(v)) is not None}
    for node in graph.nodes:
        step(placed, node, readers, collects=node in sums)
    collected = _collected(graph, carries)
    for v in graph.outputs:
        if v not in collected:
            _settle(placed, v, graph.producers.get(v))
    _pull_back(placed, graph)
    return placed


def _pull_back(placed: Placed, graph: Graph) -> None:
    """What no input splits, random numbers for dropout say, is made in the parts in which all its readers want it."""
    wanted: dict[Value, set[Split]] = {v: {placed.splits[v]} for v in graph.outputs}
    for node in reversed(graph.nodes):
        needs = placed.needs.get(node, tuple(None if v is None else placed.splits[v] for v in node.operands))
        if _is_free(node) and len(node.results) == 1 and not any(placed.splits[node.result]):
            asked = wanted.get(node.result, set())
            if len(asked) == 1 and any(split := next(iter(asked))):
                placed.splits[node.result] = split
                shape = sizes(node.result)
                needs = tuple(None if v is None else as_part(sizes(v), split, shape) for v in node.operands)
                if node.op.random:
                    needs = (None,) * len(node.operands)
                placed.needs[node] = needs
        for v, need in zip(node.operands, needs, strict=True):
            if v is not None:
                wanted.setdefault(v, set()).add(need or whole(v.ndim))


def _is_free(node: Node) -> bool:
    """Whether any part of a result can be computed: from nothing, from a key, or from operands that broadcast."""
    if is_source(node) or node.op.random or node.op.elementwise:
        return True
    axes = node.axes if not node.regions else None
    return axes is not None and not axes.roles and all(f.startswith("...") for f in axes.sizes)


def _collected(graph: Graph, carries: int) -> set[Value]:
    """Carries that only have something added at each step: a sum over devices can wait until the loop has ended."""
    out = set()
    for entering, leaving in zip(graph.inputs[:carries], graph.outputs[:carries], strict=True):
        node = graph.producers.get(leaving)
        if node is not None and is_addition(node) and graph.users.get(entering.value) == (node,):
            out.add(leaving)
    return out


def _readers(graph: Graph) -> dict[Value, int]:
    """How many nodes read a value; outputs have one reader more."""
    found = {v: len(nodes) for v, nodes in graph.users.items()}
    for v in graph.outputs:
        found[v] = found.get(v, 0) + 1
    return found


def step(placed: Placed, node: Node, readers: Mapping[Value, int] | None = None, *, collects: bool = False) -> None:
    """Place the results of one node; a value that was moved for an earlier reader is not moved again."""
    depth = 1 + max((placed.depths.get(v, 0) for v in node.operands if v is not None), default=0)
    placed.depths.update(dict.fromkeys(node.results, depth))
    if node.op is scan_op:
        _scan(placed, node)
        return
    have = [None if v is None else placed.splits[v] for v in node.operands]
    found = placed.passage(node)
    placed.needs[node] = found.needs
    waiting = _still_waiting(placed, node, found, readers or {}, collects)
    if not waiting:
        for v in node.operands:
            if v is not None:
                _settle(placed, v, node)
    for v, split, need in zip(node.operands, have, found.needs, strict=True):
        if v is None or split is None or need is None:
            continue
        if depth - placed.moved.get((v, need), -_FAR - 1) > _FAR:
            _move(placed, node, v, split, need)
            placed.moved[v, need] = depth
    if is_permutation(node) and node.operands[0] is not None:
        placed.roots[node.result] = placed.roots.get(node.operands[0], node.operands[0])
    for v, split in zip(node.results, found.gives, strict=True):
        placed.splits[v] = split
        sums = frozenset(axis for axis in found.sums if placed.mesh.size(axis) > 1) | waiting
        if sums:
            placed.pending[v] = sums
            if found.at_once:
                _settle(placed, v, node)


def _still_waiting(
    placed: Placed, node: Node, found: Passage, readers: Mapping[Value, int], collects: bool
) -> frozenset[str]:
    """The sums that the operands wait for and that can as well be made of the result."""
    operands = [v for v in node.operands if v is not None]
    if collects:
        operands = [v for v in operands if v in placed.pending] or operands
    waits = [placed.pending.get(v, frozenset()) for v in operands]
    if not waits or not waits[0] or any(w != waits[0] for w in waits) or any(readers.get(v, 2) > 1 for v in operands):
        return frozenset()
    adds = is_addition(node) and len({v.type for v in operands}) == 1
    return waits[0] if (adds or is_permutation(node)) and not found.sums else frozenset()


def _settle(placed: Placed, v: Value, node: Node | None) -> None:
    """Sum a value over the axes it waits for."""
    for axis in sorted(placed.pending.pop(v, frozenset())):
        if node is not None:
            # Compilers sum numbers of 16 bits over devices in 32.
            size = placed.bytes(v) * (2 if v.dtype.is_float and v.dtype.bits == 16 else 1)
            placed.exchanges.append(Exchange("all-reduce", axis, size, node))
            placed.summed.add((v, axis))


def _move(placed: Placed, node: Node, v: Value, have: Split, need: Split) -> None:
    """What it takes to get from one split to another: giving up a split gathers, taking one on is free.

    A value and its transpose are gathered once, unless they are read again much later.
    """
    mesh = placed.mesh
    for k, axis in enumerate(have):
        if axis is None or need[k] == axis or mesh.size(axis) == 1:
            continue
        kind = "all-to-all" if axis in need else "all-gather"
        root = placed.roots.get(v, v)
        if kind == "all-gather":
            depth = placed.depths[node.results[0]]
            if depth - placed.gathered.get((root, axis), -_FAR - 1) <= _FAR:
                continue
            placed.gathered[root, axis] = depth
        size = prod(mesh.local(sizes(v), need)) * v.dtype.itemsize
        placed.exchanges.append(Exchange(kind, axis, size, node, whole=v if kind == "all-gather" else None))


# -- loops ----------------------------------------------------------------------------------------------------------
def _scan(placed: Placed, node: Node) -> None:
    """A carry is split as the body leaves it, sequences as they come but for the axis of steps."""
    body = node.regions[0]
    carries, sequences = node.attributes["carries"], node.attributes["sequences"]
    have = [placed.splits[v] if v is not None else () for v in node.operands]
    for v in node.operands:
        if v is not None:
            _settle(placed, v, node)
    entering = [
        *have[:carries],
        *(split[1:] for split in have[carries : carries + sequences]),
        *have[carries + sequences :],
    ]
    inner = placed
    for _ in range(2):  # zeros come in whole and go round split
        names = {i.name: split for i, split in zip(body.inputs, entering, strict=True)}
        inner = propagate(body, placed.mesh, names, carries)
        entering[:carries] = [inner.splits[v] for v in body.outputs[:carries]]
    length = node.attributes.get("length", 1)
    times = length if isinstance(length, int) else 1
    placed.exchanges += [Exchange(e.kind, e.axis, e.bytes, e.node, e.times * times) for e in inner.exchanges]
    placed.splits.update(inner.splits)
    leaving = [inner.splits[v] for v in body.outputs]
    for k, v in enumerate(node.results):
        if k < carries and body.outputs[k] in inner.pending:
            placed.pending[v] = inner.pending[body.outputs[k]]
        placed.splits[v] = leaving[k] if k < carries else (None, *leaving[k])
