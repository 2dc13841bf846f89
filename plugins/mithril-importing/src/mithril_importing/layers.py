"""Layers of an imported model: each runs the operations of one module of the source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mithril.graph import ModelError
from mithril.models import Layer, Wrapper, shared_parameter
from mithril_importing.regions import Region

Known = Callable[[str, Sequence[Region]], "Layer | None"]
_run: ContextVar[Run | None] = ContextVar("run", default=None)
_recorded: ContextVar[dict[str, Any] | None] = ContextVar("recorded", default=None)


class ImportedLayer(Layer):
    """The operations of one module of a source; ``layers`` are those of the modules within it.

    A layer that replaces it gets the values that cross the border of these operations.
    """

    scalars = True

    def __init__(self, path: str, regions: Sequence[Region], pattern: Known) -> None:
        self.path = path
        self.regions = tuple(regions)
        inner: dict[str, list[Region]] = {}
        for region in regions:
            for part in region.inner():
                inner.setdefault(part.scope.path, []).append(part)
        self.parts = {p: k for k, p in enumerate(inner)}  # path of a child in the source -> its index in ``layers``
        self.layers = [pattern(p, parts) or ImportedLayer(p, parts, pattern) for p, parts in inner.items()]
        self.replaced: frozenset[str] = frozenset()  # paths of the children that are not of the source any more
        prefix = f"{path}." if path else ""
        self._children.update((x, p.removeprefix(prefix)) for p, x in zip(inner, self.layers, strict=True))

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        reads = self.regions[0].reads
        return ("input",) if len(reads) == 1 else reads

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        results = self.regions[0].results
        return ("output",) if len(results) == 1 else results

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.path, tuple(self.layers))  # the root has a digest of the operations

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.path}')"

    def part(self, path: str) -> Layer:
        """Return the layer of a module directly within this one."""
        return self.layers[self.parts[path]]

    def owner(self, name: str) -> tuple[Layer, str]:
        """Return the innermost layer that contains a parameter, with its wrappers, and the name within it."""
        path = max((p for p in self.parts if name.startswith(f"{p}.")), key=len, default=None)
        if path is None:
            return self, name.removeprefix(f"{self.path}.") if self.path else name
        layer = self.part(path)
        inner = unwrapped(layer)
        owner, rest = inner.owner(name) if isinstance(inner, ImportedLayer) else (inner, name[len(path) + 1 :])
        return (layer if owner is inner else owner), rest

    def accept_child(self, old: Layer, new: Layer) -> None:
        """Raise ModelError if the values that cross the border of a layer are not terminals of its replacement."""
        inner = unwrapped(old)
        if isinstance(inner, ImportedLayer):
            self._check_border(inner, new)
        if unwrapped(new) is not inner:
            self.replaced |= {path for path, k in self.parts.items() if self.layers[k] is old}

    def _check_border(self, inner: ImportedLayer, new: Layer) -> None:
        calls = [[p.scope for p in region.inner() if p.scope.path == inner.path] for region in self.regions]
        # One call of a replacement runs where the layer ran: operations of others between its own would be both before
        # and after it.
        contiguous = all(len(scopes) == len(set(scopes)) for scopes in calls)
        required, terminals = len(new.inputs), len(new.inputs + new.optional)
        fits = all(required <= len(r.reads) <= terminals and len(r.results) == len(new.outputs) for r in inner.regions)
        if not contiguous or not (fits or unwrapped(new) is inner):
            raise ModelError(
                f"'{inner.path}' cannot be replaced by {new!r}"
                + ("" if contiguous else ": other operations run between its own"),
                facts=dict.fromkeys(
                    f"it reads {_listed(r.reads)}, and others read its {_listed(r.results)}" for r in inner.regions
                ),
                hint="replace a layer within or around it, or write a layer with these inputs and outputs",
            )

    @staticmethod
    @contextmanager
    def recorded() -> Iterator[dict[str, Any]]:
        """Within this context a trace enters its values by their names in the source into the dictionary."""
        values: dict[str, Any] = {}
        token = _recorded.set(values)
        try:
            yield values
        finally:
            _recorded.reset(token)

    def build(self, *values: Any) -> Any:
        if _run.get() is None:
            raise ModelError(
                f"{self!r} runs within the imported model only",
                hint="compile the model with outputs=['" + self.path + "']",
            )
        run = Run.current()
        region = run.calls[self.path]
        # a call with fewer operands than the first has None for the others
        return run.interpret(self, region, values[: len(region.reads)])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"


def unwrapped(layer: Layer) -> Layer:
    """Return the layer within wrappers."""
    return _with_wrapped(layer)[-1]


def _with_wrapped(layer: Layer) -> list[Layer]:
    """Return a layer and those within it that it wraps."""
    return [layer, *_with_wrapped(layer.inner)] if isinstance(layer, Wrapper) else [layer]


class Run(ABC):
    """One run over a graph in a trace; ``values`` holds those of the graph by name, and receives all others."""

    def __init__(self, root: ImportedLayer, values: dict[str, Any]) -> None:
        self.root, self.values = root, values
        self.path, self.scope = root.context.path, root.context.parameter_scope
        self.calls: dict[str, Region] = {}  # path of a layer -> the call that runs
        self.is_changed = False  # whether a layer ran that is not of the source, so sizes may differ from those there

    @staticmethod
    def current() -> Run:
        """Return the run whose layers are being built."""
        run = _run.get()
        assert run is not None
        return run

    @abstractmethod
    def execute(self, source: Any) -> None:
        """Set the results of an operation in ``values``."""

    def passed(self, name: str) -> Any:
        """Return a value as it crosses the border of a layer."""
        return self.values[name]

    def received(self, name: str, value: Any) -> Any:
        """Return a value that crossed the border of a layer."""
        return value

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context layers of the root run the operations of this graph."""
        token = _run.set(self)
        try:
            yield
        finally:
            _run.reset(token)
        recorded = _recorded.get()
        if recorded is not None:
            recorded.update(self.values)

    def interpret(self, layer: ImportedLayer, region: Region, values: Sequence[Any]) -> Any:
        """Run a region of a layer and return its results."""
        originals = {name: self.values[name] for name in region.reads if name in self.values}
        for name, value in zip(region.reads, values, strict=True):
            self.values[name] = self.received(name, value)
        for item in region.items:
            if not isinstance(item, Region):
                self.execute(item.source)
                continue
            self.calls[item.scope.path] = item
            operands = tuple(self.passed(name) for name in item.reads)
            built = layer.context.call(layer.part(item.scope.path), operands, {}, layer.location)
            # a sequence of ONNX is one value, and a list
            results = built if isinstance(built, tuple) or len(item.results) != 1 else (built,)
            for name, result in zip(item.results, results, strict=True):
                self.values[name] = self.received(name, result)
            if item.scope.path in layer.replaced:
                self.is_changed = True
        results = tuple(self.passed(name) for name in region.results)
        # A wrapper may have changed its inputs; others, such as a residual connection, read the original ones.
        self.values.update(originals)
        return results[0] if len(results) == 1 else results

    def _scoped(self, path: str) -> str:
        return f"{self.scope}.{path}" if self.scope and path else self.scope or path

    def has_declared(self, name: str) -> bool:
        """Whether the layer of a parameter declares it, or did so: a known layer, or a replacement."""
        owner, rest = self.root.owner(name)
        return not isinstance(unwrapped(owner), ImportedLayer) and name.removesuffix(f".{rest}") in self.calls

    def parameter(self, name: str, shape: Sequence[Any], dtype: Any) -> Any:
        """Return a parameter by its name in the source; the layer that contains it declares it."""
        layer, rest = self.root.owner(name)
        owner = unwrapped(layer)
        scope = self._scoped(name.removesuffix(rest).rstrip("."))
        context = self.root.context
        for part in _with_wrapped(layer):
            context.parameter_scopes.setdefault(part, scope)
        if (id(owner), rest) in context.reparametrized:
            return owner.param(rest, shape, dtype=dtype)
        return shared_parameter(layer, rest, shape, dtype=dtype)
