"""Frontends, which convert models to graphs: for layers (``mithril.models``), graphs, and transformed models.

A frontend is a function ``source(model, *, outputs, inference) -> Source``, named by a ``FrontendSpec``. The compiler
accesses models only through their source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from os.path import isdir
from pkgutil import resolve_name
from typing import Any, Protocol

from mithril import plugins
from mithril.backend import Backend, attributed
from mithril.compiler.initializers import Array, Index
from mithril.compiler.model_files import read_model_file
from mithril.compiler.option_table import Settings
from mithril.graph import BackendError, DType, Graph, Input, OptionError, PluginError, TensorType
from mithril.plugins import FrontendSpec

# Frontends of the core; the first one also receives unsupported models and raises the error.
CORE = (
    FrontendSpec("models", ("mithril.models.language.layer.Layer",), "mithril.models.frontend:LayerSource"),
    FrontendSpec("graph", ("mithril.graph.core.Graph",), "mithril.compiler.graph_source:GraphSource"),
    FrontendSpec(
        "transformed",
        ("mithril.compiler.transformed_source.Transformed",),
        "mithril.compiler.transformed_source:TransformedSource",
    ),
)


class InputDeclaration(Protocol):
    """The declaration of a model input."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[Any, ...] | None: ...  # ints, names, dims, None for any size; None: unknown rank
    @property
    def dtype(self) -> DType | None: ...
    @property
    def where(self) -> str: ...  # the first layer that uses the input, and the user's line
    @property
    def required(self) -> bool: ...
    @property
    def produced(self) -> frozenset[str]: ...  # names that layers produce: the input may be one of them, misspelled


@dataclass(frozen=True)
class TraceRequest:
    """Settings for tracing a model."""

    training: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)  # inputs with constant values
    trainable: Collection[str] | None = None  # names or patterns of the inputs to differentiate; None: all parameters
    dtype: DType | None = None  # default dtype of parameters


class Source(Protocol):
    """The compiler's interface to a model."""

    name: str
    inference: bool

    @property
    def inputs(self) -> Sequence[InputDeclaration]: ...
    @property
    def outputs(self) -> Sequence[str]: ...
    @property
    def layers(self) -> Sequence[str]: ...  # paths of the layers
    @property
    def pretrained(self) -> Mapping[str, Any]: ...  # arrays of parameters and states by name, complete once traced

    def expects(self, name: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        """Return the shape and dtype that the first user of an input expects, or None if unknown."""

    def graph(self, types: Mapping[str, TensorType], request: TraceRequest) -> Graph:
        """Return the typed graph for inputs of these types."""

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        """Return initial values of parameters and states, or a region of each."""

    def __fingerprint__(self) -> tuple[Any, ...]: ...


def is_model(target: Any) -> bool:
    """Whether a frontend accepts an object of this class."""
    classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(target).__mro__}
    specs = [*CORE, *(registered.spec for registered in plugins.frontends().values())]
    return any(classes.intersection(spec.accepts) for spec in specs)


def model_of(path: str | PathLike[str]) -> Any:
    """Return the model of a file, for ``ml.compile(path, backend)``."""
    try:
        return read_model_file(path, None, "models", {})
    except PluginError as error:
        text = fspath(path)
        suffixes = tuple(suffix for entry in plugins.formats().values() for suffix in entry.spec.suffixes)
        if isdir(text):
            hint = f"ml.from_pretrained({text!r}) reads folders of checkpoints"
        elif text.endswith(suffixes):
            hint = f"files of this format hold compiled models: ml.load({text!r})"
        else:
            hint = "rename the file to the suffix of its format"
        raise error.with_hint(hint) from None


def source_of(model: Any, *, outputs: Sequence[str] | None, inference: bool) -> Source:
    """Return the source of a model, created by the frontend that accepts its class."""
    classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    core = next((spec for spec in CORE if classes.intersection(spec.accepts)), None)
    entries = plugins.frontends().items() if core is None else ()
    name = next((name for name, entry in entries if classes.intersection(entry.spec.accepts)), None)
    if name is not None:
        return PluginSource(name, model, outputs=outputs, inference=inference)
    source: Source = resolve_name((core or CORE[0]).loads)(model, outputs=outputs, inference=inference)
    return source


def learn(source: Source, shapes: Mapping[str, Any]) -> bool:
    """Tell a model with layers the shapes of its parameters; return whether it has layers."""
    method = getattr(source, "learn", None)
    if method is not None:
        method(shapes)
    return method is not None


class PluginSource:
    """The source of a frontend of a plugin, which is named in errors of the frontend."""

    def __init__(self, name: str, model: Any, **settings: Any) -> None:
        self.origin = f"frontend '{name}' by {plugins.frontends()[name].origin}"
        self._attributed = partial(attributed, f"the frontend '{name}'", plugins.frontends()[name].plugin)
        frontend = plugins.load_frontend(name)
        with self._attributed():
            self._source: Source = frontend(model, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return self.origin, *self._source.__fingerprint__()

    def graph(self, types: Mapping[str, TensorType], request: TraceRequest) -> Graph:
        with self._attributed():
            return self._source.graph(types, request)

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        with self._attributed():
            return self._source.initial(inputs, seed, index)


def backend_names(backend: Backend, settings: Settings) -> set[str]:
    """Return the names of a backend and of those in ``backend_map``, with the names of their base classes."""
    guests = [plugins.backend_class(g) if isinstance(g, str) else g for g in settings.as_dict()["backend_map"].values()]
    return {name for one in (backend, *guests) for name in one.names()}


def make_backend(backend: Backend | type[Backend] | str, settings: Settings) -> Backend:
    """Return the backend instance for an instance, a class or a name."""
    if isinstance(backend, str):
        name, backend = backend, plugins.backend_class(backend)
        if not (isinstance(backend, type) and issubclass(backend, Backend)):
            entry = plugins.backend(name)
            raise BackendError(
                f"the backend '{name}' of {entry.origin} is {backend!r}, not a class of backends",
                facts=[f"loading: {entry.spec.loads}", "expected: a class derived from mithril.backend.Backend"],
                hint=f"report it to the authors of {entry.plugin.distribution}",
            )
    if isinstance(backend, type) and issubclass(backend, Backend):
        precision = settings["precision"]
        return backend(precision=precision) if precision else backend()
    if isinstance(backend, Backend):
        precision = settings["precision"]
        if precision and backend.precision not in (None, precision):
            raise OptionError(
                f"precision='{precision}' conflicts with the backend's precision '{backend.precision}'",
                hint="pass precision only once",
            )
        return backend.with_precision(precision) if precision and backend.precision is None else backend
    raise BackendError(
        f"expected a backend instance, class or name, got {backend!r}",
        facts=["accepted: a backend instance such as ml.NumpyBackend(), its class, or its name"],
    )
