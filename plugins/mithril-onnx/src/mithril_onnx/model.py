"""Imported models: ``ml.from_onnx``, ``ml.load("model.onnx")``, ``ml.compile`` of an ONNX model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from mithril.backend import checked
from mithril.graph import (
    Builder,
    DType,
    InputError,
    ModelError,
    Size,
    UnsupportedError,
    Value,
    closest,
    dtype as as_dtype,
)
from mithril.models import Model
from mithril_importing.arrays import Array
from mithril_importing.damage import damage
from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.model import model_of
from mithril_importing.names import identifier, path_name, unique_names
from mithril_importing.patterns import known_layer
from mithril_onnx import operators as _operators  # noqa: F401  (registers the rows)
from mithril_onnx.importer import CHECK, Importer, custom_rows
from mithril_onnx.reading import OnnxFile, declared_shape, read
from mithril_onnx.regions import GraphRun, module_names, region_of
from mithril_onnx.running import run_file
from mithril_onnx.support import check_supported
from mithril_onnx.table import OPERATORS, Row, canonical_domain
from mithril_onnx.tensors import dtype_of_code
from mithril_onnx.values import as_value


def roles_of(file: OnnxFile, graph: Any, rows: Mapping[tuple[str, str], Row], fixed: Collection[str]) -> dict[str, str]:
    """Return the role of each initializer of the graph.

    Floats of more than one element are parameters, unless an operator needs their elements at import. Integers,
    scalars and tensors of 8 and fewer bits are constants.
    """
    uses: dict[str, set[str]] = {}
    for name, kind in _uses(file, graph, rows):
        uses.setdefault(name, set()).add(kind)
    roles = {}
    for t in graph.initializer:
        if t.name in fixed:
            continue
        array = file.arrays[t.name]
        kinds = uses.get(t.name, set())
        # Exporters write settings, such as an epsilon or the root of a head's size, as tensors of one element.
        trains = array.size > 1 and as_dtype(array.dtype).is_float and t.data_type in FLOATS
        if not trains or kinds & {"Known", "Sizes"}:
            roles[t.name] = "constant"
        elif kinds == {"State"}:
            roles[t.name] = "state"
        elif kinds:
            roles[t.name] = "param"
    return roles


FLOATS = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


def _uses(file: OnnxFile, graph: Any, rows: Mapping[tuple[str, str], Row]) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor that a node reads, with the annotation of the operand."""
    for node in graph.node:
        domain = canonical_domain(node.domain)
        version = file.opset if not domain else 1 << 30
        row = rows.get((domain, node.op_type)) or OPERATORS.find(domain, node.op_type, version)
        for k, name in enumerate(node.input):
            if name:
                yield name, row.signature.kind(k) if row is not None else "Operand"
        for a in node.attribute:
            if a.HasField("g"):
                yield from _uses(file, a.g, rows)
    for output in graph.output:
        yield output.name, "Operand"


BOUNDED = ("NonMaxSuppression", "NonZero")


