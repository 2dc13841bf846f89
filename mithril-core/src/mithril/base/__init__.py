"""Base types and utilities: errors, decisions, dtypes, symbolic sizes, registry, files on disk, timing."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "": ("files", "registry"),
    "annotations": ("Layers", "Least", "Positive", "describe", "mismatch"),
    "cpu_stopwatch": ("Lap", "Stopwatch", "lower_quartile"),
    "decisions": ("Decision", "Decisions"),
    "dims": (
        *("Call", "Dim", "Shape", "Size", "Symbol", "at_most", "bounds", "dim_of_node", "equal", "floordiv"),
        *("is_static", "maximum", "minimum", "mod", "numel", "parse_dim", "product", "substitute", "symbols"),
    ),
    "disk_cache": ("Store",),
    "dtypes": (
        *("ALL", "DEFAULT_FLOAT", "DTYPE_NAMES", "DType", "bfloat16", "bool_", "dtype", "float16", "float32"),
        *(
            "float64",
            "int16",
            "int32",
            "int64",
            "int8",
            "promote",
            "promote_scalar",
            "scalar_dtype",
            "uint16",
            "uint32",
            "uint64",
            "uint8",
        ),
    ),
    "errors": (
        *("BackendError", "CompileTimeoutError", "DTypeError", "GradientError", "GraphError", "GuardError"),
        *(
            "InputError",
            "MemoryLimitError",
            "MithrilError",
            "ModelError",
            "OperationError",
            "OptionError",
            "OptionWarning",
        ),
        *("ParseError", "PassError", "PluginError", "RewriteError", "ShapeError", "StrictError", "UnsupportedError"),
        *("VerificationError", "closest", "unknown"),
    ),
    "fingerprints": ("UnhashableObject", "fields", "fingerprint", "package_version_key"),
    "guards": ("Guard", "assume", "bind", "collect_guards"),
    "interleaved_timing": ("time_interleaved",),
    "levels": ("LEVELS", "PASS_LEVELS", "STAGES", "STAGE_ALIASES"),
    "lru_cache": ("Counts", "LruCache"),
    "operator_overloads": ("Operators",),
    "patterns": ("matches", "require_match"),
    "quoting": ("c_quoted", "c_visible", "docstring", "quoted", "storable", "utf8", "visible"),
    "registry": ("Registry", "operation_name", "operation_names", "operation", "operations", "register"),
    "tables": ("columns", "si"),
    "tensor_type": ("TensorType",),
    "version": ("__version__",),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
