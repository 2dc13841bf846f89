"""Running: backends, the compiled model, memory plan, profile, benchmark."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "batch_buckets": ("Buckets", "find_buckets"),
    "bounds": ("Bound", "KINDS", "Room", "with_bounds"),
    "capture": ("until",),
    "compiled_model": ("CompiledModel",),
    "index_checks": ("Checked", "GivenIndices", "given_indices", "with_checks"),
    "initializers": ("initialize",),
    "interpreter": ("Stepped",),
    "memory_usage": ("MemoryUse", "ProgramMemory", "largest_sizes", "memory_use"),
    "model_files": ("load",),
    "program": ("Interface", "Kind", "Program", "Request", "Results"),
    "pure_function": ("PureFunction", "PureProgram"),
    "runner": ("Runner",),
    "signature": ("InputSpec", "adapt", "array_type", "as_numpy", "missing_or_unknown", "settle"),
    "tables": ("columns", "si"),
    "watching": ("Watcher", "watch"),
    "weight_files": ("load_file", "save_file"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
