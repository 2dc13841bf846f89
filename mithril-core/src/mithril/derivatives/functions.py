"""Python functions of values as graphs: traced where they are called, transformed, and put into the graph around."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import Builder, Graph, GraphError, TensorType, Value, evaluate, is_building
from mithril.ops import Region, as_tuple


@dataclass(frozen=True)
class Traced:
    """A function's graph: inputs for its arguments, by parameter, then the values that it captures."""

    graph: Graph
    arguments: tuple[str, ...]
    captured: tuple[Value, ...]
    is_single: bool  # the function returned a value, not a tuple


def traced(function: Callable[..., Any], types: Sequence[TensorType]) -> Traced:
    """Trace a function of values of these types in the current graph."""
    outer = Builder.current()
    region = Region(outer, getattr(function, "__name__", "function"))
    with region:
        values = [region.bind(name, t) for name, t in zip(_names(function, len(types)), types, strict=True)]
        returned = function(*values)
        results = []
        for one in as_tuple(returned):
            if not isinstance(one, (Value, bool, int, float, np.ndarray, np.generic)):
                raise GraphError(
                    f"the function '{region.name}' returned a {type(one).__name__}",
                    facts=[f"got {one!r:.80}", "accepted: values, NumPy arrays, Python numbers, tuples of those"],
                )
            results.append(region.local(one) if isinstance(one, Value) else region.constant(one))
    captured = tuple(region.captured)
    graph = region.close(captured, {f"y{k}": v for k, v in enumerate(results)})
    names = tuple(v.name for v in values)
    return Traced(graph, names, captured, not isinstance(returned, (tuple, list)))


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the parameters, numbers after ``*args``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return [*names, *(f"x{k}" for k in range(len(names), count))]


def put(graph: Graph, values: Sequence[Value]) -> tuple[Value, ...]:
    """Put a transformed graph into the current one; ``values`` are its inputs but constants, in order."""
    return Builder.current().inline(graph, values)


def on_arrays_too(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of values that computes by the references where no graph is being built."""

    def called(*arguments: Any) -> Any:
        for k, a in enumerate(arguments):
            if not isinstance(a, (Value, bool, int, float, np.ndarray, np.generic)):
                raise GraphError(
                    f"argument {k} is a {type(a).__name__}",
                    facts=[f"got {a!r:.80}", "accepted: values, NumPy arrays, Python numbers"],
                )
        if is_building() or any(isinstance(a, Value) for a in arguments):
            builder = Builder.current()
            return function(*[a if isinstance(a, Value) else builder.constant(a) for a in arguments])
        builder = Builder("function")
        with builder:
            returned = function(*[builder.constant(a) for a in arguments])
        leaves: list[Value] = []
        shape = _collected(returned, leaves)
        arrays = list(evaluate(builder.build({str(k): v for k, v in enumerate(leaves)}), {}).values())
        return _restored(shape, arrays)

    called.__name__ = called.__qualname__ = getattr(function, "__name__", "function")
    called.__doc__ = function.__doc__
    return called


def _collected(returned: Any, leaves: list[Value]) -> Any:
    if isinstance(returned, tuple):
        return tuple(_collected(part, leaves) for part in returned)
    leaves.append(returned)
    return len(leaves) - 1


def _restored(shape: Any, arrays: Sequence[Any]) -> Any:
    return tuple(_restored(part, arrays) for part in shape) if isinstance(shape, tuple) else arrays[shape]
