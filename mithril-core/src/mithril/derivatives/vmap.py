"""``vmap`` of graphs: which inputs have rows, along which axis, and where the outputs have theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mithril.backend import matches
from mithril.derivatives import batched_regions  # noqa: F401  (enters the rules of control flow)
from mithril.derivatives.batching import BatchedValue, Batching, move_axis
from mithril.derivatives.functions import on_arrays_too, put, traced
from mithril.graph import (
    Builder,
    Dim,
    Graph,
    GraphError,
    Input,
    Output,
    Size,
    TensorType,
    Value,
    assume,
    closest,
    symbols,
)

AxisByName = int | Mapping[str, int | None]


def vmap_graph(
    graph: Graph, in_axes: AxisByName = 0, out_axes: AxisByName = 0, size: Size | str | None = None
) -> Graph:
    """Return the graph for all rows at once; see ``ml.vmap``."""
    rows = rows_of(graph, size)
    axes = input_axes(graph.arguments, in_axes)
    if size is None and all(axis is None for axis in axes.values()):
        raise GraphError("no input has rows", facts=[f"in_axes: {in_axes!r}"], hint="give one an axis: in_axes=0")
    with Builder(graph.name) as builder:
        builder.guards.update(dict.fromkeys(graph.guards))
        arguments = [_argument(builder, i, axes[i.name], rows) for i in graph.arguments]
        batching = Batching(rows)
        results = batching.walk(graph, arguments)
        ends = output_axes(graph, out_axes, axes)
        outputs = [
            _output(batching, one, carried, ends[one.name]) for one, carried in zip(graph.results, results, strict=True)
        ]
    return builder.build(graph.carrying(outputs))


def rows_of(graph: Graph, size: Size | str | None) -> Size:
    """Return the number of rows: as stated, else a symbol that the graph does not have."""
    if isinstance(size, (int, Dim)):
        return size
    used = {s.name for i in graph.inputs for s in symbols(*i.type.shape)}
    if size is None:
        size = next(n for k in range(len(used) + 1) if (n := f"rows_{k}" if k else "rows") not in used)
    elif size in used:
        raise GraphError(f"the size '{size}' is one of the graph's own already", hint="choose another name")
    return Dim(size)


def input_axes(inputs: Sequence[Input], in_axes: AxisByName) -> dict[str, int | None]:
    """Return the axis of the rows in each input, None for those that are the same for all rows."""
    default = in_axes if isinstance(in_axes, int) else 0
    axes: dict[str, int | None] = {i.name: default if i.role in ("input", "cotangent") else None for i in inputs}
    axes = _axes_of("in_axes", axes, {} if isinstance(in_axes, int) else in_axes)
    return {i.name: _place(f"in_axes of '{i.name}'", axes[i.name], i.type.rank) for i in inputs}


def output_axes(graph: Graph, out_axes: AxisByName, inputs: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the axis of the rows in each output; states keep theirs."""
    default = out_axes if isinstance(out_axes, int) else 0
    axes: dict[str, int | None] = {
        one.name: inputs.get(one.of) if one.role == "state" else default for one in graph.results
    }
    axes = _axes_of("out_axes", axes, {} if isinstance(out_axes, int) else out_axes)
    ranks = {n: v.ndim for n, v in zip(graph.output_names, graph.outputs, strict=True)}
    return {n: _place(f"out_axes of '{n}'", axis, ranks[n]) for n, axis in axes.items()}


def _axes_of(argument: str, axes: dict[str, int | None], axes_given: Mapping[str, int | None]) -> dict[str, int | None]:
    for pattern, axis in axes_given.items():
        names = [n for n in axes if matches(n, pattern)]
        if not names:
            similar = closest(pattern, list(axes))
            raise GraphError(
                f"'{pattern}' in {argument} matches no {'input' if argument == 'in_axes' else 'output'}",
                facts=[f"known: {', '.join(axes)}"],
                hint=f"did you mean '{similar[0]}'?" if similar else None,
            )
        axes |= dict.fromkeys(names, axis)
    return axes


