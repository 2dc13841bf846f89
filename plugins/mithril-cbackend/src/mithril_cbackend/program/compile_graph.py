"""Compilation of a graph for a machine: kernels and driver to an executable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mithril.backend import BuildOptions, LazyGraph
from mithril.graph import BackendError, Graph, OptionError, UnsupportedError, decompose, unknown
from mithril.system import files
from mithril_cbackend import module_loader
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.cpu_info import l2_bytes, processors, vector_bytes
from mithril_cbackend.graph import fusion
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import call_entry, kernel_errors, program as programs
from mithril_cbackend.program.any_size import AnySizeExecutable
from mithril_cbackend.program.executable import Executable, LoweredProgram, rewritten
from mithril_cbackend.tir import machine_code


def machine(
    options: BuildOptions, target: CompileTarget, num_threads: int | None = None, scheduler: str = "auto"
) -> Machine:
    """Return the machine to compile for: this one, unless the options select another."""
    cpu_options: Mapping[str, Any] = options.settings["cpu_options"]
    width = cpu_options.get("vector_bytes", vector_bytes() if target.arch is None else target.vector_bytes)
    if width not in (4, 16, 32, 64):
        raise OptionError(f"cpu_options: invalid vector_bytes {width}", facts=["accepted: 16, 32, 64"])
    if not cpu_options.get("vectorize", True):
        width = 4
    threads = options.num_threads or num_threads or processors()
    limit = processors()
    if threads > limit:
        options.decisions.record("downgrade", f"using {limit} instead of {threads} threads: the process has no more")
        threads = limit
    cpu = cpu_options.get("cpu")
    if cpu is not None:
        check_cpu(cpu)
    result = Machine(
        cpu or machine_code.host_cpu(),
        int(threads),
        int(width),
        fuse=options.fuses,
        plan=options.memory_plan,
        compact=target.optimize_size,
        scheduler=scheduler,
        features=machine_code.selected_features(cpu) if target.arch is None else (),
    )
    hardware = options.target
    if hardware is not None and hardware.instructions:
        options.decisions.record("choice", f"the costs of instructions of '{hardware.name}' select fusion")
        result = replace(result, instructions=dict(hardware.instructions))
    if hardware is not None and hardware.cache is not None:
        options.decisions.record("choice", f"the levels of memory of '{hardware.name}' select kernels and fusion")
        return replace(result, cache=hardware.cache, scratchpad=hardware.scratchpad)
    return replace(result, cache=l2_bytes()) if target.arch is None else result


def check_cpu(cpu: Any) -> None:
    """Raise OptionError if code for the CPU cannot run on this machine, where it would kill the process."""
    if cpu not in machine_code.cpu_names():
        message, facts, hint = unknown("CPU in cpu_options", str(cpu), machine_code.cpu_names())
        raise OptionError(message, facts=facts[:1], hint=hint)
    missing = machine_code.missing_features(cpu)
    if missing:
        raise OptionError(
            f"this machine cannot run code for the CPU '{cpu}'",
            facts=[f"its CPU '{machine_code.host_cpu()}' lacks: {', '.join(missing)}"],
            hint="drop cpu from cpu_options; compiled.export(folder) writes C for other machines",
        )


def write_source(executable: Executable, graph: Graph, options: BuildOptions) -> None:
    """Write the C of ``compiled.source`` to ``file_path`` if that option is set."""
    path = options.source_path(graph)
    if path is not None:
        files.write(path, executable.source, "file_path")


def rebuild(graph: Graph, executable: Executable) -> Executable:
    """Decompose and compile another graph for the machine and target of an executable."""
    lowered = decompose(graph, lambda node: fusion.is_lowered(node) or fusion.runs_on_host(node), "c")
    result = compiled(lowered, executable.machine, executable.target)
    result.plugins = executable.plugins
    return result


def compiled(graph: Graph, machine: Machine, target: CompileTarget, is_stored: bool = False) -> Executable:
    """Compile kernels and driver to machine code in this process; for the cache, to a shared library."""
    program = programs.write(graph, machine, machine.plan)
    # Positions in arrays are numbers of 32 bits.
    if not program.sizes and programs.elements(program) >= 1 << 31:
        raise UnsupportedError("cannot compile for backend 'c': a value of this graph has 2**31 elements or more")
    if machine.threads > 1:
        machine_code.set_threads(machine.threads)
    functions: dict[str, Any] = {n: f.primfunc for n, f in program.functions.items()}
    functions[programs.DRIVE] = program.driver
    layout = program.layout(graph)
    try:
        built = machine_code.compiled(
            functions, call_entry.entries(graph, layout), machine.cpu, machine.threads, machine.features
        )
    except BackendError as error:
        # LLVM compiles all functions at once, and its error names none of them.
        raise (first_failing_kernel(program, machine) or error) from error.__cause__
    lowered = LoweredProgram(program, machine)
    storable = is_stored and not program.host_steps
    library = module_loader.shared_library(built) if storable else None
    code = module_loader.load(library, machine.threads) if library is not None else built
    parts = LazyGraph(graph), layout, target, code, lambda: lowered
    sized = AnySizeExecutable(program.arena_plan(machine.plan), *parts) if program.sizes else None
    executable = sized or Executable(*parts)
    executable.library = library
    executable.host_steps = program.host_steps
    return executable


def first_failing_kernel(program: programs.Program, machine: Machine) -> BackendError | None:
    """Return the error of the first kernel that cannot be compiled alone, or None if all can."""
    helpers = {n: f.primfunc for n, f in program.functions.items() if n not in program.kernels}
    for name, kernel in program.kernels.items():
        try:
            one = {**helpers, name: program.functions[name].primfunc}
            machine_code.compiled(one, {}, machine.cpu, machine.threads, machine.features)
        except BackendError as error:
            return kernel_errors.failed(kernel, str(error).splitlines()[0])
    return None


def lower_again(graph: Graph, machine: Mapping[str, Any]) -> LoweredProgram:
    """Generate kernels and driver again for a program whose machine code came from the cache."""
    return rewritten(graph, Machine(**machine))
