# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Hooks of alder-lab."""

from mithril import (
    Architecture,
    Command,
    Export,
    FileFormat,
    Found,
    FrontendSpec,
    HardwareTarget,
    MemoryLevel,
    Option,
    ProfilerSpec,
    hookimpl,
)

api_version = (1, 1)
BOARD = HardwareTarget(
    "alder_board",
    family="cpu",
    aliases=("alder-b",),
    peak_flops={"float32": 4e9},
    bandwidth=1e9,
    memory=256 << 20,
    dtypes=("float32",),
    costs={"launch": 1e-6, "efficiency": 0.5},
    summary="a small board",
    levels=(MemoryLevel("sram", 16 << 10, scratchpad=True), MemoryLevel("l2", 1 << 20)),
    instructions={"exp": 40.0},
)
seen = []  # of the hooks that observe and decide


@hookimpl
def mithril_targets():
    return [BOARD]


@hookimpl
def mithril_detect_targets():
    return [Found("alder_board", 1, "always there")]


@hookimpl
def mithril_profilers():
    return [ProfilerSpec("alder-watch", "alder_lab.tools:Watch", "seconds per operation")]


@hookimpl
def mithril_commands():
    return [Command("alder-count", "alder_lab.tools:count", "Count the operations of a graph in a file.")]


@hookimpl
def mithril_formats():
    return [
        FileFormat(
            "alder-text",
            (".alder",),
            saves="alder_lab.files:save",
            loads="alder_lab.files:load",
            models="alder_lab.files:model",
            summary="the graph as text",
            backends=("alder", "numpy"),
            marker="",
        )
    ]


@hookimpl
def mithril_architectures():
    return [Architecture("alder-net", loads="alder_lab.files:load", saves="alder_lab.files:save")]


@hookimpl
def mithril_frontends():
    return [FrontendSpec("alder-polynomial", ("alder_lab.models.Polynomial",), "alder_lab.models:source")]


@hookimpl
def mithril_exports():
    return [
        Export("alder_polynomial", "alder_lab.models:Polynomial"),
        Export("alder_size", "alder_lab.tools:size", on="CompiledModel"),
    ]


@hookimpl
def mithril_options():
    return [Option("alder_log", bool, False, "Observe the compilation.", affects="shown", needs_steps=True)]


@hookimpl
def mithril_advise(model, backend, options, user_options):
    if options["optimization_level"] == "high" and "alder_mode" not in user_options:
        return {"alder_mode": "eager"}
    return {}


@hookimpl
def mithril_amend_pipeline(draft, target, level):
    if target is not None and target.name == "alder_board" and level != "none":
        draft.add("alder-count")


@hookimpl(wrapper=True)
def mithril_run_pass(pass_, graph):
    result = yield
    seen.append(("pass", pass_.name, len(graph.nodes), len(result.nodes)))
    return result


@hookimpl(wrapper=True)
def mithril_build(graph, backend):
    executable = yield
    seen.append(("build", backend.name))
    return executable


@hookimpl
def mithril_observers(context):
    if not context.options["alder_log"]:
        return []
    from alder_lab.tools import Observer

    return [Observer(seen)]


@hookimpl
def mithril_compile_begin(context):
    context.scratch["alder"] = []


@hookimpl
def mithril_compile_stage(context, stage, graph):
    context.scratch.setdefault("alder", []).append(stage)


@hookimpl
def mithril_compile_end(context, result, error):
    seen.append(("end", context.backend.name, type(error).__name__, tuple(context.scratch["alder"])))
