"""The three kinds of values in an import: known arrays, values of the graph, and vectors of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.graph import Builder, Dim, Node, UnsupportedError, Value, dtype as as_dtype
from mithril_importing import arrays
from mithril_importing.arrays import Array, is_sizes


class NotConstantError(UnsupportedError):
    """An operator needs a number at import, and its operand is computed from the inputs of the model."""

    def __init__(self, description: str, names: Sequence[str]) -> None:
        super().__init__(
            f"{description} must be known at import, but depends on inputs of the model",
            facts=[f"inputs: {', '.join(names)}"] if names else [],
            hint=f"fix them: ml.from_onnx(path, constants={{'{names[0]}': ...}})" if names else None,
        )
        self.names = tuple(names)


class Strings:
    """Strings, which no backend computes with: an error where they are read, nothing where they are not."""

    def __init__(self, description: str, examples: Sequence[str]) -> None:
        self.description = description
        self.examples = tuple(examples)

    def error(self) -> UnsupportedError:
        listed = ", ".join(f"'{e}'" for e in self.examples[:4])
        return UnsupportedError(
            f"{self.description} are strings ({listed}{', ...' if len(self.examples) > 4 else ''})",
            facts=["accepted: numbers"],
            hint="select other outputs: ml.from_onnx(path, outputs=['probabilities']); or export integer labels",
        )


def as_value(x: Any) -> Value:
    """Return anything numeric of the environment as a value of the current graph."""
    if isinstance(x, Strings):
        raise x.error()
    array = np.asarray([] if isinstance(x, Value) or is_sizes(x) else x)
    if array.dtype.kind in "OSU":
        raise Strings("constants", [str(e) for e in array.reshape(-1)[:5]]).error()
    return arrays.as_value(x)


class Knowledge:
    """The elements of values that do not depend on inputs: constants, parameters with arrays, and their results."""

    def __init__(self) -> None:
        self.arrays: dict[Value, Array] = {}  # parameters of the root graph
        self.sizes: dict[Value, Array] = {}  # symbolic sizes that became values

    def array(self, x: Any) -> Any:
        """Return the elements of x, or None if they depend on inputs of the graph."""
        if not isinstance(x, Value):
            return None if is_sizes(x) else np.asarray(x)
        try:
            return self._of(x, Builder.current(), {})
        except _DependsOnInputs:
            return None

    def producer(self, x: Any) -> Node | None:
        """Return the node that computes x, in this graph or in those around it."""
        builder: Any = Builder.current()
        while builder is not None:
            if (node := next((n for n in builder.nodes if any(r is x for r in n.results)), None)) is not None:
                return node  # type: ignore[no-any-return]
            x = next((outer for outer, local in getattr(builder, "captured", {}).items() if local is x), x)
            builder = getattr(builder, "outer", None)
        return None

    def inputs_of(self, x: Value) -> list[str]:
        """Return the names of the graph inputs that x depends on."""
        names: dict[str, None] = {}
        builder: Any = Builder.current()
        pending = [x]
        seen: set[Value] = set()
        while builder is not None:
            producers = {r: n for n in builder.nodes for r in n.results}
            captures: list[Value] = []
            outer_of = {local: outer for outer, local in getattr(builder, "captured", {}).items()}
            while pending:
                v = pending.pop()
                if v in seen:
                    continue
                seen.add(v)
                if v in producers:
                    pending += [o for o in producers[v].operands if o is not None]
                else:
                    captures.append(outer_of.get(v, v))
            if not hasattr(builder, "outer"):
                roles = {i.value: i for i in builder.inputs}
                names |= dict.fromkeys(roles[v].name for v in captures if v in roles and roles[v].role == "input")
                return list(names)
            pending, builder = captures, builder.outer
        return list(names)

    def _of(self, x: Value, builder: Any, done: dict[Value, Array]) -> Any:
        if x in done:
            return done[x]
        if x in self.arrays:
            return self.arrays[x]
        producer = next((n for n in builder.nodes if any(r is x for r in n.results)), None)
        if producer is None:
            outer = next((o for o, local in getattr(builder, "captured", {}).items() if local is x), None)
            if outer is not None or (hasattr(builder, "outer") and all(i.value is not x for i in builder.inputs)):
                return self._of(x if outer is None else outer, builder.outer, done)
            existing = next((i for i in builder.inputs if i.value is x), None)
            if existing is None or existing.data is None:
                raise _DependsOnInputs
            return existing.data
        if producer.is_constant:
            return np.asarray(producer.attributes["value"], producer.attributes["dtype"].numpy)
        if producer.regions or any(isinstance(d, Dim) for r in producer.results for d in r.shape):
            raise _DependsOnInputs
        operands = [None if o is None else self._of(o, builder, done) for o in producer.operands]
        if producer.op.name == "size_value" and isinstance(producer.attributes["value"], Dim):
            raise _DependsOnInputs
        results = producer.op.evaluate(operands, producer.attributes)
        done.update(zip(producer.results, results if isinstance(results, tuple) else (results,), strict=True))
        return done[x]


class _DependsOnInputs(Exception):
    pass


def dtype_name(x: Any) -> str:
    return as_dtype(x.dtype).name
