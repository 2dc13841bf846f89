"""The importer: runs the nodes of an ONNX graph on the values of an environment, by the table of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx

from mithril.graph import (
    Builder,
    Dim,
    InputError,
    MithrilError,
    OperationError,
    Origin,
    UnsupportedError,
    Value,
    check_limit,
    check_memory,
)
from mithril_importing.arrays import Array, is_sizes, sizes_of
from mithril_importing.damage import MISTAKES
from mithril_importing.folding import Folding
from mithril_importing.table import results_of
from mithril_onnx.bounded import BoundedRows
from mithril_onnx.declared_types import compare, declared_types
from mithril_onnx.functions import body_of, with_attributes
from mithril_onnx.reading import OnnxFile, dense_bytes
from mithril_onnx.sizes import SIZES, NoSizesError
from mithril_onnx.table import OPERATORS, Row, canonical_domain, row_of
from mithril_onnx.tensors import to_array
from mithril_onnx.values import Knowledge, NotConstantError, as_value

A = onnx.AttributeProto


def attributes_of(node: Any, folder: str | None, body: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the attributes of a node: numbers, strings, tuples of them, arrays, and functions for graphs."""
    return {a.name: _value(a, node, folder, body) for a in node.attribute}


def _value(a: Any, node: Any, folder: str | None, body: Callable[[Any], Any]) -> Any:
    if a.ref_attr_name:
        raise InputError(
            f"the attribute '{a.name}' of node '{node.name}' refers to '{a.ref_attr_name}' outside a function"
        )
    kind = a.type
    if kind == A.INT:
        return int(a.i)
    if kind == A.FLOAT:
        return float(a.f)
    if kind == A.STRING:
        return a.s.decode("utf-8", "replace")
    if kind == A.INTS:
        return tuple(int(i) for i in a.ints)
    if kind == A.FLOATS:
        return tuple(float(f) for f in a.floats)
    if kind == A.STRINGS:
        return tuple(s.decode("utf-8", "replace") for s in a.strings)
    if kind == A.TENSOR:
        return to_array(a.t, folder)
    if kind == A.GRAPH:
        return body(a.g)
    if kind == A.SPARSE_TENSOR:
        from mithril_onnx.reading import dense

        return dense(a.sparse_tensor, folder)
    if kind == A.TYPE_PROTO:
        return a.tp
    raise UnsupportedError(f"the attribute '{a.name}' of node '{node.name}' has an unsupported type {kind}")


CHECK = "onnx.checker.check_model(model, full_check=True)"  # of a file


class Weights(Protocol):
    """The layer that owns the parameters and states of the imported graph."""

    @property
    def training(self) -> bool: ...
    def weight(self, name: str, array: Array) -> Value: ...
    def statistic(self, name: str, array: Array) -> Value: ...
    def update_statistic(self, name: str, value: Value) -> None: ...
    def key(self) -> Value: ...


class Initializer:
    """A tensor of the file, converted when it is used: to a parameter, a state or a constant."""

    __slots__ = ("array", "name", "role")

    def __init__(self, name: str, array: Array, role: str) -> None:
        self.name = name
        self.array = array
        self.role = role  # "param", "state" or "constant"


