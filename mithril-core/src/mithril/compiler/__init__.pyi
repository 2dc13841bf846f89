"""The compiler: from a model to an executable program in seven steps, and the calls of compiled programs."""

from mithril.compiler.batch_buckets import (
    Buckets as Buckets,
    find_buckets as find_buckets,
)
from mithril.compiler.bound_checks import (
    Bound as Bound,
    BufferBound as BufferBound,
    KINDS as KINDS,
    with_bounds as with_bounds,
)
from mithril.compiler.capture import subgraph_to as subgraph_to
from mithril.compiler.compiled_model import CompiledModel as CompiledModel
from mithril.compiler.frontend import (
    InputDeclaration as InputDeclaration,
    Source as Source,
    TraceRequest as TraceRequest,
    make_backend as make_backend,
    source_of as source_of,
)
from mithril.compiler.graph_source import GraphSource as GraphSource
from mithril.compiler.index_checks import (
    IndexCheckedExecutable as IndexCheckedExecutable,
    IndexInput as IndexInput,
    given_indices as given_indices,
    with_checks as with_checks,
)
from mithril.compiler.initializers import (
    Array as Array,
    Index as Index,
    initialize as initialize,
    norms_of as norms_of,
)
from mithril.compiler.input_types import (
    TRAINING_FLAG as TRAINING_FLAG,
    input_specs as input_specs,
    probe_types as probe_types,
)
from mithril.compiler.interpreter import Interpreter as Interpreter
from mithril.compiler.memory_usage import (
    MemoryUse as MemoryUse,
    ProgramMemory as ProgramMemory,
    allocated_bytes as allocated_bytes,
    largest_sizes as largest_sizes,
    memory_use as memory_use,
)
from mithril.compiler.model_files import (
    load as load,
    read_model_file as read_model_file,
)
from mithril.compiler.model_transforms import (
    grad as grad,
    gradients as gradients,
    hessian as hessian,
    hvp as hvp,
    jacobian as jacobian,
    jvp as jvp,
    parse as parse,
    vjp as vjp,
    vmap as vmap,
)
from mithril.compiler.option_table import (
    OptionRegistry as OptionRegistry,
    Readable as Readable,
    Settings as Settings,
    declared_options as declared_options,
    default_settings as default_settings,
    option_registry as option_registry,
    option_rows as option_rows,
    resolve_options as resolve_options,
    split_options as split_options,
)
from mithril.compiler.pass_pipeline import installed as installed
from mithril.compiler.program import (
    Interface as Interface,
    Program as Program,
    ProgramKey as ProgramKey,
    ProgramKind as ProgramKind,
    Results as Results,
    assemble_of as assemble_of,
)
from mithril.compiler.program_summary import (
    PluginRecord as PluginRecord,
    columns as columns,
    format_si as format_si,
    layer_results as layer_results,
)
from mithril.compiler.pure_function import (
    PureFunction as PureFunction,
    PureProgram as PureProgram,
)
from mithril.compiler.requirements import check_memory as check_memory
from mithril.compiler.runner import Runner as Runner
from mithril.compiler.signature import (
    CALL_OPTIONS as CALL_OPTIONS,
    InputSpec as InputSpec,
    array_type as array_type,
    as_numpy as as_numpy,
    convert_input as convert_input,
    declared_text as declared_text,
    expanded as expanded,
    missing_or_unknown as missing_or_unknown,
    resolve_type as resolve_type,
)
from mithril.compiler.steps import (
    Compiler as Compiler,
    compile as compile,
)
from mithril.compiler.transformed_source import Transformed as Transformed
from mithril.compiler.updated_states import with_updates as with_updates
from mithril.compiler.watching import (
    Watcher as Watcher,
    watch as watch,
)
from mithril.compiler.weight_files import (
    load_file as load_file,
    save_file as save_file,
)
