"""The axes of a call: as its operation declares them or, for a composite without a declaration, derived from its body.

An axis of a composite is parallel if it is parallel in every node of the body that it passes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mithril.graph.axes_notation import parse_axes
from mithril.graph.axes_resolution import resolve
from mithril.graph.core import Graph, Node, Op, Value, types_of
from mithril.graph.declaration import limits_of
from mithril.graph.dims import Size, TensorType, numel
from mithril.graph.errors import MithrilError
from mithril.graph.guards import collect_guards
from mithril.graph.op_axes import WHOLE, Factors, OpAxes, unknown_axes

_CACHE: WeakKeyDictionary[Op, dict[Any, OpAxes]] = WeakKeyDictionary()
CACHED_CALLS = 4096  # per operation

# One use of a factor: the value, its axis, and the number of elements of the outer factors in that axis.
Occurrence = tuple[Value, int, int]


def axes_of(node: Node) -> OpAxes:
    """Return the axes of operands and results of a node that share a loop."""
    return call_axes(node.op, operand_types(node), node.attributes, [v.type for v in node.results])


def operand_types(node: Node) -> list[TensorType | None]:
    """Return the types of the operands, None for absent ones."""
    return types_of(node.operands)


def call_axes(
    op: Op,
    types: Sequence[TensorType | None],
    attributes: Mapping[str, Any],
    results: Sequence[TensorType] | None = None,
) -> OpAxes:
    """Return the axes of a call; undeclared ones follow from the body of a composite, else they are all "whole"."""
    cache = _CACHE.setdefault(op, {})
    # of operations with regions the results do not follow from types and attributes
    key = (tuple(types), tuple(attributes.values()), tuple(results or ()), limits_of(types))
    axes = cache.get(key)
    if axes is None:
        if len(cache) > CACHED_CALLS:
            cache.clear()
        with collect_guards():  # discarded: type inference already recorded them
            axes = cache[key] = _resolve(op, types, attributes, results or op.infer(types, attributes))
    return axes


def _resolve(
    op: Op, types: Sequence[TensorType | None], attributes: Mapping[str, Any], results: Sequence[TensorType]
) -> OpAxes:
    shapes, result_shapes = [None if t is None else t.shape for t in types], [t.shape for t in results]
    rule: Any = "... -> ..." if op.elementwise else op.declared_axes
    if rule is None and op.composite:
        return _body_axes(op, types, attributes)
    if callable(rule):
        rule = rule(shapes, attributes, result_shapes)
    if isinstance(rule, str):
        rule = resolve(parse_axes(rule), op.operands, shapes, attributes, result_shapes)
    return replace(rule or unknown_axes(shapes, result_shapes), moves=op.moves)


def flops(node: Node) -> Size:
    """Return the number of floating-point operations, which planners compare.

    They are those of ``counted_flops``; a primitive of which nothing says how many counts one per element.
    """
    total, unknown = _count(node)
    for inner in unknown:
        total = total + sum(numel(value.type.shape) for value in inner.results)
    return total


def counted_flops(node: Node) -> tuple[Size, tuple[str, ...]]:
    """Return the floating-point operations that are declared, and the names of primitives of unknown ones.

    They are as declared, else the sum over the body of a composite, or two per term of a product.
    """
    total, unknown = _count(node)
    return total, tuple(sorted({inner.op.name for inner in unknown}))


def _count(node: Node) -> tuple[Size, list[Node]]:
    op = node.op
    if op.cost is None and op.composite:
        total: Size = 0
        unknown: list[Node] = []
        for inner in op.decompose(operand_types(node), node.attributes).nodes:
            operations, more = _count(inner)
            total = total + operations
            unknown += more
        return total, unknown
    if op.cost is None and node.operands and not op.moves and op.infer_rule is None:
        axes = axes_of(node)
        return (axes.terms * 2, []) if axes.is_product else (0, [node])
    return op.declared_flops(operand_types(node), [v.type for v in node.results], node.attributes), []


# -- composites ------------------------------------------------------------------------------------------------------
def _body_axes(op: Op, types: Sequence[TensorType | None], attributes: Mapping[str, Any]) -> OpAxes:
    """Return the axes that follow from the body; all but the parallel ones are whole."""
    body = op.decompose(types, attributes)
    ties = _Ties(body)
    while True:
        axes, broken = _assemble(ties, types)
        if broken is None:
            broken = next((f for f in axes.parallel if not _holds(op, types, attributes, axes, f, ties)), None)
            if broken is None:
                return axes
        ties.fixed.add(int(broken.removeprefix("p")))


class _Ties:
    """Union-find of the factors in a body: nodes tie their occurrences into numbered groups."""

    def __init__(self, body: Graph) -> None:
        self.body = body
        self.parents: dict[Occurrence, Occurrence] = {}
        self.sizes: dict[Occurrence, int] = {}
        views: dict[tuple[Value, int], list[set[int]]] = {}  # offsets of the factors, for each user or producer
        tainted: set[Occurrence] = set()
        for node in body.nodes:
            axes = axes_of(node)
            for factor, occurrences in _occurrences(node, axes).items():
                size = axes.sizes[factor]
                for occurrence in occurrences:
                    self._tie(occurrences[0], occurrence)
                    if isinstance(size, int):
                        self.sizes[occurrence] = gcd(self.sizes.get(occurrence, 0), size)
                    else:
                        tainted.add(occurrence)
                if factor in axes.roles:
                    tainted.add(occurrences[0])
            for value, fs in _described(node, axes):
                for axis, factors in enumerate(fs):
                    views.setdefault((value, axis), []).append(set(_begins(axes, factors)))
        for value in body.outputs:
            for axis, size in enumerate(value.shape):
                if (value, axis) not in views and isinstance(size, int):  # an operand returned unchanged
                    self._tie((value, axis, 1), (value, axis, 1))
                    self.sizes[value, axis, 1] = size
        # A factor that some node does not distinguish cannot be split.
        for (value, axis), begins in views.items():
            for begin in begins[0].union(*begins) - begins[0].intersection(*begins):
                tainted.add((value, axis, begin))
        constants = {i.value for i in body.inputs if i.data is not None}
        roots = {self._root(p) for p in self.parents}
        numbers = {root: k for k, root in enumerate(roots)}
        self.groups = {p: numbers[self._root(p)] for p in self.parents}
        self.fixed = {self.groups[p] for p in self.parents if p in tainted or p[0] in constants}
        self.size_of: dict[int, int] = {}
        for occurrence, group in self.groups.items():
            self.size_of[group] = gcd(self.size_of.get(group, 0), self.sizes.get(occurrence, 0))

    def _root(self, occurrence: Occurrence) -> Occurrence:
        while self.parents[occurrence] is not occurrence:  # each root is stored as its parent
            self.parents[occurrence] = self.parents[self.parents[occurrence]]
            occurrence = self.parents[occurrence]
        return occurrence

    def _tie(self, a: Occurrence, b: Occurrence) -> None:
        self.parents.setdefault(a, a)
        self.parents.setdefault(b, b)
        self.parents[self._root(b)] = self._root(a)

    def at(self, value: Value, axis: int) -> list[tuple[int, int]]:
        """Return the splittable groups of an axis, as (outer elements, group)."""
        entries = {(p[2], g) for p, g in self.groups.items() if p[0] is value and p[1] == axis and g not in self.fixed}
        return sorted(entries)


def _described(node: Node, axes: OpAxes) -> Iterator[tuple[Value, Sequence[Factors]]]:
    for v, fs in zip((*node.operands, *node.results), (*axes.operands, *axes.results), strict=True):
        if v is not None and fs is not None:
            yield v, fs


def _occurrences(node: Node, axes: OpAxes) -> dict[str, list[Occurrence]]:
    """Return the occurrences of each factor of a node."""
    entries: dict[str, list[Occurrence]] = {}
    for value, fs in _described(node, axes):
        for axis, factors in enumerate(fs):
            for factor, begin in zip(factors, _begins(axes, factors), strict=True):
                entries.setdefault(factor, []).append((value, axis, begin))
    return entries


def _begins(axes: OpAxes, factors: Factors) -> list[int]:
    """Return the number of outer elements of each factor of an axis, or -1 if a size is unknown."""
    begin, out = 1, []
    for factor in factors:
        out.append(begin)
        size = axes.sizes[factor]
        begin = begin * size if isinstance(size, int) and begin > 0 else -1
    return out


def _assemble(ties: _Ties, types: Sequence[TensorType | None]) -> tuple[OpAxes, str | None]:
    """Return the axes of operands and results, and an overlapping group or None."""
    sizes: dict[str, Size] = {}
    operands = iter([i.value for i in ties.body.inputs if i.data is None])
    broken: list[str] = []

    def factors(value: Value, axis: int) -> Factors:
        n, covered, out = value.shape[axis], 1, []

        def rest(size: Size) -> None:
            name = f"rest{len(sizes)}"
            sizes[name] = size
            out.append(name)

        for begin, group in ties.at(value, axis):
            size = ties.size_of[group]
            if begin < covered or begin % covered or size < 1:
                broken.append(f"p{group}")
                return ()
            if begin > covered:
                rest(begin // covered)
            sizes[f"p{group}"] = size
            out.append(f"p{group}")
            covered = begin * size
        if not isinstance(n, int) or covered < n or not out:
            rest(n // covered if isinstance(n, int) and covered else n)
        return tuple(out)

    values = [None if t is None else next(operands) for t in types]
    read = tuple(None if v is None else tuple(factors(v, k) for k in range(v.ndim)) for v in values)
    results = tuple(tuple(factors(v, k) for k in range(v.ndim)) for v in ties.body.outputs)
    roles = {f: WHOLE for f in sizes if f.startswith("rest")}
    axes = OpAxes(read, results, sizes, roles, tuple(v.shape for v in ties.body.outputs))
    return axes, broken[0] if broken else None


def _holds(
    op: Op,
    types: Sequence[TensorType | None],
    attributes: Mapping[str, Any],
    axes: OpAxes,
    factor: str,
    ties: _Ties,
) -> bool:
    """Whether the composite on slices has the same nodes as its body on slices.

    Equal shapes are not enough: with half of the channels, the same number of groups normalizes over other elements.
    """
    size = axes.sizes[factor]
    assert isinstance(size, int)
    parts = next((p for p in range(2, size + 1) if size % p == 0), 1)
    if parts == 1:
        return True
    local = {factor: size // parts}
    shapes = [
        None if t is None or fs is None else axes.local_shape(t.shape, fs, local)
        for t, fs in zip(types, axes.operands, strict=True)
    ]
    cut = [None if t is None or s is None else TensorType(t.dtype, s) for t, s in zip(types, shapes, strict=True)]
    try:
        part = op.decompose(cut, op.canonical(cut, dict(attributes)))
    except MithrilError:
        return False
    return _same_but_cut(ties, part, int(factor.removeprefix("p")), parts)


def _same_but_cut(ties: _Ties, part: Graph, group: int, parts: int) -> bool:
    """Whether ``part`` has the nodes of the body with attributes and shapes of slices."""
    body = ties.body
    if len(body.nodes) != len(part.nodes) or len(body.inputs) != len(part.inputs):
        return False
    images: dict[Value | None, Value | None] = {None: None}
    for i, j in zip(body.inputs, part.inputs, strict=True):
        images[i.value] = j.value
        if i.data is not None and (j.data is None or not np.array_equal(i.data, j.data)):
            return False
    for a, b in zip(body.nodes, part.nodes, strict=True):
        if a.op is not b.op or a.regions or [images[v] for v in a.operands] != [*b.operands]:
            return False
        axes = axes_of(a)
        local: dict[str, Size] = {}
        for factor, occurrences in _occurrences(a, axes).items():
            size = axes.sizes[factor]
            if ties.groups[occurrences[0]] == group and isinstance(size, int):
                local[factor] = size // parts
        if {**a.attributes, **axes.cut(local)} != dict(b.attributes):
            return False
        for x, y, fs in zip(a.results, b.results, axes.results, strict=True):
            if y.shape != axes.local_shape(x.shape, fs, local):
                return False
            images[x] = y
    return all(images[x] is y for x, y in zip(body.outputs, part.outputs, strict=True))
