"""Backends: base class, memory planning, and code generation for backends that run Python source."""

from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "": ("memory_plan",),
    "annotations": ("Layers", "Least", "Positive", "describe", "mismatch", "covers", "matches", "require_match"),
    "arrays": ("as_numpy", "is_plain", "is_sparse", "to_numpy", "EncodedWeight"),
    "attribution": ("annotated", "attributed", "plugin_of", "third_parties"),
    "base": ("Backend", "ExactSizesRequired", "Executable", "LazyGraph"),
    "build_options": ("BUILD_OPTIONS", "BuildOptions", "declared_defaults"),
    "capabilities": ("Capabilities", "Form", "Prefers"),
    "checked_calls": ("CheckedType", "check_call", "checked", "constructor", "is_ours", "reject_surplus"),
    "codegen.call": ("Call",),
    "codegen.common": (
        *("NUMPY_NAMES", "PREDICATES", "SIGNS", "UNARY", "operands_unchanged", "axes_text", "bounds", "dtype_of"),
        *("functions", "integer_cast", "shared_helpers", "is_half", "is_integer", "reduction_identity", "operators"),
        *("FourierCalls", "LibraryCalls", "is_wide_float", "sliced"),
    ),
    "codegen.control_flow": ("python_control",),
    "codegen.emit": ("emit", "NameAllocator"),
    "codegen.lowering_table": ("Lowerings", "ArrayKernel", "Condition", "TextWriter"),
    "codegen.shared": ("Dialect", "HELPERS", "xp"),
    "codegen.shared.": ("complex_numbers", "factors", "indexing", "integers", "reductions"),
    "codegen.shared.cached_attention": ("cached_attention",),
    "codegen.shared.dialect": ("needs",),
    "codegen.shared.expert_products": ("expert_matmul", "expert_weight_grad"),
    "codegen.shared.indexing": ("positions",),
    "codegen.shared.integers": ("floordiv_int",),
    "codegen.shared.pooling": ("max_pool_positions", "offsets", "pool_counts", "taps", "window_parts"),
    "codegen.shared.reductions": ("single",),
    "codegen.shared.sparse_products": ("columns_of", "sparse_matmul", "sparse_matmul_transposed"),
    "codegen.source": ("Source", "template_texts"),
    "forking": ("watch",),
    "host_calls": ("check_results", "host_function"),
    "memory_plan": (
        *("ALIGNMENT", "Buffer", "MemoryPlan", "Strategy", "columns", "find_strategy", "format_bytes"),
        *("in_place_updates", "lifetimes", "nbytes", "parse_bytes", "peak_bytes", "plan", "state_updates"),
    ),
    "numpy_blas": ("numpy_threads", "openblas"),
    "program_by_sizes": ("ProgramBySizes",),
    "plugin_lowering": ("Label", "PluginLowering", "applicable", "lowering_error_context", "plugin_lowerings"),
    "source_backend": ("Forward", "SourceBackend", "SourceExecutable"),
    "sparse_weight": ("PairWeight", "SparseFormat", "SparseWeight", "check_format", "packed", "pruned_mask"),
    "stored_operands": ("compared_with_itself", "with_stored_operands"),
    "weight_memory": ("HeldWeights", "held_weights"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
