"""Base types and utilities: errors, decisions, dtypes, symbolic sizes, guards, the registry of operations."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "": ("registry",),
    "decisions": ("Decision", "Decisions"),
    "deprecation": ("deprecated", "removal"),
    "dims": (
        *("Call", "Dim", "Shape", "Size", "Symbol", "at_most", "bounds", "dim_of_node", "equal", "floordiv"),
        *("is_static", "maximum", "minimum", "mod", "numel", "parse_dim", "product"),
        *("shape_text", "substitute", "symbols"),
    ),
    "dtypes": (
        *("ALL", "DEFAULT_FLOAT", "DTYPE_NAMES", "DType", "bfloat16", "bool_", "dtype", "float16", "float32"),
        *("float64", "int16", "int32", "int64", "int8", "promote", "promote_scalar", "scalar_dtype", "uint16"),
        *("uint32", "uint64", "uint8"),
    ),
    "errors": (
        *("BackendError", "CompileTimeoutError", "DTypeError", "GradientError", "GraphError", "GuardError"),
        *("InputError", "MemoryLimitError", "MithrilError", "ModelError", "OperationError", "OptionError"),
        *("OptionWarning", "ParseError", "PassError", "PluginError", "RewriteError", "ShapeError", "StrictError"),
        *("UnsupportedError", "VerificationError", "closest", "unknown"),
    ),
    "guards": ("Guard", "assume", "bind", "collect_guards"),
    "levels": ("LEVELS", "PASS_LEVELS", "STAGES", "stage_name"),
    "limits": (
        *(
            "allowed_memory",
            "check_limit",
            "check_memory",
            "limit",
            "parsed_expression",
            "parsed_json",
            "reader_limits",
        ),
    ),
    "operator_overloads": ("Operators",),
    "quoting": ("quoted", "visible"),
    "registry": ("Registry", "operation_name", "operation_names", "operation", "operations", "register"),
    "tensor_type": ("TensorType",),
    "version": ("__version__",),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