class Context:
    """The node being imported, for operators that need more than their operands."""

    def __init__(self, importer: Importer, node: Any, env: dict[str, Any], path: str) -> None:
        self.importer = importer
        self.node = node
        self.env = env
        self.path = path

    @property
    def training(self) -> bool:
        return self.importer.weights.training

    @property
    def results(self) -> int:
        """The number of results up to the last one that has a name."""
        return max([k + 1 for k, name in enumerate(self.node.output) if name], default=0)

    def code(self, position: int) -> int | None:
        """Return the declared ONNX element type of an operand, if the file tells it."""
        names = self.node.input
        return self.importer.codes.get(names[position]) if position < len(names) else None

    def statistic(self, position: int) -> str | None:
        """Return the name of the state that an operand is, or None."""
        item = self.env.get(self.node.input[position])
        return item.name if isinstance(item, Initializer) and item.role == "state" else None

    def known(self, x: Any, description: str) -> Array:
        return self.importer.known(x, f"{description} of {self.node.op_type}")

    @property
    def bound(self) -> int | None:
        """The bound on the rows of the node's result, by the name of the node or of its operator."""
        bounds = self.importer.bounds
        return bounds.get(self.node.name, bounds.get(self.node.op_type))

    @property
    def open_equality(self) -> tuple[Any, Any] | None:
        """The sizes whose equality the first operand is, if it is not known."""
        return self.importer.open_equalities.get(self.node.input[0])

    def bounded(self, value: Value, axis: int, number: Value) -> Value:
        """Return a result with padding beyond ``number`` rows along an axis."""
        self.importer.rows_of.start(self.node.output[0], f"'{self.node.op_type}'", value, axis, number)
        return value


class Body:
    """The graph of If, Loop or Scan, as a function; names of the enclosing graphs are captured."""

    def __init__(self, importer: Importer, graph: Any, env: dict[str, Any], path: str) -> None:
        self.importer = importer
        self.graph = graph
        self.env = env
        self.path = path
        self.results = len(graph.output)

    def __call__(self, *arguments: Any) -> list[Any]:
        env = dict(self.env)
        for declared, x in zip(self.graph.input, arguments, strict=True):
            env[declared.name] = x
        return self.importer.run(self.graph, env, self.path)


