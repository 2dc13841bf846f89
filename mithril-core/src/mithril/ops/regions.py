"""Tracing of control-flow regions: closed graphs, whose captures are passed as additional operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import Builder, DType, Graph, Input, Op, OperationError, TensorType, Value, as_results


class Region(Builder):
    """The builder of a region. A value of another builder is captured: it becomes one input of the region.

    Parameters and constants that the body creates belong to the outermost graph and are captured at every level.
    """

    def __init__(self, outer: Builder, name: str) -> None:
        super().__init__(name)
        self.outer = outer
        self.origin, self.tags = outer.origin, outer.tags
        self.captured: dict[Value, Value] = {}  # outer value -> input of the region
        self._body_values: set[Value] = set()

    def bind(self, name: str, type: TensorType) -> Value:
        """Add an input that the operation itself provides: a state, an element of a sequence."""
        value = Value(self.unique(name), type)
        self.inputs.append(Input(value))
        self._body_values.add(value)
        return value

    def local(self, value: Value) -> Value:
        """Return the region's value for ``value``, captured if it is an outer one."""
        if value in self._body_values:
            return value
        local = self.captured.get(value)
        if local is None:
            local = self.captured[value] = Value(self.unique(value.name), value.type)
            self._body_values.add(local)
        return local

    def close(self, captured: Iterable[Value], outputs: Mapping[str, Value]) -> Graph:
        """Return the region as a graph whose inputs are the bound ones, then the captured values."""
        inputs = (*self.inputs, *(Input(self.local(v)) for v in captured))
        # Guards are checked on the outermost graph, which has the same symbols.
        self.outer.guards.update(self.guards)
        return Graph(inputs, tuple(self.nodes), as_results(outputs), self.name)

    # -- overrides that capture outer values -------------------------------------------------------------------------
    def input(self, *arguments: Any, **keywords: Any) -> Value:
        return self.local(self.outer.input(*arguments, **keywords))

    def emit(self, op: Op, operands: Sequence[Value | None], *arguments: Any, **keywords: Any) -> tuple[Value, ...]:
        local_operands = [None if v is None else self.local(v) for v in operands]
        results = super().emit(op, local_operands, *arguments, **keywords)
        self._body_values.update(results)
        return results

    def inline(self, graph: Graph, arguments: Sequence[Value | None]) -> tuple[Value, ...]:
        start = len(self.nodes)
        outputs = super().inline(graph, [None if v is None else self.local(v) for v in arguments])
        self._body_values.update(v for node in self.nodes[start:] for v in node.results)
        return outputs


class Body:
    """A Python function traced in a region: its raw return values, converted once their dtypes are known."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[tuple[str, TensorType]],
        arguments_of: Callable[..., tuple[Any, ...]] = lambda *values: values,
    ) -> None:
        self.region = Region(Builder.current(), name)
        with self.region:
            arguments = arguments_of(*[self.region.bind(n, t) for n, t in inputs])
            _check_parameters(name, function, arguments)
            self.returned = function(*arguments)

    def results(self, returned: Sequence[Any], dtypes: Sequence[DType | None]) -> list[Value]:
        """Convert returned values to values of the region; Python numbers take the expected dtype."""
        out: list[Value] = []
        with self.region:
            for item, dtype in zip(returned, dtypes, strict=True):
                if isinstance(item, Value):
                    out.append(self.region.local(item))
                elif isinstance(item, (bool, int, float)):
                    out.append(self.region.constant(item, dtype))
                elif isinstance(item, (np.ndarray, np.generic)):
                    out.append(self.region.constant(item))
                else:
                    raise OperationError(
                        f"the {self.region.name} of a control flow operation returned a {type(item).__name__}",
                        facts=[f"got {item!r}", "expected: values, NumPy arrays, Python numbers, tuples of those"],
                    )
        return out


def _check_parameters(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Raise OperationError unless the function takes these arguments: Python's error would not tell what they are."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some callables written in C, nothing is known
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        received = ", ".join(f"a tuple of {len(a)}" if isinstance(a, tuple) else "one value" for a in arguments)
        raise OperationError(
            f"the {name} of a control flow operation does not fit: {error}",
            facts=[f"its parameters: {signature}", f"it receives: {received}"],
            hint="a tuple is one argument: unpack it in the function" if "tuple" in received else None,
        ) from None


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return one result or several as a tuple."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def name_outputs(stem: str, values: Sequence[Value]) -> dict[str, Value]:
    """Return names for the outputs of a region."""
    return {f"{stem}{k}" if len(values) > 1 else stem: v for k, v in enumerate(values)}


def close(bodies: Sequence[tuple[Body, Mapping[str, Value]]]) -> tuple[tuple[Graph, ...], list[Value]]:
    """Return the regions of one operation, which share their captured inputs, and the captured values."""
    captured = list(dict.fromkeys(v for body, _ in bodies for v in body.region.captured))
    return tuple(body.region.close(captured, outputs) for body, outputs in bodies), captured
