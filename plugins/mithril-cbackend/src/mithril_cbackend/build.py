"""From a graph and the options of a compilation to an executable."""

from __future__ import annotations

from mithril.backend import BuildOptions
from mithril.ir import Graph
from mithril_cbackend.compile_target import resolve_target
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.schedule import tuning
from mithril_cbackend.schedule.schedules import Schedules


def build(graph: Graph, options: BuildOptions, schedules: Schedules, num_threads: int | None = None) -> Executable:
    options.reject("c", ("template_path", "code_transformers"), "machine code is made of loops, not of a text")
    target = resolve_target(options.settings)
    if target.arch is not None:
        what = f"calls in this process run on its own processor; compiled.export(folder) is for {target.arch}"
        options.decisions.record("choice", what)
    made_for = compile_graph.machine(options, target, num_threads)
    executable = compile_graph.compiled(
        graph, tuning.scheduled(graph, made_for, options, schedules, compile_graph.compiled), target
    )
    compile_graph.write_source(executable, graph, options)
    return executable