class OnnxGraph(ImportedLayer):
    """The nodes of an ONNX graph as a layer."""

    scalars = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(
        self,
        file: Any,
        outputs: Sequence[str],
        operators: Mapping[str, Any],
        constants: Mapping[str, Any],
        inputs: Sequence[str],
        bounds: Mapping[str, int],
    ) -> None:
        self.file: OnnxFile = file
        self.bounds = dict(bounds)
        self.operators = dict(operators)
        self.constants = dict(constants)
        graph = cut(file.proto.graph, outputs)
        self.graph = _Shared(graph)
        initial = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
        declared = {i.name: i for i in graph.input}
        _check_names("constant", constants, [*declared, *initial])
        _check_names("input", inputs, list(declared))
        self.declared = [
            i for i in declared.values() if i.name not in constants and (i.name not in initial or i.name in inputs)
        ]
        self.source_names = unique_names([i.name for i in self.declared], identifier)
        self.result_names = unique_names([o.name for o in graph.output], identifier, self.source_names.values())
        self.inputs = tuple(self.source_names.values())
        self.pretrained = {}
        self.outputs = tuple(self.result_names.values())
        rows = custom_rows(operators)
        check_supported(file, graph, rows)
        self.roles = roles_of(file, graph, rows, {*constants, *(i.name for i in self.declared)})
        variables = [n for n, role in self.roles.items() if role != "constant"]
        modules = module_names(graph, variables)
        self.paths = unique_names(variables, lambda name: modules.get(name) or path_name(name))
        self.pretrained = {self.paths[n]: file.arrays[n] for n in variables}
        if any(o.type.WhichOneof("value") not in ("tensor_type", None) for o in graph.output):
            self.outputs = self._elements()
        shapes = {self.paths[n]: tuple(file.arrays[n].shape) for n in variables}
        parameters = {n: self.paths[n] for n in variables if self.roles[n] == "param"}
        region = region_of(graph, [i.name for i in self.declared], parameters)
        super().__init__("", [region], known_layer(shapes))
        self.bounded = _bounded_results(graph, bounds)
        self.outputs = (*self.outputs, *(f"{identifier(name)}_rows" for name in self.bounded))

    def __fingerprint__(self) -> tuple[Any, ...]:
        functions = tuple((n, f.__module__, f.__qualname__, id(f)) for n, f in self.operators.items())
        constants = tuple((n, np.asarray(a).tobytes()) for n, a in self.constants.items() if not isinstance(a, list))
        mapped = tuple(self.file.arrays[n] for n in sorted(self.file.mapped) if self.roles.get(n) == "constant")
        return (
            self.file.digest,
            mapped,
            self.bounds,
            self.inputs,
            self.outputs,
            functions,
            constants,
            tuple(self.layers),
        )

    def expects(self, terminal: str) -> Any:
        declared = next(i for i in self.declared if self.source_names[i.name] == terminal)
        return shape_and_dtype(declared)

    def build(self, *inputs: Value) -> Any:
        return tuple(as_value(r) for r in flattened(self._run(self, inputs)))

    def _elements(self) -> tuple[str, ...]:
        """Return the names of outputs that are sequences, one per element, by an import with the declared shapes."""
        with Builder() as builder:
            arguments = []
            for declared in self.declared:
                shape, dtype = shape_and_dtype(declared)
                if shape is None:
                    raise UnsupportedError(f"the rank of the input '{declared.name}' is not declared")
                arguments.append(builder.input(declared.name, shape, dtype))
            results = self._run(Unbound(), arguments)
        names: list[str] = []
        for name, r in zip(self.result_names.values(), results, strict=True):
            names += [f"{name}_{k}" for k in range(len(r))] if isinstance(r, list) else [name] if r is not None else []
        return tuple(names)

    def _run(self, weights: Any, inputs: Sequence[Value]) -> list[Any]:
        importer = Importer(self.file, weights, self.roles, custom_rows(self.operators), self.bounds)
        env: dict[str, Any] = dict(zip(self.source_names, inputs, strict=True))
        for name, value in self.constants.items():
            env[name] = value if isinstance(value, list) or value is None else np.asarray(value)
        order = None if isinstance(weights, Unbound) else self._by_layers(importer, env)
        with damage(self.file.name, "ONNX model", CHECK):
            results = importer.run(self.graph.proto, env, order=order)
        return [*results, *(importer.rows_of.numbers[name] for name in getattr(self, "bounded", ()))]

    def _by_layers(self, importer: Importer, env: dict[str, Any]) -> Callable[[Callable[[int], None]], None]:
        """Return a function that imports the nodes in the layers of their modules."""
        region = self.regions[0]

        def order(import_node: Callable[[int], None]) -> None:
            run = GraphRun(self, env, import_node)
            importer.is_changed = lambda: run.is_changed
            with run.active():
                run.interpret(self, region, [env[name] for name in region.reads])

        return order

    def run_source(
        self, source: Any, inputs: Mapping[str, Array]
    ) -> tuple[Iterator[tuple[str, Array]], dict[str, Array]]:
        """Return the tensors that a file computes by their names, and its outputs."""
        names = [n for node in self.graph.proto.node for n in node.output if n]
        arrays = {n: inputs[name] for n, name in self.source_names.items() if name in inputs}
        constants = {n: np.asarray(x) for n, x in self.constants.items() if not isinstance(x, list)}
        tensors = run_file(source, names, {**arrays, **constants})
        outputs = {name: tensors[n] for n, name in self.result_names.items() if n in tensors}
        return iter(tensors.items()), outputs

    # -- weights, for the importer -----------------------------------------------------------------------------------
    def weight(self, name: str, array: Array) -> Value:
        value: Value = Run.current().parameter(self.paths[name], array.shape, array.dtype)
        return value

    def statistic(self, name: str, array: Array) -> Value:
        return self.state(self.paths[name], array.shape, dtype=array.dtype)

    def update_statistic(self, name: str, value: Value) -> None:
        self.update_state(self.paths[name], value)


class Unbound:
    """Stand-in for the layer in an import that only finds names."""

    training = False

    def weight(self, name: str, array: Array) -> Value:
        return Builder.current().param(name, array.shape, array.dtype)

    statistic = weight

    def update_statistic(self, name: str, value: Value) -> None:
        pass

    def key(self) -> Value:
        return Builder.current().input("rng", (2,), "uint32")


class _Shared:
    """A graph that copies of a layer share."""

    def __init__(self, proto: Any) -> None:
        self.proto = proto

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


@checked()
def from_onnx(
    source: Any,
    outputs: Sequence[str] | None = None,
    *,
    operators: Mapping[str, Callable[..., Any]] | None = None,
    constants: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    bounds: Mapping[str, int] | None = None,
) -> Model:
    """Return an ONNX model as a model that compiles for every backend, trains, and is a block of other models.

    ``source`` is a path, bytes or an ``onnx.ModelProto``. ``outputs`` selects tensors by name, also inner ones;
    nodes that they do not depend on are not imported. ``operators`` supplies functions for operators by name,
    ``constants`` fixes inputs to values, and ``inputs`` lists initializers that stay inputs. ``bounds``, by operator or
    node, are the rows of results whose size depends on data: ``{"NonMaxSuppression": 100}``. Rows beyond their number,
    which becomes an output ``NAME_rows``, are padding.
    """
    return _model(read(source), tuple(outputs or ()), operators or {}, constants or {}, tuple(inputs), bounds or {})


