"""A layer of mithril that runs the layers of the predecessor's model on typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril import ModelError, Value, dtype as as_dtype
from mithril.models import Layer
from mithril_compat.language.block import Leaf
from mithril_compat.language.connection import Connection, Constant, Tensor

SHARED = ("weight", "w_ho", "w_out")  # weights whose first size is that of the output


class Weight:
    """A parameter that gets its shape from the first layer that uses it."""

    def __init__(self, program: Program, name: str, shape: Sequence[Any] | None) -> None:
        self.program, self.name, self.shape = program, name, shape
        self.value: Any = None

    def sized(self, shape: Sequence[Any], init: str = "normal") -> Any:
        """Return the parameter, declared with this shape at its first use."""
        if self.value is None:
            self.value = self.program.param(self.name, tuple(shape), init)
        return self.value


def fill(weight: Any, shape: Sequence[Any], init: str = "normal") -> Any:
    """Return a connected weight unchanged, else a parameter of this shape."""
    return weight.sized(shape, init) if isinstance(weight, Weight) else weight


class Program(Layer):
    """The layers of a model in order, with the names of its inputs, parameters, states and outputs."""

    scalars = True

    def __init__(
        self,
        leaves: Sequence[Leaf],
        data: Mapping[str, Connection],
        parameters: Mapping[str, Connection],
        shapes: Mapping[str, Sequence[Any] | None],
        states: Mapping[str, tuple[Connection, Connection, Any]],
        results: Mapping[str, Connection],
        float_dtype: Any,
    ) -> None:
        self.leaves = leaves
        self.inputs = tuple(data)
        self.data, self.parameters, self.shapes = data, parameters, shapes
        self.states, self.results = states, results
        self.outputs = tuple(results)
        self.float_dtype = float_dtype
        self.constants: dict[str, Any] = {}  # outputs that are Python values: shapes, sizes

    def expects(self, terminal: str) -> Any:
        edge = self.data[terminal].edge
        integers = (leaf.edges[key].edge for leaf in self.leaves for key in leaf.integers)
        kinds: dict[Any, str] = {int: "int32", bool: "bool"}
        kind = kinds.get(getattr(edge.type, "element", None))
        return (None, kind or "int32") if kind or any(e is edge for e in integers) else None

    def build(self, *operands: Any) -> Any:
        values: dict[int, Any] = {id(e.edge): v for e, v in zip(self.data.values(), operands, strict=True)}
        for name, edge in self.parameters.items():
            values[id(edge.edge)] = Weight(self, name, self.given_shape(name) or self.shapes[name])
        for name, (source, _, initial) in self.states.items():
            values[id(source.edge)] = self._state(name, source, initial)
        self._expected = self._compared(values)
        for leaf in self.leaves:
            self._current = leaf
            inputs = {key: self._value(leaf.edges[key], values, leaf, key) for key in leaf.input_names}
            try:
                outputs = leaf.run(self, inputs)
            except AttributeError as error:
                if not any(isinstance(x, Weight) for x in inputs.values()):
                    raise
                raise self._unsized(inputs, leaf) from error
            for key, value in outputs.items():
                values[id(leaf.edges[key].edge)] = value
        for name, (_, result, _) in self.states.items():
            self.update_state(name, values[id(result.edge)])
        outputs = {}
        for name, edge in self.results.items():
            value = values[id(edge.edge)]
            if not isinstance(value, Value):
                self.constants[name] = value
                value = self.context.as_value(np.zeros((), np.float32))
            outputs[name] = value
        return tuple(outputs.values()) if len(outputs) > 1 else next(iter(outputs.values()))

    # -- for layers --------------------------------------------------------------------------------------------------
    def size_of(self, weight: Any, axis: int) -> Any:
        """Return the size of a weight, or None if it is not known yet."""
        shape = getattr(weight, "shape", None)
        size = shape[axis] if shape else None
        return size if not isinstance(weight, Weight) or isinstance(size, int) else None

    def expected_size(self) -> Any:
        """Return the last size of the output of the current layer if a loss compares it with data, else None.

        Cells of a sequence share weights, and the loss may compare another one of them.
        """
        edges = (edge.edge for key, edge in self._current.edges.items() if key in SHARED)
        sizes = (self._expected.get(id(e)) for e in (self._current.couts[-1].edge, *edges))
        return next((size for size in sizes if size is not None), None)

    def is_read(self) -> bool:
        """Whether a layer reads the last output of the current one, or it is a result."""
        output = self._current.couts[-1].edge
        read = (leaf.edges[key].edge for leaf in self.leaves for key in leaf.input_names)
        return any(edge is output for edge in (*read, *(e.edge for e in self.results.values())))

    def state_name(self, key: str) -> str:
        """Return the name of a state of the current layer, numbered if several layers have such states."""
        alike = [leaf for leaf in self.leaves if type(leaf) is type(self._current) and leaf.has_states]
        return key if len(alike) == 1 else f"{key}_{alike.index(self._current)}"

    def array(self, numbers: Any) -> np.ndarray[Any, Any]:
        """Return an array of the program's floats."""
        return np.asarray(numbers, dtype=as_dtype(self.float_dtype).numpy)

    def _compared(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Return the last sizes of predictions, from the targets of their losses."""
        sizes = {}
        for leaf in self.leaves:
            if {"input", "target"} <= leaf.edges.keys():
                target = values.get(id(leaf.edges["target"].edge))
                if isinstance(target, Value) and target.ndim:
                    compared = leaf.edges["input"].edge
                    sizes[id(compared)] = target.shape[-1]
                    for key, edge in getattr(compared.producer, "edges", {}).items():
                        if key in SHARED:
                            sizes[id(edge.edge)] = target.shape[-1]
        return sizes

    def _state(self, name: str, source: Connection, initial: Any) -> Any:
        if isinstance(initial, Tensor):
            x = initial.array(self.float_dtype)
        elif isinstance(initial, Value) or callable(initial):
            return Weight(self, name, None)
        else:
            x = np.asarray(initial)
        if x.size and not np.all(x == x.flat[0]):
            raise ModelError(f"the initial value of state '{name}' has different elements", hint="pass it as state=")
        value = float(x.flat[0]) if x.dtype.kind == "f" else int(x.flat[0])
        return self.state(
            name, x.shape, f"constant(value={value})", self.float_dtype if x.dtype.kind == "f" else x.dtype
        )

    def _value(self, edge: Connection, values: dict[int, Any], leaf: Leaf, key: str) -> Any:
        edge = edge.edge
        if id(edge) not in values:
            if not edge.is_valued:
                raise ModelError(f"input '{key}' of {type(leaf).__name__} is not connected")
            values[id(edge)] = self.plain(edge.value)
        value = values[id(edge)]
        if isinstance(value, Weight):
            if value.value is None and value.shape is not None and all(isinstance(s, int) for s in value.shape):
                value.sized(value.shape)
            return value if value.value is None else value.value
        return value

    def plain(self, value: Any) -> Any:
        """Return a constant: tensors as values of the graph, everything else as Python has it."""
        if isinstance(value, Tensor):
            return self.context.as_value(value.array(self.float_dtype))
        if isinstance(value, Constant):
            return value.number(self.float_dtype)
        if hasattr(value, "__array__") and not isinstance(value, Value):
            return self.context.as_value(np.asarray(value))
        return value

    def _unsized(self, inputs: Mapping[str, Any], leaf: Leaf) -> ModelError:
        names = ", ".join(f"'{x.name}'" for x in inputs.values() if isinstance(x, Weight))
        return ModelError(
            f"the shape of parameter {names} is unknown",
            facts=[f"first used by {type(leaf).__name__}"],
            hint="declare it: model.set_shapes(...), or shapes= of compile",
        )


def in_order(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the layers such that each comes after those whose outputs it reads."""
    by_output = {id(leaf.edges[o].edge): leaf for leaf in leaves for o in leaf.outputs}
    ordered: dict[int, Leaf] = {}
    for start in leaves:
        pending = [(start, False)]
        open_layers: set[int] = set()
        while pending:
            leaf, expanded = pending.pop()
            if id(leaf) in ordered:
                continue
            if expanded:
                ordered[id(leaf)] = leaf
                continue
            if id(leaf) in open_layers:
                raise ModelError(f"the model has a cycle through {type(leaf).__name__}")
            open_layers.add(id(leaf))
            pending.append((leaf, True))
            sources = (by_output.get(id(leaf.edges[key].edge)) for key in leaf.input_names)
            pending += [(s, False) for s in sources if s is not None and id(s) not in ordered]
    return list(ordered.values())


def needed(leaves: Sequence[Leaf], results: Sequence[Connection]) -> list[Leaf]:
    """Return the layers that the results depend on, in order."""
    edges = {id(e.edge) for e in results}
    selected = []
    for leaf in reversed(in_order(leaves)):
        if any(id(leaf.edges[o].edge) in edges for o in leaf.outputs):
            selected.append(leaf)
            edges |= {id(leaf.edges[key].edge) for key in leaf.input_names}
    return selected[::-1]


__all__ = ["Program", "Weight", "fill", "in_order", "needed"]
