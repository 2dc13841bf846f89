"""The intermediate representation: values, nodes, graphs; building, editing, printing, parsing, verifying."""

from mithril.ir.apply import emit as emit
from mithril.ir.attribute_texts import (
    attribute_text as attribute_text,
    attributes_key as attributes_key,
    attributes_text as attributes_text,
    parse_attributes as parse_attributes,
)
from mithril.ir.attribute_types import (
    Axes as Axes,
    Axis as Axis,
    Ints as Ints,
    Pairs as Pairs,
    normalize_axes as normalize_axes,
    normalize_axis as normalize_axis,
    number as number,
)
from mithril.ir.axes_notation import (
    Atom as Atom,
    Declaration as Declaration,
    REDUCING as REDUCING,
    axes_error as axes_error,
    parse_axes as parse_axes,
)
from mithril.ir.builder import (
    Builder as Builder,
    computing as computing,
    is_building as is_building,
    trace as trace,
)
from mithril.ir.core import (
    Attributes as Attributes,
    Graph as Graph,
    Input as Input,
    NOWHERE as NOWHERE,
    Node as Node,
    Op as Op,
    Origin as Origin,
    Output as Output,
    Value as Value,
    as_results as as_results,
    iterate as iterate,
    types_of as types_of,
)
from mithril.ir.declaration import (
    Attribute as Attribute,
    limits_of as limits_of,
)
from mithril.ir.declare import (
    binary as binary,
    composite as composite,
    op as op,
    unary as unary,
)
from mithril.ir.decomposition import decompose as decompose
from mithril.ir.editor import Editor as Editor
from mithril.ir.evaluation import (
    Arrays as Arrays,
    evaluate as evaluate,
    rounding_spread as rounding_spread,
    substitute_sizes as substitute_sizes,
)
from mithril.ir.parser import parse as parse
from mithril.ir.result_names import (
    cotangent_name as cotangent_name,
    result as result,
    result_name as result_name,
)
from mithril.ir.samples import (
    Arr as Arr,
    Sample as Sample,
    bools as bools,
    exactly as exactly,
    ints as ints,
    positive as positive,
    sample as sample,
)
from mithril.ir.text import (
    structural_hash as structural_hash,
    structurally_equal as structurally_equal,
    to_text as to_text,
)
from mithril.ir.type_rules import (
    always as always,
    attribute_dtype as attribute_dtype,
    boolean as boolean,
    broadcast as broadcast,
    expect_equal as expect_equal,
    expect_paired as expect_paired,
    expect_rank as expect_rank,
    floating as floating,
    integer as integer,
    integral as integral,
    like as like,
    logical as logical,
    numeric as numeric,
    operand as operand,
    per_input as per_input,
    reduced as reduced,
    same_shape as same_shape,
)
from mithril.ir.verifier import (
    Snapshot as Snapshot,
    verify as verify,
)
