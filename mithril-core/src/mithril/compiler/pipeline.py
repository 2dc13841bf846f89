"""Steps three to five of ``ml.compile``: from the request of a program to its graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mithril import plugins
from mithril.compiler.bound_checks import with_bounds
from mithril.compiler.frontend import TraceRequest
from mithril.compiler.graph_source import with_fixed_parameters
from mithril.compiler.index_checks import with_checks
from mithril.compiler.observers import Progress
from mithril.compiler.option_table import declared_options
from mithril.compiler.packed_products import with_packed_products
from mithril.compiler.program import ProgramKey, Results
from mithril.compiler.requirements import (
    check_layers,
    check_trainable,
    framework_subject,
    note_graph,
    note_target_memory,
    record_operations,
    require_no_control_flow,
    require_no_promotion,
    require_static,
)
from mithril.compiler.session import Session
from mithril.compiler.signature import TRAINING_FLAG
from mithril.compiler.sparse_inputs import with_sparse_inputs
from mithril.compiler.unused_parts import unused_inputs, without_inputs
from mithril.compiler.updated_states import with_updates
from mithril.derivatives import gradients, require_framework_gradients
from mithril.graph import Graph, Output, computing, result, verify
from mithril.passes import PipelineReport


class ProgramGraphs(NamedTuple):
    """The graphs of one program, and what follows from them."""

    traced: Graph
    optimized: Graph
    results: Results
    wrt: tuple[str, ...]
    native: bool  # whether the backend's framework computes gradients
    report: PipelineReport
    checks: list[Any]  # of compiler.index_checks and compiler.bound_checks


class Pipeline:
    """Traces, differentiates and optimizes graphs for a session; ``progress`` decides whether this is reported."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session, self.progress = session, progress

    @computing()  # the caller may be building a graph, into which operators of passes would write
    def graphs(self, request: ProgramKey, *, for_framework: bool = False) -> ProgramGraphs:
        """Return the graphs of a program."""
        session, kind = self.session, request.kind
        self.progress.restart()
        traced = with_sparse_inputs(self.trace(dict(request.types), training=kind.training), request.stored)
        if request.embeds:
            traced = with_fixed_parameters(traced, request.constants, session.backend)
        is_divided = bool(session.settings["backend_map"])
        traced = with_packed_products(traced, session.backend, is_divided, session.decisions)
        if kind.of:
            check_trainable(session.settings["trainable"], traced, session.unused)
        check_layers(session.settings.as_dict(), declared_options(), traced, session.source.layers)
        note_graph(traced, session.settings, session.decisions)
        record_operations(traced, session.decisions)
        self.progress.stage("types", traced)
        keeps = kind.training or kind.of or for_framework
        graph, checks = self._with_checks(traced if keeps else with_updates(traced, session.decisions))
        subject = framework_subject(session.backend, session.settings, kind.of, for_framework)
        wrt = kind.wrt if kind.wrt is not None else default_wrt(traced) if kind.of else ()
        derivatives: Sequence[Output] = ()
        if kind.of and subject is not None:
            # The framework adds these results when it builds: here they are declared, so that calls know
            # their names and types.
            derivatives = [result("gradient", name, traced.input(name).value) for name in wrt]
        elif kind.of:
            graph, derivatives = self.differentiate(graph, kind.of, wrt)
        # Rules with other gradients, such as that of a maximum at a tie, do not apply where a framework
        # differentiates the result.
        graph, report = self.optimize(graph, then_gradients=subject is not None, parameters_bound=bool(request.binding))
        self.progress.stage("optimize", graph)
        note_target_memory(graph, session.target, session.decisions)
        if subject is not None:
            require_framework_gradients(graph, *subject)
        results = Results.of(traced, derivatives)
        return ProgramGraphs(traced, graph, results, wrt, subject is not None, report, checks)

    def trace(self, types: Mapping[str, Any], *, training: bool) -> Graph:
        """Run steps three and four and return the typed graph, without parameters that no result depends on."""
        graph = self._traced(types, training=training)
        # A trace with other optional inputs, such as the text that a decoder reads once, may need the others.
        is_only = all(s.required or name == TRAINING_FLAG for name, s in self.session.specs.items())
        unused = unused_inputs(graph, "param") if is_only else ()
        if unused and not self.session.inference:  # the other mode may need them
            unneeded = unused_inputs(self._traced(types, training=not training), "param")
            unused = tuple(name for name in unused if name in unneeded)
        if not unused:
            return graph
        self.session.note_unused(unused)
        return without_inputs(graph, unused)

    def _traced(self, types: Mapping[str, Any], *, training: bool) -> Graph:
        settings = self.session.settings
        request = TraceRequest(
            training=training and not self.session.inference,
            constants=settings["constants"],
            trainable=settings["trainable"],
            dtype=self.session.backend.dtype,
        )
        graph = self.session.source.graph(types, request)
        self.progress.stage("shapes", graph)
        verify(graph)
        if settings["static_shapes"]:
            require_static(graph)
        if settings["static_types"]:
            require_no_promotion(graph)
        if not settings["dynamic_control_flow"]:
            require_no_control_flow(graph)
        return graph

    def _with_checks(self, traced: Graph) -> tuple[Graph, list[Any]]:
        """Add the results of run-time checks to the graph: loop bounds and, with ``checks=True``, indices."""
        graph, bounds = with_bounds(traced)
        if not self.session.settings["checks"]:
            return graph, [*bounds]
        graph, checks, has_regions = with_checks(graph)
        if has_regions:
            self.session.decisions.record("ignored", "checks=True does not check indices inside branches and loops")
        return graph, [*bounds, *checks]

    def differentiate(self, graph: Graph, of: tuple[str, ...], wrt: tuple[str, ...]) -> tuple[Graph, Sequence[Output]]:
        """Return the graph with gradients of the outputs ``of``, and these gradients."""
        # Fuse first: the gradient of a composite is better than that of its decomposition.
        before = self.optimize(graph, only="fuse", then_gradients=True)[0]
        lowers = None if self.session.settings["backend_map"] else self.session.backend.lowers
        after = gradients(before, of, wrt, lowers)
        self.progress.stage("gradients", after)
        # The new results follow those of the graph.
        return after, after.results[len(before.results) :]

    def optimize(
        self, graph: Graph, only: str = "", *, then_gradients: bool = False, parameters_bound: bool = False
    ) -> tuple[Graph, PipelineReport]:
        """Run step five: all passes, or those of the stage ``only``."""
        manager = self.session.manager
        if only:
            manager = manager.selected(lambda one: one.stage == only)
        context = self.session.pass_context(then_gradients=then_gradients, parameters_bound=parameters_bound)
        return manager.run(graph, context, runner=self._run_pass)

    def _run_pass(self, pass_: Any, graph: Graph, context: Any, last: Callable[..., Graph]) -> Graph:
        self.session.deadline.check(f"pass '{pass_.name}'")
        start = time.perf_counter()
        after = plugins.run_pass(pass_, graph, context, last)
        self.progress.passed(pass_.name, graph, after, start, time.perf_counter() - start)
        if after is not graph and not pass_.trusted:
            self._record_change(pass_)
        return after

    def _record_change(self, pass_: Any) -> None:
        """Record a pass of a third party or of the user."""
        entry = plugins.passes().get(pass_.name)
        if entry is not None and entry.origin == pass_.origin:
            self.session.decisions.record("plugin", f"pass '{pass_.name}' by {pass_.origin}")
        else:
            self.session.decisions.record("choice", f"custom pass '{pass_.name}' of {pass_.origin} changed the graph")


def default_wrt(graph: Graph) -> tuple[str, ...]:
    """Return the inputs that are differentiated by default: parameters and trainable inputs."""
    return tuple(
        i.name
        for i in graph.with_role("param", "input")
        if i.type.dtype.is_float and i.tags.get("trainable", i.role == "param")
    )
