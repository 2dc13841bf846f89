"""A stepping backend: NumPy computes one operation at a time and reports each to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend import Backend, BuildOptions, as_numpy
from mithril.graph import BackendError, DType, Graph, Node, bind, dtype as as_dtype, iterate, substitute

Array = np.ndarray[Any, Any]
OnStep = Callable[[Node, Sequence[Array]], None]


class StepperBackend(Backend):
    """Runs a graph one operation at a time. ``on_step(node, results)`` is called after each; it may raise."""

    name = "stepper"

    def __init__(self, *, on_step: OnStep | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.on_step = on_step

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        """Whether the operation is a primitive; composites arrive decomposed."""
        return not node.op.composite

    def build(self, graph: Graph, options: BuildOptions | None = None) -> Stepper:
        self.check(graph)
        return Stepper(graph, self.on_step)

    def array(self, data: Any, dtype: Any = None) -> Array:
        return np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)

    def to_numpy(self, array: Array) -> Array:
        return array

    def is_array(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)


class Stepper:
    """A graph ready to run."""

    source = None  # nothing is generated

    def __init__(self, graph: Graph, on_step: OnStep | None) -> None:
        self.graph = graph
        self.on_step = on_step
        self.lowered = frozenset(node.op.name for node, _ in iterate(graph))

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Array]:
        arguments = [(params if i.role == "param" else inputs)[i.name] for i in self.graph.arguments]
        with np.errstate(all="ignore"):  # nan and infinity are values, not accidents
            results = self.run(self.graph, arguments)
        return dict(zip(self.graph.output_names, map(np.array, results), strict=True))  # no views of operands

    def run(self, graph: Graph, arguments: Sequence[Array]) -> list[Array]:
        """Compute the outputs of a graph or region from the arrays of its inputs."""
        values: dict[Any, Array] = {i.value: i.data for i in graph.inputs if i.data is not None}
        values.update((i.value, a) for i, a in zip(graph.arguments, arguments, strict=True))
        shapes = {i.name: i.type.shape for i in graph.inputs}
        sizes = bind(shapes, {i.name: values[i.value].shape for i in graph.inputs})
        for node in graph.nodes:
            operands = [None if v is None else values[v] for v in node.operands]
            attributes = {name: substitute_all(value, sizes) for name, value in node.attributes.items()}
            outcome = self.step(node, operands, attributes)
            results = [np.asarray(r, v.dtype.numpy) for r, v in zip(outcome, node.results, strict=True)]
            values.update(zip(node.results, results, strict=True))
            if self.on_step is not None:
                self.on_step(node, results)
        return [values[v] for v in graph.outputs]

    def step(self, node: Node, operands: list[Any], attributes: dict[str, Any]) -> Sequence[Any]:
        """Compute one operation: control flow runs its regions here, others run their reference implementation."""
        if node.op.name in CONTROL:
            return CONTROL[node.op.name](self, node.regions, operands, **attributes)
        result = node.op.reference(*operands, **attributes)
        return (result,) if len(node.op.results) == 1 else result


def substitute_all(value: Any, sizes: Mapping[str, int]) -> Any:
    """Replace the symbols of an attribute by the sizes of this call."""
    if isinstance(value, tuple):
        return tuple(substitute_all(v, sizes) for v in value)
    return value if isinstance(value, (int, float, str, DType, type(None))) else substitute(value, sizes)


def choose(stepper: Stepper, regions: Sequence[Graph], operands: list[Array]) -> list[Array]:
    """``if``: the first region where the condition holds, else the second."""
    condition, *rest = operands
    return stepper.run(regions[0] if condition else regions[1], rest)


def loop(
    stepper: Stepper, regions: Sequence[Graph], operands: list[Array], *, states: int, max_trips: int | None
) -> list[Array]:
    """``while``: the body as long as the condition holds."""
    condition, body = regions
    current, rest = operands[:states], operands[states:]
    trips = 0
    while (max_trips is None or trips < max_trips) and stepper.run(condition, [*current, *rest])[0]:
        current = stepper.run(body, [*current, *rest])
        trips += 1
    return current


def scan(
    stepper: Stepper,
    regions: Sequence[Graph],
    operands: list[Array],
    *,
    carries: int,
    sequences: int,
    length: int,
    reverse: bool,
) -> list[Array]:
    """Run ``scan``: the body once per step, with its per-step results stacked."""
    (body,) = regions
    current, rest = operands[:carries], operands[carries + sequences :]
    rows: list[list[Array]] = []
    for k in steps(length, reverse):
        elements = [x[k] for x in operands[carries : carries + sequences]]
        results = stepper.run(body, [*current, *elements, *rest])
        current = results[:carries]
        rows.append(results[carries:])
    if reverse:
        rows.reverse()
    if rows:
        return [*current, *(np.stack(column) for column in zip(*rows, strict=True))]
    return [*current, *(np.empty((0, *v.shape), v.dtype.numpy) for v in body.outputs[carries:])]


def steps(length: int, reverse: bool) -> Iterator[int]:
    return iter(range(length - 1, -1, -1) if reverse else range(length))


CONTROL: dict[str, Callable[..., list[Array]]] = {"if": choose, "while": loop, "scan": scan}


def first_not_finite(node: Node, results: Sequence[Array]) -> None:
    """Stop at the first nan or infinity; pass it as ``on_step``."""
    for array in results:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise BackendError(
                f"'{node.op.name}' gave {bad} values of {array.size} that are not finite",
                facts=[str(node.origin)],
                hint="inspect the operands: compile with on_step=print",
            )
