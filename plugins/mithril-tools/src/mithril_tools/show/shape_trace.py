"""``trace_shapes=True``: the derivation of each operation's shape, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from mithril.graph import Graph, Node, attribute_text, visible

if TYPE_CHECKING:
    from mithril.plugins import CompileContext


class ShapeTrace:
    """Observer that prints one line per operation as soon as shapes are inferred."""

    def __init__(self, context: CompileContext) -> None:
        self.console = Console(highlight=False)

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None:
        if name == "shapes" and graph is not None:
            for line in derivations(graph):
                self.console.print(Text(visible(line)), soft_wrap=True)

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        return None

    def end(self, result: Any, error: BaseException | None) -> None:
        return None


def derivations(graph: Graph) -> list[str]:
    """Yield inputs, then ``layer: op(x: f32[B, 8], axis=1) -> %y: f32[B]`` for every operation, then outputs and
    guards.
    """
    lines = [f"{i.role} {i.name}: {i.type}" for i in graph.arguments]
    layer = None
    for node in graph.nodes:
        if node.is_constant:
            continue
        if node.origin.path != layer:
            layer = node.origin.path
            lines.append(str(node.origin) if layer else "(outside any layer)")
        lines.append(f"  {_call(node)} -> " + ", ".join(f"%{v.name}: {v.type}" for v in node.results))
    lines += [f"output {name}: {v.type}" for name, v in zip(graph.output_names, graph.outputs, strict=True)]
    lines += [f"checked at each call: {guard}" for guard in graph.guards]
    return lines


def _call(node: Node) -> str:
    operands = ["none" if v is None else f"{v.name}: {v.type}" for v in node.operands]
    attributes = [f"{name}={attribute_text(value)}" for name, value in node.attributes.items()]
    return f"{node.op.name}({', '.join([*operands, *attributes])})"
