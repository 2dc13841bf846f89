"""A graph built by a backend and called like any program: parameters apart from inputs, operands left intact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from mithril.backend import Backend, BuildOptions
from mithril.graph import Graph, Op, decompose, iterate

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


class Program:
    """An executable of the backend under test. Calling it checks that it ran every operation itself.

    With ``host``, the backend may also run the references of primitives for which it records a fallback.
    """

    def __init__(self, backend: Backend, options: BuildOptions, graph: Graph, host: bool = False) -> None:
        self.backend = backend
        self.params = {i.name for i in graph.arguments if i.role == "param"}
        decomposed = run_by(backend, options, graph, host)
        self.references = {n.op.name for n, _ in iterate(decomposed) if host and backend.falls_back(n, options)}
        self.executable = backend.build(decomposed, options)
        needed = {node.op.name for node in self.executable.graph.nodes}
        ran = set(self.executable.lowered) | self.references
        assert needed <= ran, f"the backend did not run {sorted(needed - ran)} itself"

    def native(self, arguments: Arrays) -> dict[str, Any]:
        """Convert arguments to arrays of the backend."""
        return {name: self.backend.array(a) for name, a in arguments.items()}

    def call(self, native: Mapping[str, Any]) -> dict[str, Any]:
        """Run on arrays of the backend and return such arrays."""
        params = {n: a for n, a in native.items() if n in self.params}
        inputs = {n: a for n, a in native.items() if n not in self.params}
        names = (list(params), list(inputs))
        # Engines without empty arrays, such as GGML, may leave these to references.
        is_empty = any(0 in array.shape for array in native.values())
        with nullcontext() if is_empty else ForbiddenReference(self.references):
            results = self.executable(params, inputs)
        assert names == (list(params), list(inputs)), "the program changed the dictionaries of its arguments"
        for name, value in results.items():
            assert self.backend.is_array(value), f"'{name}' is a {type(value).__name__}, no array of the backend"
        return dict(results)

    def numpy(self, native: Mapping[str, Any]) -> dict[str, Array]:
        """Copy arrays of the backend."""
        return {name: np.array(self.backend.to_numpy(value)) for name, value in native.items()}

    def __call__(self, arguments: Arrays) -> dict[str, Array]:
        before = {name: np.asarray(array).tobytes() for name, array in arguments.items()}  # native may share memory
        native = self.native(arguments)
        results = self.numpy(self.call(native))
        for name, content in before.items():
            for array in (arguments[name], self.backend.to_numpy(native[name])):
                assert np.asarray(array).tobytes() == content, f"'{name}' was written to"
        return results


def run_by(backend: Backend, options: BuildOptions, graph: Graph, host: bool = False) -> Graph:
    """Decompose a graph to operations that the backend lowers and, with ``host``, primitives that it falls back for."""
    return decompose(
        graph, lambda n: backend.lowers(n, options) or (host and backend.falls_back(n, options)), backend.name
    )


def not_lowered(backend: Backend, options: BuildOptions, graph: Graph) -> set[str]:
    """Return the names of the primitives of a graph that the backend does not lower."""
    parts = decompose(graph, lambda node: backend.lowers(node, options) or not node.op.composite)
    return {node.op.name for node, _ in iterate(parts) if not backend.lowers(node, options)}


class ForbiddenReference:
    """While active, evaluating an operation by its reference raises: a backend that falls back is detected."""

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = before = Op.evaluate

        def refuse(op: Op, *operands: Any, **attributes: Any) -> Any:
            if op.name in self.allowed:
                return before(op, *operands, **attributes)
            raise AssertionError(f"the backend ran the reference of '{op.name}' instead of its own lowering")

        Op.evaluate = refuse  # type: ignore[method-assign, assignment]

    def __exit__(self, *exc: object) -> None:
        Op.evaluate = self.before  # type: ignore[method-assign]


def with_params(graph: Graph, names: set[str]) -> Graph:
    """Return the graph with some of its inputs as parameters."""
    from dataclasses import replace

    return graph.replaced(inputs=tuple(replace(i, role="param") if i.name in names else i for i in graph.inputs))


def every_other(graph: Graph) -> set[str]:
    """Return the names of the second, fourth, ... argument."""
    return {i.name for i in graph.arguments[1::2]}


def backwards(arguments: Arrays, ordered: Collection[str] = ()) -> dict[str, Array]:
    """Return other arguments of the same shapes: the elements of each, unless it is ordered, in the opposite order."""
    return {n: a if n in ordered else np.array(a.ravel()[::-1]).reshape(a.shape) for n, a in arguments.items()}
