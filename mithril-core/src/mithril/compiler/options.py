"""Options of ``ml.compile`` that the core implements, declared by the built-in plugin ``core``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from mithril.backend import Least, Positive, parse_bytes
from mithril.base import Dim
from mithril.compiler.readable import Readable
from mithril.plugins import Option, hookimpl

Path = str | os.PathLike[str]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options of the core."""
    return [
        Option(
            "autodiff",
            Literal["graph", "native"],
            "graph",
            "Compute gradients in the graph, where passes optimize them, or with the backend's autograd.",
        ),
        Option(
            "backend_map",
            Mapping[str, Any],
            _NOTHING,
            "Run submodels on other backends: a mapping from the name in set_attribute('backend', name) to a backend.",
        ),
        Option("cache", bool, False, "Cache compiled programs on disk.", affects="shown"),
        Option(
            "cache_dir",
            Path | None,
            None,
            "Directory of the cache; None selects the user's cache directory.",
            affects="shown",
        ),
        Option(
            "checks",
            bool,
            False,
            "Raise an error for indices out of range; without checks they are clamped to the valid range.",
        ),
        Option(
            "code_transformers",
            Sequence[Callable[[str], str]],
            (),
            "Functions (code -> code) to apply to the generated source, in order.",
        ),
        Option(
            "constants", Mapping[str, Any], _NOTHING, "Inputs to replace by constants: a mapping from name to array."
        ),
        Option(
            "custom_passes",
            Sequence[Any],
            (),
            "Additional passes: functions (graph -> graph), pass objects, or names of installed passes.",
        ),
        Option(
            "dynamic_control_flow",
            bool,
            True,
            "Allow branches and loops at run time; False requires that they resolve at compile time.",
        ),
        Option(
            "file_path",
            Path | None,
            None,
            "Write the generated source to this file; programs with gradients go to net.grad.py next to net.py.",
            affects="shown",
        ),
        Option("graph_optimization", bool, False, "Raise optimization_level to at least 'medium'."),
        Option(
            "hints",
            Mapping[str, Any],
            _NOTHING,
            "Expected properties of the inputs.",
            keys={"input_batch_size_range": Sequence[int]},
        ),
        Option(
            "inference",
            bool,
            False,
            "Compile for inference only: no gradients, no dropout, running statistics in batch norm.",
        ),
        Option(
            "jit",
            bool | None,
            None,
            "Use the backend's just-in-time compiler; None selects the backend's default.",
        ),
        Option("jit_options", Mapping[str, Any], _NOTHING, "Options of the backend's just-in-time compiler."),
        Option(
            "max_memory_gb",
            Annotated[float | str, Readable(parse_bytes)] | None,
            None,
            "Reject programs and calls that need more memory: 8, '8GB', '512MiB'.",
        ),
        Option(
            "memory_planning",
            bool | str | Callable[..., Any],
            True,
            "Strategy for the arena: 'smallest' (True), 'greedy', 'best_fit', 'apart' (False: no reuse of memory), "
            "'module:function', or a function.",
            ("optimizations.memory_planning",),
        ),
        Option(
            "max_programs",
            Positive,
            64,
            "Maximum number of cached programs for calls with different shapes; the least recently used is evicted.",
            affects="shown",
        ),
        Option(
            "num_threads",
            Positive | None,
            None,
            "Maximum number of threads of the backend; None keeps the backend's default.",
            ("cpu_options.num_threads",),
        ),
        Option(
            "optimization_level",
            Literal["none", "low", "medium", "high"],
            "medium",
            "Set of passes to run; `mithril passes` lists the passes of each level.",
        ),
        Option(
            "optimizations",
            Mapping[str, bool],
            _NOTHING,
            "Passes or groups of passes to enable or disable in addition to the level: {'fusion': False}.",
        ),
        Option(
            "optimize_for",
            Literal["throughput", "latency"] | None,
            None,
            "Optimize for throughput (merges matmuls that share an operand) or latency (does not merge them, "
            "and compiles exact batch sizes).",
            ("hints.inference_priority",),
        ),
        Option(
            "outputs",
            Sequence[str] | None,
            None,
            "Names of the values to return; None selects the outputs that the model declares.",
        ),
        Option(
            "plugin_patience",
            Annotated[float, Least(0, open=True)] | None,
            5.0,
            "Seconds after which a plugin of a third party that is still running is named on stderr; None: never.",
            affects="shown",
        ),
        Option(
            "precision",
            Literal["float32", "float16", "bfloat16"] | None,
            None,
            "Dtype of parameters and computation; None keeps the dtypes of the model.",
        ),
        Option("seed", int | None, None, "Seed for the initial parameters and random operations."),
        Option(
            "semantics",
            Literal["portable", "native"],
            "portable",
            "Use the same semantics on all backends, or the backend's own semantics where they are faster.",
        ),
        Option(
            "shapes",
            Mapping[str, Sequence[int | str | Dim | None]],
            _NOTHING,
            "Shapes of inputs: for each axis a size, a name, a Dim with bounds, or None for any size.",
        ),
        Option(
            "static_inference", bool, False, "Compile for inference with constant parameters, shapes and memory layout."
        ),
        Option("static_shapes", bool, False, "Raise an error if a shape is symbolic."),
        Option("static_types", bool, False, "Raise an error if a dtype would be promoted."),
        Option(
            "strict",
            bool,
            False,
            "Raise an error for fallbacks, ignored options and downgrades instead of recording a decision.",
        ),
        Option("target_hardware", str | None, None, "Hardware to compile for; `mithril plugins` lists the targets."),
        Option("template_path", Path | None, None, "Jinja2 template for the generated source.", file=True),
        Option(
            "timeout",
            Annotated[float, Least(0, open=True)] | None,
            None,
            "Time limit of compilation in seconds.",
            affects="shown",
        ),
        Option(
            "trainable",
            Sequence[str] | None,
            None,
            "Names or patterns of the inputs to differentiate with respect to; None selects all parameters.",
        ),
        Option("types", Mapping[str, Any], _NOTHING, "Dtypes of inputs: a mapping from name to dtype."),
        Option(
            "verify",
            Literal["none", "structure", "numeric"],
            "structure",
            "Check after each pass: nothing, the structure of the graph, or also its values on random inputs.",
        ),
    ]
