"""Kinds of operations, which color the boxes of drawings: in light and in dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mithril import Node
from mithril.graph import flops, is_layout, is_product, is_static

# kind -> fill in light and in dark
COLORS = {
    "input": ("#e8f0fe", "#1f3352"),
    "cotangent": ("#e8f0fe", "#1f3352"),
    "state": ("#fdf3d8", "#4a3d17"),
    "output": ("#e6f4ea", "#1d402a"),
    "product": ("#fde3cf", "#553018"),
    "elementwise": ("#e0f3f3", "#17403f"),
    "reduction": ("#fbe3ee", "#4d1f36"),
    "movement": ("#f1f3f4", "#2d3135"),
    "control flow": ("#ece4fb", "#37265c"),
}
STYLE = (
    "@media(prefers-color-scheme:dark){"
    + "".join(f".{kind.replace(' ', '-')}{{fill:{dark}}}" for kind, (_, dark) in COLORS.items())
    + "text{fill:#ddd}text.head{fill:#fff}path{stroke:#888}}"
)


def kind_of(node: Node) -> str:
    """Return the kind of an operation, by its declaration."""
    if node.regions:
        return "control flow"
    if node.op.elementwise:
        return "elementwise"
    if is_product(node):
        return "product"
    return "movement" if node.op.moves or is_layout(node) or not node.operands else "reduction"


def kind_of_layer(nodes: Sequence[Node]) -> str:
    """Return the kind of the operation of a layer that computes most."""

    def work(node: Node) -> int:
        count = flops(node)
        return int(count) if is_static((count,)) else 0

    return kind_of(max(nodes, key=work))


def title_of(node: Node) -> str:
    """Return the name of an operation with the activation that is fused into it."""
    activation = node.attributes.get("activation", "none")
    return node.op.name if activation in ("none", None) else f"{node.op.name}, {activation}"


def attributes_of(node: Node) -> str:
    """Return the short attributes that differ from their defaults, such as ``stride=(2, 2)``."""
    words = []
    for name, value in node.attributes.items():
        declared = node.op.attributes.get(name)
        if name not in ("activation", "shape", "dtype", "value") and value != getattr(declared, "default", None):
            words.append(f"{name}={value}")
    text = " ".join(words)
    return text if len(text) <= 40 else text[:39] + "…"


def summary_of(nodes: Sequence[Node]) -> str:
    """Return the operations of a layer other than movements, the most frequent first."""
    counts = Counter(title_of(node) for node in nodes if kind_of(node) != "movement")
    words = [f"{count} {name}" if count > 1 else name for name, count in counts.most_common(3)]
    return "; ".join(words) + ("; …" if len(counts) > 3 else "")
