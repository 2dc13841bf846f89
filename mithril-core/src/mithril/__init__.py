"""The public face of mithril: every name is found here and loaded when it is first used.

``import mithril as ml`` imports no backend, no plugin and none of the core's own modules. A name comes from the table
below, else from an installed plugin (``ml.JaxBackend``); a name that a known distribution would bring says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mithril import models as models, ops as ops, testing as testing
    from mithril.autodiff import gradients as gradients
    from mithril.backend.base import Backend as Backend
    from mithril.base.dims import Dim as Dim
    from mithril.base.dtypes import (
        DType as DType,
        TensorType as TensorType,
        bfloat16 as bfloat16,
        bool_ as bool_,
        dtype as dtype,
        float16 as float16,
        float32 as float32,
        float64 as float64,
        int8 as int8,
        int16 as int16,
        int32 as int32,
        int64 as int64,
        promote as promote,
        uint8 as uint8,
        uint16 as uint16,
        uint32 as uint32,
        uint64 as uint64,
    )
    from mithril.base.errors import (
        BackendError as BackendError,
        CompileTimeoutError as CompileTimeoutError,
        DTypeError as DTypeError,
        GradientError as GradientError,
        GraphError as GraphError,
        GuardError as GuardError,
        InputError as InputError,
        MemoryLimitError as MemoryLimitError,
        MithrilError as MithrilError,
        ModelError as ModelError,
        OperationError as OperationError,
        OptionError as OptionError,
        OptionWarning as OptionWarning,
        ParseError as ParseError,
        PassError as PassError,
        PluginError as PluginError,
        RewriteError as RewriteError,
        ShapeError as ShapeError,
        StrictError as StrictError,
        UnsupportedError as UnsupportedError,
        VerificationError as VerificationError,
    )
    from mithril.compiler.steps import compile as compile
    from mithril.ir import Builder as Builder, Graph as Graph, Node as Node, Origin as Origin, Value as Value
    from mithril.ir.declare import composite as composite, op as op
    from mithril.ir.parse import parse as parse
    from mithril.ir.verify import verify as verify
    from mithril.models import Connection as Connection, IOKey as IOKey, Model as Model
    from mithril.passes.manager import Pass as Pass, PassManager as PassManager, pass_ as pass_
    from mithril.plugins.hookspecs import (
        BackendSpec as BackendSpec,
        Command as Command,
        CompileContext as CompileContext,
        Export as Export,
        FileFormat as FileFormat,
        Found as Found,
        HardwareTarget as HardwareTarget,
        Lowering as Lowering,
        OpsSpec as OpsSpec,
        Option as Option,
        PassSpec as PassSpec,
        PipelineDraft as PipelineDraft,
        ProfilerSpec as ProfilerSpec,
        hookimpl as hookimpl,
    )
    from mithril.rewrite import Rule as Rule, RuleSet as RuleSet, rule as rule
    from mithril.runtime.model_files import load as load
    from mithril.tools.batching import find_batch_size as find_batch_size, process_in_batches as process_in_batches
    from mithril.tools.benchmark import BenchmarkConfig as BenchmarkConfig, run_benchmark as run_benchmark
    from mithril.tools.calibrate import calibrate as calibrate, estimate as estimate
    from mithril.tools.diff import diff as diff
    from mithril.tools.profile import profile as profile
    from mithril.tools.tune import tune as tune

__version__ = "0.1.0"

# Where the core's own names live: module below ``mithril`` -> names. A test holds this equal to the imports above.
_HOME = {
    "autodiff": ("gradients",),
    "compiler.steps": ("compile",),
    "base.dims": ("Dim",),
    "base.errors": (
        "BackendError",
        "CompileTimeoutError",
        "DTypeError",
        "GradientError",
        "GraphError",
        "GuardError",
        "InputError",
        "MemoryLimitError",
        "MithrilError",
        "ModelError",
        "OperationError",
        "OptionError",
        "OptionWarning",
        "ParseError",
        "PassError",
        "PluginError",
        "RewriteError",
        "ShapeError",
        "StrictError",
        "UnsupportedError",
        "VerificationError",
    ),
    "ir": ("Builder", "Graph", "Node", "Origin", "Value"),
    "ir.parse": ("parse",),
    "ir.verify": ("verify",),
    "plugins.hookspecs": (
        "BackendSpec",
        "Command",
        "CompileContext",
        "Export",
        "FileFormat",
        "Found",
        "HardwareTarget",
        "Lowering",
        "OpsSpec",
        "Option",
        "PassSpec",
        "PipelineDraft",
        "ProfilerSpec",
        "hookimpl",
    ),
    "models": ("Connection", "IOKey", "Model"),
    "ir.declare": ("composite", "op"),
    "passes.manager": ("Pass", "PassManager", "pass_"),
    "rewrite": ("Rule", "RuleSet", "rule"),
    "backend.base": ("Backend",),
    "tools.batching": ("find_batch_size", "process_in_batches"),
    "tools.benchmark": ("BenchmarkConfig", "run_benchmark"),
    "tools.calibrate": ("calibrate", "estimate"),
    "tools.diff": ("diff",),
    "runtime.model_files": ("load",),
    "tools.profile": ("profile",),
    "tools.tune": ("tune",),
    "base.dtypes": (
        "DType",
        "TensorType",
        "bfloat16",
        "bool_",
        "dtype",
        "float16",
        "float32",
        "float64",
        "int16",
        "int32",
        "int64",
        "int8",
        "promote",
        "uint16",
        "uint32",
        "uint64",
        "uint8",
    ),
}
_SUBMODULES = ("models", "ops", "testing")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def _core_names() -> set[str]:
    """Return the names of the public face that no plugin can provide."""
    from pkgutil import iter_modules

    return {*_MODULE_OF, *_SUBMODULES, *(module.name for module in iter_modules(__path__))}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'mithril' has no attribute '{name}'")
    from importlib import import_module
    from importlib.util import find_spec

    if module := _MODULE_OF.get(name):
        value = getattr(import_module(f"mithril.{module}"), name)
    elif find_spec(f"mithril.{name}"):  # also the way of `from mithril import plugins`, which asks here first
        return import_module(f"mithril.{name}")
    else:
        value = import_module("mithril.plugins").export(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from mithril.plugins import exports

    return sorted({"__version__", *_MODULE_OF, *_SUBMODULES, *exports()})
