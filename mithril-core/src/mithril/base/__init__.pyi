"""Base types and utilities: errors, decisions, dtypes, symbolic sizes, guards, the registry of operations."""

from mithril.base import registry as registry
from mithril.base.decisions import (
    Decision as Decision,
    Decisions as Decisions,
)
from mithril.base.deprecation import (
    deprecated as deprecated,
    removal as removal,
)
from mithril.base.dims import (
    Call as Call,
    Dim as Dim,
    Shape as Shape,
    Size as Size,
    Symbol as Symbol,
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
from mithril.base.dtypes import (
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
from mithril.base.errors import (
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
    unknown as unknown,
)
from mithril.base.guards import (
    Guard as Guard,
    assume as assume,
    bind as bind,
    collect_guards as collect_guards,
)
from mithril.base.levels import (
    LEVELS as LEVELS,
    PASS_LEVELS as PASS_LEVELS,
    STAGES as STAGES,
    stage_name as stage_name,
)
from mithril.base.limits import (
    allowed_memory as allowed_memory,
    check_limit as check_limit,
    check_memory as check_memory,
    limit as limit,
    parsed_expression as parsed_expression,
    parsed_json as parsed_json,
    reader_limits as reader_limits,
)
from mithril.base.operator_overloads import Operators as Operators
from mithril.base.quoting import (
    quoted as quoted,
    visible as visible,
)
from mithril.base.registry import (
    Registry as Registry,
    operation as operation,
    operation_name as operation_name,
    operation_names as operation_names,
    operations as operations,
    register as register,
)
from mithril.base.tensor_type import TensorType as TensorType
from mithril.base.version import __version__ as __version__
