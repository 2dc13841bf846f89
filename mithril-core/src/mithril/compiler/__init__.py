"""The compiler: from a model to an executable program, in seven steps."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "backend_choice": ("make_backend",),
    "graph_functions": ("gradients", "parse"),
    "frontend": ("InputDeclaration", "Source", "TraceRequest", "source_of"),
    "graph_source": ("GraphSource",),
    "initializers": ("Array", "Index", "initialize", "norms_of"),
    "input_types": ("TRAINING_FLAG", "input_specs", "probe_types"),
    "memory_remedy": ("check_memory",),
    "model_transforms": ("grad", "hessian", "hvp", "jacobian", "jvp", "vjp", "vmap"),
    "option_table": (
        *("OptionRegistry", "Settings", "declared_options", "default_settings", "split_options", "option_registry"),
        *("option_rows", "resolve_options"),
    ),
    "pass_pipeline": ("installed",),
    "readable": ("Readable",),
    "steps": ("Compiler", "compile"),
    "transformed_source": ("Transformed",),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
