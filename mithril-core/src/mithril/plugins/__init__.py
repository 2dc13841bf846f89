"""Plugins: hooks, descriptors, loading, and tables of the names that plugins provide.

``from mithril import plugins; plugins.backends()``. Only this package uses pluggy. Listing names imports the plugin
modules but no framework; looking up one backend imports the module of its plugin only.
"""

from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "": ("hooks", "pip_hints"),
    "hooks": ("hookimpl",),
    "host": ("Plugins", "default"),
    "host:default": (
        *("advise", "all", "amend_pipeline", "architectures", "backend", "backend_class", "backends", "build"),
        *("clash_text", "commands", "compile_begin", "compile_end", "compile_stage", "deciders", "detect_targets"),
        *("devices", "export", "exports", "extension", "extensions", "format_of", "formats", "found"),
        *("frontends", "generation", "import_op", "load_architecture", "load_command", "load_device"),
        *("load_format", "load_frontend", "load_pass", "load_profiler", "lowerings", "observers", "op_names"),
        *("op_plugin", "options", "parts_of_programs", "pass_aliases", "pass_placement", "pass_spec"),
        *("pass_table", "passes", "private_imports", "profilers", "provided"),
        *("register", "reload", "report", "reserve", "run_pass", "target", "targets", "unregister"),
    ),
    "loader": ("HOOKS", "Plugin", "PluginProblem", "WRAPPABLE", "violated_requirements"),
    "specs": (
        *("Architecture", "BackendSpec", "Command", "CompileContext", "DeviceSpec", "Export", "FileFormat", "Found"),
        *(
            "FrontendSpec",
            "HardwareTarget",
            "Lowering",
            "MemoryLevel",
            "OpsSpec",
            "Option",
            "PassSpec",
            "PipelineDraft",
        ),
        *("PluginWarning", "ProfilerSpec"),
    ),
    "tables": ("Entry", "Table", "name_owner"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
