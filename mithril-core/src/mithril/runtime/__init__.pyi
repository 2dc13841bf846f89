"""Running: backends, the compiled model, memory plan, profile, benchmark."""

from mithril.runtime.batch_buckets import (
    Buckets as Buckets,
    find_buckets as find_buckets,
)
from mithril.runtime.bound_checks import (
    Bound as Bound,
    BufferBound as BufferBound,
    KINDS as KINDS,
    with_bounds as with_bounds,
)
from mithril.runtime.call_options import CALL_OPTIONS as CALL_OPTIONS
from mithril.runtime.capture import subgraph_to as subgraph_to
from mithril.runtime.compiled_model import CompiledModel as CompiledModel
from mithril.runtime.declared_shapes import (
    declared_text as declared_text,
    expanded as expanded,
)
from mithril.runtime.index_checks import (
    IndexCheckedExecutable as IndexCheckedExecutable,
    IndexInput as IndexInput,
    given_indices as given_indices,
    with_checks as with_checks,
)
from mithril.runtime.inspection import PluginRecord as PluginRecord
from mithril.runtime.interpreter import Interpreter as Interpreter
from mithril.runtime.memory_usage import (
    MemoryUse as MemoryUse,
    ProgramMemory as ProgramMemory,
    allocated_bytes as allocated_bytes,
    largest_sizes as largest_sizes,
    memory_use as memory_use,
)
from mithril.runtime.model_files import (
    load as load,
    read_model_file as read_model_file,
)
from mithril.runtime.program import (
    Interface as Interface,
    Program as Program,
    ProgramKey as ProgramKey,
    ProgramKind as ProgramKind,
    Results as Results,
    assemble_of as assemble_of,
)
from mithril.runtime.program_summary import layer_results as layer_results
from mithril.runtime.pure_function import (
    PureFunction as PureFunction,
    PureProgram as PureProgram,
)
from mithril.runtime.runner import Runner as Runner
from mithril.runtime.signature import (
    InputSpec as InputSpec,
    array_type as array_type,
    as_numpy as as_numpy,
    convert_input as convert_input,
    missing_or_unknown as missing_or_unknown,
    resolve_type as resolve_type,
)
from mithril.runtime.tables import (
    columns as columns,
    format_si as format_si,
)
from mithril.runtime.updated_states import with_updates as with_updates
from mithril.runtime.watching import (
    Watcher as Watcher,
    watch as watch,
)
from mithril.runtime.weight_files import (
    load_file as load_file,
    save_file as save_file,
)
