"""Imported models: ``ml.from_keras`` and ``ml.load("model.keras")``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from mithril.backend import checked
from mithril.graph import Builder, Dim, InputError, MithrilError, ShapeError, UnsupportedError, Value, dtype as as_dtype
from mithril.models import Layer, Model
from mithril_keras import layers as _layers  # noqa: F401  # they enter their rows
from mithril_keras.archive import DAMAGE, Archive
from mithril_keras.config import layer_config
from mithril_keras.importer import Network, check_supported
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights

MISTAKES: tuple[type[BaseException], ...] = (*DAMAGE, IndexError, ArithmeticError, AssertionError, StopIteration)
EXAMPLE = 256  # replaces an open size while weights are read, where layers require static sizes


class KerasGraph(Layer):
    """The layers of an archive as one layer."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, archive: Any) -> None:
        self.content = _Shared(archive)
        self.network: Network = self.content.network
        types = [self.network.input_type(k) for k in range(len(self.network.inputs))]
        self.types = [(shape, as_dtype(kind)) for shape, kind in types]
        names: set[str] = set()
        self.inputs = tuple(_unique(name or r.layer, names) for name, r in self.network.inputs)
        self.outputs = tuple(_unique(name or r.layer, names) for name, r in self.network.outputs)
        reader = _Reading()
        self._read(reader)
        self.pretrained = reader.arrays

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.content.archive.digest, self.inputs, self.outputs)

    def expects(self, terminal: str) -> Any:
        return self.types[self.inputs.index(terminal)]

    def build(self, *inputs: Value) -> Any:
        return self._run(self, inputs)

    def weight(self, name: str, array: Any, state: bool) -> Value:
        """Return a parameter or a state of the archive."""
        return (self.state if state else self.param)(name, array.shape, dtype=array.dtype)

    def _run(self, owner: Any, inputs: Sequence[Value]) -> tuple[Any, ...]:
        archive = self.content.archive
        weights = Weights(owner, archive, "", "", "the model", training=owner.training)
        try:
            results = self.network.run(weights, [Tensor(x) for x in inputs])
        except MISTAKES as error:
            if isinstance(error, MithrilError):
                raise
            raise archive.damaged(error) from error
        return tuple(r.value for r in results)

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
            self._run(reader, arguments)


class _Reading:
    """Stand-in for the layer while the archive is read."""

    training = False

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def weight(self, name: str, array: Any, state: bool) -> Value:
        if name in self.arrays:
            raise InputError(f"two variables of the archive have the name '{name}'")
        self.arrays[name] = array
        return Builder.current().param(name, array.shape, array.dtype)

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


class KerasModel(Model):
    """A model imported from Keras; its parameters have the names of its layers and variables."""

    def __init__(self, graph: Layer) -> None:
        super().__init__()
        assert isinstance(graph, KerasGraph)
        for name, (shape, kind) in zip(graph.inputs, graph.types, strict=True):
            self.input(name, shape=shape, dtype=kind)
        self |= graph(**{t: t for t in (*graph.inputs, *graph.outputs)})
        self.steps[0].name = ""  # parameters have the names of the archive, without a prefix
        self.set_outputs(*graph.outputs)


@checked()
def from_keras(path: str | os.PathLike[str]) -> KerasModel:
    """Return the model of a ``.keras`` archive, which compiles for every backend, trains, and is a block of others.

    Functional and sequential models are read, with their weights. Keras is not needed, and no code of the file runs.
    """
    archive = Archive(path)
    try:
        model = KerasModel(KerasGraph(archive))
        model.name = _unique(str(archive.config["config"].get("name", "model")), set())
    except MISTAKES as error:
        if isinstance(error, MithrilError):
            raise
        raise archive.damaged(error) from error
    return model


def load(path: str | os.PathLike[str], *, backend: Any = None, **options: Any) -> Any:
    """Load an archive as a compiled model for inference."""
    from mithril.compiler import compile

    return compile(from_keras(path), backend, **{"inference": True, **options})


def _unique(name: str, used: set[str]) -> str:
    text = re.sub(r"\W", "_", name) or "_"
    text = base = f"_{text}" if text[0].isdigit() else text
    k = 1
    while text in used:
        k += 1
        text = f"{base}_{k}"
    used.add(text)
    return text
