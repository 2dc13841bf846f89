"""Backends: base class, memory planning, and code generation for backends that run Python source."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "": ("memory_plan",),
    "annotations": ("Layers", "Least", "Positive", "describe", "mismatch"),
    "arrays": ("as_numpy", "to_numpy"),
    "attribution": ("annotated", "attributed", "plugin_of", "third_parties"),
    "base": ("Backend", "BuildOptions", "Executable"),
    "capabilities": ("Capabilities", "Form", "Prefers"),
    "checked_calls": ("CheckedType", "check_call", "checked", "constructor", "is_ours", "reject_surplus"),
    "codegen.call": ("Call",),
    "codegen.common": (
        *(
            "NUMPY_NAMES",
            "PREDICATES",
            "SIGNS",
            "UNARY",
            "operands_unchanged",
            "axes_text",
            "bounds",
            "dtype_of",
            "functions",
            "integer_cast",
            "shared_helpers",
        ),
        *("is_half", "is_integer", "reduction_identity", "operators"),
    ),
    "codegen.control_flow": ("python_control",),
    "codegen.emit": ("emit",),
    "codegen.helper_metadata": ("needs",),
    "codegen.lowering_table": ("Lowerings",),
    "codegen.names": ("NameAllocator",),
    "codegen.shared": ("Dialect", "HELPERS", "xp"),
    "codegen.shared.": ("complex_numbers", "factors", "indexing", "integers", "reductions"),
    "codegen.shared.indexing": ("positions",),
    "codegen.shared.integers": ("floordiv_int",),
    "codegen.shared.pooling": ("pool_counts", "taps", "window_parts"),
    "codegen.shared.reductions": ("single",),
    "codegen.slice_syntax": ("sliced",),
    "codegen.source": ("Source", "template_texts"),
    "forking": ("watch",),
    "host_calls": ("check_results", "host_function"),
    "lazy_graph": ("LazyGraph",),
    "memory_plan": (
        *("ALIGNMENT", "Buffer", "MemoryPlan", "Strategy", "columns", "find_strategy", "format_bytes", "lifetimes"),
        *("nbytes", "parse_bytes", "peak_bytes", "plan"),
    ),
    "patterns": ("matches", "require_match"),
    "plugin_lowering": ("Label", "PluginLowering", "applicable", "lowering_error_context", "plugin_lowerings"),
    "source_backend": ("Forward", "SourceBackend", "SourceExecutable"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
