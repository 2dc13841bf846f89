"""Graphs: values, nodes, types, symbolic sizes and guards, axes and traits; building, editing, text, verification.

Errors, dtypes and the registry of operations are imported without the modules of graphs."""

from mithril.graph import registry as registry
from mithril.graph.apply import emit as emit
from mithril.graph.attribute_types import (
    Axes as Axes,
    Axis as Axis,
    Ints as Ints,
    Pairs as Pairs,
    attribute_text as attribute_text,
    attributes_key as attributes_key,
    attributes_text as attributes_text,
    normalize_axes as normalize_axes,
    normalize_axis as normalize_axis,
    number as number,
    parse_attributes as parse_attributes,
)
from mithril.graph.axes_notation import (
    Atom as Atom,
    Declaration as Declaration,
    REDUCING as REDUCING,
    axes_error as axes_error,
    parse_axes as parse_axes,
)
from mithril.graph.builder import (
    Builder as Builder,
    computing as computing,
    is_building as is_building,
    trace as trace,
)
from mithril.graph.core import (
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
from mithril.graph.decisions import (
    Decision as Decision,
    Decisions as Decisions,
    LEVELS as LEVELS,
    PASS_LEVELS as PASS_LEVELS,
    STAGES as STAGES,
)
from mithril.graph.declaration import (
    Attribute as Attribute,
    limits_of as limits_of,
)
from mithril.graph.declare import (
    binary as binary,
    composite as composite,
    op as op,
    unary as unary,
)
from mithril.graph.decomposition import decompose as decompose
from mithril.graph.dims import (
    Call as Call,
    Dim as Dim,
    Shape as Shape,
    Size as Size,
    Symbol as Symbol,
    TensorType as TensorType,
    at_most as at_most,
    bounds as bounds,
    dim_of_node as dim_of_node,
    equal as equal,
    floordiv as floordiv,
    is_static as is_static,
    maximum as maximum,
    minimum as minimum,
    mod as mod,
    numel as numel,
    parse_dim as parse_dim,
    product as product,
    shape_text as shape_text,
    substitute as substitute,
    symbols as symbols,
)
from mithril.graph.dtypes import (
    ALL as ALL,
    DEFAULT_FLOAT as DEFAULT_FLOAT,
    DTYPE_NAMES as DTYPE_NAMES,
    DType as DType,
    bfloat16 as bfloat16,
    bool_ as bool_,
    dtype as dtype,
    float16 as float16,
    float32 as float32,
    float64 as float64,
    int16 as int16,
    int32 as int32,
    int64 as int64,
    int8 as int8,
    promote as promote,
    promote_scalar as promote_scalar,
    scalar_dtype as scalar_dtype,
    uint16 as uint16,
    uint32 as uint32,
    uint64 as uint64,
    uint8 as uint8,
)
from mithril.graph.editor import Editor as Editor
from mithril.graph.errors import (
    BackendError as BackendError,
    CompileTimeoutError as CompileTimeoutError,
    DTypeError as DTypeError,
    GradientError as GradientError,
    GraphError as GraphError,
    GuardError as GuardError,
    InputError as InputError,
    MemoryLimitError as MemoryLimitError,
    MithrilError as MithrilError,
    ModelError as ModelError,
    OperationError as OperationError,
    OptionError as OptionError,
    OptionWarning as OptionWarning,
    ParseError as ParseError,
    PassError as PassError,
    PluginError as PluginError,
    RewriteError as RewriteError,
    ShapeError as ShapeError,
    StrictError as StrictError,
    UnsupportedError as UnsupportedError,
    VerificationError as VerificationError,
    closest as closest,
    deprecated as deprecated,
    quoted as quoted,
    removal as removal,
    unknown as unknown,
    visible as visible,
)
from mithril.graph.evaluation import (
    Arrays as Arrays,
    evaluate as evaluate,
    rounding_spread as rounding_spread,
    substitute_sizes as substitute_sizes,
)
from mithril.graph.guards import (
    Guard as Guard,
    assume as assume,
    bind as bind,
    collect_guards as collect_guards,
)
from mithril.graph.limits import (
    allowed_memory as allowed_memory,
    check_limit as check_limit,
    check_memory as check_memory,
    limit as limit,
    parsed_expression as parsed_expression,
    parsed_json as parsed_json,
    reader_limits as reader_limits,
)
from mithril.graph.node_axes import (
    axes_of as axes_of,
    call_axes as call_axes,
    flops as flops,
    operand_types as operand_types,
)
from mithril.graph.op_axes import (
    Factors as Factors,
    OpAxes as OpAxes,
    Role as Role,
    unknown_axes as unknown_axes,
)
from mithril.graph.operator_overloads import Operators as Operators
from mithril.graph.parser import parse as parse
from mithril.graph.registry import (
    Registry as Registry,
    operation as operation,
    operation_name as operation_name,
    operation_names as operation_names,
    operations as operations,
    register as register,
)
from mithril.graph.result_names import (
    cotangent_name as cotangent_name,
    result as result,
    result_name as result_name,
)
from mithril.graph.samples import (
    Arr as Arr,
    Sample as Sample,
    bools as bools,
    exactly as exactly,
    ints as ints,
    positive as positive,
    sample as sample,
)
from mithril.graph.text import (
    structural_hash as structural_hash,
    structurally_equal as structurally_equal,
    to_text as to_text,
)
from mithril.graph.traits import (
    is_addition as is_addition,
    is_cheap as is_cheap,
    is_expensive as is_expensive,
    is_fold as is_fold,
    is_layout as is_layout,
    is_matrix_transpose as is_matrix_transpose,
    is_permutation as is_permutation,
    is_product as is_product,
    is_source as is_source,
    is_unchanged as is_unchanged,
    is_view as is_view,
    is_windowed_product as is_windowed_product,
    linear_in as linear_in,
    precision as precision,
    reads_rows as reads_rows,
    sample_nodes as sample_nodes,
)
from mithril.graph.type_rules import (
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
from mithril.graph.verifier import (
    Snapshot as Snapshot,
    verify as verify,
)
from mithril.graph.version import __version__ as __version__
