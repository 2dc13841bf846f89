"""Tracing the bodies of control flow: closed graphs, whose outer values come in as further operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base import DType, OperationError, Size, TensorType
from mithril.ir.builder import Builder
from mithril.ir.core import Attributes, Graph, Input, Op, Value, as_results


class Region(Builder):
    """The builder of a region. A value of another builder becomes an input here, once, and is remembered as captured.

    Parameters and constants that the body makes belong to the graph around it and are captured likewise, through
    as many levels as there are.
    """

    def __init__(self, outer: Builder, name: str) -> None:
        super().__init__(name)
        self.outer = outer
        self.origin, self.tags = outer.origin, outer.tags
        self.captured: dict[Value, Value] = {}  # value outside -> input here
        self._own: set[Value] = set()

    def bind(self, name: str, type: TensorType) -> Value:
        """An input that the operation itself feeds: a state, an element of a sequence."""
        value = Value(self.unique(name), type)
        self.inputs.append(Input(value))
        self._own.add(value)
        return value

    def local(self, value: Value) -> Value:
        """The value as it is known in here."""
        if value in self._own:
            return value
        known = self.captured.get(value)
        if known is None:
            known = self.captured[value] = Value(self.unique(value.name), value.type)
            self._own.add(known)
        return known

    def close(self, captured: Iterable[Value], outputs: Mapping[str, Value]) -> Graph:
        """The region as a graph that takes what was bound, then these captured values."""
        inputs = (*self.inputs, *(Input(self.local(v)) for v in captured))
        self.outer.guards.update(self.guards)  # the symbols are those of the whole graph, where guards are checked
        return Graph(inputs, tuple(self.nodes), as_results(outputs), self.name)

    # -- what a builder does, with values from outside ---------------------------------------------------------------
    def input(
        self,
        name: str,
        shape: Sequence[Size],
        dtype: Any = "float32",
        role: str = "input",
        data: np.ndarray[Any, Any] | None = None,
        tags: Attributes | None = None,
        of: str = "",
    ) -> Value:
        return self.local(self.outer.input(name, shape, dtype, role, data, tags, of))

    def emit(
        self,
        op: Op,
        operands: Sequence[Value | None],
        attributes: Mapping[str, Any],
        regions: Sequence[Graph] = (),
        name: str | None = None,
    ) -> tuple[Value, ...]:
        inside = [None if v is None else self.local(v) for v in operands]
        made = super().emit(op, inside, attributes, regions, name)
        self._own.update(made)
        return made

    def inline(self, graph: Graph, arguments: Sequence[Value | None]) -> tuple[Value, ...]:
        start = len(self.nodes)
        made = super().inline(graph, [None if v is None else self.local(v) for v in arguments])
        self._own.update(v for node in self.nodes[start:] for v in node.results)
        return made


class Body:
    """A Python function traced in a region: its results as it gave them, to be closed once the dtypes are settled."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[tuple[str, TensorType]],
        call: Callable[..., Any] = lambda function, *values: function(*values),
    ) -> None:
        self.region = Region(Builder.current(), name)
        with self.region:
            self.made = call(function, *[self.region.bind(n, t) for n, t in inputs])

    def results(self, made: Sequence[Any], dtypes: Sequence[DType | None]) -> list[Value]:
        """Values of the region; a Python number takes the dtype expected of it."""
        out: list[Value] = []
        with self.region:
            for given, wanted in zip(made, dtypes, strict=True):
                if isinstance(given, Value):
                    out.append(self.region.local(given))
                elif isinstance(given, (bool, int, float)):
                    out.append(self.region.constant(given, wanted))
                elif isinstance(given, (np.ndarray, np.generic)):
                    out.append(self.region.constant(given))
                else:
                    raise OperationError(
                        f"the {self.region.name} of a control flow operation returned a {type(given).__name__}",
                        facts=[f"got {given!r}", "accepted: values, NumPy arrays, Python numbers, tuples of those"],
                    )
        return out


def many(made: Any) -> tuple[Any, ...]:
    """One result or several, as a tuple."""
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def named(stem: str, values: Sequence[Value]) -> dict[str, Value]:
    """Names for the outputs of a region, for people to read."""
    return {f"{stem}{k}" if len(values) > 1 else stem: v for k, v in enumerate(values)}


def close(bodies: Sequence[tuple[Body, Mapping[str, Value]]]) -> tuple[tuple[Graph, ...], list[Value]]:
    """The regions of one operation, which all take the same captured values; and those values."""
    captured = list(dict.fromkeys(v for body, _ in bodies for v in body.region.captured))
    return tuple(body.region.close(captured, outputs) for body, outputs in bodies), captured
