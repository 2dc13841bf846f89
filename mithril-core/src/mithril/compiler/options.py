"""Options of ``ml.compile`` that the core itself honours, answered by the built-in plugin ``core``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from mithril.base import Dim, Least, Positive
from mithril.plugins import Option, hookimpl

Path = str | os.PathLike[str]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Keywords that need no plugin."""
    return [
        Option(
            "autodiff",
            Literal["graph", "native"],
            "graph",
            "Gradients as a graph that passes see, or by the backend's own autograd.",
        ),
        Option(
            "backend_map",
            Mapping[str, Any],
            _NOTHING,
            "Sub-models to run elsewhere: the name set with set_attribute('backend', name) -> backend.",
        ),
        Option("cache", bool, False, "Keep what was compiled on disk and use it again.", affects="shown"),
        Option(
            "cache_dir", Path | None, None, "Folder of the cache; None is the user's cache folder.", affects="shown"
        ),
        Option(
            "checks",
            bool,
            False,
            "Raise where an index lies outside of what it indexes; else it is moved to the nearest inside.",
        ),
        Option(
            "code_transformers",
            Sequence[Callable[[str], str]],
            (),
            "Functions code -> code, applied to the generated source in order.",
        ),
        Option("constants", Mapping[str, Any], _NOTHING, "Inputs whose values are fixed now: name -> array."),
        Option(
            "custom_passes", Sequence[Any], (), "Functions graph -> graph, pass objects, or names of installed passes."
        ),
        Option("dynamic_control_flow", bool, True, "False: every branch and loop must resolve at compile time."),
        Option(
            "file_path",
            Path | None,
            None,
            "Write the generated source to this file; with gradients to net.grad.py beside net.py.",
            affects="shown",
        ),
        Option("graph_optimization", bool, False, "True: at least optimization_level 'medium'."),
        Option(
            "hints",
            Mapping[str, Any],
            _NOTHING,
            "Expectations of the inputs.",
            keys={"input_batch_size_range": Sequence[int]},
        ),
        Option("inference", bool, False, "No gradients; dropout off, batch norm with its running statistics."),
        Option(
            "jit",
            bool | None,
            None,
            "Compile with the backend's just-in-time compiler; None is the backend's best choice.",
        ),
        Option("jit_options", Mapping[str, Any], _NOTHING, "Options of the backend's just-in-time compiler."),
        Option(
            "max_memory_gb", float | str | None, None, "Refuse programs and calls that need more: 8, '8GB', '512MiB'."
        ),
        Option(
            "memory_planning",
            bool | str | Callable[..., Any],
            True,
            "Plan of the arena: 'smallest' (True), 'greedy', 'best_fit', 'apart' (False), 'module:function', function.",
            ("optimizations.memory_planning",),
        ),
        Option(
            "max_programs",
            Positive,
            64,
            "Programs kept for calls of different shapes; the least recently used goes first.",
            affects="shown",
        ),
        Option(
            "num_threads",
            Positive | None,
            None,
            "Threads the backend may use; None leaves its own default.",
            ("cpu_options.num_threads",),
        ),
        Option(
            "optimization_level",
            Literal["none", "low", "medium", "high"],
            "medium",
            "Which passes run; see `mithril passes`.",
        ),
        Option(
            "optimizations",
            Mapping[str, bool],
            _NOTHING,
            "Single passes switched on or off on top of the level: {'fusion': False}.",
        ),
        Option(
            "optimize_for",
            Literal["throughput", "latency"] | None,
            None,
            "Throughput joins products of one operand; latency leaves them apart and rounds no batches up.",
            ("hints.inference_priority",),
        ),
        Option(
            "outputs", Sequence[str] | None, None, "Names of the values to return; None is what the model declares."
        ),
        Option(
            "precision",
            Literal["float32", "float16", "bfloat16"] | None,
            None,
            "Dtype of the parameters and the computation; None keeps the model's.",
        ),
        Option("seed", int | None, None, "Seed of the parameters and of random operations."),
        Option(
            "semantics",
            Literal["portable", "native"],
            "portable",
            "One meaning on all backends, or the backend's own where it is faster.",
        ),
        Option(
            "shapes",
            Mapping[str, Sequence[int | str | Dim | None]],
            _NOTHING,
            "Shapes of inputs; per axis a size, a name, None for any size, or a Dim with bounds.",
        ),
        Option("static_inference", bool, False, "Inference with parameters, shapes and memory fixed now."),
        Option("static_shapes", bool, False, "An error where a shape stays symbolic."),
        Option("static_types", bool, False, "An error where a dtype would be promoted."),
        Option("strict", bool, False, "Whatever would only be noted in compiled.decisions is an error."),
        Option("target_hardware", str | None, None, "Hardware to compile for; see `mithril plugins`."),
        Option("template_path", Path | None, None, "Jinja2 template to write the source with.", file=True),
        Option(
            "timeout",
            Annotated[float, Least(0, open=True)] | None,
            None,
            "Seconds after which compiling gives up.",
            affects="shown",
        ),
        Option(
            "trainable",
            Sequence[str] | None,
            None,
            "Names or patterns of the inputs to differentiate by; None is all parameters.",
        ),
        Option("types", Mapping[str, Any], _NOTHING, "Dtypes of inputs: name -> dtype."),
        Option(
            "verify",
            Literal["none", "structure", "numeric"],
            "structure",
            "What is checked after each pass: nothing, the graph, or its values too.",
        ),
    ]
