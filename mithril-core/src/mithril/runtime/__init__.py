"""Running: backends, the compiled model, memory plan, profile, benchmark."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "batch_buckets": ("Buckets", "find_buckets"),
    "bound_checks": ("Bound", "KINDS", "BufferBound", "with_bounds"),
    "call_options": ("CALL_OPTIONS",),
    "capture": ("subgraph_to",),
    "compiled_model": ("CompiledModel",),
    "index_checks": ("IndexCheckedExecutable", "IndexInput", "given_indices", "with_checks"),
    "interpreter": ("Interpreter",),
    "memory_usage": ("MemoryUse", "ProgramMemory", "allocated_bytes", "largest_sizes", "memory_use"),
    "inspection": ("PluginRecord",),
    "model_files": ("load", "read_model_file"),
    "program_summary": ("layer_results",),
    "program": ("Interface", "ProgramKind", "Program", "ProgramKey", "Results", "assemble_of"),
    "pure_function": ("PureFunction", "PureProgram"),
    "runner": ("Runner",),
    "declared_shapes": ("declared_text", "expanded"),
    "signature": ("InputSpec", "convert_input", "array_type", "as_numpy", "missing_or_unknown", "resolve_type"),
    "updated_states": ("with_updates",),
    "tables": ("columns", "format_si"),
    "watching": ("Watcher", "watch"),
    "weight_files": ("load_file", "save_file"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
