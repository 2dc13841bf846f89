"""Horizontal fusion: merge products that share an operand (Q, K, V) and split the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import Graph, Node, Value, ops, pass_
from mithril.graph import Editor, is_static, numel
from mithril.ops import ACTIVATIONS, concat, linear, split
from mithril.passes import RuleSet, rule

ROWS = 16  # of the operand: with fewer, concatenating the weights costs more than one call saves


@pass_(name="sibling-products", exact=False)
def sibling_products(graph: Graph) -> Graph:
    """Merge ``linear`` nodes that read the same value, such as queries, keys and values of an attention."""
    groups: dict[tuple[Value, bool, object], list[Node]] = {}
    for node in graph.nodes:
        if node.op is ops.linear and node.attributes["activation"] == "none" and _own_weights(graph, node):
            x = node.operands[0]
            assert x is not None
            groups.setdefault((x, node.operands[2] is not None, node.tags.get("backend")), []).append(node)
    selection = [nodes for (x, _, _), nodes in groups.items() if len(nodes) > 1 and _is_profitable(x)]
    if not selection:
        return graph
    editor = graph.edit()
    for nodes in selection:
        _merge(editor, nodes)
    result: Graph = editor.freeze()
    return result


def _own_weights(graph: Graph, node: Node) -> bool:
    """Whether weights and bias are inputs, and therefore available before the first of the products."""
    return all(v is None or v in graph.input_of for v in node.operands[1:])


def _is_profitable(x: Value) -> bool:
    return not is_static(x.shape) or int(numel(x.shape[:-1])) >= ROWS


def _merge(editor: Editor, nodes: Sequence[Node]) -> None:
    first = nodes[0]
    x = first.operands[0]
    sizes = tuple(n.result.shape[-1] for n in nodes)
    with editor.before(first):
        weights = concat(*[n.operands[1] for n in nodes], axis=0)
        bias = concat(*[n.operands[2] for n in nodes], axis=0) if first.operands[2] is not None else None
        parts = split(linear(x, weights, bias), sizes=sizes, axis=-1)
    for node, part in zip(nodes, parts, strict=True):
        editor.replace_value(node.result, part)
        editor.erase_dead(node)


# Activations that kernels of products apply before they store the result.
EPILOGUES = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")


def _merged(name: str, activation: Any) -> list[Any]:
    return [
        rule(
            lambda x, w, b: activation(linear(x, w, b)),
            lambda x, w, b: linear(x, w, b, activation=name),
            exact=False,
            name=f"linear and {name}",
        ),
        rule(
            lambda x, w: activation(linear(x, w, None)),
            lambda x, w: linear(x, w, activation=name),
            exact=False,
            name=f"linear without bias and {name}",
        ),
    ]


RULES = RuleSet("linear-activation", [r for name in EPILOGUES for r in _merged(name, ACTIVATIONS[name])])
