"""The compiler: from a model to an executable program in seven steps, and the calls of compiled programs."""

from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "batch_buckets": ("Buckets",),
    "bound_checks": ("Bound", "KINDS", "BufferBound", "with_bounds"),
    "capture": ("subgraph_to",),
    "compiled_model": ("CompiledModel",),
    "frontend": ("make_backend", "Source", "TraceRequest", "model_of", "source_of"),
    "graph_source": ("GraphSource",),
    "index_checks": ("IndexCheckedExecutable", "IndexInput", "given_indices", "with_checks"),
    "initializers": ("Array", "Index", "initialize", "norms_of"),
    "input_types": ("input_specs", "probe_types"),
    "interpreter": ("Interpreter",),
    "memory_usage": ("ProgramMemory", "largest_sizes", "memory_use"),
    "model_files": ("load",),
    "model_export": ("Exported",),
    "model_transforms": ("gradients", "parse", "grad", "hessian", "hvp", "jacobian", "jvp", "vjp", "vmap"),
    "option_table": (
        *("OptionRegistry", "Settings", "option_registry"),
        *("option_rows", "resolve_options", "Readable"),
    ),
    "pass_pipeline": ("installed",),
    "plugin_records": ("compare_plugins", "manifest_of"),
    "program": ("Interface", "ProgramKind", "Program", "ProgramKey", "Results", "assemble_of"),
    "program_summary": ("layer_results", "columns", "format_flops", "format_si", "unknown_flops"),
    "pure_function": ("PureProgram",),
    "requirements": ("check_memory",),
    "runner": ("Runner",),
    "signature": (
        *("TRAINING_FLAG", "declared_text", "expanded", "InputSpec", "convert_input", "array_type", "as_numpy"),
        *("missing_or_unknown", "resolve_type"),
    ),
    "steps": ("ModelCompiler", "compile"),
    "transformed_source": ("Transformed",),
    "unused_parts": ("ADDED_LOSS", "Unused"),
    "watching": ("watch",),
    "weight_files": ("load_file", "save_file"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
