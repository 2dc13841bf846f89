"""The pass manager, which runs passes in order and checks and times each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from mithril.graph import Graph, MithrilError, PassError, Snapshot, VerificationError, computing, verify
from mithril.passes.declare import Pass, PassContext, as_pass
from mithril.passes.numeric import check_results
from mithril.passes.order import pipeline_text, sort_passes

Runner = Callable[[Any, Graph, Any, Callable[..., Graph]], Graph]


@dataclass(frozen=True)
class PassRecord:
    """Node counts and time of one pass."""

    name: str
    seconds: float
    before: int
    after: int
    changed: bool


@dataclass
class PipelineReport:
    """A printable table of all passes that ran."""

    records: list[PassRecord] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.records:
            return "no passes"
        width = max(len(r.name) for r in self.records)
        lines = [f"{'pass'.ljust(width)}  {'nodes':>13}  {'ms':>8}"]
        for r in self.records:
            count = f"{r.before} -> {r.after}" if r.changed else "="
            lines.append(f"{r.name.ljust(width)}  {count:>13}  {r.seconds * 1e3:8.2f}")
        return "\n".join(lines)


class PassManager:
    """A pipeline of passes. The graph is verified after each pass and, with ``check="numeric"``, also evaluated."""

    def __init__(self, passes: Iterable[Any], *, check: str = "structure") -> None:
        self.passes = sort_passes([as_pass(p) for p in passes])
        self.check = check

    def __str__(self) -> str:
        return pipeline_text(self.passes)

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.passes]

    def selected(self, keep: Callable[[Pass], bool]) -> PassManager:
        """Return a manager of the passes that ``keep`` accepts, in this order."""
        part = copy(self)
        part.passes = [one for one in self.passes if keep(one)]
        return part

    @computing()  # a step that is being built runs passes on the graphs of its parts
    def run(
        self, graph: Graph, context: PassContext | None = None, runner: Runner | None = None
    ) -> tuple[Graph, PipelineReport]:
        """Run all passes and return the graph and a report. ``runner(pass, graph, context, run)`` wraps each pass."""
        context = context or PassContext()
        report = PipelineReport()
        done: list[str] = []
        for one in self.passes:
            start = time.perf_counter()
            before = graph
            graph = self.run_one(one, graph, context, runner, done)
            done.append(one.name)
            elapsed = time.perf_counter() - start
            report.records.append(
                PassRecord(one.name, elapsed, len(before.nodes), len(graph.nodes), graph is not before)
            )
        return graph, report

    def run_one(
        self,
        one: Pass,
        graph: Graph,
        context: PassContext | None = None,
        runner: Runner | None = None,
        done: Sequence[str] = (),
    ) -> Graph:
        """Run one pass and check its result."""
        context = context or PassContext()

        # Passes of this project are tested not to change their input, so that the snapshot is spared for
        # them.
        snapshot = None if self.check == "none" or one.trusted else Snapshot(graph)

        def last(pass_: Pass, graph: Graph, context: PassContext) -> Graph:
            result = pass_(graph, context)
            if not isinstance(result, Graph):  # before plugins that wrap the pass see it
                raise _no_graph(pass_, result, done)
            return result

        try:
            new_graph = last(one, graph, context) if runner is None else runner(one, graph, context, last)
        except MithrilError as error:
            raise error.with_facts(*_pass_facts(one, done)) from None
        except Exception as error:
            raise PassError(
                f"pass '{one.name}' failed: {type(error).__name__}: {error}", facts=_pass_facts(one, done)
            ) from error
        if snapshot is not None and (difference := snapshot.difference()) is not None:
            raise PassError(
                f"pass '{one.name}' changed its input graph in place",
                facts=[difference, *_pass_facts(one, done)],
                hint="build new nodes with graph.edit() or node.replaced(...), and return the new graph",
            )
        self._check(one, graph, new_graph, done)
        return new_graph

    def _check(self, one: Pass, before: Graph, after: Any, done: Sequence[str]) -> None:
        if not isinstance(after, Graph):
            raise _no_graph(one, after, done)
        if after is before or self.check == "none":
            return
        try:
            # Only the nodes that differ: a pass that changes one node does not pay for the whole graph.
            verify(after, since=before)
        except VerificationError as error:
            raise PassError(
                f"pass '{one.name}' returned an invalid graph: {error.what}",
                facts=[*error.facts, *_pass_facts(one, done)],
                hint="this is a bug in the pass, not in the model",
            ) from error
        if one.keeps_interface:
            _same_interface(one, before, after, done)
        if self.check == "numeric":
            check_results(one, before, after, _pass_facts(one, done))


def _no_graph(one: Pass, result: Any, done: Sequence[str]) -> PassError:
    return PassError(
        f"pass '{one.name}' returned {type(result).__name__}, expected a graph",
        facts=_pass_facts(one, done),
        hint="return the input graph if nothing changes",
    )


def _pass_facts(one: Pass, done: Sequence[str]) -> list[str]:
    return [
        f"pass '{one.name}' from {one.origin}" if one.origin else "",
        f"passes before: {', '.join(done)}" if done else "",
    ]


def _same_interface(one: Pass, before: Graph, after: Graph, done: Sequence[str]) -> None:
    if before.inputs == after.inputs and before.results == after.results:
        return  # the same objects, as after most passes

    def inputs_of(graph: Graph) -> dict[str, tuple[Any, ...]]:  # in any order
        return {i.name: (i.name, i.role, i.type) for i in graph.arguments}

    def results_of(graph: Graph) -> list[tuple[Any, ...]]:
        return [(r.name, r.role, r.of, r.type) for r in graph.results]

    if inputs_of(before) != inputs_of(after) or results_of(before) != results_of(after):
        old, new = ([*inputs_of(g).values(), *results_of(g)] for g in (before, after))
        removed, added = ([tuple(map(str, r)) for r in a if r not in b] for a, b in ((old, new), (new, old)))
        raise PassError(
            f"pass '{one.name}' changed the graph's inputs or outputs",
            facts=[f"removed: {removed[:5]}", f"new: {added[:5]}", *_pass_facts(one, done)],
            hint="declare keeps_interface=False if this is intended",
        )
