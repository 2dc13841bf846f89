"""Programs of engines that compile for the sizes of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from mithril.graph import DType, Graph

Compiled = Callable[[list[Any]], dict[str, Any]]


class ProgramBySizes:
    """The function of a program, compiled once for each combination of the shapes of its arguments.

    Subclasses define ``compile``; ``array`` is optional. One thread runs at a time.
    """

    def __init__(self, forward: Callable[..., dict[str, Any]], graph: Graph) -> None:
        self.forward = forward  # the generated function
        self.arguments = [(i.name, i.role == "param", i.type.dtype) for i in graph.arguments]
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self.lock = Lock()

    def compile(self, arrays: list[Any]) -> Compiled:
        """Return the function of the arguments, in the order of the graph, for the shapes of these."""
        raise NotImplementedError

    def array(self, x: Any, dtype: DType) -> Any:
        """Return an argument as the engine takes it."""
        return x

    def results(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the results of the generated function, for the arguments in the order of the graph."""
        values: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for (name, is_param, _), x in zip(self.arguments, arrays, strict=True):
            values[not is_param][name] = x
        return self.forward(*values)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            arrays = [self.array((params if p else inputs)[name], dtype) for name, p, dtype in self.arguments]
            shapes = tuple([x.shape for x in arrays])
            if shapes not in self.compiled:
                self.compiled[shapes] = self.compile(arrays)
            return self.compiled[shapes](arrays)

    def forget_sizes(self) -> None:
        """Release all that was compiled."""
        self.compiled.clear()
