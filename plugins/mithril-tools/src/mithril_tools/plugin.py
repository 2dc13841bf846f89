"""Hooks of mithril-tools; importing this module imports neither click nor rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal

from mithril import CompileContext, Export, Option, hookimpl

NOTHING: Mapping[str, Any] = MappingProxyType({})
Path = str | PathLike[str]

# Module of ``mithril_tools`` -> the names that it exports as ``ml.*``.
EXPORTS = {
    "batching": ("find_batch_size", "process_in_batches"),
    "benchmark": ("BenchmarkConfig", "run_benchmark"),
    "calibrate": ("calibrate", "estimate"),
    "diff": ("diff",),
    "profile": ("profile",),
    "tune": ("tune",),
    "verify": ("verify",),
}
# Option -> module of the observer that it enables.
OBSERVERS = {
    "verbose": "mithril_tools.show.verbose:Verbose",
    "dump_graph": "mithril_tools.show.dump:Dump",
    "trace_shapes": "mithril_tools.show.shape_trace:ShapeTrace",
    "save_intermediates": "mithril_tools.show.dump:Intermediates",
    "profile": "mithril_tools.show.verbose:Timing",
    "visualize": "mithril_tools.visualization.observer:Drawing",
}


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.diff``, ``ml.profile``, ``ml.run_benchmark`` and similar names; ``compiled.get_profile_stats()``."""
    names = [Export(name, f"mithril_tools.{module}:{name}") for module, names in EXPORTS.items() for name in names]
    return [*names, Export("get_profile_stats", "mithril_tools.profile:stats_of", on="CompiledModel")]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options that display a compilation."""
    return [
        Option(
            "dump_format",
            Literal["dot", "json", "text"],
            "text",
            "Format of the files that dump_graph writes.",
            affects="shown",
        ),
        Option(
            "dump_graph",
            Path | None,
            None,
            "Directory for the graph after each pass, as numbered files.",
            affects="shown",
            needs_steps=True,
            example='"graphs"',
        ),
        Option(
            "intermediate_dir",
            Path | None,
            None,
            "Directory for the files of save_intermediates.",
            affects="shown",
            example='"stages"',
        ),
        Option("profile", bool, False, "Record the time of each compile stage and of each operation.", affects="shown"),
        Option(
            "profile_output",
            Path | None,
            None,
            "Write the recorded profile to this file, as Chrome-trace JSON.",
            affects="shown",
            example='"trace.json"',
        ),
        Option(
            "save_intermediates",
            bool,
            False,
            "Save the graph of every stage, and named values at run time.",
            affects="shown",
            needs_steps=True,
        ),
        Option(
            "trace_shapes",
            bool,
            False,
            "Show how each operation's shape was derived.",
            affects="shown",
            needs_steps=True,
        ),
        Option("verbose", bool, False, "Show stages, passes and times while compiling.", affects="shown"),
        Option(
            "visualize",
            bool,
            False,
            "Write a drawing of the optimized graph to a file; with show_memory, of the graph that runs.",
            affects="shown",
            needs_steps=True,
        ),
        Option(
            "viz_options",
            Mapping[str, Any],
            NOTHING,
            "Appearance of the drawing, and its file.",
            keys={
                "format": str,
                "output_path": str | PathLike[str] | None,
                "show_shapes": bool,
                "show_types": bool,
                "show_memory": bool,
                "depth": int | None,
            },
            affects="shown",
            example='{"format": "svg", "show_shapes": True}',
        ),
    ]


@hookimpl
def mithril_advise(
    model: Any, backend: Any, options: Mapping[str, Any], user_options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the options that ``ml.tune`` found fastest, at ``optimization_level="high"``."""
    if options["optimization_level"] != "high":
        return {}
    from mithril_tools.tuning_cache import load_best

    return load_best(model, backend, options, user_options)


@hookimpl
def mithril_observers(context: CompileContext) -> Sequence[Any]:
    """Return the observers that options enable."""
    from pkgutil import resolve_name

    return [resolve_name(home)(context) for option, home in OBSERVERS.items() if context.options[option]]
