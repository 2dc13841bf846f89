"""Steps six and seven of ``ml.compile``: from an optimized graph to an executable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril import plugins
from mithril.backend import Backend, BuildOptions, Executable
from mithril.compiler.frontend import make_backend
from mithril.compiler.partition import Partitioned
from mithril.compiler.pipeline import Pipeline
from mithril.compiler.requirements import PeakOf, check_arguments
from mithril.derivatives import with_marked_surrogates
from mithril.graph import Graph, OptionError, computing
from mithril.plugins import HardwareTarget

Names = tuple[str, ...]


class Builder:
    """Decomposes graphs to operations of the backends, partitions them, and builds executables."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.session = pipeline, pipeline.session

    def options(self) -> BuildOptions:
        """Return the options of one build."""
        session = self.session
        return BuildOptions(session.settings, inference=session.inference, decisions=session.decisions)

    def decomposed(self, graph: Graph, backend: Backend, options: BuildOptions) -> Graph:
        """Decompose a graph to operations of the backend; clean it, as decompositions repeat subexpressions."""
        decomposed = backend.decomposed(with_marked_surrogates(graph), options)
        return decomposed if decomposed is graph else self.pipeline.optimize(decomposed, only="clean")[0]

    @computing()  # as for the graphs
    def build(
        self,
        graph: Graph,
        native: tuple[Names, Names] | None = None,
        peak_of: PeakOf | None = None,
        split: Callable[[Graph], Graph] | None = None,
    ) -> Executable:
        """Return the executable of a graph, or of the part of the decomposed graph that ``split`` returns.

        With ``native`` (outputs with cotangents, inputs to differentiate) the backend's framework computes gradients.
        ``peak_of`` serves the hint of a memory error.
        """
        session, progress, options = self.session, self.pipeline.progress, self.options()
        backend_map = {name: make_backend(b, session.settings) for name, b in session.settings["backend_map"].items()}
        if backend_map and native is not None:
            is_chosen = session.settings["autodiff"] == "native"
            subject = "autodiff='native'" if is_chosen else f"a gradient of '{session.backend.name}' on several devices"
            raise OptionError(
                f"{subject} requires a single backend, but backend_map names others",
                hint=f"omit backend_map, or {'omit autodiff' if is_chosen else 'compile for one device'}",
            )

        def single(graph: Graph, backend: Backend) -> Executable:
            return backend.build(self.decomposed(graph, backend, options), options)

        def last(graph: Graph, backend: Backend, target: HardwareTarget | None) -> Any:
            if backend_map:
                return Partitioned(graph, backend, backend_map, single)
            lowered = self.decomposed(graph, backend, options)
            lowered = lowered if split is None else split(lowered)
            progress.stage("generate", lowered)
            check_arguments(lowered, session.backend, session.settings, peak_of)
            if native is not None:
                return backend.build_with_gradients(lowered, *native, options)
            return backend.build(lowered, options)

        executable: Executable = plugins.build(graph, session.backend, session.target, last)
        progress.stage("build", executable.graph)
        return executable
