"""Mutable view of a graph: use lists, replace, insert, erase; ``freeze`` returns an immutable graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mithril.graph.builder import Builder
from mithril.graph.core import Graph, Input, Node, Value
from mithril.graph.errors import GraphError


class Slot:
    """A position in the linked list of nodes; the node in it can be replaced."""

    __slots__ = ("after", "before", "node")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.before: Slot = self
        self.after: Slot = self


class Editor:
    """A graph being edited. Each edit takes time proportional to the affected nodes, not to the graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs: list[Input] = list(graph.inputs)
        self.outputs: list[Value] = list(graph.outputs)
        self.guards = dict.fromkeys(graph.guards)
        self.changed = False
        self._names = {i.name: 1 for i in graph.inputs} | {v.name: 1 for n in graph.nodes for v in n.results}
        self._constants = {i.value: i.data for i in graph.inputs if i.data is not None}
        self._ends = Slot(None)  # sentinel of a circular list: after it the first node, before it the last
        self._slots: dict[Value, Slot] = {}
        # Uses are by slot, not by node: a node that is replaced keeps its slot, so that uses of its
        # operands stay valid.
        self._uses: dict[Value, dict[Slot, None]] = {}
        for node in graph.nodes:
            self._link(Slot(node), self._ends)
        self._output_uses: dict[Value, list[int]] = {}
        for k, value in enumerate(self.outputs):
            self._output_uses.setdefault(value, []).append(k)

    # -- reading -----------------------------------------------------------------------------------------------------
    def nodes(self) -> Iterator[Node]:
        """Iterate over the nodes in order; the current one may be erased or replaced."""
        slot = self._ends.after
        while slot is not self._ends:
            # Read before the caller edits, because an erased node leaves the list.
            following = slot.after
            if slot.node is not None:
                yield slot.node
            slot = following

    def producer(self, value: Value) -> Node | None:
        slot = self._slots.get(value)
        return slot.node if slot else None

    def users(self, value: Value) -> list[Node]:
        return [slot.node for slot in self._uses.get(value, ()) if slot.node is not None]

    def use_count(self, value: Value) -> int:
        """Return the number of nodes and outputs that use the value."""
        return len(self._uses.get(value, ())) + len(self._output_uses.get(value, ()))

    def is_output(self, value: Value) -> bool:
        return value in self._output_uses

    def data_of(self, value: Value) -> Any:
        """Return the elements of a constant input, or None for any other value."""
        return self._constants.get(value)

    def holds(self, node: Node) -> bool:
        slot = self._slots.get(node.result) if node.results else None
        return slot is not None and slot.node is node

    # -- changing ----------------------------------------------------------------------------------------------------
    def replace_value(self, old: Value, new: Value) -> list[Node]:
        """Replace every use of ``old`` by ``new``, a value of the same type; return the rewritten nodes."""
        if old is new:
            return []
        if old.type != new.type:
            raise GraphError(f"cannot replace %{old.name}: {old.type} by %{new.name}: {new.type}: the types differ")
        touched = []
        for slot in list(self._uses.get(old, ())):
            assert slot.node is not None
            operands = tuple(new if v is old else v for v in slot.node.operands)
            touched.append(self._exchange(slot, slot.node.replaced(operands=operands)))
        for k in self._output_uses.pop(old, ()):
            self.outputs[k] = new
            self._output_uses.setdefault(new, []).append(k)
            self.changed = True
        return touched

    def replace_node(self, node: Node, new: Node) -> Node:
        """Replace a node by one with the same results, in its position."""
        return self._exchange(self._slot(node), new)

    def erase(self, node: Node) -> None:
        """Remove an unused node."""
        for value in node.results:
            if self.use_count(value):
                raise GraphError(f"cannot erase '{node.op.name}': %{value.name} is still used")
        slot = self._slot(node)
        self._forget(slot)
        slot.before.after, slot.after.before = slot.after, slot.before
        slot.node = None
        self.changed = True

    def erase_dead(self, node: Node) -> None:
        """Remove a node if it is unused, and transitively its operands that become unused."""
        stack = [node]
        while stack:
            dead = stack.pop()
            if not self.holds(dead) or any(self.use_count(v) for v in dead.results):
                continue
            operands = [self.producer(v) for v in dead.operands if v is not None]
            self.erase(dead)
            stack.extend(n for n in operands if n is not None)

    @contextmanager
    def before(self, node: Node | None) -> Iterator[Builder]:
        """Enter a builder whose nodes are inserted right before ``node``, or at the end if it is None."""
        anchor = self._ends if node is None else self._slot(node)
        builder = Builder(self.graph.name)
        builder._used = self._names
        if node is not None:
            builder.origin, builder.tags = node.origin, node.tags
        with builder:
            yield builder
        for i in builder.inputs:
            self.inputs.append(i)
            if i.data is not None:
                self._constants[i.value] = i.data
        for new_node in builder.nodes:
            self._link(Slot(new_node), anchor)
        self.guards.update(builder.guards)
        self.changed = self.changed or bool(builder.nodes or builder.inputs)

    def freeze(self) -> Graph:
        """Return the new graph, or the original object if nothing changed."""
        # The same object tells pass managers and caches that nothing has to be verified or compiled
        # again.
        if not self.changed:
            return self.graph
        return Graph(
            tuple(self.inputs),
            tuple(self.nodes()),
            self.graph.carrying(self.outputs),
            self.graph.name,
            tuple(self.guards),
        )

    # -- the linked list ---------------------------------------------------------------------------------------------
    def _slot(self, node: Node) -> Slot:
        slot = self._slots.get(node.result)
        if slot is None or slot.node is not node:
            raise GraphError(f"'{node.op.name}' is no longer in the graph")
        return slot

    def _link(self, slot: Slot, anchor: Slot) -> None:
        slot.before, slot.after = anchor.before, anchor
        anchor.before.after = slot
        anchor.before = slot
        self._remember(slot)

    def _remember(self, slot: Slot) -> None:
        assert slot.node is not None
        for value in slot.node.results:
            self._slots[value] = slot
        for operand in slot.node.operands:
            if operand is not None:
                self._uses.setdefault(operand, {})[slot] = None

    def _forget(self, slot: Slot) -> None:
        assert slot.node is not None
        for value in slot.node.results:
            self._slots.pop(value, None)
        for operand in slot.node.operands:
            if operand is not None:
                self._uses.get(operand, {}).pop(slot, None)

    def _exchange(self, slot: Slot, node: Node) -> Node:
        self._forget(slot)
        slot.node = node
        self._remember(slot)
        self.changed = True
        return node


Graph._editor = Editor
