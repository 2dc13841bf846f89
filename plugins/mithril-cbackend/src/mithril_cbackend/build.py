"""Entry point of a compilation: graph and options to executable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from mithril.backend import BuildOptions, ExactSizesRequired, format_bytes, nbytes
from mithril.graph import BackendError, Graph, MithrilError, ShapeError, symbols
from mithril_cbackend.compile_target import CompileTarget, resolve_target
from mithril_cbackend.graph import integer_products, patches
from mithril_cbackend.lowering.attention import attention
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.rows import fused_rows
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.schedule import tuning
from mithril_cbackend.schedule.schedules import Schedules


def checked(
    options: BuildOptions, num_threads: int | None = None, scheduler: str = "auto"
) -> tuple[CompileTarget, Machine]:
    """Return the target and the machine that the options describe."""
    options.reject("c", ("template_path", "code_transformers"), "machine code is generated from loops, not from text")
    target = resolve_target(options.settings)
    return target, compile_graph.machine(options, target, num_threads, scheduler)


def build(
    graph: Graph,
    options: BuildOptions,
    schedules: Schedules,
    num_threads: int | None = None,
    scheduler: str = "auto",
) -> Executable:
    target, machine = checked(options, num_threads, scheduler)
    if target.arch is not None:
        message = f"compiled for this CPU to be called here; compiled.export(folder) writes C for {target.arch}"
        options.decisions.record("choice", message)
    if any(symbols(*i.type.shape) for i in graph.inputs):
        executable = any_size(graph, machine, target, options)
    else:
        graph = patches.as_products(integer_products.fused(graph, machine), options.decisions)
        machine = tuning.scheduled(graph, machine, options, schedules, compile_graph.compiled)
        executable = compile_graph.compiled(graph, machine, target, options.settings["cache"])
    if scheduler != "own":
        record_schedulers(executable.program.kernels.values(), scheduler, options)
    record_scratchpad(executable.program.kernels.values(), machine, options)
    executable.plugins = options.plugins
    compile_graph.write_source(executable, graph, options)
    return executable


def record_schedulers(kernels: Collection[Kernel], scheduler: str, options: BuildOptions) -> None:
    """Record which kernels TVM schedules, and why templates of this backend write the rest."""
    scheduled = Counter(k.anchor.op.name for k in kernels if k.scheduled is not None)
    unscheduled = Counter(f"{k.anchor.op.name} ({k.unscheduled})" for k in kernels if k.scheduled is None)
    if scheduled or (kernels and scheduler == "tvm"):
        lists = (", ".join(f"{n} {name}" for name, n in c.items()) or "none" for c in (scheduled, unscheduled))
        by_tvm, by_templates = lists
        count = f"{scheduled.total()} of {len(kernels)} kernels"
        options.decisions.record("choice", f"scheduler: TVM for {count}: {by_tvm}; templates: {by_templates}")


def record_scratchpad(kernels: Collection[Kernel], machine: Machine, options: BuildOptions) -> None:
    """Record how many kernels there are for the scratchpad of a hardware target, and how much of it they take."""
    if machine.scratchpad is None:
        return
    rows = [k.scratch for k in kernels if k.template in (attention.attention, fused_rows.rows)]
    used = max((sum(nbytes(v.type) for v in values) // machine.threads for values in rows), default=0)
    share = f"{format_bytes(used)} of the scratchpad's {format_bytes(machine.scratchpad)}"
    options.decisions.record("choice", f"fusion: {len(kernels)} kernels, whose rows take {share}")


def any_size(graph: Graph, machine: Machine, target: CompileTarget, options: BuildOptions) -> Executable:
    """Compile a program for all sizes; raise ExactSizesRequired if one of its kernels requires exact sizes."""
    if options.settings["optimize_for"] == "latency":
        raise ExactSizesRequired("optimize_for='latency' compiles a program for each size")
    if graph.results_of("gradient") or any(i.role == "param" and i.tags.get("donated") for i in graph.inputs):
        raise ExactSizesRequired("gradients are computed by programs of exact sizes")
    try:
        graph = integer_products.fused(graph, machine)
        return compile_graph.compiled(graph, machine, target, options.settings["cache"])
    except ExactSizesRequired:
        raise
    except (ShapeError, TypeError, BackendError) as error:
        message = error.what if isinstance(error, MithrilError) else f"the program cannot run any size: {error}"
        raise ExactSizesRequired(message) from error
