"""Rows of a batch: a graph for one row becomes a graph for all rows at once.

Values that depend on the rows have them as their first axis; other values are computed once and broadcast. An operation
runs on all rows at a place that follows from its axes, else by the rule declared next to it (``@name.vmap``), else by
its body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from typing import Any, NamedTuple

from mithril.derivatives.placement import Inserted, Joined, place_rows
from mithril.graph import (
    CHECKS,
    Builder,
    Graph,
    MithrilError,
    Node,
    Op,
    OperationError,
    Registry,
    Size,
    TensorType,
    Value,
    call_axes,
    product,
    types_of,
)
from mithril.ops import random_bits, reshape, scan, spread, transpose


class BatchedValue(NamedTuple):
    """A value of one row in the graph for all rows."""

    value: Value
    has_rows: bool = False  # along its first axis; without, it is the same for all
    is_own_key: bool = False  # comes from the random key of the model itself: rows draw separate numbers


Operands = Sequence[BatchedValue | None]
# Rules of operations with regions: ``(batching, node, operands)`` gives the results; filled by ``batched_regions``.
region_rules: Registry[Callable[..., list[BatchedValue]]] = Registry("rows through regions")


class Batching:
    """One walk over a graph. Nodes go to the current builder."""

    def __init__(self, rows: Size) -> None:
        self.rows = rows
        self.active: Value | None = None  # which rows take the branch or the round that is walked; None: all

    @contextmanager
    def masked_by(self, active: Value | None) -> Iterator[None]:
        """Walk a branch or a round that only some rows take: loops in it run for those rows only."""
        outer, self.active = self.active, active
        try:
            yield
        finally:
            self.active = outer

    def walk(self, graph: Graph, arguments: Sequence[BatchedValue]) -> list[BatchedValue]:
        """Return the outputs for these values of the inputs that are not constants."""
        builder = Builder.current()
        values: dict[Value, BatchedValue] = {}
        remaining = iter(arguments)
        for i in graph.inputs:
            if i.role == "constant":
                value = builder.input(i.name, i.type.shape, i.type.dtype, "constant", data=i.data, tags=i.tags)
                values[i.value] = BatchedValue(value)
            else:
                values[i.value] = next(remaining)
        outer = builder.origin, builder.tags
        for node in graph.nodes:
            operands = [None if v is None else values[v] for v in node.operands]
            has_origin = str(node.origin)
            marks = {name: tag for name, tag in node.tags.items() if name in CHECKS}
            with builder.at(node.origin if has_origin else outer[0], node.tags or outer[1]):
                results = self._node(node, operands)
            if marks:
                _mark(builder, results[0].value, marks)
            for old, new in zip(node.results, results, strict=True):
                values[old] = new
        return [values[v] for v in graph.outputs]

    def _node(self, node: Node, operands: Operands) -> list[BatchedValue]:
        op = node.op
        present = [o for o in operands if o is not None]
        has_rows = any(o.has_rows for o in present)
        draws = any(o.is_own_key and not o.has_rows for o in present)
        is_loop_of_some_rows = bool(node.regions) and self.active is not None
        if not has_rows and not draws and not is_loop_of_some_rows:
            return self._copy_unbatched(node, operands, has_keys=False)
        if node.regions:
            return region_rules[op.name](self, node, present)
        # The body shows which of its operations draw: rows must have separate numbers, which the
        # composite would share.
        if draws and op.composite:
            return self._body(node, operands)
        if draws and op is random_bits:  # one draw for all rows
            shape = (self.rows, *node.attributes["shape"])
            return [BatchedValue(random_bits(present[0].value, shape=shape), has_rows=True)]
        if not has_rows:
            return self._copy_unbatched(node, operands, has_keys=True)
        return self._all_rows(node, operands)

    def _copy_unbatched(self, node: Node, operands: Operands, *, has_keys: bool) -> list[BatchedValue]:
        """Copy a node that does not depend on the rows."""
        builder = Builder.current()
        if node.is_constant:  # shared within the graph
            return [BatchedValue(builder.constant(node.attributes["value"], node.attributes["dtype"]))]
        values = tuple(None if o is None else o.value for o in operands)
        results = tuple(Value(builder.unique(v.name), v.type) for v in node.results)
        changes = {"operands": values, "results": results, "origin": builder.origin, "tags": builder.tags}
        builder.nodes.append(node.replaced(**changes))
        return [BatchedValue(v, is_own_key=has_keys) for v in results]

    def _body(self, node: Node, operands: Operands) -> list[BatchedValue]:
        """Expand a composite into its body."""
        op = node.op
        types = types_of(node.operands)
        return self.walk(op.decompose(types, node.attributes), [o for o in operands if o is not None])

    def _all_rows(self, node: Node, operands: Operands) -> list[BatchedValue]:
        op = node.op
        try:
            values = self._applied(op, node, operands)
        except MithrilError as error:
            place_text = f"from {node.origin}" if str(node.origin) else ""
            raise error.with_facts(f"in the rows of '{op.name}'", place_text) from error.__cause__
        if values is None:
            return self._body(node, operands)
        carried = [BatchedValue(v, has_rows=True) for v in values]
        for old, new in zip(node.results, carried, strict=True):
            self._check(op, old, new.value)
            if all(new.value is not o.value for o in operands if o is not None):
                new.value.name = Builder.current().unique(old.name)
        return carried

    def _applied(self, op: Op, node: Node, operands: Operands) -> Sequence[Value] | None:
        """Return the results for all rows, or None if the body has to be used."""
        rows = [o is not None and o.has_rows for o in operands]
        values = [None if o is None else o.value for o in operands]
        # Rules of an operation come first: they know shortcuts that its axes do not tell.
        if op.batching is not None:
            results = op.batching(self.rows, tuple(rows), *values, **node.attributes)
            if results is not NotImplemented:
                return tuple(results) if isinstance(results, (tuple, list)) else (results,)
        if op.elementwise:
            return self._emit(op, self._aligned(values, rows), node.attributes)
        types = types_of(node.operands)
        place = place_rows(op, types, node.attributes, rows)
        if place is None and op.composite and not self._is_meant(op, node, rows):
            return None
        if place is None:
            place, values = self._with_repeated_operands(op, node, values, rows)
        if isinstance(place, Inserted):
            return self._insert(op, place, values, node.attributes)
        return self._join(op, place, types, values, node.attributes)

    @staticmethod
    def _is_meant(op: Op, node: Node, rows: Sequence[bool]) -> bool:
        """Whether the gradient is one that the body does not have: straight through a rounding, or none."""
        flows = any(v is not None and r and v.dtype.is_float for v, r in zip(node.operands, rows, strict=True))
        return bool(op.surrogate or op.gradient_reason) and flows and any(v.dtype.is_float for v in node.results)

    def _with_repeated_operands(
        self, op: Op, node: Node, values: list[Value | None], rows: Sequence[bool]
    ) -> tuple[Inserted | Joined, list[Value | None]]:
        """Return a place for the rows once operands that are the same for all rows are repeated for each."""
        types = types_of(node.operands)
        candidates = [not r and v is not None for r, v in zip(rows, values, strict=True)]
        # Fewest first, since each repeated operand is copied once per row.
        for repeated in _subsets(candidates):
            place = place_rows(op, types, node.attributes, [a or b for a, b in zip(rows, repeated, strict=True)])
            if place is not None:
                pairs = zip(values, repeated, strict=True)
                return place, [spread(v, self.rows) if v is not None and new else v for v, new in pairs]
        raise no_rule(op)

    # -- the operation with rows in its operands ----------------------------------------------------------------------
    def _aligned(self, values: Sequence[Value | None], rows: Sequence[bool]) -> list[Value | None]:
        """Return operands that broadcast: rows are the first axis of all."""
        rank = max(v.ndim - r for v, r in zip(values, rows, strict=True) if v is not None)
        return [
            v if v is None or not r else _with_unit_axes(v, rank - (v.ndim - 1))
            for v, r in zip(values, rows, strict=True)
        ]

    def _insert(self, op: Op, place: Inserted, values: Sequence[Value | None], attributes: Any) -> list[Value]:
        operands = [
            v if v is None or axis_at is None else move_axis(_with_unit_axes(v, ones), 0, axis_at)
            for v, axis_at, ones in zip(values, place.axis_places, place.ones, strict=True)
        ]
        results = self._emit(op, operands, place.edited(attributes, self.rows))
        return [move_axis(v, axis_at, 0) for v, axis_at in zip(results, place.results, strict=True)]

    def _join(self, op: Op, place: Joined, types: Any, values: Sequence[Value | None], attributes: Any) -> list[Value]:
        expected = op.infer(types, attributes)
        # The factor is the whole axis: no sizes are needed.
        if op.composite and op.declared_axes is None:
            outer_size: dict[int, Size] = dict.fromkeys([*range(len(values)), *range(-len(expected), 0)], 1)
            changed = dict(attributes)
        else:
            axes = call_axes(op, types, attributes, expected)
            outer_size = {
                k: product(axes.sizes[f] for f in _before(fs[axis_at], place.factor))
                for k, fs, axis_at in zip(
                    (*range(len(values)), *range(-len(expected), 0)),
                    (*axes.operands, *axes.results),
                    (*place.operands, *place.results),
                    strict=True,
                )
                if fs is not None and axis_at is not None
            }
            local = {place.factor: self.rows * axes.sizes[place.factor]}
            if place.factor in axes.counted and not isinstance(local[place.factor], int):
                return self._one_by_one(op, place, values, attributes)  # such as groups, which are a number
            changed = {**attributes, **axes.cut(local)}
        operands = [
            v if v is None or axis_at is None else self._merge_rows(v, axis_at, outer_size[k])
            for k, (v, axis_at) in enumerate(zip(values, place.operands, strict=True))
        ]
        results = self._emit(op, operands, changed)
        count = len(expected)
        return [
            self._split_rows(v, t, axis_at, outer_size[k - count])
            for k, (v, t, axis_at) in enumerate(zip(results, expected, place.results, strict=True))
        ]

    def _one_by_one(self, op: Op, place: Joined, values: Sequence[Value | None], attributes: Any) -> list[Value]:
        """Row after row, where their number would have to be known."""
        rows = [v for v, k in zip(values, place.operands, strict=True) if v is not None and k is not None]

        def step(carry: Any, row: tuple[Value, ...]) -> Any:
            elements = iter(row)
            operands = [
                v if axis_at is None else next(elements) for v, axis_at in zip(values, place.operands, strict=True)
            ]
            results = self._emit(op, operands, attributes)
            return carry, tuple(results)

        return list(scan(step, (), tuple(rows))[1])

    def _merge_rows(self, x: Value, axis: int, outer_size: Size) -> Value:
        """Rows as part of an axis (of a row), within ``outer_size`` elements."""
        shape = x.shape[1:]
        inner = shape[axis] if outer_size == 1 else shape[axis] // outer_size
        if outer_size == 1:
            x = move_axis(x, 0, axis)
        else:
            x = reshape(x, shape=(self.rows, *shape[:axis], outer_size, inner, *shape[axis + 1 :]))
            x = move_axis(x, 0, axis + 1)
        result: Value = reshape(x, shape=(*shape[:axis], self.rows * shape[axis], *shape[axis + 1 :]))
        return result

    def _split_rows(self, y: Value, t: TensorType, axis: int, outer_size: Size) -> Value:
        """Undo it for a result that is of type ``t`` in one row."""
        shape = t.shape
        if outer_size == 1:
            y = reshape(y, shape=(*shape[:axis], self.rows, *shape[axis:]))
            return move_axis(y, axis, 0)
        inner = shape[axis] // outer_size
        y = reshape(y, shape=(*shape[:axis], outer_size, self.rows, inner, *shape[axis + 1 :]))
        parted: Value = reshape(move_axis(y, axis + 1, 0), shape=(self.rows, *shape))
        return parted

    def _emit(self, op: Op, values: Sequence[Value | None], attributes: Any) -> list[Value]:
        types = types_of(values)
        return list(Builder.current().emit(op, values, op.canonical(types, dict(attributes))))

    def _check(self, op: Op, row: Value, value: Value) -> None:
        expected = TensorType(row.dtype, (self.rows, *row.shape))
        if value.type != expected:
            raise OperationError(
                f"the rows of '{op.name}' are {value.type}, expected {expected}",
                facts=[f"declared at {op.declared_at}"],
                hint=f"correct the rule @{op.name.rsplit('.', 1)[-1]}.vmap",
            )

    def with_rows(self, carried: BatchedValue) -> Value:
        """Return the value for each row, whether it depends on the rows or not."""
        return carried.value if carried.has_rows else spread(carried.value, self.rows)


def no_rule(op: Op) -> OperationError:
    """Return the error of an operation that says nothing of its axes."""

    reason = f"it has no axes: {op.no_axes}" if op.no_axes else "no axis of its operands can hold them"
    return OperationError(
        f"operation '{op.name}' cannot run on all rows at once",
        facts=[reason, f"of {_distribution(op)}, declared at {op.declared_at}"],
        hint=f'declare its axes, @op(..., axes="..."), or a rule: @{op.name.rsplit(".", 1)[-1]}.vmap',
    )


def _mark(builder: Builder, result: Value, marks: Mapping[str, Any]) -> None:
    """Tag the node that gives a result."""
    k = next(k for k in reversed(range(len(builder.nodes))) if any(result is v for v in builder.nodes[k].results))
    builder.nodes[k] = builder.nodes[k].replaced(tags={**builder.nodes[k].tags, **marks})


def _subsets(candidates: Sequence[bool]) -> list[list[bool]]:
    """Return the choices among some operands, fewest first, but not none."""
    places = [k for k, m in enumerate(candidates) if m]
    choices = [[k for n, k in enumerate(places) if bits >> n & 1] for bits in range(1, 1 << len(places))]
    return [[k in repeated for k in range(len(candidates))] for repeated in sorted(choices, key=len)]


def _before(factors: Sequence[str], factor: str) -> Sequence[str]:
    return factors[: list(factors).index(factor)]


def _with_unit_axes(x: Value, ones: int) -> Value:
    """Axes of size 1 after the rows."""
    return reshape(x, shape=(x.shape[0], *[1] * ones, *x.shape[1:])) if ones > 0 else x


def move_axis(x: Value, source: int, target: int) -> Value:
    """Move one axis to another place."""
    if source == target:
        return x
    rest = [k for k in range(x.ndim) if k != source]
    rest.insert(target, source)
    result: Value = transpose(x, perm=tuple(rest))
    return result


def _distribution(op: Op) -> str:
    """Return the distribution that declares an operation, or its module."""
    module = op.reference.__module__.partition(".")[0]
    names = packages_distributions().get(module, ())
    return ", ".join(sorted(set(names))) or f"module '{op.reference.__module__}'"