class Importer:
    """One import of a graph into the current builder."""

    def __init__(
        self,
        file: OnnxFile,
        weights: Weights,
        roles: Mapping[str, str],
        rows: Mapping[tuple[str, str], Row] | None = None,
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        self.bounds = bounds or {}
        self.rows_of = BoundedRows()
        self.file = file
        self.weights = weights
        self.roles = roles  # of initializers by name: "param", "state"; others are constants
        self.rows = rows or {}
        self.knowledge = Knowledge()
        self.codes = {t.name: t.data_type for t in file.proto.graph.initializer}
        self.codes |= {i.name: i.type.tensor_type.elem_type for i in file.proto.graph.input}
        self.opset = file.opset
        self.depth = 0
        self.written = len(file.proto.graph.node)
        self.nodes = 0  # imported so far
        self.folding = Folding(lambda: file.size)  # its memory includes nodes of functions and sparse tensors
        self.is_changed: Callable[[], bool] = lambda: False  # whether a layer is not that of the file
        self.open_equalities: dict[str, tuple[Any, Any]] = {}  # by result: sizes whose equality is not known

    # -- graphs ------------------------------------------------------------------------------------------------------
    def run(
        self,
        graph: Any,
        env: dict[str, Any],
        path: str = "",
        order: Callable[[Callable[[int], None]], Any] | None = None,
    ) -> list[Any]:
        """Import the nodes of a graph and return its outputs; ``order`` calls a function with their positions."""
        # Recursion of Python has a limit, too, but its error names neither the file nor a remedy.
        check_limit("depth", self.depth, f"'{self.file.name}' nests {self.depth} graphs or functions")
        self.depth += 1
        try:
            self._initializers(graph, env)
            declared = declared_types(self.file.proto.graph if self.depth == 1 else graph)

            def import_node(k: int) -> None:
                node = graph.node[k]
                self.step(node, env, path, k)
                for name in node.output:
                    # bounded rows are more than the declared ones, and a replaced layer may have other sizes
                    if name in declared and not self.rows_of.axes and not self.is_changed():
                        compare(self.file, node, name, env[name], declared[name])

            if order is None:
                for k in range(len(graph.node)):
                    import_node(k)
            else:
                order(import_node)
            return [self.lookup(o.name, env, f"output '{o.name}'") for o in graph.output]
        finally:
            self.depth -= 1

    def _initializers(self, graph: Any, env: dict[str, Any]) -> None:
        main = self.depth == 1  # not by identity: a cut graph is a copy
        for t in graph.initializer:
            # A name in the environment is a constant that the user gives in place of the initializer.
            if t.name not in env or not main:
                array = self.file.arrays[t.name] if main else to_array(t, self.file.folder)
                env[t.name] = Initializer(t.name, array, self.roles.get(t.name, "constant") if main else "constant")
        if main:
            for s in graph.sparse_initializer:
                env.setdefault(s.values.name, self.file.arrays[s.values.name])

    def lookup(self, name: str, env: Mapping[str, Any], where: str) -> Any:
        if name not in env:
            raise InputError(
                f"{where} of '{self.file.name}' refers to '{name}', which no earlier node produces",
                hint="check the file: onnx.checker.check_model(model)",
            )
        item = env[name]
        return self.operand(item, "Operand") if isinstance(item, Initializer) else item

    # -- nodes -------------------------------------------------------------------------------------------------------
    def step(self, node: Any, env: dict[str, Any], path: str, position: int) -> None:
        """Import one node."""
        self.nodes += 1
        # Functions may call functions: a small file can expand to exponentially many nodes.
        check_limit("nodes", self.nodes - self.written, f"the functions of '{self.file.name}' expand to more nodes")
        for a in node.attribute:
            if a.HasField("sparse_tensor"):
                self.folding.memory += dense_bytes(a.sparse_tensor)
                check_memory(self.folding.memory, self.file.size, f"the sparse tensors of '{self.file.name}'")
        label = node.name or f"{node.op_type}_{position}"
        layer_path = f"{path}/{label}" if path else label
        builder = Builder.current()
        origin = builder.origin
        layer = origin.path
        # Layers of the modules in a scope's name have these names already.
        place = layer_path.rpartition("/")[2] if module_of(layer_path) else layer_path
        inner = Origin(f"{layer}.{place}" if layer else place, origin.file, origin.line)
        try:
            with builder.at(inner, builder.tags):
                results = self._results(node, env, layer_path)
        except NotConstantError as error:
            raise error.with_facts(f"node '{layer_path}' ({node.op_type})") from None
        except MithrilError as error:
            raise error.with_facts(f"node '{layer_path}' ({node.op_type}) of '{self.file.name}'") from None
        except MISTAKES as cause:
            raise OperationError(
                f"cannot import node '{layer_path}' ({node.op_type}) of '{self.file.name}'",
                facts=[f"{type(cause).__name__}: {cause}"],
                hint=f"check the file: {CHECK}",
            ) from cause
        if len(results) < len([n for n in node.output if n]):
            raise OperationError(
                f"node '{layer_path}' ({node.op_type}) has {len(node.output)} outputs, expected {len(results)}"
            )
        for name, result in zip(node.output, results, strict=False):
            if name:
                env[name] = result

    def _results(self, node: Any, env: dict[str, Any], where: str) -> tuple[Any, ...]:
        domain = canonical_domain(node.domain)
        operands = [self._item(name, env, where) for name in node.input]
        # Absent operands at the end are like operands that are not written at all.
        while operands and operands[-1] is None:
            operands.pop()
        attributes = attributes_of(node, self.file.folder, lambda graph: Body(self, graph, env, where))
        # Computed at import, symbolic sizes stay sizes: reshapes need them, and values of the graph
        # have none.
        if (sized := SIZES.get(node.op_type)) and not domain and any(is_sizes(x) for x in operands):
            arrays = [x.array if isinstance(x, Initializer) else x for x in operands]
            if all(x is None or isinstance(x, np.ndarray) for x in arrays):
                try:
                    return results_of(sized(*arrays, **attributes))
                except NoSizesError:
                    # The branch of an If may depend on it: the condition is then checked by each call (commit
                    # 9b62a485).
                    if node.op_type == "Equal" and all(np.size(x) == 1 for x in arrays):
                        a, b = (np.asarray(x, object).item() for x in arrays)
                        self.open_equalities[node.output[0]] = a, b
        local = self.file.functions.get((domain, node.op_type, getattr(node, "overload", "")))
        row, context = self.row(node), Context(self, node, env, where)
        # A user's function comes before one of the file, which comes before ours: exporters give functions of the file
        # the names of operators of a later standard, with their meaning in this file.
        if local is not None and (domain, node.op_type) not in self.rows:
            return self._call(local, operands, attributes, context)
        if row is None:
            body = body_of(node, self.opset, [self._type(x) for x in operands])
            if body is None:
                raise unsupported(node)
            return self._call(body, operands, attributes, context)
        return self.apply(row, operands, attributes, context)

    def row(self, node: Any) -> Row | None:
        """Return the row of a node's operator, or None."""
        domain = canonical_domain(node.domain)
        if (domain, node.op_type) in self.rows:
            return self.rows[domain, node.op_type]
        return OPERATORS.find(domain, node.op_type, self.opset if not domain else 1 << 30)

    def _item(self, name: str, env: Mapping[str, Any], where: str) -> Any:
        if not name:
            return None
        if name not in env:
            self.lookup(name, env, f"node '{where}'")
        return env[name]

    def _type(self, item: Any) -> Any:
        if isinstance(item, Initializer):
            return item.array.dtype, item.array.shape
        if item is None or isinstance(item, list):
            return None
        return (np.dtype(np.int64) if is_sizes(item) else item.dtype), item.shape

    def apply(
        self, row: Row, operands: Sequence[Any], attributes: Mapping[str, Any], context: Context
    ) -> tuple[Any, ...]:
        """Call the function of a row; constant operands are folded."""
        operands, attributes = _older_attributes(row, operands, attributes)
        _check_call(row, operands, attributes)
        kinds = [row.signature.kind(k) for k in range(len(operands))]
        converted = [self.operand(x, kind) for x, kind in zip(operands, kinds, strict=True)]
        extra = {"context": context} if "context" in row.signature.keywords else {}
        values = [k for k, x in enumerate(converted) if kinds[k] in ("Operand", "Weight", "State") and x is not None]
        fixed = [converted[k] for k in values] + [x for x in converted if isinstance(x, Value)]

        def compute() -> tuple[Any, ...]:
            arguments = [as_value(x) if k in values else x for k, x in enumerate(converted)]
            return results_of(row.signature.function(*arguments, **attributes, **extra))

        if row.folds and all(isinstance(x, np.ndarray) and not is_sizes(x) for x in fixed):
            folded = self.folding.fold(compute)
            if folded is not None:
                return folded
        for k in values:
            item, converted[k] = converted[k], as_value(converted[k])
            if is_sizes(item):
                self.knowledge.sizes[converted[k]] = item
        results = compute()
        if self.rows_of.axes:
            self.rows_of.follow(context.node, [*converted, *_captured(context)], attributes, results)
        return results

    def operand(self, item: Any, kind: str) -> Any:
        """Return an item of the environment in the form that an operand's annotation asks for."""
        if kind == "Known":
            return None if item is None else self.known(item, "an operand")
        if kind == "Sizes":
            return None if item is None else self.sizes(item)
        if isinstance(item, Initializer):
            if item.role == "constant" or kind == "Item":
                return item.array
            if item.role == "state":
                value = self.weights.statistic(item.name, item.array)
            else:
                value = self.weights.weight(item.name, item.array)
            self.knowledge.arrays[value] = item.array
            return value
        if kind in ("Operand", "Weight", "State") and isinstance(item, list):
            raise OperationError("an operand is a sequence, expected a tensor")
        return item

    def known(self, item: Any, description: str) -> Array:
        """Return the elements of an operand that must not depend on inputs."""
        if isinstance(item, Initializer):
            return item.array
        if is_sizes(item):
            raise NotConstantError(description, [])
        array: Array | None = self.knowledge.array(item)
        if array is None:
            raise NotConstantError(description, self.knowledge.inputs_of(item))
        return array

    def sizes(self, item: Any) -> tuple[int | Dim, ...]:
        """Return an operand as sizes, which may be symbolic."""
        if isinstance(item, Value):
            item = self.knowledge.sizes.get(item, item)
        array = item if is_sizes(item) else self.known(item, "an operand that holds sizes or axes")
        return sizes_of(array)

    # -- functions ---------------------------------------------------------------------------------------------------
    def _call(
        self, function: Any, operands: list[Any], attributes: Mapping[str, Any], context: Context
    ) -> tuple[Any, ...]:
        """Inline the body of a function."""
        if len(operands) > len(function.input):
            raise OperationError(
                f"the function '{function.name}' takes {len(function.input)} operands, got {len(operands)}"
            )
        env: dict[str, Any] = dict.fromkeys(function.input)
        env |= dict(zip(function.input, operands, strict=False))
        defaults = {a.name: a for a in function.attribute_proto}
        outer = self.opset, self.codes
        opset_versions = {canonical_domain(o.domain): o.version for o in function.opset_import}
        self.opset, self.codes = opset_versions.get("", self.opset), {}
        self.depth += 1
        check_limit("depth", self.depth, f"the function '{function.name}' calls itself, or {self.depth} functions nest")
        try:
            for k, node in enumerate(function.node):
                self.folding.memory += node.ByteSize()
                check_memory(self.folding.memory, self.file.size, f"the functions of '{self.file.name}'")
                self.step(with_attributes(node, attributes, defaults), env, context.path, k)
            output_pairs = zip(function.output, [*context.node.output, *[""] * len(function.output)])
            location = f"function '{function.name}'"
            return tuple(self.lookup(name, env, location) if used else None for name, used in output_pairs)
        finally:
            self.depth -= 1
            self.opset, self.codes = outer


def _captured(context: Context) -> list[Any]:
    """Return the values that the bodies of a node read."""
    bodies = [a.g for a in context.node.attribute if a.HasField("g")]
    return [context.env.get(name) for body in bodies for inner in body.node for name in inner.input]


def _older_attributes(
    row: Row, operands: Sequence[Any], attributes: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return attributes that later versions made operands, such as the axes of Squeeze, as operands."""
    names = row.signature.names
    positional = [name for name in attributes if name in names and name not in row.attributes]
    if not positional:
        return operands, attributes
    complete = [*operands, *[None] * (len(names) - len(operands))]
    for name in positional:
        if complete[names.index(name)] is None:
            value = attributes[name]
            kind = np.float32 if np.asarray(value).dtype.kind == "f" else np.int64
            complete[names.index(name)] = np.asarray(value, kind)
    return complete, {n: v for n, v in attributes.items() if n not in positional}


def _check_call(row: Row, operands: Sequence[Any], attributes: Mapping[str, Any]) -> None:
    row.signature.check_operands(row.name, operands)
    for name, value in attributes.items():
        if name not in row.attributes:
            raise UnsupportedError(
                f"{row.name} has the attribute '{name}', which is not supported",
                facts=[f"known: {', '.join(row.attributes) or 'none'}"],
            )
        default = row.attributes[name]
        if default is not None and isinstance(default, (int, float, str)) and not isinstance(value, type(default)):
            raise OperationError(
                f"{row.name}: the attribute '{name}' is {value!r:.60}", facts=[f"expected: {type(default).__name__}"]
            )


def module_of(name: str) -> list[str]:
    """Return the names of the modules around a node that is named by its scope: ``/encoder/layer.0/MatMul``."""
    return name.strip("/").split("/")[:-1] if name.startswith("/") else []


def unsupported(node: Any) -> UnsupportedError:
    domain = f"{node.domain}." if node.domain else ""
    return UnsupportedError(f"the operator {domain}{node.op_type} is not supported")


def custom_rows(operators: Mapping[str, Callable[..., Any]]) -> dict[tuple[str, str], Row]:
    """Return rows for a user's functions, by ``"Name"`` or ``"domain.Name"``."""
    rows = {}
    for full, function in operators.items():
        domain, _, name = full.rpartition(".")
        rows[canonical_domain(domain), name] = row_of(function, name, canonical_domain(domain), 1, True)
    return rows
