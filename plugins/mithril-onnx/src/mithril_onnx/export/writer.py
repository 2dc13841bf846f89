"""The writer of ONNX graphs: names, nodes, constants, and sizes that are computed at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper as helper
import onnx.numpy_helper as numpy_helper

from mithril.graph import Dim, Graph, Node, Size, Symbol, UnsupportedError, Value, is_static
from mithril_onnx.export.table import row_for
from mithril_onnx.tensors import code_of_dtype


class Names:
    """Unique names of one file."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def new(self, stem: str) -> str:
        name, k = stem, 0
        while name in self.used or not name:
            k += 1
            name = f"{stem}_{k}"
        self.used.add(name)
        return name


class Writer:
    """A graph being written. The bodies of control flow have writers of their own, with ``outer`` set."""

    def __init__(self, opset: int, outer: Writer | None = None) -> None:
        self.opset = opset
        self.outer = outer
        self.root: Writer = outer.root if outer is not None else self
        self.names: Names = outer.names if outer is not None else Names()
        self.nodes: list[Any] = []
        self.of: dict[Value, str] = {}
        self.path = ""
        if outer is None:
            self.prologue: list[Any] = []  # nodes that compute sizes
            self.initializers: list[Any] = []
            self.constants: dict[Any, tuple[str, Any]] = {}  # name, and the array, whose id is the key
            self.sizes: dict[Any, str] = {}
            self.symbols: dict[str, tuple[str, int]] = {}  # symbol -> input and axis

    # -- nodes -------------------------------------------------------------------------------------------------------
    def node(self, kind: str, *operands: str, results: int = 1, stem: str = "", **attributes: Any) -> Any:
        """Append a node and return the name of its result, or the names."""
        return self._node(self.nodes, kind, operands, results, stem, attributes)

    def _node(
        self, nodes: list[Any], kind: str, operands: Sequence[str], results: int, stem: str, attributes: dict[str, Any]
    ) -> Any:
        names = [self.names.new(stem or kind.lower()) for _ in range(results)]
        set_attributes = {n: v for n, v in attributes.items() if v is not None}
        # The layers around a node as PyTorch writes its modules: readers find layers by these names.
        label = f"/{self.path.replace('.', '/')}/{kind}" if self.path else kind
        trimmed = list(operands)
        while trimmed and not trimmed[-1]:
            trimmed.pop()
        nodes.append(helper.make_node(kind, trimmed, names, name=self.names.new(label), **set_attributes))
        return names[0] if results == 1 else names

    def constant(self, array: Any, dtype: Any = None, stem: str = "constant") -> str:
        """Return the name of a constant, shared between equal ones."""
        value = np.asarray(array) if dtype is None else np.asarray(array, dtype)
        root = self.root
        # Large arrays are shared only as one object: keys of their bytes would double the memory.
        key = (value.dtype.str, str(value.dtype), value.shape, value.tobytes()) if value.size <= 1024 else id(array)
        if key not in root.constants:
            name = self.names.new(stem)
            root.constants[key] = (name, array)
            if value.size > 1 and value.dtype.kind not in "biu":  # initializers of floats are parameters
                root.prologue.append(helper.make_node("Constant", [], [name], name=name, value=tensor_of(value, name)))
            else:
                root.initializers.append(tensor_of(value, name))
        return root.constants[key][0]

    def ints(self, values: Sequence[int]) -> str:
        return self.constant(np.asarray(list(values), np.int64), stem="sizes")

    def cast(self, name: str, dtype: Any) -> str:
        out: str = self.node("Cast", name, to=code_of_dtype(dtype))
        return out

    # -- sizes -------------------------------------------------------------------------------------------------------
    def shape(self, sizes: Sequence[Size]) -> str:
        """Return the name of a vector of sizes."""
        if is_static(tuple(sizes)):
            return self.ints([int(d) for d in sizes])
        key = tuple(sizes)
        root = self.root
        if key not in root.sizes:
            parts = [self.size(d) for d in sizes]
            root.sizes[key] = parts[0] if len(parts) == 1 else self._ahead("Concat", *parts, axis=0)
        return root.sizes[key]

    def size(self, d: Size) -> str:
        """Return the name of a vector of one size."""
        if isinstance(d, int):
            return self.ints([d])
        root = self.root
        if d not in root.sizes:
            root.sizes[d] = self._computed(d)
        return root.sizes[d]

    def _ahead(self, kind: str, *operands: str, **attributes: Any) -> str:
        root = self.root
        name: str = root._node(root.prologue, kind, operands, 1, "size", attributes)
        return name

    def _computed(self, d: Dim) -> str:
        if d.symbol is not None:
            return self._symbol(d.symbol)
        total = None
        for monomial, coefficient in d.terms:
            term = None
            for atom in monomial:
                factor = self._symbol(atom) if isinstance(atom, Symbol) else self._call(atom)
                term = factor if term is None else self._ahead("Mul", term, factor)
            if term is None:
                term = self.ints([coefficient])
            elif coefficient != 1:
                term = self._ahead("Mul", term, self.ints([coefficient]))
            total = term if total is None else self._ahead("Add", total, term)
        assert total is not None
        return total

    def _symbol(self, symbol: Symbol) -> str:
        root = self.root
        if symbol.name not in root.symbols:
            raise UnsupportedError(f"the size '{symbol.name}' is not that of an axis of an input")
        key = "symbol", symbol.name
        if key not in root.sizes:
            name, axis = root.symbols[symbol.name]
            root.sizes[key] = self._ahead("Shape", name, start=axis, end=axis + 1)
        return root.sizes[key]

    def _call(self, call: Any) -> str:
        a, b = (self.size(arg) for arg in call.args)
        if call.function == "floordiv":  # a - a mod b is a multiple of b, also where a is negative
            return self._ahead("Div", self._ahead("Sub", a, self._ahead("Mod", a, b)), b)
        return self._ahead({"mod": "Mod", "max": "Max", "min": "Min"}[call.function], a, b)

    # -- values ------------------------------------------------------------------------------------------------------
    def name(self, value: Value) -> str:
        writer: Writer | None = self
        while writer is not None:
            if value in writer.of:
                return writer.of[value]
            writer = writer.outer
        raise UnsupportedError(f"the value '{value.name}' has no name in the ONNX graph")

    def write(self, graph: Graph) -> None:
        """Write the nodes of a graph whose inputs have names."""
        for node in graph.nodes:
            self.path = node.origin.path
            if node.is_constant:
                self.of[node.result] = self.constant(node.attributes["value"], node.attributes["dtype"].numpy)
                continue
            self.write_node(node)

    def write_node(self, node: Node) -> None:
        row = row_for(node, self.opset)
        assert row is not None, node.op.name
        operands = ["" if v is None else self.name(v) for v in node.operands]
        results = row.write(self, node, *operands)
        for value, name in zip(node.results, [results] if isinstance(results, str) else results, strict=True):
            self.of[value] = name

    def declared(self, name: str, value: Value) -> Any:
        return helper.make_tensor_value_info(
            name, code_of_dtype(value.dtype), [d if isinstance(d, int) else str(d) for d in value.shape]
        )


def tensor_of(array: Any, name: str) -> Any:
    tensor = numpy_helper.from_array(np.asarray(array, order="C"), name)
    assert isinstance(tensor, onnx.TensorProto)
    return tensor
