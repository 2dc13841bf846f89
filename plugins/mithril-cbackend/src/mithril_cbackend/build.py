"""Entry point of a compilation: graph and options to executable."""

from __future__ import annotations

from mithril.backend import BuildOptions
from mithril.ir import Graph
from mithril_cbackend.compile_target import CompileTarget, resolve_target
from mithril_cbackend.graph import integer_products
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.schedule import tuning
from mithril_cbackend.schedule.schedules import Schedules


def checked(options: BuildOptions, num_threads: int | None = None) -> tuple[CompileTarget, Machine]:
    """Return the target and the machine that the options describe."""
    options.reject("c", ("template_path", "code_transformers"), "machine code is generated from loops, not from text")
    target = resolve_target(options.settings)
    return target, compile_graph.machine(options, target, num_threads)


def build(graph: Graph, options: BuildOptions, schedules: Schedules, num_threads: int | None = None) -> Executable:
    target, machine = checked(options, num_threads)
    if target.arch is not None:
        message = f"compiled for this CPU to be called here; compiled.export(folder) writes C for {target.arch}"
        options.decisions.record("choice", message)
    graph = integer_products.fused(graph)
    machine = tuning.scheduled(graph, machine, options, schedules, compile_graph.compiled)
    executable = compile_graph.compiled(graph, machine, target)
    executable.plugins = options.plugins
    compile_graph.write_source(executable, graph, options)
    return executable
