"""Operations called on connections: each call becomes a layer of that operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import ModelError, Op
from mithril.models.language.connection import Connection, Connections, Step
from mithril.models.language.layer import Layer
from mithril.models.language.source_location import user_location
from mithril.models.language.symbolic_sizes import Size, as_operand, connections_in, resolve


class Apply(Layer):
    """A function of connections, constants and sizes."""

    scalars = True

    def __init__(self, function: Any, operands: Sequence[Any], attributes: Mapping[str, Any], title: str) -> None:
        self.function = function
        self.title = title
        self.template = list(operands)
        self.keywords = dict(attributes)
        self.sources: list[Connection] = []
        seen: set[int] = set()
        for operand in [*operands, *attributes.values()]:
            for connection in [operand] if isinstance(operand, Connection) else connections_in(operand):
                if id(connection) not in seen:
                    seen.add(id(connection))
                    self.sources.append(connection)
        self.inputs = tuple(f"x{k}" for k in range(len(self.sources)))
        self.outputs = _outputs(function, attributes)

    @property
    def default_bindings(self) -> Mapping[str, Any]:
        return dict(zip(self.inputs, self.sources, strict=True))

    def build(self, *values: Any) -> Any:
        values_by_id = {id(c): v for c, v in zip(self.sources, values, strict=True)}
        operands = [self._operand(o, values_by_id) for o in self.template]
        return self.function(*operands, **{n: resolve(a, values_by_id) for n, a in self.keywords.items()})

    @staticmethod
    def _operand(operand: Any, values: dict[int, Any]) -> Any:
        if isinstance(operand, Connection):
            return values[id(operand)]
        if isinstance(operand, Size):
            return as_operand(operand, values)
        return resolve(operand, values)

    def __repr__(self) -> str:
        return self.title


def _outputs(function: Any, attributes: Mapping[str, Any]) -> tuple[str, ...]:
    results: tuple[str, ...] = getattr(function, "results", ("result",))
    if len(results) == 1:
        return ("output",)
    if not results:  # one per entry of the attribute "sizes"
        results = tuple(f"output{k}" for k in range(len(attributes["sizes"])))
    return results


def _wire(layer: Apply, name: str) -> Any:
    layer.name = None
    step = Step(layer, (), {}, user_location())
    step.name = name
    outputs = tuple(step.results.values())
    step.attach_to_model()
    return outputs[0] if len(outputs) == 1 else Connections(outputs)


def apply(op: Op, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Wire a layer that applies ``op`` and return its output connections."""
    for operand in operands:
        if isinstance(operand, str):
            raise ModelError(
                f"operation '{op.name}' cannot take the name '{operand}'",
                facts=[f"at {user_location()}"],
                hint="names work in layers; take the connection with model['...']",
            )
    if not op.variadic and any(a in op.operands for a in attributes):
        operands, attributes = op.bind(tuple(operands), dict(attributes))
    return _wire(Apply(op, operands, attributes, op.name), op.name.rpartition(".")[2])


class Take:
    """Indexing ``x[...]`` by entries of which some are slices, written as (start, stop, step)."""

    def __init__(self, slices: Sequence[bool]) -> None:
        self.slices = tuple(slices)

    def __call__(self, x: Any, *entries: Any) -> Any:
        from mithril.ops import getitem

        pairs = zip(entries, self.slices, strict=True)
        return getitem(x, tuple(slice(*entry) if is_slice else entry for entry, is_slice in pairs))


def apply_index(connection: Connection, index: Any) -> Any:
    """Wire a layer for ``connection[index]`` and return its output connection."""
    parts = list(index) if isinstance(index, tuple) else [index]
    operands: list[Any] = []
    for part in parts:  # slices become tuples, so that ``connections_in`` finds the sizes in them
        if isinstance(part, slice):
            part = (part.start, part.stop, part.step)
        operands.append(np.asarray(part) if isinstance(part, list) else part)
    take = Take([isinstance(part, slice) for part in parts])
    return _wire(Apply(take, [connection, *operands], {}, "index"), "index")
