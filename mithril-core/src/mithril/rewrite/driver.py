"""Applying rules until none matches: a worklist, readers before what they read, so that the largest match wins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mithril.base.errors import RewriteError
from mithril.ir import Graph, Node, Value
from mithril.ir.editor import Editor

if TYPE_CHECKING:
    from mithril.rewrite.rules import Rule

Observer = Callable[["Rule", Node, Value], None]
FUEL = 8  # applications per node of the graph before rules are taken to undo each other


def rewrite(graph: Graph, rules: Sequence[Rule], observe: Observer | None = None) -> Graph:
    """The graph with ``rules`` applied wherever they match, bodies of control flow included."""
    by_op: dict[str, list[Rule]] = {}
    for one in rules:
        by_op.setdefault(one.pattern.op, []).append(one)
    reach = max((one.pattern.depth for one in rules), default=1)
    made: dict[int, Graph] = {}
    for current in _inner_first(graph):
        made[id(current)] = _Worklist(_with_bodies(current, made), by_op, reach, observe).run()
    return made[id(graph)]


def _inner_first(graph: Graph) -> list[Graph]:
    """A graph and all bodies within it, each after those it holds."""
    found, pending = [], [graph]
    while pending:
        current = pending.pop()
        found.append(current)
        pending.extend(region for node in current.nodes for region in node.regions)
    return found[::-1]


def _with_bodies(graph: Graph, made: dict[int, Graph]) -> Graph:
    """The graph with its nodes' bodies exchanged for those already rewritten."""
    changed = False
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.regions:
            regions = tuple(made[id(r)] for r in node.regions)
            if any(new is not old for new, old in zip(regions, node.regions, strict=True)):
                node = node.replaced(regions=regions)
                changed = True
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes)) if changed else graph


class _Worklist:
    def __init__(self, graph: Graph, by_op: dict[str, list[Rule]], reach: int, observe: Observer | None) -> None:
        self.graph = graph
        self.by_op = by_op
        self.reach = reach
        self.observe = observe
        self.fuel = FUEL * len(graph.nodes) + 64
        self.recent: deque[str] = deque(maxlen=6)

    def run(self) -> Graph:
        if not any(node.op.name in self.by_op for node in self.graph.nodes):
            return self.graph
        editor: Editor = self.graph.edit()
        pending = {node.result: None for node in self.graph.nodes if node.op.name in self.by_op}
        while pending:
            value, _ = pending.popitem()  # the last: readers first
            node = editor.producer(value)
            if node is None or node.result is not value:
                continue  # gone with an earlier match
            done = self._apply_one(editor, node)
            if done is not None:
                pending.update(self._affected(editor, *done))
        return editor.freeze()

    def _apply_one(self, editor: Editor, node: Node) -> tuple[Value, list[Node]] | None:
        for one in self.by_op.get(node.op.name, ()):
            done = one.apply(editor, node)
            if isinstance(done, str):
                continue
            self.recent.append(one.name)
            self.fuel -= 1
            if self.fuel < 0:
                raise RewriteError(
                    "rewriting does not come to an end: rules undo each other, or one makes what it matches",
                    facts=[f"the last ones applied: {', '.join(self.recent)}"],
                )
            if self.observe is not None:
                self.observe(one, node, done[0])
            return done
        return None

    def _affected(self, editor: Editor, new: Value, readers: list[Node]) -> dict[Value, None]:
        """Nodes whose match may have changed: what was made, what reads it within reach, and what lies below it."""
        found: dict[Value, None] = {}
        above = readers
        for step in range(self.reach - 1):
            results = [v for node in above for v in node.results]
            found.update(dict.fromkeys(results))
            if step + 2 < self.reach:
                above = [user for v in results for user in editor.users(v)]
        below = [new]
        for _ in range(self.reach):
            nodes = [n for n in map(editor.producer, below) if n is not None]
            found.update(dict.fromkeys(n.result for n in nodes))
            below = [v for n in nodes for v in n.operands if v is not None]
        return {
            v: None
            for v in reversed(found)
            if (node := editor.producer(v)) is not None and node.result is v and node.op.name in self.by_op
        }