def _place(subject: str, axis: int | None, rank: int) -> int | None:
    """Return the axis as a non-negative number, among the axes of a row and of the rows."""
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank - 1 <= axis <= rank:
        raise GraphError(
            f"{subject} is {axis!r}",
            facts=[f"accepted: None, or {-rank - 1} to {rank}: one row has rank {rank}"],
        )
    return axis % (rank + 1)


def _argument(builder: Builder, i: Input, axis: int | None, rows: Size) -> BatchedValue:
    shape = i.type.shape if axis is None else (*i.type.shape[:axis], rows, *i.type.shape[axis:])
    value = Value(builder.unique(i.name), TensorType(i.type.dtype, shape))
    builder.inputs.append(replace(i, value=value))
    if axis is None:
        return BatchedValue(value, is_own_key=i.role == "state" and i.tags.get("init") == "key")
    return BatchedValue(move_axis(value, axis, 0), has_rows=True)


def _output(batching: Batching, output: Output, carried: BatchedValue, axis: int | None) -> Value:
    if axis is not None:
        return move_axis(batching.with_rows(carried), 0, axis)
    if carried.has_rows:
        name, argument = (output.of, "in_axes") if output.role == "state" else (output.name, "out_axes")
        raise GraphError(
            f"output '{output.name}' differs between rows, but is to be the same for all",
            hint=f"{argument}={{'{name}': 0}} gives each row its own",
        )
    return carried.value


def vmap_function(
    function: Callable[..., Any],
    in_axes: int | Sequence[int | None] = 0,
    out_axes: int | Sequence[int | None] = 0,
    size: Size | None = None,
) -> Callable[..., Any]:
    """Return a function of values for all rows at once; see ``ml.vmap``."""

    def mapped(*values: Value) -> Any:
        ends = _by_position("in_axes", in_axes, len(values))
        axes = [
            _place(f"in_axes of argument {k}", a, v.ndim - 1) for k, (a, v) in enumerate(zip(ends, values, strict=True))
        ]
        rows = _common_rows(values, axes, size)
        types = [
            v.type if a is None else TensorType(v.dtype, v.shape[:a] + v.shape[a + 1 :])
            for v, a in zip(values, axes, strict=True)
        ]
        one = traced(function, types)
        axis_by_name = dict(zip(one.arguments, axes, strict=True))
        inputs = {i.name: axis_by_name.get(i.name) for i in one.graph.arguments}
        places = _by_position("out_axes", out_axes, len(one.graph.outputs))
        graph = vmap_graph(one.graph, inputs, dict(zip(one.graph.output_names, places, strict=True)), rows)
        results = put(graph, [*values, *one.captured])
        return results[0] if one.is_single else results

    mapped.__name__ = f"vmap of {getattr(function, '__name__', 'function')}"
    return on_arrays_too(mapped)


def _by_position(argument: str, axes_given: int | Sequence[int | None], count: int) -> list[int | None]:
    if isinstance(axes_given, int):
        return [axes_given] * count
    if len(axes_given) != count:
        raise GraphError(f"{argument} has {len(axes_given)} entries for {count} values", facts=[f"got {axes_given!r}"])
    return list(axes_given)


def _common_rows(values: Sequence[Value], axes: Sequence[int | None], size: Size | None) -> Size:
    """Return the number of rows, on which all arguments that have rows agree."""
    sizes = [v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None]
    return same_rows([f"argument {k}" for k, a in enumerate(axes) if a is not None], sizes, size)


def same_rows(names: Sequence[str], sizes: Sequence[Size], size: Size | None) -> Size:
    """Return the number of rows, which all inputs that have them agree on."""
    rows = size if size is not None else sizes[0] if sizes else None
    if rows is None:
        raise GraphError("no input has rows", hint="give one an axis: in_axes=0, or say their number: size=8")
    for name, n in zip(names, sizes, strict=True):
        if not assume(n, "==", rows, "all inputs have the same rows"):
            facts = [f"'{other}' has {m}" for other, m in zip(names, sizes, strict=True)]
            raise GraphError(f"'{name}' has {n} rows, expected {rows}", facts=facts)
    return rows
