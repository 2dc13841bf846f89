"""Which calls of which operations the kit makes: derived from the operations' own samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mithril.derivatives import gradients
from mithril.graph import (
    Arr,
    Builder,
    Dim,
    DType,
    Graph,
    MithrilError,
    Node,
    Op,
    Sample,
    Size,
    Value,
    dtype as as_dtype,
    emit,
)
from mithril_testing.sample_arrays import arrays_for
from mithril_testing.selection import selected

# Additional dtypes for the first sample of an operation, by kind.
_SIBLINGS = {
    "float": ("float64", "float16", "bfloat16"),
    "int": ("int8", "int64", "uint8"),
    "uint": ("uint8",),
    "bool": (),
}


@dataclass(frozen=True)
class Case:
    """One call of one operation on concrete arrays."""

    op: Op
    sample: Sample
    number: int
    dtype: DType | None = None  # None: the sample's own

    @property
    def id(self) -> str:
        """``softmax[1]``, ``softmax[0-float16]`` or ``softmax[label]``."""
        parts = [self.sample.label or str(self.number)]
        if self.dtype is not None:
            parts.append(self.dtype.name)
        return f"{self.op.name}[{'-'.join(parts)}]"

    def names(self) -> list[str]:
        """Return every name that an xfail may use for the case, the most general first."""
        names = [self.op.name, f"{self.op.name}[{self.sample.label or self.number}]", self.id]
        if self.dtype is not None:
            names.insert(1, f"{self.op.name}[{self.dtype.name}]")
        return list(dict.fromkeys(names))

    @cached_property
    def arrays(self) -> list[np.ndarray[Any, Any] | None]:
        return arrays_for(self.sample, self.id, self.dtype)

    @property
    def needs(self) -> set[DType]:
        """Dtypes the backend must have for the case."""
        dtypes = {as_dtype(a.dtype) for a in self.arrays if a is not None}
        dtypes |= {v for v in self.op.complete(self.sample.attributes).values() if isinstance(v, DType)}
        return dtypes

    def graph(self) -> Graph:
        """Return the call as a graph of inputs ``x0, x1, ...``."""
        return self._graph

    @cached_property
    def _graph(self) -> Graph:
        return self._built(None)

    def symbolic_graph(self) -> Graph:
        """Return the call with the first operand's leading size as a Dim."""
        return self._built(next((a.shape[0] for a in self.arrays if a is not None and a.ndim), None))

    def _built(self, leading: int | None) -> Graph:
        builder = Builder(self.op.name.replace(".", "_"))
        with builder:
            values: list[Value | None] = []
            for k, array in enumerate(self.arrays):
                if array is None:
                    values.append(None)
                    continue
                shape: tuple[Size, ...] = array.shape
                if shape and shape[0] == leading and array.ndim == self._rank:
                    shape = (Dim("N", 0, 64), *shape[1:])
                values.append(builder.input(f"x{k}", shape, as_dtype(array.dtype)))
            attributes = self.sample.attributes
            if not any(v is not None for v in values):
                results = emit(self.op, (), attributes)
            else:
                results = self.op(*values, **attributes)
        outputs = results if isinstance(results, tuple) else (results,)
        return builder.build({f"y{k}": v for k, v in enumerate(outputs)})

    @property
    def _rank(self) -> int:
        return next((a.ndim for a in self.arrays if a is not None), 0)

    def inputs(self) -> dict[str, np.ndarray[Any, Any]]:
        return {f"x{k}": a for k, a in enumerate(self.arrays) if a is not None}


def backend_cases(dtypes: Collection[DType], ops: Collection[str | Op] | None = None) -> Iterator[Case]:
    """Yield all cases that a backend with these dtypes must pass; ``ops`` as for ``selected``."""
    for _, op in sorted(selected(ops).items()):
        for number, sample in enumerate(op.samples):
            cases = [Case(op, sample, number)]
            if number == 0 and sample.dtypes:
                cases += [Case(op, sample, number, as_dtype(d)) for d in _siblings(sample)]
            for case in cases:
                if case.needs <= set(dtypes) and _accepted(case):
                    yield case


def _siblings(sample: Sample) -> tuple[str, ...]:
    first = next((s for s in sample.operands if s is not None), None)
    if not isinstance(first, Arr) or first.values is not None:
        return ()
    return tuple(d for d in _SIBLINGS[as_dtype(first.dtype).kind] if d != first.dtype)


def _accepted(case: Case) -> bool:
    """Whether the operation takes this dtype at all; its own sample it must take."""
    if case.dtype is None:
        return True
    try:
        case.graph()
    except MithrilError:
        return False
    return True


def is_primitive(node: Node) -> bool:
    """Whether a node's operation has no body of other operations."""
    op = node.op
    return not op.composite


def symbolic_graph(case: Case) -> Graph | None:
    """Return the case with a symbolic leading size, or None if the operation requires a static one."""
    if not any(a is not None and a.ndim for a in case.arrays):
        return None
    try:
        graph = case.symbolic_graph()
    except MithrilError:
        return None
    return graph if any(not i.type.is_static for i in graph.inputs) else None


def differentiable(case: Case) -> bool:
    """Whether gradients flow from some output of the case to some operand."""
    if case.op.gradient is None and not case.op.composite:
        return False
    if not any(a is not None and as_dtype(a.dtype).is_float for a in case.arrays):
        return False
    return any(v.dtype.is_float for v in case.graph().outputs)


def gradient_graph(graph: Graph) -> Graph:
    """Return the graph with the gradients of all float outputs for all float inputs."""
    outputs = [n for n, v in zip(graph.output_names, graph.outputs, strict=True) if v.dtype.is_float]
    return gradients(graph, outputs, [i.name for i in graph.inputs if i.type.dtype.is_float])
