"""Check that a framework's automatic differentiation of the generated code yields the gradients of the graph."""

from __future__ import annotations

from mithril.derivatives.gradient_graph import gradients
from mithril.derivatives.reverse import live_nodes
from mithril.graph import GradientError, Graph, Input, Node, Output, Value, iterate, operation

SURROGATE = "surrogate"  # tag of a node, and of its decomposition: the operation with a custom gradient


def with_marked_surrogates(graph: Graph) -> Graph:
    """Tag the nodes with custom gradients, so that they are recognized once they are decomposed."""
    if not any(node.op.surrogate for node, _ in iterate(graph)):
        return graph
    nodes = []
    for node in graph.nodes:
        if node.regions:
            node = node.replaced(regions=tuple(map(with_marked_surrogates, node.regions)))
        if node.op.surrogate:
            node = node.replaced(tags={**node.tags, SURROGATE: node.op.name})
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes))


def require_framework_gradients(graph: Graph, subject: str, hint: str, custom: bool = False) -> None:
    """Raise GradientError if ``subject``, a framework, would silently return other gradients or zeros.

    With ``custom`` the framework calls the custom gradients of operations.
    """
    for node, _ in iterate(graph) if not custom else ():
        name = node.tags.get(SURROGATE) or (node.op.name if node.op.surrogate else None)
        if name is not None:
            raise GradientError(
                f"{subject} would ignore the custom gradient of '{name}'",
                facts=[str(node.origin), operation(str(name)).doc.splitlines()[0]],
                hint=hint,
            )
    for name, node in cut_parameters(graph).items():
        raise GradientError(
            f"{subject} would return zeros as the gradient of '{name}': '{node.op.name}' has no gradient",
            facts=[str(node.origin), node.op.gradient_reason],
            hint=f"exclude it: ml.compile(model, ..., trainable=[...]) without '{name}'",
        )


def operation_gradient(node: Node) -> Graph:
    """Return the gradients of one operation for its float operands, a function of operands, results and cotangents."""
    operands = [None if v is None else Value(f"operand_{k}", v.type) for k, v in enumerate(node.operands)]
    results = [Value(f"result_{k}", v.type) for k, v in enumerate(node.results)]
    call = node.replaced(operands=tuple(operands), results=tuple(results))
    inputs = tuple(Input(v) for v in operands if v is not None)
    graph = Graph(inputs, (call,), tuple(Output(v, v.name) for v in results))
    names = [i.name for i in inputs if i.type.dtype.is_float]
    full = gradients(graph, [v.name for v in results if v.dtype.is_float], names)
    if call not in full.nodes:  # a composite without a rule: its body is computed again
        results = [Value(v.name, v.type) for v in results]
    outputs = full.results[len(node.results) :]
    nodes = live_nodes([n for n in full.nodes if n is not call], [r.value for r in outputs])
    arguments = (*inputs, *(i for i in full.inputs if i.role == "constant"), *map(Input, results))
    return Graph((*arguments, *full.with_role("cotangent")), tuple(nodes), outputs)


def cut_parameters(graph: Graph) -> dict[str, Node]:
    """Return the trainable parameters that affect outputs only through operations without gradients, with the first."""
    reaches: dict[Value, int] = {}  # bits of the parameters that a value depends on
    moves: dict[Value, int] = {}  # bits of those that gradients flow back to
    cuts: dict[int, Node] = {}
    params = [i for i in graph.with_role("param") if i.type.dtype.is_float and i.tags.get("trainable", True)]
    for k, i in enumerate(params):
        reaches[i.value] = moves[i.value] = 1 << k
    for node in graph.nodes:
        reached = differing = 0
        for v in node.operands:
            if v is not None:
                reached |= reaches.get(v, 0)
                differing |= moves.get(v, 0)
        if not reached:
            continue
        has_gradient = node.op.gradient is not None or not node.op.gradient_reason
        for v in node.results:
            reaches[v] = reached
            moves[v] = differing if has_gradient and v.dtype.is_float else 0
            cuts.update((k, node) for k in range(len(params)) if differing & ~moves[v] & (1 << k) and k not in cuts)
    outputs = [r.value for r in graph.results if r.role == "output"]
    reached = differing = 0
    for v in outputs:
        reached |= reaches.get(v, 0)
        differing |= moves.get(v, 0)
    return {i.name: cuts[k] for k, i in enumerate(params) if reached & ~differing & (1 << k)}
