"""The intermediate representation: values, nodes, graphs; building, editing, printing, parsing, verifying."""

from mithril.base.lazy_exports import lazy_exports
from mithril.ir import apply, axes_of_bodies, builder, editor, text  # noqa: F401  (they set hooks of Op and Graph)

HOMES = {
    "apply": ("emit",),
    "attribute_texts": ("attribute_text", "attributes_key", "attributes_text", "parse_attributes"),
    "attribute_types": ("Axes", "Axis", "Ints", "Pairs", "normalize_axes", "normalize_axis", "number"),
    "axes": ("Factors", "OpAxes", "Role", "unknown_axes"),
    "axes_notation": ("Declaration", "parse_axes"),
    "axes_of_bodies": ("body_axes",),
    "builder": ("Builder", "computing", "is_building", "trace"),
    "core": (
        "Attributes",
        "Graph",
        "Input",
        "NOWHERE",
        "Node",
        "Op",
        "Origin",
        "Output",
        "Value",
        "as_results",
        "iterate",
    ),
    "declaration": ("Attribute",),
    "declare": ("binary", "composite", "op", "unary"),
    "decomposition": ("decompose",),
    "editor": ("Editor",),
    "evaluation": ("Arrays", "at_sizes", "evaluate", "rounding_spread"),
    "parser": ("parse",),
    "result_names": ("cotangent_name", "result", "result_name"),
    "samples": ("Arr", "Sample", "bools", "exactly", "ints", "positive", "sample"),
    "text": ("same", "structural_hash", "to_text"),
    "traits": (
        *("is_addition", "is_cheap", "is_expensive", "is_fold", "is_layout", "is_matrix_transpose", "is_permutation"),
        *("is_product", "is_source", "is_unchanged", "is_view", "is_windowed_product", "linear_in", "precision"),
        *("reads_rows", "sample_nodes"),
    ),
    "type_rules": (
        *("always", "attribute_dtype", "boolean", "broadcast", "expect_equal", "expect_paired", "expect_rank"),
        *("floating", "integer", "integral", "like", "logical", "numeric", "operand", "per_input", "reduced"),
        *("same_shape", "shape_text"),
    ),
    "verifier": ("Snapshot", "verify"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