def _model(file: OnnxFile, *selection: Any) -> Model:
    with damage(file.name, "ONNX model", CHECK):
        layer = OnnxGraph(file, *selection)
        types = {terminal: shape_and_dtype(i) for i, terminal in zip(layer.declared, layer.inputs, strict=True)}
        inputs = {name: (_named_sizes(shape), kind) for name, (shape, kind) in types.items()}
        model = model_of(layer, inputs, {t: name for name, t in layer.result_names.items() if t == identifier(name)})
        model.name = identifier(file.proto.graph.name or "model")
    return model


def load(path: str | os.PathLike[str], *, backend: Any = None, **options: Any) -> Any:
    """Load an ONNX file as a compiled model for inference."""
    from mithril.compiler import compare_plugins, compile

    file = read(path)
    compiled = compile(_model(file, (), {}, {}, (), {}), backend, **{"inference": True, **options})
    compare_plugins(compiled, {p.key: p.value for p in file.proto.metadata_props}.get("mithril.plugins"), path)
    return compiled


def source(model: Any, *, outputs: Sequence[str] | None, inference: bool) -> Any:
    """Return the compiler's view of an ``onnx.ModelProto``."""
    from mithril.compiler import source_of

    return source_of(from_onnx(model), outputs=outputs, inference=inference)


def _named_sizes(shape: tuple[Size, ...] | None) -> list[Any] | None:
    """Return symbols by name, which bind to any size, and None for arithmetic on them."""
    if shape is None:
        return None
    return [d if isinstance(d, int) else d.symbol.name if d.symbol else None for d in shape]


# -- declarations -------------------------------------------------------------------------------------------------
def shape_and_dtype(declared: Any) -> tuple[tuple[Size, ...] | None, DType]:
    kind = declared.type
    if kind.WhichOneof("value") == "optional_type":
        kind = kind.optional_type.elem_type
    if kind.WhichOneof("value") != "tensor_type":
        raise UnsupportedError(
            f"the input '{declared.name}' is a {kind.WhichOneof('value') or 'tensor of unknown type'}",
            facts=["accepted: tensors"],
            hint=f"fix it to a list of arrays: ml.from_onnx(path, constants={{'{declared.name}': [...]}})",
        )
    return declared_shape(kind.tensor_type, declared.name), dtype_of_code(kind.tensor_type.elem_type)


def flattened(results: Sequence[Any]) -> list[Any]:
    """Return the results, with the elements of sequences in their place."""
    return [x for r in results for x in (r if isinstance(r, list) else [] if r is None else [r])]


def cut(graph: Any, outputs: Sequence[str]) -> Any:
    """Return the graph up to the tensors ``outputs``, without nodes that they do not need."""
    if not outputs:
        return graph
    produced = {name for n in graph.node for name in n.output} | {i.name for i in graph.input}
    for name in outputs:
        if name not in produced:
            suggestions = closest(name, produced, 1)
            raise ModelError(
                f"the ONNX graph has no tensor '{name}'",
                hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
            )
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed |= names_read(node)
    new = onnx.GraphProto()
    new.name = graph.name
    new.node.extend(reversed(nodes))
    new.initializer.extend(t for t in graph.initializer if t.name in needed)
    new.sparse_initializer.extend(s for s in graph.sparse_initializer if s.values.name in needed)
    new.input.extend(i for i in graph.input if i.name in needed)
    declared = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    new.output.extend(declared.get(name) or onnx.ValueInfoProto(name=name) for name in outputs)
    return new


def _bounded_results(graph: Any, bounds: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of results with a bound."""
    nodes = [n for n in graph.node if n.op_type in BOUNDED and (n.name in bounds or n.op_type in bounds)]
    used = {key for n in nodes for key in (n.name, n.op_type)}
    for key, size in bounds.items():
        if key not in used:
            raise InputError(
                f"bounds names '{key}', but no node or operator of the graph with a bound has this name",
                facts=[f"with a bound: {', '.join(BOUNDED)}"],
            )
        if type(size) is not int or size < 1:
            raise InputError(f"bounds: {size!r} for '{key}' must be a positive integer")
    return tuple(n.output[0] for n in nodes)


def names_read(node: Any) -> set[str]:
    """Return the names that a node and its bodies read."""
    names = set(node.input)
    for a in node.attribute:
        for g in (*([a.g] if a.HasField("g") else []), *a.graphs):
            for inner in g.node:
                names |= names_read(inner)
            names |= {o.name for o in g.output}
    return names


def _check_names(kind: str, names: Any, registry: Sequence[str]) -> None:
    for name in names:
        if name not in registry:
            suggestions = closest(name, registry, 1)
            raise InputError(
                f"the {kind} '{name}' is not an input of the ONNX graph",
                facts=[f"inputs: {', '.join(registry[:16])}"],
                hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
            )
