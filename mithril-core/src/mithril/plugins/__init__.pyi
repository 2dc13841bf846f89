"""Plugins: hooks, descriptors, loading, and tables of the names that plugins provide.

``from mithril import plugins; plugins.backends()``. Only this package uses pluggy. Listing names imports the plugin
modules but no framework; looking up one backend imports the module of its plugin only."""

from mithril.plugins import (
    hooks as hooks,
    pip_hints as pip_hints,
)
from mithril.plugins.hooks import hookimpl as hookimpl
from mithril.plugins.host import (
    Plugins as Plugins,
    default as default,
)
from mithril.plugins.loader import (
    HOOKS as HOOKS,
    Plugin as Plugin,
    PluginProblem as PluginProblem,
    WRAPPABLE as WRAPPABLE,
    violated_requirements as violated_requirements,
)
from mithril.plugins.specs import (
    Architecture as Architecture,
    BackendSpec as BackendSpec,
    Command as Command,
    CompileContext as CompileContext,
    Export as Export,
    FileFormat as FileFormat,
    Found as Found,
    FrontendSpec as FrontendSpec,
    HardwareTarget as HardwareTarget,
    Lowering as Lowering,
    OpsSpec as OpsSpec,
    Option as Option,
    PassSpec as PassSpec,
    PipelineDraft as PipelineDraft,
    PluginWarning as PluginWarning,
    ProfilerSpec as ProfilerSpec,
)
from mithril.plugins.tables import (
    Entry as Entry,
    Table as Table,
    name_owner as name_owner,
)

advise = default.advise
all = default.all
amend_pipeline = default.amend_pipeline
architectures = default.architectures
backend = default.backend
backend_class = default.backend_class
backends = default.backends
build = default.build
clash_text = default.clash_text
commands = default.commands
compile_begin = default.compile_begin
compile_end = default.compile_end
compile_stage = default.compile_stage
deciders = default.deciders
detect_targets = default.detect_targets
export = default.export
exports = default.exports
extension = default.extension
extensions = default.extensions
format_of = default.format_of
formats = default.formats
found = default.found
frontends = default.frontends
generation = default.generation
import_op = default.import_op
load_architecture = default.load_architecture
load_command = default.load_command
load_format = default.load_format
load_frontend = default.load_frontend
load_pass = default.load_pass
load_profiler = default.load_profiler
lowerings = default.lowerings
observers = default.observers
op_names = default.op_names
op_plugin = default.op_plugin
options = default.options
pass_aliases = default.pass_aliases
pass_placement = default.pass_placement
pass_spec = default.pass_spec
pass_table = default.pass_table
passes = default.passes
profilers = default.profilers
provided = default.provided
register = default.register
reload = default.reload
report = default.report
reserve = default.reserve
run_pass = default.run_pass
target = default.target
targets = default.targets
unregister = default.unregister
