"""The values of one device's graph: which part of each it holds, and the exchanges that bring another part.

Every value has a split and the axes over which it is a sum still to be made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.base import OperationError, UnsupportedError, int32, operation
from mithril.ir import Builder, Graph, Node, Value
from mithril.ops import if_op
from mithril_parallel.mesh import Mesh, Split, base, blocks
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_rules import Local

INDEX = "mesh/"  # inputs of this name hold a device's place along an axis


@dataclass(frozen=True)
class Part:
    """The parts of an output: split along axes of the mesh, and terms of a sum over others."""

    split: Split
    sums: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sharded:
    """``graph`` is what one device runs. Inputs it has beyond the whole graph's are its places in the mesh."""

    graph: Graph
    mesh: Mesh
    inputs: Mapping[str, Split]
    outputs: Mapping[str, Part]

    @property
    def indices(self) -> dict[str, str]:
        """Inputs that hold the device's place, and along which axis."""
        names = {INDEX + axis: axis for axis in self.mesh.axes}
        return {i.name: names[i.name] for i in self.graph.inputs if i.name in names}


class LocalGraph(ABC):
    """``made`` maps values of the whole graph to the local ones; ``splits`` and ``open`` say what these are."""

    def __init__(self, graph: Graph, mesh: Mesh, turns: frozenset[str], *, inside: bool = False) -> None:
        self.graph, self.mesh, self.turns = graph, mesh, turns
        self.inside = inside  # a loop, which a turn does to its end
        self.builder = Builder(graph.name)
        self.made: dict[Value, Value] = {}
        self.splits: dict[Value, Split] = {}
        self.open: dict[Value, frozenset[str]] = {}
        self.known: dict[tuple[Value, Split], Value] = {}  # values brought into another split
        self.node: Node | None = None
        self.wanted: dict[Value, Split] = {}
        self.collecting: set[Value] = set()  # carries of a loop that only have something added
        self.once: set[Value] = set()  # what is made after all turns

    @abstractmethod
    def region(
        self,
        graph: Graph,
        inputs: Mapping[str, Split],
        outputs: Mapping[str, Split],
        *,
        collecting: Collection[Value] = (),
        left_open: Collection[str] = (),
    ) -> Sharded:
        """Cut a loop's body or a branch. ``collecting`` values only have something added; outputs may stay sums."""

    def emit(self, node: Node, operands: Sequence[Value | None], found: Local) -> None:
        if self.turns and self.is_once(node):
            if any(a in self.turns for need in found.needs for a in need or ()):
                raise self._mixed()
            self.once.update(node.results)
        names = [v.name for v in node.results]
        made = self.builder.emit(
            node.op,
            operands,
            {**node.attributes, **found.attributes},
            node.regions,
            names[0] if len(names) == 1 else None,
        )
        for whole_value, value, split in zip(node.results, made, found.gives, strict=True):
            expected = self.mesh.local(sizes(whole_value), split)
            if value.shape != expected:
                raise OperationError(
                    f"the part of %{whole_value.name} that a device makes is {list(value.shape)}, not {list(expected)}",
                    facts=[repr(node), str(node.origin)],
                )
            if found.scale != 1.0:
                value = operation("mul")(value, found.scale)
            for axis, kind in found.joins.items():
                value = self._exchange("all_reduce", value, axis, kind=kind)
            self.made[whole_value], self.splits[whole_value] = value, split
            if found.sums:
                self.open[whole_value] = found.sums

    def is_once(self, node: Node) -> bool:
        return node.tags.get("phase") == "update" or any(v in self.once for v in node.operands if v is not None)

    def settled(self, v: Value) -> Value:
        """Sum a value over the axes that it waits for, and return it."""
        for axis in sorted(self.open.pop(v, frozenset())):
            wanted = self.wanted.get(v) or self._met(v, axis)
            if wanted is not None and axis in wanted and self.splits[v][wanted.index(axis)] is None:
                k = wanted.index(axis)
                self.made[v] = self._exchange("reduce_scatter", self.made[v], axis, axis=k)
                self.splits[v] = tuple(axis if j == k else a for j, a in enumerate(self.splits[v]))
            else:
                self.made[v] = self._exchange("all_reduce", self.made[v], axis, kind="sum")
            if axis in self.turns:
                self.once.add(v)
        return self.made[v]

    def _met(self, v: Value, axis: str) -> Split | None:
        """Return the split of an argument that is combined with a value, as a parameter is with its gradient."""
        front, seen = [v], {v}
        while front:
            for node in self.graph.users.get(front.pop(), ()):
                alike = node.op.elementwise
                if not alike and node.op is not if_op:  # in which an optimizer's update may be
                    continue
                for other in node.operands:
                    if other in self.graph.input_of and other.shape == v.shape and axis in self.splits[other]:
                        return self.splits[other]
                following = [r for r in node.results if alike and r.shape == v.shape and r not in seen]
                front += following
                seen.update(following)
        return None

    # -- exchanges ----------------------------------------------------------------------------------------------------
    def as_split(self, v: Value, need: Split, *, closed: bool = True) -> Value:
        """Return the local value of ``v`` in another split, summed unless ``closed`` is False."""
        if closed:
            self.settled(v)
        known = self.known.get((v, need))
        if known is not None:
            return known
        value = self.made[v]
        for k, axis in enumerate(self.splits[v]):
            if axis is not None and need[k] != axis:
                value = self._gathered(value, axis, k)
        for k, axis in enumerate(need):
            if axis is not None and self.splits[v][k] != axis:
                value = self._cut(value, axis, k)
        if v not in self.open:
            self.known[v, need] = value
        return value

    def _exchange(self, name: str, value: Value, mesh_axis: str, **attributes: Any) -> Value:
        if mesh_axis not in self.turns:
            op = operation(f"mesh.{name}")
            complete = op.complete({"mesh": mesh_axis, "parts": self.mesh.size(mesh_axis), **attributes})
            return self.builder.emit(op, (value,), op.canonical([value.type], complete))[0]
        if self.inside or attributes.get("kind") != "sum":
            raise self._mixed()
        made: Value = operation("mesh.chunk_sum")(value)
        return made

    def _mixed(self) -> UnsupportedError:
        node = self.node
        return UnsupportedError(
            "this model mixes the examples of a batch, which cannot be cut into chunks",
            facts=[repr(node), str(node.origin)] if node is not None else [],
            hint="pipeline_chunks=1, or leave out what looks at the whole batch: batch normalization in training, "
            "a loss divided by a sum over the batch",
        )

    def _gathered(self, value: Value, entry: str, k: int) -> Value:
        """Gather the parts of a value along axis ``k``."""
        if blocks(entry) == 1:
            return self._exchange("all_gather", value, entry, axis=k)
        made = self._exchange("all_gather", _taken_apart(value, entry, k), base(entry), axis=k + 1)
        return _joined(made, k)

    def _cut(self, value: Value, entry: str, k: int) -> Value:
        """Return this device's part along axis ``k`` of a whole value."""
        if blocks(entry) > 1:
            return _joined(self._cut(_taken_apart(value, entry, k), base(entry), k + 1), k)
        return self._cut_once(value, entry, k)

    def _cut_once(self, value: Value, mesh_axis: str, k: int) -> Value:
        length = value.shape[k]
        assert isinstance(length, int)
        part = length // self.mesh.size(mesh_axis)
        start = operation("reshape")(self.place(mesh_axis) * part, shape=(1,))
        zero = operation("full")(shape=(1,), value=0, dtype=int32)
        starts = operation("concat")(*[start if j == k else zero for j in range(value.ndim)], axis=0)
        shape = tuple(part if j == k else n for j, n in enumerate(value.shape))
        made: Value = operation("dynamic_slice")(value, starts, sizes=shape)
        return made

    def place(self, mesh_axis: str) -> Value:
        """Return the input that holds the device's place along an axis."""
        name = INDEX + mesh_axis
        for i in self.builder.inputs:
            if i.name == name:
                return i.value
        return self.builder.input(name, (), int32)


def _taken_apart(value: Value, entry: str, k: int) -> Value:
    """Return a value with the blocks of axis ``k`` as an axis of their own."""
    n, count = value.shape[k], blocks(entry)
    assert isinstance(n, int)
    made: Value = operation("reshape")(value, shape=(*value.shape[:k], count, n // count, *value.shape[k + 1 :]))
    return made


def _joined(value: Value, k: int) -> Value:
    shape = (*value.shape[:k], value.shape[k] * value.shape[k + 1], *value.shape[k + 2 :])
    made: Value = operation("reshape")(value, shape=shape)
    return made
