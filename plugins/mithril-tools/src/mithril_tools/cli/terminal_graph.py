"""Graph drawing for the terminal: one line per operation, one lane per live value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from mithril.graph import Graph, Node, Value


def draw(graph: Graph) -> list[Text]:
    """Return the lines of the drawing. Parameters and constants are named on the line of their user, without lanes."""
    lanes: list[Value | None] = []
    last_use = {v: k for k, node in enumerate(graph.nodes) for v in node.operands if v is not None}
    outputs = set(graph.outputs)
    lines = []
    for source in graph.inputs:
        if source.role in ("input", "cotangent", "state"):
            lane = _open(lanes, source.value)
            lines.append(_line(_row(lanes, lane, [], []), source.role, str(source.type), source.name))
    for k, node in enumerate(graph.nodes):
        read = [lanes.index(v) for v in dict.fromkeys(node.operands) if v is not None and v in lanes]
        if not read and not node.operands:
            continue  # a scalar constant is named where it is used
        ending = [lane for lane in read if last_use[_value(lanes, lane)] == k and _value(lanes, lane) not in outputs]
        going_on = [lane for lane in read if lane not in ending]
        result = node.results[0]
        op_lane = ending[0] if ending else _open(lanes, result)
        row = _row(lanes, op_lane, ending, going_on)
        for lane in ending:
            lanes[lane] = None
        lanes[op_lane] = result
        lines.append(_line(row, node.op.name, str(result.type), _note(graph, node)))
        if result not in last_use and result not in outputs:
            lanes[op_lane] = None
    for name, value in zip(graph.output_names, graph.outputs):
        lane = lanes.index(value) if value in lanes else _open(lanes, value)
        lines.append(_line(_row(lanes, lane, [], []), "output", str(value.type), name))
        if graph.outputs.count(value) == 1:
            lanes[lane] = None
    return lines


def _value(lanes: list[Value | None], lane: int) -> Value:
    value = lanes[lane]
    assert value is not None
    return value


def _open(lanes: list[Value | None], value: Value) -> int:
    """Assign ``value`` to the leftmost free lane and return its index."""
    if None in lanes:
        lane = lanes.index(None)
        lanes[lane] = value
    else:
        lane = len(lanes)
        lanes.append(value)
    return lane


def _row(lanes: list[Value | None], op_lane: int, ending: list[int], going_on: list[int]) -> str:
    """Draw ``│ ●─╯``: the operation's lane, the lanes that end in it, and the operands that stay alive."""
    touched = [op_lane, *ending, *going_on]
    left, right = min(touched), max(touched)
    cells = []
    for lane, value in enumerate(lanes):
        if lane == op_lane:
            sign = "●"
        elif lane in ending:
            sign = "╯" if lane > op_lane else "╰"
        elif lane in going_on:
            sign = "┤" if lane > op_lane else "├"
        elif value is not None:
            sign = "┼" if left < lane < right else "│"
        else:
            sign = "─" if left < lane < right else " "
        cells.append(sign + ("─" if left <= lane < right else " "))
    return "".join(cells)


def _note(graph: Graph, node: Node) -> str:
    """Describe the layer and the parameters that it reads."""
    params = [
        v.name for v in node.operands if v is not None and v in graph.input_of and graph.input_of[v].role == "param"
    ]
    path = node.origin.path if node.origin else ""
    return "  ".join(part for part in (path, ", ".join(params)) if part)


def _line(row: str, label: str, type_: str, note: str) -> Text:
    return Text.assemble((row.rstrip(), "cyan"), " ", (label, "bold"), "  ", (type_, "green"), "  ", (note, "dim"))
