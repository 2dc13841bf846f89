"""SVG drawing of a graph or of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from mithril import Graph, Node, Value
from mithril.backend import format_bytes, nbytes
from mithril.compiler import ProgramMemory, largest_sizes
from mithril.graph import is_static, visible
from mithril_tools.visualization.kinds import (
    COLORS,
    STYLE,
    attributes_of,
    kind_of,
    kind_of_layer,
    summary_of,
    title_of,
)
from mithril_tools.visualization.layout import Box, place

CHARACTER, LINE = 6.6, 15.0  # of the 11-pixel font
CROWDED = 60  # operations above which whole layers are drawn, unless depth= is set
ARROW = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#777"/></marker></defs>'
)
FEW = 30  # boxes of a drawing of layers, which then fits on a page


@dataclass(frozen=True)
class DrawingStyle:
    """Drawing style of the boxes. ``depth`` draws layers down to that level as one box each."""

    show_shapes: bool = True
    show_types: bool = True
    depth: int | None = None
    times: Mapping[str, float] = field(default_factory=dict)  # seconds by layer path
    memory: ProgramMemory | None = None  # of the program whose graph is drawn

    def sizes(self) -> Mapping[str, int] | None:
        """Return the sizes at which memory is shown: the largest ones, or None if there is no bound."""
        return None if self.memory is None else largest_sizes(self.memory.graph)

    def allocated(self) -> Mapping[Node, int]:
        """Return the bytes that each operation allocates, as in ``compiled.memory_report()``."""
        sizes = self.sizes()
        return {} if self.memory is None or sizes is None else self.memory.allocated(sizes)

    def caption(self) -> str:
        """Return the figure of the memory plan."""
        sizes = self.sizes()
        if self.memory is None:
            return ""
        if sizes is None:
            return "memory: depends on a size without a bound"
        use = self.memory.at(sizes)
        bounds = "".join(f" at {name}={size}" for name, size in sizes.items())
        return f"memory{bounds}: values {format_bytes(use.workspace)}, peak {format_bytes(use.peak)}, {use.label}"


@dataclass(eq=False)
class Item:
    """A box before layout: the thing it represents, and the values it produces and uses."""

    key: str
    lines: list[str]
    kind: str
    makes: list[Value] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)


def svg(graph: Graph, look: DrawingStyle | None = None, under: str = "") -> str:
    """Draw the graph; with ``under``, only the body of the layer with that path."""
    look = look or DrawingStyle()
    items = _items(graph, look, under)
    maker = {id(v): k for k, item in enumerate(items) for v in item.makes}
    edges: dict[tuple[int, int], None] = {}
    for k, item in enumerate(items):
        for v in item.reads:
            source = maker.get(id(v))
            if source is not None and source != k:
                edges[min(source, k), max(source, k)] = None
    boxes = [Box(max(len(line) for line in item.lines) * CHARACTER + 18, len(item.lines) * LINE + 10) for item in items]
    layout = place(boxes, list(edges))
    legend, width = _legend([item.kind for item in items], layout.height)
    width, height = max(layout.width, width), layout.height + 24
    size, view = f'width="{width:.0f}" height="{height:.0f}"', f'viewBox="0 0 {width:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="monospace" font-size="11">',
        f"<title>{escape(visible(under or title(graph)))}</title>",
        f"<style>{STYLE}</style>",
        ARROW,
    ]
    parts += map(_edge, layout.routes)
    for item, box in zip(items, boxes, strict=True):
        parts.append(_box(item, box))
    return "\n".join([*parts, legend, "</svg>"])


def title(graph: Graph) -> str:
    """Return the title of a drawing."""
    return f"{graph.name}: gradients" if graph.with_role("cotangent") else graph.name


def _legend(kinds: Sequence[str], y: float) -> tuple[str, float]:
    """Return the colors with their kinds in a row, and its width."""
    parts, x = [], 10.0
    for kind in (kind for kind in COLORS if kind in kinds):
        parts.append(f'<rect x="{x:.1f}" y="{y + 4:.1f}" width="10" height="10" {_fill(kind)} stroke="#888"/>')
        parts.append(f'<text x="{x + 14:.1f}" y="{y + 13:.1f}" fill="#555">{kind}</text>')
        x += 26 + len(kind) * CHARACTER
    return f"<g>{''.join(parts)}</g>", x


def _fill(kind: str) -> str:
    return f'class="{kind.replace(" ", "-")}" fill="{COLORS[kind][0]}"'


def _edge(route: list[tuple[float, float]]) -> str:
    (x, y), *rest = route
    path = [f"M{x:.1f} {y:.1f}"]
    for nx, ny in rest:
        middle = (y + ny) / 2
        path.append(f"C{x:.1f} {middle:.1f} {nx:.1f} {middle:.1f} {nx:.1f} {ny:.1f}")
        x, y = nx, ny
    return f'<path d="{"".join(path)}" fill="none" stroke="#999" marker-end="url(#a)"/>'


def _box(item: Item, box: Box) -> str:
    left = box.x - box.width / 2
    place = f'x="{left:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    parts = [f'<g><rect {place} rx="4" {_fill(item.kind)} stroke="#888"/>']
    for k, line in enumerate(item.lines):
        weight = ' font-weight="bold" class="head"' if k == 0 else ' fill="#555"'
        parts.append(
            f'<text x="{box.x:.1f}" y="{box.y + 5 + LINE * (k + 0.75):.1f}" text-anchor="middle"{weight}>'
            f"{escape(visible(line))}</text>"
        )
    return "".join([*parts, "</g>"])


def _type_lines(values: Sequence[Value], look: DrawingStyle) -> list[str]:
    """Describe the results of a box, such as ``float32 [8, 10]``."""
    lines = []
    for value in values:
        parts = [value.dtype.name] if look.show_types else []
        parts += ["[" + ", ".join(map(str, value.shape)) + "]"] if look.show_shapes else []
        if parts:
            lines.append(" ".join(parts))
    return lines[:4]


# -- what is drawn ------------------------------------------------------------------------------------------------
def _items(graph: Graph, look: DrawingStyle, under: str) -> list[Item]:
    """Inputs (parameters are named in their reader's box), operations or whole layers, outputs."""
    nodes = [n for n in graph.nodes if not n.is_constant and _inside(n.origin.path, under)]
    depth = look.depth
    if depth is None and len(nodes) > CROWDED:
        depth = page_depth(nodes, under)
    level = (under.count(".") + 1 if under else 0) + depth if depth is not None else None
    params = {i.value: i.name for i in graph.with_role("param")}
    items: list[Item] = []
    if not under:
        items += [
            _input(i.name, i.value, i.role, look) for i in graph.inputs if i.role in ("input", "cotangent", "state")
        ]
    groups: dict[str, Item] = {}
    allocated = look.allocated()
    for k, node in enumerate(nodes):
        path = _path_prefix(node.origin.path, level) if level is not None else ""
        single = level is None or node.origin.path.count(".") + 1 < level or not path or path == under
        key = f"#{k}" if single else path
        item = groups.get(key)
        if item is None:
            item = groups[key] = _operation(node, look, params, allocated) if single else _layer(path, look)
            items.append(item)
        item.makes += node.results
        item.reads += [v for v in node.operands if v is not None]
    for path, item in groups.items():
        if not path.startswith("#"):
            body = [n for n in nodes if _inside(n.origin.path, path)]
            item.kind = kind_of_layer(body)
            item.lines += _layer_lines(body, params, allocated)
            external_uses = {v for n in nodes if not _inside(n.origin.path, path) for v in n.operands} | set(
                graph.outputs
            )
            item.lines += _type_lines([v for v in item.makes if v in external_uses], look)
    items = _in_order(items)
    if not under and (caption := look.caption()):
        items.append(Item(caption, [caption], "output"))
    if not under:
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            items.append(Item(name, [name, "output"], "output", reads=[value]))
    return items


def page_depth(nodes: Sequence[Node], under: str = "") -> int:
    """Return the deepest level at which the layers are few enough for one page, at least 1."""
    below = under.count(".") + 1 if under else 0
    deepest = max((n.origin.path.count(".") + 1 for n in nodes if n.origin.path), default=1)
    for depth in range(deepest - below, 1, -1):
        if len({_path_prefix(n.origin.path, below + depth) or id(n) for n in nodes}) <= FEW:
            return depth
    return 1


def _in_order(items: list[Item]) -> list[Item]:
    """Sort groups topologically. A layer used twice may be part of a cycle: there the input order counts."""
    maker = {id(v): k for k, item in enumerate(items) for v in item.makes}
    needs = [{maker[id(v)] for v in item.reads if id(v) in maker} - {k} for k, item in enumerate(items)]
    out: list[Item] = []
    state = [0] * len(items)  # 1 while its dependencies are being sorted, 2 when it is sorted
    for first in range(len(items)):
        stack = [first]
        while stack:
            k = stack[-1]
            if state[k] == 0:
                state[k] = 1
                stack += [n for n in sorted(needs[k], reverse=True) if state[n] == 0]
            else:
                stack.pop()
                if state[k] == 1:
                    state[k] = 2
                    out.append(items[k])
    return out


def _input(name: str, value: Value, role: str, look: DrawingStyle) -> Item:
    return Item(name, [name, role, *_type_lines([value], look)], role, [value])


def _operation(node: Node, look: DrawingStyle, params: Mapping[Value, str], allocated: Mapping[Node, int]) -> Item:
    lines = [title_of(node)]
    if node.origin.path:
        lines.append(node.origin.path)
    if attributes := attributes_of(node):
        lines.append(attributes)
    labels = [params[v].rpartition(".")[2] for v in node.operands if v is not None and v in params]
    if labels:
        lines.append(", ".join(labels))
    lines += _type_lines(node.results, look)
    if node in allocated:
        lines.append(format_bytes(allocated[node]) if allocated[node] else "view")
    return Item(node.op.name, lines, kind_of(node))


def _layer(path: str, look: DrawingStyle) -> Item:
    lines = [path]
    if path in look.times:
        lines.append(f"{1e3 * look.times[path]:.3g} ms")
    return Item(path, lines, "movement")


def _layer_lines(nodes: list[Node], params: Mapping[Value, str], allocated: Mapping[Node, int]) -> list[str]:
    lines = [f"{len(nodes)} operation{'s' * (len(nodes) != 1)}"]
    if summary := summary_of(nodes):
        lines.append(summary)
    weights: dict[Any, None] = dict.fromkeys(v for n in nodes for v in n.operands if v is not None and v in params)
    if weights and all(is_static(v.shape) for v in weights):
        lines.append(f"parameters {format_bytes(sum(nbytes(v.type) for v in weights))}")
    if allocated:
        lines.append(f"values {format_bytes(sum(allocated[n] for n in nodes))}")
    return lines


def _inside(path: str, under: str) -> bool:
    return not under or path == under or path.startswith(under + ".")


def _path_prefix(path: str, level: int) -> str:
    return ".".join(path.split(".")[:level]) if path else ""
