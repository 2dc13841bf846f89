"""Operations called on connections: each call becomes a layer of that one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base import ModelError
from mithril.ir import Op
from mithril.models.language.connection import Connection, Connections, Step
from mithril.models.language.layer import Layer
from mithril.models.language.source_location import here
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
        for given in [*operands, *attributes.values()]:
            for connection in [given] if isinstance(given, Connection) else connections_in(given):
                if id(connection) not in seen:
                    seen.add(id(connection))
                    self.sources.append(connection)
        self.inputs = tuple(f"x{k}" for k in range(len(self.sources)))
        self.outputs = _outputs(function, attributes)

    @property
    def default_bindings(self) -> Mapping[str, Any]:
        return dict(zip(self.inputs, self.sources, strict=True))

    def build(self, *values: Any) -> Any:
        known = {id(c): v for c, v in zip(self.sources, values, strict=True)}
        operands = [self._operand(o, known) for o in self.template]
        return self.function(*operands, **{n: resolve(a, known) for n, a in self.keywords.items()})

    @staticmethod
    def _operand(given: Any, known: dict[int, Any]) -> Any:
        if isinstance(given, Connection):
            return known[id(given)]
        if isinstance(given, Size):
            return as_operand(given, known)
        return resolve(given, known)

    def __repr__(self) -> str:
        return self.title


def _outputs(function: Any, attributes: Mapping[str, Any]) -> tuple[str, ...]:
    results: tuple[str, ...] = getattr(function, "results", ("result",))
    if len(results) == 1:
        return ("output",)
    if not results:  # as many as the attributes say
        results = tuple(f"output{k}" for k in range(len(attributes["sizes"])))
    return results


def _wire(layer: Apply, name: str) -> Any:
    layer.name = None
    step = Step(layer, (), {}, here())
    step.name = name
    made = tuple(step.results.values())
    step.settle()
    return made[0] if len(made) == 1 else Connections(made)


def apply(op: Op, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """The layer that applies ``op``, wired; its output connections."""
    for given in operands:
        if isinstance(given, str):
            raise ModelError(
                f"operation '{op.name}' cannot take the name '{given}'",
                facts=[f"at {here()}"],
                hint="names work in layers; take the connection with model['...']",
            )
    if not op.variadic and any(a in op.operands for a in attributes):
        operands, attributes = op.bind(tuple(operands), dict(attributes))
    return _wire(Apply(op, operands, attributes, op.name), op.name.rpartition(".")[2])


def apply_index(connection: Connection, index: Any) -> Any:
    """The layer behind ``connection[index]``."""
    from mithril.ops import getitem

    parts = list(index) if isinstance(index, tuple) else [index]
    flat: list[Any] = []
    for part in parts:  # slices hold sizes too, and are taken apart so that those are found
        if isinstance(part, slice):
            part = (part.start, part.stop, part.step)
        flat.append(np.asarray(part) if isinstance(part, list) else part)
    kinds = [isinstance(part, slice) for part in parts]

    def take(x: Any, *given: Any) -> Any:
        key = tuple(slice(*g) if is_slice else g for g, is_slice in zip(given, kinds, strict=True))
        return getitem(x, key)

    return _wire(Apply(take, [connection, *flat], {}, "index"), "index")


Connection._apply = staticmethod(apply)
Connection._index = staticmethod(apply_index)
