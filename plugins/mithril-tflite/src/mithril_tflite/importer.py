"""The importer: runs the operators of a graph on the values of an environment, by the table of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mithril.graph import (
    Builder,
    DType,
    InputError,
    MithrilError,
    OperationError,
    Origin,
    UnsupportedError,
    Value,
    check_limit,
)
from mithril_importing.arrays import Array, as_value, is_sizes, sizes_of
from mithril_importing.damage import MISTAKES
from mithril_importing.declared_types import other_type, type_text
from mithril_importing.folding import Folding
from mithril_importing.table import results_of
from mithril_tflite.operators.activations import activated
from mithril_tflite.reading import Graph, Node, Tensor, TfliteFile
from mithril_tflite.sizes import SIZES
from mithril_tflite.table import OPERATORS, Row
from mithril_tflite.values import Handle, real, stored

CHECK = "ai_edge_litert.interpreter.Interpreter(path).allocate_tensors()"  # of a file


class Weights(Protocol):
    """The layer that owns the parameters and states of the imported graph."""

    def weight(self, name: str, array: Array) -> Value: ...
    def variable(self, name: str) -> Value: ...
    def assign(self, name: str, value: Value) -> None: ...


class Context:
    """The operator being imported, for functions that need more than their operands."""

    def __init__(self, importer: Importer, graph: Graph, node: Node, items: Sequence[Any], is_stored: bool) -> None:
        self.importer, self.graph, self.node, self.items = importer, graph, node, items
        self.is_stored = is_stored  # whether operands are as their tensors store them

    @property
    def results(self) -> int:
        return len(self.node.outputs)

    def constant(self, position: int) -> Array | None:
        """Return the elements of an operand as stored, if they are known."""
        x = self.items[position]
        return x if isinstance(x, np.ndarray) and not is_sizes(x) else None

    @property
    def weights(self) -> Weights:
        return self.importer.weights

    def dtype(self, position: int = 0) -> DType:
        """Return the declared dtype of a result."""
        return self.graph.tensors[self.node.outputs[position]].dtype

    @property
    def zero(self) -> int:
        """The stored number of 0 in the first result."""
        q = self.graph.tensors[self.node.outputs[0]].quantization
        return int(q.zero[0]) if q is not None and self.is_stored else 0

    def body(self, index: int) -> Body:
        """Return another graph of the file, as a function."""
        graphs = self.importer.file.graphs
        if not 0 <= index < len(graphs):
            raise OperationError(f"there is no graph {index} in the file, but {len(graphs)}")
        return Body(self.importer, graphs[index])


class Body:
    """A graph that an operator calls; arguments that are known stay known in it."""

    def __init__(self, importer: Importer, graph: Graph) -> None:
        self.importer, self.graph = importer, graph

    def __call__(self, *arguments: Any) -> tuple[Value, ...]:
        env = dict(zip((self.graph.keys[k] for k in self.graph.inputs), arguments, strict=True))
        items = self.importer.run(self.graph, env)
        tensors = [self.graph.tensors[k] for k in self.graph.outputs]
        return tuple(as_value(x, t.dtype) for x, t in zip(items, tensors, strict=True))


class Importer:
    """One import of a file into the current builder; ``parameters`` are names of parameters by key of the tensor."""

    def __init__(self, file: TfliteFile, graph: Graph, weights: Weights, parameters: Mapping[str, str]) -> None:
        self.file, self.graph, self.weights, self.parameters = file, graph, weights, parameters
        self.depth = self.nodes = 0
        self.folding = Folding(lambda: file.reader.size)
        self.written = sum(len(graph.nodes) for graph in file.graphs)
        self.is_changed: Callable[[], bool] = lambda: False  # whether a layer is not that of the file

    # -- graphs ------------------------------------------------------------------------------------------------------
    def run(self, graph: Graph, env: dict[str, Any]) -> list[Any]:
        """Import a graph and return its outputs."""
        self.depth += 1
        # A graph that calls itself has no end.
        check_limit("depth", self.depth, f"'{self.file.name}' nests {self.depth} graphs")
        try:
            for node in graph.nodes:
                self.step(graph, node, env)
            return [self.item(graph, k, env) for k in graph.outputs]
        finally:
            self.depth -= 1

    def item(self, graph: Graph, index: int, env: Mapping[str, Any]) -> Any:
        """Return a tensor: a value, an array, or a vector of sizes."""
        key = graph.keys[index]
        if key in env:
            return env[key]
        if graph.tensors[index].is_variable:  # begins with zeros
            return None
        array = self.file.constant(graph.tensors[index])
        if array is None:
            raise InputError(
                f"'{self.file.name}' reads the tensor '{key}', which no earlier operator computes",
                hint="convert the model again; its operators must be sorted",
            )
        name = self.parameters.get(key) if graph is self.graph and not self.depth else None
        return array if name is None else self.weights.weight(name, array)

    # -- operators ---------------------------------------------------------------------------------------------------
    def step(self, graph: Graph, node: Node, env: dict[str, Any], part: str = "") -> None:
        """Import an operator, or a part of it: its "product" without the activation, or its "activation"."""
        self.nodes += 1
        # Graphs may call graphs: a small file can expand to exponentially many operators.
        check_limit("nodes", self.nodes - self.written, f"the graphs of '{self.file.name}' expand to more operators")
        place = f"operator {node.index} ({node.name}) of '{self.file.name}'"
        name = graph.keys[node.outputs[0]] if node.outputs else place
        builder = Builder.current()
        origin = builder.origin
        label = name.split(";")[0].rpartition("/")[2] or node.name
        inner = Origin(f"{origin.path}.{label}" if origin.path else label, origin.file, origin.line)
        try:
            with builder.at(inner, builder.tags):
                results = self._results(graph, node, env, part)
            if len(results) < len(node.outputs):
                raise OperationError(f"{node.name} has {len(node.outputs)} results, expected {len(results)}")
            for k, result in zip(node.outputs, results, strict=False):
                if part != "product" and not self.is_changed():
                    self._compare(graph, graph.tensors[k], result)
        except MithrilError as error:
            raise error.with_facts(f"{place}, which computes '{name}'") from None
        except MISTAKES as cause:
            raise OperationError(
                f"cannot import {place}",
                facts=[f"it computes '{name}'", f"{type(cause).__name__}: {cause}"],
                hint=f"check the file: {CHECK}",
            ) from cause
        for k, result in zip(node.outputs, results, strict=False):
            env[product_key(graph, node) if part == "product" else graph.keys[k]] = result

    def _results(self, graph: Graph, node: Node, env: dict[str, Any], part: str) -> tuple[Any, ...]:
        row = OPERATORS.get(node.name)
        if row is None:
            raise UnsupportedError(f"{node.name} is not supported", hint="select other outputs: outputs=[...]")
        options, signature = dict(node.options), row.signature
        activation = 0 if "activation" in signature.keywords else options.pop("activation", 0)
        results: tuple[Any, ...]
        if part == "activation":
            results, is_stored = (env[product_key(graph, node)],), False
        else:
            items = [None if k < 0 else self.item(graph, k, env) for k in node.inputs]
            while items and items[-1] is None:
                items.pop()
            signature.check_operands(row.name, items)
            is_known = all(isinstance(x, np.ndarray) for x in items)
            if is_known and row.name in SIZES and any(is_sizes(x) for x in items):
                return results_of(SIZES[row.name](*items, **options))
            tensors = [graph.tensors[k] if k >= 0 else None for k in node.inputs]
            is_stored = row.moves and self._moves(graph, node, row)
            context = (
                {"context": Context(self, graph, node, items, is_stored)} if "context" in signature.keywords else {}
            )
            arguments = [
                None if x is None else self._known(x, t, row, k) for k, (x, t) in enumerate(zip(items, tensors))
            ]
            values = [
                k for k, x in enumerate(items) if x is not None and signature.kind(k) in ("Operand", "Weight", "Stored")
            ]

            def compute() -> tuple[Any, ...]:
                for k in values:
                    is_real = signature.kind(k) != "Stored" and not is_stored
                    arguments[k] = self._value(items[k], tensors[k], is_real)
                computed = results_of(signature.function(*arguments, **options, **context))
                return self._finished(graph, node, computed, activation, part, is_stored)

            if (
                row.folds
                and not part
                and all(isinstance(items[k], np.ndarray) and not is_sizes(items[k]) for k in values)
            ):
                folded = self.folding.fold(compute)
                if folded is not None:
                    return folded
            return compute()
        return self._finished(graph, node, results, activation, part, is_stored)

    def _finished(
        self, graph: Graph, node: Node, results: tuple[Any, ...], activation: int, part: str, is_stored: bool
    ) -> tuple[Any, ...]:
        """Return results with the fused activation, as their tensors store them."""
        if part == "product":
            return results
        if activation:
            results = tuple(activated(y, activation) for y in results)  # type: ignore[no-untyped-call]
        if is_stored:
            return results
        finished = []
        for y, k in zip(results, node.outputs):
            t = graph.tensors[k]
            is_real = isinstance(y, Value) and y.dtype.is_float and t.dtype.is_integer
            finished.append(stored(y, t.quantization, t.dtype) if t.quantization is not None and is_real else y)
        return tuple(finished)

    def _moves(self, graph: Graph, node: Node, row: Row) -> bool:
        """Whether the elements of all operands and results mean the same numbers."""
        operands = [k for j, k in enumerate(node.inputs) if k >= 0 and row.signature.kind(j) in ("Operand", "Weight")]
        first, *rest = [graph.tensors[k].quantization for k in (*operands, *node.outputs)] or [None]
        # Kernels that only move bytes read and write numbers with one scale; others are computed in real numbers.
        if any(q is not None and not q.is_single for q in (first, *rest)):
            return True  # rows of weights, which only reshapes and slices of constants read
        return all(q is first or (q is not None and q.equals(first)) for q in rest)

    def _known(self, x: Any, tensor: Tensor | None, row: Row, position: int) -> Any:
        """Return an operand whose elements decide the graph; others arrive as values."""
        kind = row.signature.kind(position)
        if kind not in ("Known", "Sizes"):
            return x
        if isinstance(x, Value) or (is_sizes(x) and kind == "Known"):
            assert tensor is not None
            raise UnsupportedError(
                f"the operand '{tensor.name}' of {row.name} must be known at import, but depends on inputs",
                hint="convert the model with static sizes, or select others: ml.from_tflite(path, outputs=[...])",
            )
        if kind == "Known":
            return x
        return sizes_of(x)

    def _value(self, x: Any, tensor: Tensor | None, is_real: bool) -> Any:
        assert tensor is not None
        if isinstance(x, Handle):
            return x
        if is_real and tensor.quantization is not None and tensor.dtype.is_integer:
            return real(x, tensor.quantization, tensor.dtype)
        return as_value(x, tensor.dtype)

    # -- declared types ----------------------------------------------------------------------------------------------
    def _compare(self, graph: Graph, tensor: Tensor, result: Any) -> None:
        """Raise OperationError if a result differs from its declaration.

        Where an input of the file has an open size, a size without a signature may be that of one example.
        """
        if not isinstance(result, (Value, np.ndarray)):
            return
        actual = other_type(
            result,
            tensor.dtype,
            tensor.shape,
            lambda a, b: graph.has_open_sizes or b == -1 or type(a) is not int or a == b,
            tensor.dtype if is_sizes(result) else None,
        )
        if actual is not None:
            raise OperationError(
                f"the result is {actual}",
                facts=[f"the file declares {type_text(tensor.dtype, tensor.shape)}"],
                hint=f"check the file: {CHECK}; if it is valid, please report this as a mithril bug",
            )


def product_key(graph: Graph, node: Node) -> str:
    """Return the key of a result without its activation."""
    return f"{graph.keys[node.outputs[0]]} before its activation"
