"""Imported models: ``ml.from_keras`` and ``ml.load("model.keras")``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.backend import checked
from mithril.graph import Builder, Dim, InputError, MithrilError, ShapeError, UnsupportedError, Value, dtype as as_dtype
from mithril.models import Layer, Model
from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.model import model_of
from mithril_importing.names import identifier, unique_name
from mithril_importing.patterns import NamedLinear
from mithril_importing.regions import Operation, Region, nested
from mithril_keras import layers as _layers  # noqa: F401  # they enter their rows
from mithril_keras.archive import DAMAGE, Archive
from mithril_keras.config import layer_config
from mithril_keras.importer import LayerCall, Network, check_supported
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights

MISTAKES: tuple[type[BaseException], ...] = (*DAMAGE, IndexError, ArithmeticError, AssertionError, StopIteration)
EXAMPLE = 256  # replaces an open size while weights are read, where layers require static sizes


class KerasGraph(ImportedLayer):
    """The layers of an archive as a layer."""

    scalars = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, archive: Any) -> None:
        self.content = _Shared(archive)
        self.network: Network = self.content.network
        types = [self.network.input_type(k) for k in range(len(self.network.inputs))]
        self.types = [(shape, as_dtype(kind)) for shape, kind in types]
        names: set[str] = set()
        self.inputs = tuple(unique_name(identifier(name or r.layer), names) for name, r in self.network.inputs)
        self.outputs = tuple(unique_name(identifier(name or r.layer), names) for name, r in self.network.outputs)
        self.sources = [f"input:{name}" for name in self.inputs]
        self.calls, self.results = self.network.calls(self.sources)
        reader = _Reading()
        self._read(reader)
        self.pretrained = reader.arrays
        operations = [Operation(c, c.scopes, c.reads, tuple(c.results.values())) for c in self.calls]
        super().__init__("", [nested(operations, self.results)], known_layer(reader.arrays))

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.content.archive.digest, self.inputs, self.outputs, tuple(self.layers))

    def expects(self, terminal: str) -> Any:
        return self.types[self.inputs.index(terminal)]

    def build(self, *inputs: Value) -> Any:
        run = KerasRun(self, self._values(inputs))
        with run.active():
            region = self.regions[0]
            run.interpret(self, region, [run.passed(name) for name in region.reads])
        return tuple(run.passed(name) for name in self.results)

    def weight(self, name: str, array: Any, state: bool) -> Value:
        """Return a parameter or a state of the archive."""
        if state:
            return self.state(name, array.shape, dtype=array.dtype)
        value: Value = Run.current().parameter(name, array.shape, array.dtype)
        return value

    def _values(self, inputs: Sequence[Value]) -> dict[str, Tensor]:
        return {name: Tensor(x) for name, x in zip(self.sources, inputs, strict=True)}

    def run_call(self, source: LayerCall, weights: Weights, values: dict[str, Tensor]) -> None:
        """Set the results of a layer; errors of Python are damage of the file."""
        try:
            source.run(weights, values)
        except MISTAKES as error:
            if isinstance(error, MithrilError):
                raise
            raise self.content.archive.damaged(error) from error

    def variables(self, owner: Any) -> Weights:
        return Weights(owner, self.content.archive, "", "", "the model", training=owner.training)

    def _read(self, reader: _Reading) -> None:
        """Trace the layers once, to read the names and arrays of parameters."""
        try:
            self._trace(reader, None)
        except (ShapeError, UnsupportedError):
            if all(None not in (shape or [None])[1:] for shape, _ in self.types):
                raise
            self._trace(reader, EXAMPLE)

    def _trace(self, reader: _Reading, example: int | None) -> None:
        with Builder() as builder:
            arguments = []
            for name, (shape, kind) in zip(self.inputs, self.types, strict=True):
                if shape is None:
                    raise UnsupportedError(
                        f"the input '{name}' of '{self.content.archive.name}' has no declared shape",
                        hint="begin the model with keras.Input(shape), and save it again",
                    )
                sizes = [
                    n if n is not None else example if example and k else Dim(f"{name}_{k}")
                    for k, n in enumerate(shape)
                ]
                arguments.append(builder.input(name, sizes, kind))
            reader.arrays.clear()
            reader.values.clear()
            values, weights = self._values(arguments), self.variables(reader)
            for call in self.calls:
                self.run_call(call, weights, values)


class KerasRun(Run):
    """One run over the layers of an archive; values are tensors with masks."""

    def __init__(self, root: KerasGraph, values: dict[str, Any]) -> None:
        super().__init__(root, values)
        self.graph, self.weights = root, root.variables(root)
        self.masked_like = {name: c.masked_like for c in root.calls for name in c.results.values()}

    def execute(self, source: LayerCall) -> None:
        self.graph.run_call(source, self.weights, self.values)

    def passed(self, name: str) -> Any:
        return self.values[name].value

    def received(self, name: str, value: Any) -> Any:
        """Return the tensor of a value; one that a wrapper or a replacement computed has the mask of the source."""
        computed = self.values.get(name)
        if computed is not None and computed.value is value:
            return computed
        masked = computed or self.values.get(self.masked_like.get(name) or "")
        mask = None if masked is None else masked.mask
        fits = mask is not None and tuple(mask.shape) == tuple(value.shape[: mask.ndim])
        return Tensor(value, mask=mask if fits else None)


def known_layer(arrays: Mapping[str, Any]) -> Callable[[str, Sequence[Region]], Layer | None]:
    """Return a function that returns the ``Linear`` of a dense layer without an activation, or None."""

    def known(path: str, regions: Sequence[Region]) -> Layer | None:
        calls = [operation.source for region in regions for operation in region.operations()]
        layer, settings = calls[0].layer, calls[0].layer.settings
        is_dense = calls[0].scopes[-1].path == path and layer.class_name == "Dense" and not layer.is_operation
        if not is_dense or any(len(r.reads) != 1 for r in regions):
            return None
        names = ["kernel", "bias"] if settings.get("use_bias", True) else ["kernel"]
        dtypes = {layer.dtype, *(str(arrays[f"{path}.{name}"].dtype) for name in names)}
        if settings.get("activation") not in (None, "linear") or dtypes != {"float32"}:
            return None
        inputs, outputs = arrays[f"{path}.kernel"].shape
        return NamedLinear(inputs, outputs, "kernel", "bias" if len(names) == 2 else None, input_major=True)

    return known


class _Reading:
    """Stand-in for the layer while the archive is read."""

    training = False

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.values: dict[str, Value] = {}

    def weight(self, name: str, array: Any, state: bool) -> Value:
        if self.arrays.setdefault(name, array) is not array:
            raise InputError(f"two variables of the archive have the name '{name}'")
        if name not in self.values:
            self.values[name] = Builder.current().param(name, array.shape, array.dtype)
        return self.values[name]

    def update_state(self, name: str, value: Value) -> None:
        pass

    def key(self) -> Value:
        return Builder.current().input("rng", (2,), "uint32")


class _Shared:
    """An archive that copies of a layer share."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        config = layer_config(archive.config, "the model")
        if not config.is_model:
            raise UnsupportedError(
                f"'{archive.name}' holds a {config.custom or config.class_name}",
                facts=["read: functional and sequential models; the code of other classes is not in the file"],
                hint="build it in Keras as keras.Model(inputs, outputs), and save that",
            )
        self.network = Network(config)
        check_supported(self.network, archive.name)

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


@checked()
def from_keras(path: str | os.PathLike[str]) -> Model:
    """Return the model of a ``.keras`` archive, which compiles for every backend, trains, and is a block of others.

    Functional and sequential models are read, with their weights. Keras is not needed, and no code of the file runs.
    """
    archive = Archive(path)
    try:
        graph = KerasGraph(archive)
        model = model_of(graph, dict(zip(graph.inputs, graph.types, strict=True)))
        model.name = identifier(str(archive.config["config"].get("name", "model")))
    except MISTAKES as error:
        if isinstance(error, MithrilError):
            raise
        raise archive.damaged(error) from error
    return model


def load(path: str | os.PathLike[str], *, backend: Any = None, **options: Any) -> Any:
    """Load an archive as a compiled model for inference."""
    from mithril.compiler import compile

    return compile(from_keras(path), backend, **{"inference": True, **options})
