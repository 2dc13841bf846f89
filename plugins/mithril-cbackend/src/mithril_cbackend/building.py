"""From a graph and options to an executable."""

from __future__ import annotations

from typing import Any

from mithril.errors import UnsupportedError
from mithril.graph import Graph
from mithril.runtime.backend import BuildOptions
from mithril_cbackend import program as programs, tir
from mithril_cbackend.executable import Executable
from mithril_cbackend.lowering.frame import Machine


def machine(options: BuildOptions) -> Machine:
    """What is compiled for: this computer, unless the options say otherwise."""
    threads = options.num_threads or 1
    return Machine(tir.host_cpu(), threads)


def build(graph: Graph, options: BuildOptions) -> Executable:
    chosen = machine(options)
    program = programs.write(graph, chosen)
    if programs.elements(program) >= 1 << 31:
        raise UnsupportedError("a value of this graph has more than 2**31 elements")
    if chosen.threads > 1:
        tir.set_threads(chosen.threads)
    functions: dict[str, Any] = {n: f.made for n, f in program.functions.items()}
    functions[programs.RUN] = program.driver
    built, run = tir.compiled(functions, programs.RUN, chosen.cpu, chosen.threads)
    return Executable(graph, program, built, run, chosen.lanes())
