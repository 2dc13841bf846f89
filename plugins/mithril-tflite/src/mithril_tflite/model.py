"""Imported models: ``ml.from_tflite``, ``ml.load("model.tflite")``, ``ml.compile("model.tflite", backend)``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mithril.backend import checked
from mithril.graph import Dim, DType, InputError, Size, Value, closest
from mithril.models import Model
from mithril_importing.arrays import Array, as_value
from mithril_importing.damage import damage
from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.model import model_of
from mithril_importing.names import identifier, unique_name
from mithril_importing.patterns import known_layer
from mithril_tflite import operators as _operators  # noqa: F401  (registers the rows)
from mithril_tflite.importer import CHECK, Importer
from mithril_tflite.reading import Graph, Node, Signature, TfliteFile, read
from mithril_tflite.regions import GraphRun, parameter_names, reads_of, region_of
from mithril_tflite.running import run_file
from mithril_tflite.support import check_supported
from mithril_tflite.variables import initial_values


class TfliteGraph(ImportedLayer):
    """The operators of a graph of a file as a layer."""

    scalars = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, file: Any, outputs: Sequence[str], signature: str | None) -> None:
        self.file: TfliteFile = file
        self.signature = _signature(file, signature)
        self.graph: Graph = file.graphs[self.signature.graph]
        self.results = [_tensor(self.graph, self.signature, name) for name in outputs] or list(self.graph.outputs)
        self.nodes = _needed(self.graph, self.results)
        check_supported(file, self.graph, self.nodes)
        self.sources = list(dict.fromkeys(self.graph.inputs))
        keys = self.graph.keys
        used: set[str] = set()
        self.input_names = {
            k: unique_name(identifier(self.signature.inputs.get(k, keys[k])), used) for k in self.sources
        }
        self.result_names = [self.signature.outputs.get(k, keys[k]) for k in self.results]
        self.inputs = tuple(self.input_names.values())
        self.outputs = tuple(unique_name(identifier(name), used) for name in self.result_names)
        constants = self._parameters()
        self.parameters = parameter_names(self.graph, self.nodes, constants)
        arrays = {name: constants[keys.index(key)] for key, name in self.parameters.items()}
        self.variables = initial_values(file)
        self.pretrained = {**arrays, **self.variables}
        region = region_of(self.graph, self.nodes, self.parameters, self.results)
        shapes = {name: tuple(a.shape) for name, a in arrays.items()}
        super().__init__("", [region], known_layer(shapes, {name: str(a.dtype) for name, a in arrays.items()}))

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.file.digest, self.signature.graph, self.inputs, self.outputs, tuple(self.layers))

    def expects(self, terminal: str) -> Any:
        return self.declared(terminal)

    def declared(self, terminal: str) -> tuple[tuple[Size, ...] | None, DType]:
        """Return the declared shape of an input, with a symbol per open size, and its dtype."""
        tensor = next(self.graph.tensors[k] for k, name in self.input_names.items() if name == terminal)
        if tensor.shape is None:
            return None, tensor.dtype
        sizes = (Dim(f"{terminal}_{axis}") if n == -1 else n for axis, n in enumerate(tensor.shape))
        return tuple(sizes), tensor.dtype

    def build(self, *inputs: Value) -> Any:
        keys = self.graph.keys
        env: dict[str, Any] = {keys[k]: x for k, x in zip(self.sources, inputs, strict=True)}
        importer = Importer(self.file, self.graph, self, self.parameters)
        run = GraphRun(self, env, importer, self.graph)
        importer.is_changed = lambda: run.is_changed
        region = self.regions[0]
        with damage(self.file.name, "TensorFlow Lite model", CHECK), run.active():
            run.interpret(self, region, [env[name] for name in region.reads])
            items = [(importer.item(self.graph, k, env), self.graph.tensors[k]) for k in self.results]
            return tuple(as_value(x, t.dtype) for x, t in items)

    def run_source(
        self, source: Any, inputs: Mapping[str, Array]
    ) -> tuple[Iterator[tuple[str, Array]], dict[str, Array]]:
        """Return the tensors that a file computes by their names, and its outputs."""
        computed = [k for node in self.nodes for k in node.outputs]
        arrays = {k: inputs[name] for k, name in self.input_names.items() if name in inputs}
        tensors = run_file(source, self.signature.graph, {*computed, *self.results}, arrays)
        keys = self.graph.keys
        outputs = {name: tensors[k] for name, k in zip(self.outputs, self.results, strict=True) if k in tensors}
        return ((keys[k], tensors[k]) for k in computed if k in tensors), outputs

    def _parameters(self) -> dict[int, Array]:
        """Return the float constants of several elements that the operators read, by index."""
        constants: dict[int, Array] = {}
        for k in dict.fromkeys((*reads_of(self.graph, self.nodes), *self.results)):
            tensor = self.graph.tensors[k]
            if k in self.input_names or tensor.is_variable or not tensor.buffer or tensor.type_name not in FLOATS:
                continue
            array = self.file.constant(tensor)
            if array is not None and array.size > 1:
                constants[k] = array
        return constants

    # -- weights, for the importer -----------------------------------------------------------------------------------
    def weight(self, name: str, array: Array) -> Value:
        value: Value = Run.current().parameter(name, array.shape, array.dtype)
        return value

    def variable(self, name: str) -> Value:
        return self.state(name, self.variables[name].shape, dtype=self.variables[name].dtype)

    def assign(self, name: str, value: Value) -> None:
        self.update_state(name, value)


FLOATS = ("FLOAT32", "FLOAT16", "FLOAT64", "BFLOAT16")


@checked()
def from_tflite(source: Any, outputs: Sequence[str] | None = None, *, signature: str | None = None) -> Model:
    """Return a TensorFlow Lite model as a model that compiles for every backend and is a block of other models.

    ``source`` is a path or bytes. ``outputs`` selects tensors by name, also inner ones; operators that they do not
    depend on are not imported. ``signature`` selects one of several by its key. TensorFlow is not needed. Float
    weights train; quantized tensors compute with the scales of the file, and results are rounded as the file declares.
    """
    return _model(read(source), tuple(outputs or ()), signature)


def _model(file: TfliteFile, outputs: Sequence[str] = (), signature: str | None = None) -> Model:
    with damage(file.name, "TensorFlow Lite model", CHECK):
        layer = TfliteGraph(file, outputs, signature)
        declared = {name: layer.declared(name) for name in layer.inputs}
        names = zip(layer.outputs, layer.result_names, strict=True)
        model = model_of(
            layer,
            {
                name: (None if shape is None else [str(n) if isinstance(n, Dim) else n for n in shape], kind)
                for name, (shape, kind) in declared.items()
            },
            {terminal: name for terminal, name in names if terminal == identifier(name)},
        )
        model.name = identifier(layer.graph.name)
    return model


def load(path: str | os.PathLike[str], *, backend: Any = None, **options: Any) -> Any:
    """Load a file as a compiled model for inference."""
    from mithril.compiler import compile

    return compile(_model(read(path)), backend, **{"inference": True, **options})


# -- selection --------------------------------------------------------------------------------------------------------
def _signature(file: TfliteFile, key: str | None) -> Signature:
    """Return the signature of a key, that of the first graph, or an empty one."""
    keys = [s.key for s in file.signatures]
    if key is None:
        return next((s for s in file.signatures if s.graph == 0), Signature("", 0, {}, {}))
    if key not in keys:
        suggestions = closest(key, keys, 1)
        raise InputError(
            f"'{file.name}' has no signature '{key}'",
            facts=[f"signatures: {', '.join(keys) or 'none'}"],
            hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
        )
    return file.signatures[keys.index(key)]


def _tensor(graph: Graph, signature: Signature, name: str) -> int:
    """Return the index of a tensor by its name in the signature or in the graph."""
    names = {key: k for k, key in enumerate(graph.keys)} | {n: k for k, n in signature.outputs.items()}
    if name not in names:
        suggestions = closest(name, names, 1)
        raise InputError(
            f"the graph '{graph.name}' has no tensor '{name}'",
            hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
        )
    return names[name]


def _needed(graph: Graph, results: Sequence[int]) -> tuple[Node, ...]:
    """Return the nodes that results depend on; those without results change variables."""
    needed, nodes = set(results), []
    for node in reversed(graph.nodes):
        if not node.outputs or needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(node.inputs)
    return tuple(reversed(nodes))
