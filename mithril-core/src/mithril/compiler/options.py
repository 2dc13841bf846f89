"""Options of ``ml.compile`` that the compiler reads, and the options of all packages of the core.

The built-in plugin ``core`` declares them. The default of an option is written in its declaration only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import EllipsisType, MappingProxyType
from typing import Annotated, Any, Literal

from mithril.backend import BUILD_OPTIONS, Least, parse_bytes
from mithril.compiler.option_table import Readable
from mithril.compiler.signature import CALL_OPTIONS
from mithril.graph import Dim
from mithril.plugins import Option, hookimpl

EMPTY: Mapping[str, Any] = MappingProxyType({})

MODEL_OPTIONS = (
    Option(
        "autodiff",
        Literal["graph", "native"],
        "graph",
        "Compute gradients in the graph, where passes optimize them, or with the backend's autograd.",
    ),
    Option(
        "constants",
        Mapping[str, Any],
        EMPTY,
        "Inputs to replace by constants: a mapping from name to array.",
        example='{"mask": np.ones((4, 4), bool)}',
    ),
    Option(
        "dynamic_control_flow",
        bool,
        True,
        "Allow branches and loops at run time; False requires that they resolve at compile time.",
    ),
    Option(
        "hints",
        Mapping[str, Any],
        EMPTY,
        "Expected properties of the inputs.",
        keys={"input_batch_size_range": Sequence[int]},
        example='{"input_batch_size_range": (1, 32)}',
    ),
    Option(
        "inference",
        bool,
        False,
        "Compile for inference only: no gradients, no dropout, running statistics in batch norm.",
    ),
    Option(
        "outputs",
        Sequence[str] | None,
        None,
        "Names of the values to return; None selects the outputs that the model declares.",
        example='["output"]',
    ),
    Option(
        "shapes",
        Mapping[str, Sequence[int | str | Dim | EllipsisType | None]],
        EMPTY,
        "Shapes of inputs: for each axis a size, a name, a Dim with bounds, None for any size; `...` for any axes.",
        example='{"input": ["B", 784]}',
    ),
    Option("static_shapes", bool, False, "Raise an error if a shape is symbolic."),
    Option("static_types", bool, False, "Raise an error if a dtype would be promoted."),
    Option(
        "trainable",
        Sequence[str] | None,
        None,
        "Names or patterns of the inputs to differentiate with respect to; None selects all parameters.",
        example='["*.weight"]',
    ),
    Option(
        "types",
        Mapping[str, Any],
        EMPTY,
        "Dtypes of inputs: a mapping from name to dtype.",
        example='{"input": "float16"}',
    ),
)

PASS_OPTIONS = (
    Option(
        "custom_passes",
        Sequence[Any],
        (),
        "Additional passes: functions (graph -> graph), pass objects, or names of installed passes.",
        example='["common-subexpression"]',
    ),
    Option("graph_optimization", bool, False, "Raise optimization_level to at least 'medium'."),
    Option(
        "optimization_level",
        Literal["none", "low", "medium", "high"],
        "medium",
        "Set of passes to run; `mithril passes` lists the passes of each level.",
    ),
    Option(
        "optimizations",
        Mapping[str, bool],
        EMPTY,
        "Passes or groups of passes to enable or disable in addition to the level: {'fusion': False}.",
        example='{"fusion": False}',
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
        "verify",
        Literal["none", "structure", "numeric"],
        "structure",
        "Check after each pass: nothing, the structure of the graph, or also its values on random inputs.",
    ),
)

BACKEND_OPTIONS = (
    Option(
        "backend_map",
        Mapping[str, Any],
        EMPTY,
        "Run submodels on other backends: a mapping from the name in set_attribute('backend', name) to a backend.",
        example='{"encoder": "torch"}',
    ),
    Option(
        "precision",
        Literal["float32", "float16", "bfloat16", "float64"] | None,
        None,
        "Dtype of parameters and computation; None keeps the dtypes of the model.",
    ),
    Option(
        "target_hardware",
        str | None,
        None,
        "Hardware to compile for; `mithril plugins` lists the targets.",
        example='"nvidia_a100"',
    ),
)

LIMIT_OPTIONS = (
    Option(
        "max_memory_gb",
        Annotated[float | str, Readable(parse_bytes)] | None,
        None,
        "Reject programs and calls that need more memory: 8, '8GB', '512MiB'.",
        example='"8GB"',
    ),
    Option(
        "plugin_patience",
        Annotated[float, Least(0, open=True)] | None,
        5.0,
        "Seconds after which a plugin of a third party that is still running is named on stderr; None: never.",
        affects="shown",
        example="30.0",
    ),
    Option(
        "strict",
        bool,
        False,
        "Raise an error for fallbacks, ignored options, downgrades and failing observers, not only a decision.",
    ),
    Option(
        "timeout",
        Annotated[float, Least(0, open=True)] | None,
        None,
        "Time limit of compilation in seconds.",
        affects="shown",
        example="60.0",
    ),
)

CACHE_OPTIONS = (
    Option("cache", bool, False, "Cache compiled programs on disk.", affects="shown"),
    Option(
        "cache_dir",
        str | os.PathLike[str] | None,
        None,
        "Directory of the cache; None selects the user's cache directory.",
        affects="shown",
        example='"cache"',
    ),
)


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options of the core."""
    layers = (BUILD_OPTIONS, CALL_OPTIONS)
    compiler = (MODEL_OPTIONS, PASS_OPTIONS, BACKEND_OPTIONS, LIMIT_OPTIONS, CACHE_OPTIONS)
    return sorted((option for group in (*layers, *compiler) for option in group), key=lambda option: option.name)
