"""Kernels: nodes of the graph that run as one function, with keys by which equal kernels share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mithril import ops
from mithril.graph import DType, Node, Op, Registry, Value, attributes_text, symbols
from mithril_cbackend.lowering.packings import Array, Pack, PackedParameter

# operations left out of kernel names
SILENT = (ops.constant, ops.full, ops.broadcast_to, ops.reshape, ops.barrier, ops.cast, ops.size_value)
Template = Callable[["Kernel", str, Any], Any]


# a value that no node produces, and its elements, or how they are computed when parameters are bound
Prepared = tuple[Value, Array | PackedParameter]


@dataclass(eq=False)
class Kernel:
    """Nodes in order that run as one function; only ``outputs`` are stored."""

    template: Template
    nodes: list[Node]
    outputs: list[Value]
    anchor: Node  # the node that decides how the kernel is scheduled
    inputs: list[Value] = field(default_factory=list)  # stored values that the kernel reads
    scratch: list[Value] = field(default_factory=list)  # additional buffers of the template
    prepared: dict[Value, Prepared] = field(default_factory=dict)  # operand of the anchor -> its packed copy
    kind: str = ""
    narrow: DType | None = None  # the dtype that the anchor's first operand was widened from without loss, if any
    in_bounds: frozenset[Node] = frozenset()  # gathers whose positions are known to be within bounds
    # gather at constant positions -> its runs: first position in the result, size, first position in the operand
    runs: dict[Node, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    scheduled: Template | None = None  # writes the kernel by TVM's schedules in place of the template
    unscheduled: str = ""  # why the template writes it, if TVM could have

    @property
    def parameters(self) -> list[Value]:
        """Arguments of the function, in order."""
        return [*self.inputs, *self.outputs, *self.scratch]

    def read_stored(self) -> None:
        """Order the nodes and collect the values that they capture as inputs."""
        self.nodes = self._in_order()
        inner_values = {v for node in self.nodes for v in node.results}
        captures: dict[Value, None] = {}
        for node in self.nodes:
            for v in node.operands:
                if v is not None and v not in inner_values and (node is not self.anchor or v not in self.prepared):
                    captures[v] = None
        self.inputs = [*captures, *(v for v, _ in self.prepared.values())]

    def _in_order(self) -> list[Node]:
        """Return the nodes in a canonical topological order: a depth-first traversal from the outputs."""
        producers = self.producers
        order: dict[Node, None] = {}
        pending = [producers[v] for v in reversed(self.outputs)]
        while pending:
            node = pending[-1]
            left = [producers[v] for v in node.operands if v in producers and producers[v] not in order]
            if left:
                pending += reversed(left)
            else:
                order[pending.pop()] = None
        return list(order)

    @property
    def sizes(self) -> list[str]:
        """The symbolic sizes that it reads, in order: arguments of the function after the buffers."""
        values = dict.fromkeys([*self.parameters, *(v for node in self.nodes for v in (*node.operands, *node.results))])
        sizes = [n for v in values if v is not None for n in v.shape]
        sizes += [node.attributes["value"] for node in self.nodes if node.op is ops.size_value]
        return sorted({s.name for s in symbols(*sizes)})

    @property
    def producers(self) -> dict[Value, Node]:
        return {v: node for node in self.nodes for v in node.results}

    def key(self) -> str:
        """Return a key that is equal for kernels that differ only in the names of their values."""
        numbers: dict[Any, int] = {}
        parts = [self.kind]

        def number(v: Value | None) -> str:
            if v is None:
                return "-"
            return str(numbers.setdefault(v, len(numbers)))

        for v in self.inputs:
            parts.append(f"{number(v)}:{v.type}")
        for node in self.nodes:
            read = ",".join(map(number, node.operands))
            results = ",".join(f"{number(v)}:{v.type}" for v in node.results)
            mark = ("!" if node in self.in_bounds else "") + str(self.runs.get(node, ""))
            parts.append(f"{results}={node.op.name}{mark}({read}|{attributes_text(node.attributes, {})})")
        parts.append(">" + ",".join(map(number, self.outputs)) + "@" + number(self.anchor.results[0]))
        return ";".join(parts)

    def name(self) -> str:
        """Return a readable name: the names of the operations, only the last ones if there are many."""
        words: dict[str, None] = {}
        for node in self.nodes:
            if node.op not in SILENT:
                words[node.op.name] = None
        selection = list(words)[-4:] or [self.anchor.op.name]
        return "_".join(name.rpartition(".")[2] for name in selection)


@dataclass(frozen=True)
class Lowering:
    """The template of an operation that is not element-wise, and the fusion it supports."""

    template: Template
    is_producer: bool  # supports an epilogue of element-wise operations
    reads_once: bool  # reads each element of the operand once, so that its producers can be fused
    scratch: Callable[[Kernel, Any], list[Value]] | None
    packing: Callable[[Kernel, Array, Any], Pack | None] | None
    computes_terms: bool = False  # the epilogue computes its other operands, such as dequantized bytes


LOWERINGS: Registry[Lowering] = Registry("kernels in C")


def lowers(
    *ops: Op,
    is_producer: bool = False,
    reads_once: bool = False,
    scratch: Any = None,
    packing: Any = None,
    computes_terms: bool = False,
) -> Callable[[Template], Template]:
    """Register a template for operations. ``packing`` returns how a known second operand is packed."""

    def register(template: Template) -> Template:
        LOWERINGS(*ops)(Lowering(template, is_producer, reads_once, scratch, packing, computes_terms))
        return template

    return register
