"""The public face of mithril: every name is found here and loaded when it is first used.

``import mithril as ml`` imports no backend, no plugin and none of the core's own modules. A name comes from the table
below, else from an installed plugin (``ml.JaxBackend``); a name that a known distribution would bring says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mithril import models as models
    from mithril import ops as ops
    from mithril import testing as testing
    from mithril.autodiff import gradients as gradients
    from mithril.compiler import compile as compile
    from mithril.dims import Dim as Dim
    from mithril.errors import BackendError as BackendError
    from mithril.errors import CompileTimeoutError as CompileTimeoutError
    from mithril.errors import DTypeError as DTypeError
    from mithril.errors import GradientError as GradientError
    from mithril.errors import GraphError as GraphError
    from mithril.errors import GuardError as GuardError
    from mithril.errors import InputError as InputError
    from mithril.errors import MemoryLimitError as MemoryLimitError
    from mithril.errors import MithrilError as MithrilError
    from mithril.errors import ModelError as ModelError
    from mithril.errors import OperationError as OperationError
    from mithril.errors import OptionError as OptionError
    from mithril.errors import ParseError as ParseError
    from mithril.errors import PassError as PassError
    from mithril.errors import PluginError as PluginError
    from mithril.errors import RewriteError as RewriteError
    from mithril.errors import ShapeError as ShapeError
    from mithril.errors import StrictError as StrictError
    from mithril.errors import UnsupportedError as UnsupportedError
    from mithril.errors import VerificationError as VerificationError
    from mithril.graph import Builder as Builder
    from mithril.graph import Graph as Graph
    from mithril.graph import Node as Node
    from mithril.graph import Origin as Origin
    from mithril.graph import Value as Value
    from mithril.graph import parse as parse
    from mithril.graph import verify as verify
    from mithril.hookspecs import BackendSpec as BackendSpec
    from mithril.hookspecs import Command as Command
    from mithril.hookspecs import CompileContext as CompileContext
    from mithril.hookspecs import Export as Export
    from mithril.hookspecs import Found as Found
    from mithril.hookspecs import HardwareTarget as HardwareTarget
    from mithril.hookspecs import Lowering as Lowering
    from mithril.hookspecs import OpsSpec as OpsSpec
    from mithril.hookspecs import Option as Option
    from mithril.hookspecs import PassSpec as PassSpec
    from mithril.hookspecs import PipelineDraft as PipelineDraft
    from mithril.hookspecs import ProfilerSpec as ProfilerSpec
    from mithril.hookspecs import hookimpl as hookimpl
    from mithril.models import Connection as Connection
    from mithril.models import IOKey as IOKey
    from mithril.models import Model as Model
    from mithril.ops import composite as composite
    from mithril.ops import op as op
    from mithril.passes import Pass as Pass
    from mithril.passes import PassManager as PassManager
    from mithril.passes import pass_ as pass_
    from mithril.rewrite import Rule as Rule
    from mithril.rewrite import RuleSet as RuleSet
    from mithril.rewrite import rule as rule
    from mithril.runtime import BenchmarkConfig as BenchmarkConfig
    from mithril.runtime import diff as diff
    from mithril.runtime import load as load
    from mithril.runtime import profile as profile
    from mithril.runtime import run_benchmark as run_benchmark
    from mithril.types import DType as DType
    from mithril.types import TensorType as TensorType
    from mithril.types import bfloat16 as bfloat16
    from mithril.types import bool_ as bool_
    from mithril.types import dtype as dtype
    from mithril.types import float16 as float16
    from mithril.types import float32 as float32
    from mithril.types import float64 as float64
    from mithril.types import int8 as int8
    from mithril.types import int16 as int16
    from mithril.types import int32 as int32
    from mithril.types import int64 as int64
    from mithril.types import promote as promote
    from mithril.types import uint8 as uint8
    from mithril.types import uint16 as uint16
    from mithril.types import uint32 as uint32
    from mithril.types import uint64 as uint64

__version__ = "0.1.0"

# Where the core's own names live: module below ``mithril`` -> names. A test holds this equal to the imports above.
_HOME = {
    "autodiff": ("gradients",),
    "compiler": ("compile",),
    "dims": ("Dim",),
    "errors": (
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
        "ParseError",
        "PassError",
        "PluginError",
        "RewriteError",
        "ShapeError",
        "StrictError",
        "UnsupportedError",
        "VerificationError",
    ),
    "graph": ("Builder", "Graph", "Node", "Origin", "Value", "parse", "verify"),
    "hookspecs": (
        "BackendSpec",
        "Command",
        "CompileContext",
        "Export",
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
    "ops": ("composite", "op"),
    "passes": ("Pass", "PassManager", "pass_"),
    "rewrite": ("Rule", "RuleSet", "rule"),
    "runtime": ("BenchmarkConfig", "diff", "load", "profile", "run_benchmark"),
    "types": (
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
