"""The compiler: from a model to an executable program, in seven steps."""

from mithril.compiler.backend_choice import make_backend as make_backend
from mithril.compiler.frontend import (
    InputDeclaration as InputDeclaration,
    Source as Source,
    TraceRequest as TraceRequest,
    source_of as source_of,
)
from mithril.compiler.graph_functions import (
    gradients as gradients,
    parse as parse,
)
from mithril.compiler.graph_source import GraphSource as GraphSource
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
from mithril.compiler.memory_remedy import check_memory as check_memory
from mithril.compiler.model_transforms import (
    grad as grad,
    hessian as hessian,
    hvp as hvp,
    jacobian as jacobian,
    jvp as jvp,
    vjp as vjp,
    vmap as vmap,
)
from mithril.compiler.option_table import (
    OptionRegistry as OptionRegistry,
    Settings as Settings,
    declared_options as declared_options,
    default_settings as default_settings,
    option_registry as option_registry,
    option_rows as option_rows,
    resolve_options as resolve_options,
    split_options as split_options,
)
from mithril.compiler.pass_pipeline import installed as installed
from mithril.compiler.readable import Readable as Readable
from mithril.compiler.steps import (
    Compiler as Compiler,
    compile as compile,
)
from mithril.compiler.transformed_source import Transformed as Transformed
