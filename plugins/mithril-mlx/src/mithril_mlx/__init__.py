"""The MLX backend of mithril, for Apple silicon, CUDA and the CPU, and utilities around MLX.

Names are imported on first use: importing this package imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Module -> the names that it exports. Those that begin with Mlx are also names of ``mithril``.
UTILITIES = {
    "utilities.analysis": ("MlxComputationGraph",),
    "utilities.batch_optimizer": ("MlxBatchOptimizer",),
    "utilities.builder": ("GraphBuilder",),
    "utilities.tensor_cache": ("MlxTensorCache",),
    "utilities.fusion": ("FusionPattern", "MlxKernelFusion"),
    "function_import": ("import_function",),
    "utilities.memory_pool": ("MlxMemoryOptimizer",),
    "utilities.profiler": ("MlxProfiler",),
    "utilities.tuner": ("MlxAutoTuner",),
}
_HOME = {name: module for module, names in {"backend": ("MlxBackend",), **UTILITIES}.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mithril_mlx' has no attribute '{name}'")
    value = getattr(import_module(f"mithril_mlx.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
