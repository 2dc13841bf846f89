"""Values of a per-device graph: the local part of each value, and the collectives that reshard it.

Every value has a split and the mesh axes over which it is a pending sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.graph import Builder, Graph, Node, OperationError, UnsupportedError, Value, int32, operation
from mithril.ops import if_op
from mithril_parallel.mesh import BLOCKS, Mesh, Split, base, blocks
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_rules import LocalRule

INDEX = "mesh/"  # prefix of inputs that hold a device's index along a mesh axis


@dataclass(frozen=True)
class Part:
    """The part of an output on one device: split along mesh axes, and a term of a sum over others."""

    split: Split
    sums: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DeviceGraph:
    """The graph of one device. Its additional inputs are the device's indices in the mesh."""

    graph: Graph
    mesh: Mesh
    inputs: Mapping[str, Split]
    outputs: Mapping[str, Part]

    @property
    def indices(self) -> dict[str, str]:
        """The inputs that hold the device's index, with their mesh axes."""
        names = {INDEX + axis: axis for axis in self.mesh.axes}
        return {i.name: names[i.name] for i in self.graph.inputs if i.name in names}


class LocalGraphBuilder(ABC):
    """A per-device graph under construction.

    ``local_values`` maps values of the full graph to local values, ``splits`` to their splits and ``pending`` to the
    mesh axes over which the local values still have to be summed.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        sequential_axes: frozenset[str],
        *,
        differentiated: bool = False,
        exchanges_rows: bool = False,
        in_region: bool = False,
    ) -> None:
        self.exchanges_rows = exchanges_rows  # whether numbers of exchanged rows may be known at run time only
        self.differentiated = differentiated  # whether a framework differentiates the graph of a device
        self.graph, self.mesh, self.sequential_axes = graph, mesh, sequential_axes
        self.in_region = in_region  # a loop body or branch, which cannot contain a sum over chunks
        self.builder = Builder(graph.name)
        self.local_values: dict[Value, Value] = {}
        self.splits: dict[Value, Split] = {}
        self.pending: dict[Value, frozenset[str]] = {}
        self.resharded: dict[tuple[Value, Split], Value] = {}  # local values in other splits
        self.routes: dict[Value, Any] = {}  # ways of rows to experts, by the numbers of their experts
        self.routed: dict[Value, tuple[Value, Any]] = {}  # rows at their experts, and their route
        self.arrivals: dict[tuple[Value, Any], Value] = {}
        self.node: Node | None = None
        self.requested_splits: dict[Value, Split] = {}
        self.accumulating: set[Value] = set()  # loop carries that the body only adds to
        self.once: set[Value] = set()  # values computed once, after all sequential iterations

    @abstractmethod
    def region(
        self,
        graph: Graph,
        inputs: Mapping[str, Split],
        outputs: Mapping[str, Split],
        *,
        accumulating: Collection[Value] = (),
        unreduced: Collection[str] = (),
    ) -> DeviceGraph:
        """Partition a loop body or a branch.

        ``accumulating`` values are only added to; the outputs ``unreduced`` may remain pending sums.
        """

    def emit(self, node: Node, operands: Sequence[Value | None], rule: LocalRule) -> None:
        if self.sequential_axes and self.is_once(node):
            if any(a in self.sequential_axes for need in rule.operand_splits for a in need or ()):
                raise self.mixed_examples_error()
            self.once.update(node.results)
        names = [v.name for v in node.results]
        outputs = self.builder.emit(
            node.op,
            operands,
            {**node.attributes, **rule.attributes},
            node.regions,
            names[0] if len(names) == 1 else None,
        )
        for full_value, value, split in zip(node.results, outputs, rule.result_splits, strict=True):
            expected = self.mesh.local(sizes(full_value), split)
            if value.shape != expected:
                raise OperationError(
                    f"the local part of %{full_value.name} has shape {list(value.shape)}, expected {list(expected)}",
                    facts=[repr(node), str(node.origin)],
                )
            if rule.scale != 1.0:
                value = operation("mul")(value, rule.scale)
            for axis, kind in rule.joins.items():
                value = self._exchange("all_reduce", value, axis, kind=kind)
            self.local_values[full_value], self.splits[full_value] = value, split
            if rule.sums:
                self.pending[full_value] = rule.sums

    def is_once(self, node: Node) -> bool:
        return node.tags.get("phase") == "update" or any(v in self.once for v in node.operands if v is not None)

    def reduce_pending(self, v: Value) -> Value:
        """Reduce a value over its pending mesh axes and return its local value."""
        for axis in sorted(self.pending.pop(v, frozenset())):
            requested = self.requested_splits.get(v) or self._partner_split(v, axis)
            if requested is not None and axis in requested and self.splits[v][requested.index(axis)] is None:
                k = requested.index(axis)
                self.local_values[v] = self._exchange("reduce_scatter", self.local_values[v], axis, axis=k)
                self.splits[v] = tuple(axis if j == k else a for j, a in enumerate(self.splits[v]))
            else:
                self.local_values[v] = self._exchange("all_reduce", self.local_values[v], axis, kind="sum")
            if axis in self.sequential_axes:
                self.once.add(v)
        return self.local_values[v]

    def _partner_split(self, v: Value, axis: str) -> Split | None:
        """Return the split of an argument combined with ``v`` (a parameter with its gradient), or None."""
        front, seen = [v], {v}
        while front:
            for node in self.graph.users.get(front.pop(), ()):
                is_elementwise = node.op.elementwise
                if not is_elementwise and node.op is not if_op:  # may contain an optimizer's update
                    continue
                for other in node.operands:
                    if other in self.graph.input_of and other.shape == v.shape and axis in self.splits[other]:
                        return self.splits[other]
                following = [r for r in node.results if is_elementwise and r.shape == v.shape and r not in seen]
                front += following
                seen.update(following)
        return None

    # -- collectives --------------------------------------------------------------------------------------------------
    def reshard(self, v: Value, target: Split, *, reduced: bool = True) -> Value:
        """Return the local value of ``v`` in another split, with pending sums reduced unless ``reduced`` is False."""
        if reduced:
            self.reduce_pending(v)
        cached = self.resharded.get((v, target))
        if cached is not None:
            return cached
        value = self.local_values[v]
        source = list(self.splits[v])
        # One exchange moves a split to another dimension, for the bytes of one part; a gather would carry all.
        for k, axis in enumerate(self.splits[v]):
            if axis is None or axis not in target or target[k] == axis or BLOCKS in axis:
                continue
            j = target.index(axis)
            if source[j] is None and axis not in self.sequential_axes:
                value = self._exchange("all_to_all", value, axis, split=j, axis=k)
                source[k], source[j] = None, axis
        # Before slices, since a mesh axis splits one dimension at a time.
        for k, axis in enumerate(source):
            if axis is not None and target[k] != axis:
                value = self._gather(value, axis, k)
        for k, axis in enumerate(target):
            if axis is not None and source[k] != axis:
                value = self._slice_part(value, axis, k)
        # Once its sums are reduced, a value is another one.
        if v not in self.pending:
            self.resharded[v, target] = value
        return value

    def _exchange(self, name: str, value: Value, mesh_axis: str, **attributes: Any) -> Value:
        if mesh_axis not in self.sequential_axes:
            op = operation(f"mesh.{name}")
            complete = op.complete({"mesh": mesh_axis, "parts": self.mesh.size(mesh_axis), **attributes})
            return self.builder.emit(op, (value,), op.canonical([value.type], complete))[0]
        if self.in_region or attributes.get("kind") != "sum":
            raise self.mixed_examples_error()
        total: Value = operation("mesh.chunk_sum")(value)
        return total

    def mixed_examples_error(self) -> UnsupportedError:
        node = self.node
        return UnsupportedError(
            "this model mixes the examples of a batch, which cannot be cut into chunks",
            facts=[repr(node), str(node.origin)] if node is not None else [],
            hint="set pipeline_chunks=1, or avoid operations over the batch: batch normalization in training, "
            "a loss divided by a sum over the batch",
        )

    def _gather(self, value: Value, entry: str, k: int) -> Value:
        """Gather the parts of a value along axis ``k``."""
        if blocks(entry) == 1:
            return self._exchange("all_gather", value, entry, axis=k)
        parts = self._exchange("all_gather", _split_axis_into_blocks(value, entry, k), base(entry), axis=k + 1)
        return _merge_blocks(parts, k)

    def _slice_part(self, value: Value, entry: str, k: int) -> Value:
        """Return this device's part of a value along axis ``k``."""
        if blocks(entry) > 1:
            return _merge_blocks(self._slice_part(_split_axis_into_blocks(value, entry, k), base(entry), k + 1), k)
        return self._slice_axis(value, entry, k)

    def _slice_axis(self, value: Value, mesh_axis: str, k: int) -> Value:
        length = value.shape[k]
        assert isinstance(length, int)
        part = length // self.mesh.size(mesh_axis)
        start = operation("reshape")(self.device_index(mesh_axis) * part, shape=(1,))
        zero = operation("full")(shape=(1,), value=0, dtype=int32)
        starts = operation("concat")(*[start if j == k else zero for j in range(value.ndim)], axis=0)
        shape = tuple(part if j == k else n for j, n in enumerate(value.shape))
        result: Value = operation("dynamic_slice")(value, starts, sizes=shape)
        return result

    def device_index(self, mesh_axis: str) -> Value:
        """Return the input that holds the device's index along a mesh axis."""
        name = INDEX + mesh_axis
        for i in self.builder.inputs:
            if i.name == name:
                return i.value
        return self.builder.input(name, (), int32)


def _split_axis_into_blocks(value: Value, entry: str, k: int) -> Value:
    """Reshape a value so that the blocks of axis ``k`` are a separate axis."""
    n, count = value.shape[k], blocks(entry)
    assert isinstance(n, int)
    result: Value = operation("reshape")(value, shape=(*value.shape[:k], count, n // count, *value.shape[k + 1 :]))
    return result


def _merge_blocks(value: Value, k: int) -> Value:
    shape = (*value.shape[:k], value.shape[k] * value.shape[k + 1], *value.shape[k + 2 :])
    result: Value = operation("reshape")(value, shape=shape)
    return result
