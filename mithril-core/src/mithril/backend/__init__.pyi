"""Backends: base class, memory planning, and code generation for backends that run Python source."""

from mithril.backend import memory_plan as memory_plan
from mithril.backend.annotations import (
    Layers as Layers,
    Least as Least,
    Positive as Positive,
    describe as describe,
    matches as matches,
    mismatch as mismatch,
    require_match as require_match,
)
from mithril.backend.arrays import (
    EncodedWeight as EncodedWeight,
    as_numpy as as_numpy,
    to_numpy as to_numpy,
)
from mithril.backend.attribution import (
    annotated as annotated,
    attributed as attributed,
    plugin_of as plugin_of,
    third_parties as third_parties,
)
from mithril.backend.base import (
    Backend as Backend,
    ExactSizesRequired as ExactSizesRequired,
    Executable as Executable,
    LazyGraph as LazyGraph,
)
from mithril.backend.build_options import (
    BUILD_OPTIONS as BUILD_OPTIONS,
    BuildOptions as BuildOptions,
    declared_defaults as declared_defaults,
)
from mithril.backend.capabilities import (
    Capabilities as Capabilities,
    Form as Form,
    Prefers as Prefers,
)
from mithril.backend.checked_calls import (
    CheckedType as CheckedType,
    check_call as check_call,
    checked as checked,
    constructor as constructor,
    is_ours as is_ours,
    reject_surplus as reject_surplus,
)
from mithril.backend.codegen.call import Call as Call
from mithril.backend.codegen.common import (
    FourierCalls as FourierCalls,
    LibraryCalls as LibraryCalls,
    NUMPY_NAMES as NUMPY_NAMES,
    PREDICATES as PREDICATES,
    SIGNS as SIGNS,
    UNARY as UNARY,
    axes_text as axes_text,
    bounds as bounds,
    dtype_of as dtype_of,
    functions as functions,
    integer_cast as integer_cast,
    is_half as is_half,
    is_integer as is_integer,
    operands_unchanged as operands_unchanged,
    operators as operators,
    reduction_identity as reduction_identity,
    shared_helpers as shared_helpers,
    sliced as sliced,
)
from mithril.backend.codegen.control_flow import python_control as python_control
from mithril.backend.codegen.emit import (
    NameAllocator as NameAllocator,
    emit as emit,
)
from mithril.backend.codegen.lowering_table import (
    ArrayKernel as ArrayKernel,
    Condition as Condition,
    Lowerings as Lowerings,
    TextWriter as TextWriter,
)
from mithril.backend.codegen.shared import (
    Dialect as Dialect,
    HELPERS as HELPERS,
    complex_numbers as complex_numbers,
    factors as factors,
    indexing as indexing,
    integers as integers,
    reductions as reductions,
    xp as xp,
)
from mithril.backend.codegen.shared.cached_attention import cached_attention as cached_attention
from mithril.backend.codegen.shared.dialect import needs as needs
from mithril.backend.codegen.shared.expert_products import (
    expert_matmul as expert_matmul,
    expert_weight_grad as expert_weight_grad,
)
from mithril.backend.codegen.shared.indexing import positions as positions
from mithril.backend.codegen.shared.integers import floordiv_int as floordiv_int
from mithril.backend.codegen.shared.pooling import (
    max_pool_positions as max_pool_positions,
    offsets as offsets,
    pool_counts as pool_counts,
    taps as taps,
    window_parts as window_parts,
)
from mithril.backend.codegen.shared.reductions import single as single
from mithril.backend.codegen.source import (
    Source as Source,
    template_texts as template_texts,
)
from mithril.backend.forking import watch as watch
from mithril.backend.host_calls import (
    check_results as check_results,
    host_function as host_function,
)
from mithril.backend.memory_plan import (
    ALIGNMENT as ALIGNMENT,
    Buffer as Buffer,
    MemoryPlan as MemoryPlan,
    Strategy as Strategy,
    UPDATES as UPDATES,
    columns as columns,
    find_strategy as find_strategy,
    format_bytes as format_bytes,
    in_place_updates as in_place_updates,
    lifetimes as lifetimes,
    nbytes as nbytes,
    parse_bytes as parse_bytes,
    peak_bytes as peak_bytes,
    plan as plan,
    state_updates as state_updates,
)
from mithril.backend.plugin_lowering import (
    Label as Label,
    PluginLowering as PluginLowering,
    applicable as applicable,
    lowering_error_context as lowering_error_context,
    plugin_lowerings as plugin_lowerings,
)
from mithril.backend.source_backend import (
    Forward as Forward,
    SourceBackend as SourceBackend,
    SourceExecutable as SourceExecutable,
)
from mithril.backend.stored_operands import (
    compared_with_itself as compared_with_itself,
    with_stored_operands as with_stored_operands,
)
from mithril.backend.weight_memory import (
    HeldWeights as HeldWeights,
    held_weights as held_weights,
)
