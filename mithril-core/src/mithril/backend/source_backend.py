"""Backends that run generated Python source: lowering tables, builds and their cache."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np

from mithril import plugins
from mithril.backend.base import Backend, LazyGraph
from mithril.backend.build_options import BuildOptions
from mithril.backend.capabilities import Capabilities
from mithril.backend.codegen.emit import emit, render
from mithril.backend.codegen.lowering_table import Lowerings
from mithril.backend.codegen.source import Source, from_template, require_template, transformed
from mithril.backend.plugin_lowering import PluginLowering, plugin_lowerings
from mithril.graph import GradientError, Graph, Node, UnsupportedError, iterate

# The function of generated source: forward(params, inputs) returns the outputs by name.
Forward = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


class SourceExecutable:
    """A generated function with its source and graph."""

    __slots__ = ("_graph", "arrays", "call", "differentiated", "fallbacks", "forward", "source")

    def __init__(self, graph: Graph | LazyGraph, source: Source, forward: Forward, call: Forward | None = None) -> None:
        self._graph = graph if isinstance(graph, LazyGraph) else LazyGraph(graph)
        self.source = source.text
        self.arrays = source.arrays
        self.forward = forward  # the generated function
        self.call = call or forward  # the function that runs, for example jitted
        self.fallbacks: frozenset[str] = frozenset()  # operations that run as NumPy references
        self.differentiated = False  # whether the framework adds gradients, which the source does not contain

    @property
    def graph(self) -> Graph:
        return self._graph.get()

    def release(self, graph: Callable[[], Graph]) -> None:
        """Release the graph and its weights; the generated function has its own copy."""
        self._graph = LazyGraph(graph)
        self.arrays = {}

    @property
    def lowered(self) -> frozenset[str]:
        return frozenset(node.op.name for node, _ in iterate(self.graph)) - self.fallbacks

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.call(params, inputs)

    @property
    def direct(self) -> Forward:
        """The function that a call runs, without its overhead."""
        return self.call

    def forget_sizes(self) -> None:
        """Discard the code that the backend compiled per size; it is recompiled on demand."""
        drop = getattr(self.call, "forget_sizes", None)
        if drop is not None:
            drop()


class SourceBackend(Backend):
    """Base class of backends that generate Python. Subclasses set ``tables``, by semantics; ``finish`` is optional.

    ``differences`` says of operations how their results differ with ``semantics="native"``; programs record it.
    """

    tables: ClassVar[Mapping[str, Lowerings]] = {}
    differences: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._made_tables: dict[Any, Lowerings] = {}
        self._latest: tuple[Any, Any] = (None, None)  # options of a build, table

    def table(self, options: BuildOptions | None = None) -> Lowerings:
        """Return the lowering table of the selected semantics, extended by plugins."""
        # A build asks for each node, with options of its own; one pair, as threads may compile at the same time.
        last_options, table = self._latest
        if last_options is options and options is not None:
            return table  # type: ignore[no-any-return]
        # The generation changes with each reload, so that lowerings of a plugin that is installed later
        # take part.
        generation = plugins.generation()
        semantics = options.semantics if options is not None else "portable"
        table = self._made_tables.get((semantics, generation))
        if table is None:
            base = self.base_table(semantics)
            extra = plugin_lowerings(self.name)
            table = self._made_tables[semantics, generation] = base.extend(extra) if extra else base
        self._latest = options, table
        return table

    def differentiable_table(self, options: BuildOptions) -> Lowerings:
        """Return the table of source that the framework differentiates."""
        return self.table(options)

    def base_table(self, semantics: str) -> Lowerings:
        """Return the lowering table of a semantics without plugins; backends of several devices have several."""
        return self.tables.get(semantics) or self.tables["portable"]

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, keeps="source", memory="frees")

    def is_view(self, node: Node) -> bool:
        row = self.table().find(node)
        return row is not None and row.view

    def overwrites(self, node: Node) -> bool:
        row = self.table().find(node)
        return row is not None and row.out is not None

    def plugin_lowering(self, node: Node, options: BuildOptions | None = None) -> PluginLowering | None:
        row = self.table(options).find(node)
        return None if row is None else row.plugin

    def falls_back(self, node: Node, options: BuildOptions | None = None) -> bool:
        return self.table(options).falls_back(node) and not self.lowers(node, options)

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        return self.table(options).lowers(node)

    def check_options(self, options: BuildOptions) -> None:
        if options.template_path is not None:
            require_template(options.template_path)

    def build(self, graph: Graph, options: BuildOptions | None = None) -> SourceExecutable:
        options = options or BuildOptions()
        source = self._source(graph, options)
        forward = self.loaded(source)
        executable = SourceExecutable(graph, source, forward, self._finished(forward, graph, options))
        executable.fallbacks = frozenset(n.op.name for n, _ in iterate(graph) if self.falls_back(n, options))
        return executable

    def loaded(self, source: Source) -> Forward:
        """Return the function of the generated module, with its constants created."""
        return source.function()

    # -- disk cache ---------------------------------------------------------------------------------------------------
    def dump(self, executable: Any) -> dict[str, bytes] | None:
        """Return the generated text and its large constants, or None if the framework differentiates the function."""
        if executable.differentiated:
            return None
        parts = {"source": executable.source.encode()}
        if executable.arrays:
            packed = io.BytesIO()
            np.savez(packed, allow_pickle=False, **executable.arrays)
            parts["arrays"] = packed.getvalue()
        return parts

    def revive(self, parts: Mapping[str, bytes], graph: LazyGraph, options: BuildOptions) -> SourceExecutable:
        """Restore the executable without generating its source again."""
        arrays = np.load(io.BytesIO(parts["arrays"]), allow_pickle=False) if "arrays" in parts else {}
        source = Source(parts["source"].decode(), arrays)
        path = options.source_path(graph.get()) if options.file_path is not None else None
        if path is not None:
            source.write(path)
        forward = self.loaded(source)
        return SourceExecutable(graph, source, forward, self._finished(forward, cast("Graph", graph), options))

    def embedded_weights(self, executable: Any, size: int) -> tuple[Sequence[Any], int]:
        """Return the constants of the generated module, among them views of mapped files."""
        space = getattr(getattr(executable, "forward", None), "__globals__", None)
        if space is None:  # a program of several backends, or of a plugin
            return super().embedded_weights(executable, size)
        return [x for x in space.values() if getattr(x, "nbytes", 0)], 0

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> SourceExecutable:
        options = options or BuildOptions()
        source = self._differentiable_source(graph, options, "autodiff='native'", "omit autodiff='native'")
        forward = self.differentiated(self.loaded(source), tuple(of), tuple(wrt))
        executable = SourceExecutable(graph, source, forward, self._finished(forward, graph, options))
        executable.differentiated = True
        return executable

    def differentiable(self, graph: Graph, options: BuildOptions | None = None) -> Forward:
        if self.capabilities.autodiff != "native":
            return super().differentiable(graph, options)
        hint = "replace the operation, or compile for another backend"
        return self.loaded(self._differentiable_source(graph, options or BuildOptions(), "a framework", hint))

    def _differentiable_source(self, graph: Graph, options: BuildOptions, subject: str, hint: str) -> Source:
        """Return source without host calls; in GradientError, ``subject`` names the differentiation."""
        on_host = next((node for node, _ in iterate(graph) if self.falls_back(node, options)), None)
        if on_host is not None:
            raise GradientError(
                f"{subject} cannot differentiate '{on_host.op.name}': '{self.name}' runs its NumPy reference",
                facts=[str(on_host.origin)],
                hint=hint,
            )
        return self._source(graph, options, gradients=True)

    def differentiated(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        """Add gradients of the framework to the generated function; its cotangents are named by ``cotangent_name``."""
        raise UnsupportedError(
            f"backend '{self.name}' has no automatic differentiation of its own", hint='use autodiff="graph" instead'
        )

    def _source(self, graph: Graph, options: BuildOptions, gradients: bool = False) -> Source:
        self.check(graph)
        text, arrays = self.generate(graph, options, gradients)
        source = Source(text, arrays)
        path = options.source_path(graph, gradients)
        if path is not None:
            source.write(path)
        return source

    def generate(self, graph: Graph, options: BuildOptions, gradients: bool = False) -> tuple[str, Mapping[str, Any]]:
        """Return the text of the module, by the user's template and code transformers, and its large constants.

        With ``gradients`` the framework differentiates the function, which must not overwrite values.
        """
        table = self.differentiable_table(options) if gradients else self.table(options)
        parts = emit(graph, table, options.plugins)
        text = from_template(options.template_path, parts) if options.template_path is not None else render(parts)
        if options.code_transformers:
            text = transformed(text, options.code_transformers)
        return text, parts["arrays"]

    def _finished(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward | None:
        if options.semantics == "native":
            for name in sorted({node.op.name for node, _ in iterate(graph)}.intersection(self.differences)):
                difference = self.differences[name]
                options.decisions.record("choice", f"'{name}' has the semantics of '{self.name}': {difference}")
        return self.finish(forward, graph, options)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward | None:
        """Return the function to call instead of ``forward``, for example a jitted one, or None for ``forward``."""
        return None
