"""Updates of small parameters as one call of ``torch._foreach_*`` for each operation, instead of one per parameter.

A training step skips an update by one ``if`` per parameter. Those with the same condition are merged, as long as their
values fit the cache of a core, and equal elementwise operations of the merged branches become one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.graph import Attribute, Graph, Input, Node, Op, Output, TensorType, Value
from mithril_torch.fusion.subgraph_fusion import lerp

ELEMENTS = 1 << 13  # of a small value: the time of an operation on it is mostly that of a call
TOTAL = 1 << 16  # elements of the results of merged branches, which fit the second-level cache with their operands
DTYPES = ("float32", "float64")


def _infer(types: Sequence[TensorType | None], attributes: Mapping[str, Any], regions: Any) -> Any:
    return tuple(types[: attributes["count"]])


each = Op(
    name="torch.each",
    operands=("xs",),
    optional=frozenset(),
    variadic=True,
    attributes={
        n: Attribute(n, kind)
        for n, kind in (("name", "str"), ("count", "int"), ("number", "float"), ("inplace", "bool"))
    },
    reference=lambda *given, **settings: NotImplemented,
    declared_at=__name__,
    doc="",
    infer_rule=_infer,
)
"""An elementwise operation on lists of ``count`` values each; a scalar operand or ``number`` follows the lists."""

BY_SCALARS = (ops.add, ops.mul, ops.div)  # with overloads for a scalar that is a tensor
NAMES = {
    ops.add: "add",
    ops.sub: "sub",
    ops.mul: "mul",
    ops.div: "div",
    ops.sqrt: "sqrt",
    ops.square: "mul",
    ops.neg: "neg",
    ops.abs: "abs",
    ops.exp: "exp",
    ops.sign: "sign",
    ops.maximum: "maximum",
    ops.minimum: "minimum",
    lerp: "lerp",
}


def with_lists(graph: Graph) -> Graph:
    """Merge the branches of small values with one condition, and operate on lists of values in them."""
    groups = _groups(graph)
    if not groups:
        return graph
    donated = _spent_arguments(graph)
    last = {group[-1]: group for group in groups}
    merged = {node for group in groups for node in group}
    nodes = []
    for node in graph.nodes:
        if node in last:
            nodes.append(_merged(last[node], donated))
        elif node not in merged:
            nodes.append(node)
    return graph.replaced(nodes=tuple(nodes))


def _spent_arguments(graph: Graph) -> set[Value]:
    """Return the donated arguments with one use, which may overwrite them."""
    uses = Counter([*(v for node in graph.nodes for v in node.operands), *graph.outputs])
    return {i.value for i in graph.inputs if i.tags.get("donated") and uses[i.value] == 1}


# -- branches ---------------------------------------------------------------------------------------------------------
def _groups(graph: Graph) -> list[list[Node]]:
    """Return the branches to merge: their results are read after the last of them only, or not at all."""
    open_groups: dict[Value, tuple[list[Node], int]] = {}
    groups: list[list[Node]] = []
    pending: dict[Value, Value] = {}  # result of a branch in an open group -> the condition of the group
    for node in graph.nodes:
        for v in node.operands:
            # A read of a merged result before the last branch closes the group: the merged branch runs
            # where its last part was.
            if v in pending:
                group, _ = open_groups.pop(pending[v])
                groups.append(group)
                pending = {r: c for r, c in pending.items() if c in open_groups}
        size = _size(node)
        if size is None:
            continue
        condition = node.operands[0]
        assert condition is not None
        group, total = open_groups.get(condition, ([], 0))
        # Beyond the cache the lists would be read from memory once per operation instead of once per
        # parameter.
        if total + size > TOTAL:
            groups.append(group)
            pending = {r: c for r, c in pending.items() if c is not condition}
            group, total = [], 0
        group.append(node)
        open_groups[condition] = group, total + size
        pending.update(dict.fromkeys(node.results, condition))
    groups += [group for group, _ in open_groups.values()]
    return [group for group in groups if len(group) > 1]


def _size(node: Node) -> int | None:
    """Return the number of elements of the results of a branch on small values, None for other nodes."""
    if node.op is not ops.if_op or any(n.regions for region in node.regions for n in region.nodes):
        return None
    total = 0
    for v in node.results:
        count = 1
        for size in v.shape:
            if not isinstance(size, int):
                return None
            count *= size
        if count > ELEMENTS:
            return None
        total += count
    return total


def _merged(group: Sequence[Node], donated: Container[Value]) -> Node:
    """Return one ``if`` for several with the same condition; it may overwrite ``donated`` operands."""
    condition = group[0].operands[0]
    outer = dict.fromkeys(v for node in group for v in node.operands[1:] if v is not None)
    regions = tuple(_joined([(node.regions[k], node.operands[1:]) for node in group], list(outer)) for k in (0, 1))
    results = tuple(v for node in group for v in node.results)
    owned = {i.value for i, v in zip(regions[0].arguments, outer, strict=True) if v in donated}
    # Only the branch that updates: the other one returns its operands.
    then = regions[0].replaced(nodes=tuple(_with_lists(regions[0], owned)))
    return group[-1].replaced(operands=(condition, *outer), results=results, regions=(then, regions[1]))


def _joined(parts: Sequence[tuple[Graph, Sequence[Value | None]]], outer: Sequence[Value | None]) -> Graph:
    """Return one region for several: an input for each outer value, and their nodes with these inputs."""
    graph = parts[0][0]
    inputs = {v: Input(Value(v.name, v.type)) for v in outer if v is not None}
    constants: list[Input] = []
    nodes: list[Node] = []
    results: list[Output] = []
    for region, operands in parts:
        constants += region.with_role("constant")
        replaced = {i.value: inputs[v].value for i, v in zip(region.arguments, operands, strict=True) if v is not None}
        for node in region.nodes:
            nodes.append(
                node.replaced(operands=tuple(replaced.get(v, v) if v is not None else v for v in node.operands))
            )
        for r in region.results:
            value = replaced.get(r.value, r.value)
            results.append(Output(value, f"{r.name}_{len(results)}", r.role, r.of))
    guards = tuple(dict.fromkeys(guard for region, _ in parts for guard in region.guards))
    return Graph((*inputs.values(), *constants), tuple(nodes), tuple(results), graph.name, guards)


# -- lists ------------------------------------------------------------------------------------------------------------
def _with_lists(graph: Graph, owned: Iterable[Value]) -> Iterable[Node]:
    """Return the nodes of a graph, by levels of dependence, with equal ones of a level as one operation on lists.

    The graph may overwrite the arguments ``owned``.
    """
    constants = {n.result: (n.attributes["value"], n.attributes["dtype"]) for n in graph.nodes if n.is_constant}
    # Operations of one level do not depend on each other, so that any of them may run together.
    level: dict[Value, int] = {}
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        depth = 0 if node.is_constant else 1 + max((level.get(v, 0) for v in node.operands if v is not None), default=0)
        level.update(dict.fromkeys(node.results, depth))
        key = _key(node, constants)
        alike.setdefault((depth, node if key is None else key), []).append(node)
    uses: dict[Value, int] = {}
    for v in (*(v for node in graph.nodes for v in node.operands if v is not None), *graph.outputs):
        uses[v] = uses.get(v, 0) + 1
    private = {v for v in owned if uses.get(v) == 1}  # and results of elementwise operations with one use
    nodes: list[Node] = []
    for (_, key), group in sorted(alike.items(), key=lambda item: item[0][0]):
        if isinstance(key, Node) or len(group) < 2:
            nodes += group
        else:
            nodes.append(_listed(group, constants, private))
        new = [v for node in group if node.op in NAMES for v in node.results]
        private.update(v for v in new if uses.get(v) == 1)
    return nodes


def _key(node: Node, constants: Mapping[Value, Any]) -> Any:
    """Return a key that is equal for nodes that one call can compute, or None."""
    if node.op not in NAMES or node.result.dtype.name not in DTYPES or not node.result.shape:
        return None
    kinds: list[Any] = []
    for v in node.operands:
        if v is None:
            return None
        if v.type == node.result.type:
            kinds.append("list")
        elif v.shape == () and v.dtype is node.result.dtype and (v in constants or node.op in BY_SCALARS):
            kinds.append(constants.get(v, v))
        else:
            return None
    if kinds[0] != "list":  # a scalar follows the list
        if node.op not in (ops.add, ops.mul) or kinds[1] != "list":
            return None
        kinds.reverse()
    return node.op, node.result.dtype, *kinds, *node.attributes.values()


def _listed(group: Sequence[Node], constants: Mapping[Value, Any], private: set[Value]) -> Node:
    """Return one operation on lists; it overwrites its first operands if nothing else reads them."""
    first = group[0]
    columns = [[v for v in node.operands if v is not None] for node in group]
    columns = [sorted(row, key=lambda v: v.shape == ()) for row in columns]  # only of commutative operations
    if first.op is ops.square:
        columns = [[row[0], row[0]] for row in columns]
    lists = [list(column) for column in zip(*columns, strict=True) if column[0].shape != ()]
    scalars = [v for v in columns[0] if v.shape == () and v not in constants]
    number = next((constants[v][0] for v in columns[0] if v in constants), None)
    # A square has its operand twice in the lists: the multiplication would read elements that are
    # overwritten already.
    inplace = first.op is not ops.square and all(v in private for v in lists[0])
    attributes = {"name": NAMES[first.op], "count": len(group), "number": number, "inplace": inplace}
    operands = (*(v for column in lists for v in column), *scalars)
    results = tuple(node.result for node in group)
    return Node(each, operands, attributes, results, origin=first.origin, tags=first.tags)


def add_rows(table: Lowerings) -> None:
    """Add the lowering row of operations on lists to ``table``."""
    table.function(each)(_each)


def _each(call: Call) -> str | None:
    count, texts = call.attributes["count"], [str(o) for o in call.operands]
    lists = [f"[{', '.join(texts[k : k + count])}]" for k in range(0, len(texts) - count + 1, count)]
    rest = texts[len(lists) * count :] + (
        [] if call.attributes["number"] is None else [call.literal(call.attributes["number"])]
    )
    suffix = "_" if call.inplace else ""
    text = f"torch._foreach_{call.attributes['name']}{suffix}({', '.join([*lists, *rest])})"
    if not call.inplace:
        return text
    call.line(text)
    return ", ".join(texts[:count])
