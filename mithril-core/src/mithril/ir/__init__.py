"""The intermediate representation: values, nodes, graphs; building, editing, printing, parsing, verifying."""

from mithril.base.lazy_exports import lazy_exports
from mithril.ir import apply, builder, editor, text  # noqa: F401  (they set hooks of Op and Graph)

HOMES = {
    "apply": ("emit",),
    "attribute_texts": ("attribute_text", "attributes_key", "attributes_text", "parse_attributes"),
    "attribute_types": ("Axes", "Axis", "Ints", "Pairs", "normalize_axes", "normalize_axis", "number"),
    "axes_notation": ("Atom", "Declaration", "REDUCING", "axes_error", "parse_axes"),
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
        "types_of",
    ),
    "declaration": ("Attribute", "limits_of"),
    "declare": ("binary", "composite", "op", "unary"),
    "decomposition": ("decompose",),
    "editor": ("Editor",),
    "evaluation": ("Arrays", "substitute_sizes", "evaluate", "rounding_spread"),
    "parser": ("parse",),
    "result_names": ("cotangent_name", "result", "result_name"),
    "samples": ("Arr", "Sample", "bools", "exactly", "ints", "positive", "sample"),
    "text": ("structurally_equal", "structural_hash", "to_text"),
    "type_rules": (
        *("always", "attribute_dtype", "boolean", "broadcast", "expect_equal", "expect_paired", "expect_rank"),
        *("floating", "integer", "integral", "like", "logical", "numeric", "operand", "per_input", "reduced"),
        "same_shape",
    ),
    "verifier": ("Snapshot", "verify"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
