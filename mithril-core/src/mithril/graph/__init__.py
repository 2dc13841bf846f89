"""Graphs: values, nodes, types, symbolic sizes and guards, axes and traits; building, editing, text, verification.

Errors, dtypes and the registry of operations are imported without the modules of graphs.
"""

import sys
from importlib import import_module
from typing import Any

from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "": ("registry",),
    "apply": ("emit",),
    "attribute_types": (
        *("attribute_text", "attributes_key", "attributes_text", "parse_attributes", "Axes", "Axis", "Ints"),
        *("Pairs", "normalize_axis", "number"),
    ),
    "axes_notation": ("Declaration", "parse_axes"),
    "builder": ("Builder", "trace"),
    "current_builder": ("computing", "is_building"),
    "core": (
        *(
            "Attributes",
            "BOUNDED",
            "CHECKS",
            "Graph",
            "Input",
            "NOWHERE",
            "Node",
            "Op",
            "Origin",
            "Output",
            "Value",
            "as_results",
        ),
        *("PLACES", "REACHED", "iterate", "types_of"),
    ),
    "decisions": ("Decision", "Decisions", "LEVELS", "PASS_LEVELS", "STAGES"),
    "declaration": ("RANDOM_KEY", "Attribute"),
    "declare": ("binary", "composite", "op", "unary"),
    "decomposition": ("decompose",),
    "dims": (
        *("Call", "Dim", "Shape", "Size", "Symbol", "at_most", "bounds", "equal", "floordiv"),
        *("is_static", "maximum", "minimum", "mod", "numel", "parse_dim", "product", "shape_text", "substitute"),
        *("symbols", "TensorType"),
    ),
    "dtypes": (
        *("ALL", "DEFAULT_FLOAT", "DType", "bfloat16", "bool_", "dtype", "float16", "float32"),
        *("float64", "int16", "int32", "int64", "int8", "promote", "promote_scalar", "recognize"),
        *("uint16", "uint32", "uint64", "uint8"),
    ),
    "editor": ("Editor",),
    "errors": (
        *("deprecated", "removal", "BackendError", "CompileTimeoutError", "DTypeError", "GradientError"),
        *("GraphError", "GuardError", "InputError", "MemoryLimitError", "MithrilError", "ModelError"),
        *("OperationError", "OptionError", "OptionWarning", "ParseError", "PassError", "PluginError"),
        *("RewriteError", "ShapeError", "StrictError", "UnsupportedError", "VerificationError", "closest"),
        *("unknown", "quoted", "visible"),
    ),
    "synonyms": (
        "LAYERS",
        "METHODS",
        "OPERATIONS",
        "OPTIONS",
        "PACKAGE",
        "expression_here",
        "name_here",
        "phrase_here",
    ),
    "evaluation": ("Arrays", "substitute_sizes", "evaluate", "rounding_spread"),
    "guards": ("Guard", "assume", "bind", "collect_guards"),
    "limits": (
        *("allowed_memory", "check_limit", "check_memory", "limit", "parsed_json"),
        "reader_limits",
    ),
    "logs": ("log",),
    "node_axes": ("axes_of", "call_axes", "counted_flops", "flops", "operand_types"),
    "op_axes": ("Factors", "OpAxes", "Role", "unknown_axes"),
    "operator_overloads": ("Operators",),
    "parser": ("parse",),
    "registry": ("Registry", "operation_name", "operation_names", "operation", "operations", "register"),
    "result_names": ("cotangent_name", "result", "result_name"),
    "samples": ("Arr", "Sample", "bools", "exactly", "ints", "positive", "sample"),
    "text": ("structurally_equal", "structural_hash", "to_text"),
    "traits": (
        *("is_addition", "is_cheap", "is_expensive", "is_fold", "is_layout", "is_matrix_transpose"),
        "is_recomputed",
        *("is_permutation", "is_product", "is_source", "is_unchanged", "is_view", "is_windowed_product"),
        *("linear_in", "precision", "reads_rows", "sample_nodes"),
    ),
    "type_rules": (
        *("always", "attribute_dtype", "boolean", "broadcast", "expect_equal", "expect_paired", "expect_rank"),
        *("floating", "integer", "integral", "like", "logical", "numeric", "operand", "per_input", "reduced"),
        "same_shape",
    ),
    "verifier": ("Snapshot", "verify"),
    "version": ("__version__",),
}
__all__, _load, __dir__ = lazy_exports(__name__, HOMES)


def __getattr__(name: str) -> Any:
    value = _load(name)
    if "mithril.graph.core" in sys.modules:  # these modules bind methods of Op and Graph
        for module in ("apply", "builder", "editor", "text"):
            import_module(f"mithril.graph.{module}")
    return value
