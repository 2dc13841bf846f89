"""A graph as a picture in the terminal: one line per operation, lanes for the values that are alive beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from mithril.ir import Graph, Node, Value


def draw(graph: Graph) -> list[Text]:
    """Lines of the picture. Parameters and constants are named on the line that reads them, not drawn as lanes."""
    lanes: list[Value | None] = []
    last_use = {v: k for k, node in enumerate(graph.nodes) for v in node.operands if v is not None}
    kept = set(graph.outputs)
    lines = []
    for given in graph.inputs:
        if given.role in ("input", "state"):
            lane = _open(lanes, given.value)
            lines.append(_line(_row(lanes, lane, [], []), given.role, str(given.type), given.name))
    for k, node in enumerate(graph.nodes):
        read = [lanes.index(v) for v in dict.fromkeys(node.operands) if v is not None and v in lanes]
        if not read and not node.operands:
            continue  # a scalar constant is named where it is read
        ending = [lane for lane in read if last_use[_value(lanes, lane)] == k and _value(lanes, lane) not in kept]
        going_on = [lane for lane in read if lane not in ending]
        result = node.results[0]
        own = ending[0] if ending else _open(lanes, result)
        row = _row(lanes, own, ending, going_on)
        for lane in ending:
            lanes[lane] = None
        lanes[own] = result
        lines.append(_line(row, node.op.name, str(result.type), _note(graph, node)))
        if result not in last_use and result not in kept:
            lanes[own] = None
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
    """The leftmost free lane, taken by ``value``."""
    if None in lanes:
        lane = lanes.index(None)
        lanes[lane] = value
    else:
        lane = len(lanes)
        lanes.append(value)
    return lane


def _row(lanes: list[Value | None], own: int, ending: list[int], going_on: list[int]) -> str:
    """``│ ●─╯``: the operation's own lane, those that end in it, and those it reads that go on."""
    touched = [own, *ending, *going_on]
    left, right = min(touched), max(touched)
    cells = []
    for lane, value in enumerate(lanes):
        if lane == own:
            sign = "●"
        elif lane in ending:
            sign = "╯" if lane > own else "╰"
        elif lane in going_on:
            sign = "┤" if lane > own else "├"
        elif value is not None:
            sign = "┼" if left < lane < right else "│"
        else:
            sign = "─" if left < lane < right else " "
        cells.append(sign + ("─" if left <= lane < right else " "))
    return "".join(cells)


def _note(graph: Graph, node: Node) -> str:
    """The layer, and the parameters it reads."""
    params = [
        v.name for v in node.operands if v is not None and v in graph.input_of and graph.input_of[v].role == "param"
    ]
    path = node.origin.path if node.origin else ""
    return "  ".join(part for part in (path, ", ".join(params)) if part)


def _line(row: str, what: str, type_: str, note: str) -> Text:
    return Text.assemble((row.rstrip(), "cyan"), " ", (what, "bold"), "  ", (type_, "green"), "  ", (note, "dim"))
