"""The hooks that a plugin can implement.

A plugin is a module named by an entry point of the group ``mithril``; importing it must be cheap. It defines any of
the functions below, marked ``@hookimpl``, with the same parameter names (fewer are allowed), and returns descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from mithril.plugins.specs import (
    Architecture,
    BackendSpec,
    Command,
    CompileContext,
    DeviceSpec,
    Export,
    FileFormat,
    Found,
    FrontendSpec,
    HardwareTarget,
    Lowering,
    OpsSpec,
    Option,
    PassSpec,
    PipelineDraft,
    ProfilerSpec,
)

if TYPE_CHECKING:
    from mithril.graph import Graph

hookimpl = pluggy.HookimplMarker("mithril")
_hookspec = pluggy.HookspecMarker("mithril")

# Parameters have no defaults, because pluggy would not pass them. The order of plugins never matters.


@_hookspec
def mithril_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Return the backends that this distribution provides. Called for every plugin: do not import a framework here.

    >>> from mithril import BackendSpec, hookimpl
    >>> @hookimpl
    ... def mithril_backends():
    ...     return [BackendSpec("tiny", "TinyBackend", "mithril_tiny.backend:TinyBackend", requires=("array",))]
    """


@_hookspec
def mithril_devices() -> Sequence[DeviceSpec]:  # type: ignore[empty-body]
    """Return the devices that a backend can compile for; ``loads`` names the backend class of the device.

    >>> from mithril import DeviceSpec, hookimpl
    >>> @hookimpl
    ... def mithril_devices():
    ...     return [DeviceSpec("opencl", "mithril_opencl.backend:OpenCLBackend")]
    """


@_hookspec
def mithril_passes() -> Sequence[PassSpec]:  # type: ignore[empty-body]
    """Return the passes that this distribution provides. ``loads`` names a function ``graph -> graph`` or a pass class.

    >>> from mithril import PassSpec, hookimpl
    >>> @hookimpl
    ... def mithril_passes():
    ...     return [PassSpec("fold-scale", "my_passes.scale:fold_scale", stage="fuse", level="medium")]
    """


@_hookspec
def mithril_targets() -> Sequence[HardwareTarget]:  # type: ignore[empty-body]
    """Return the hardware targets that ``target_hardware=`` accepts by name.

    >>> from mithril import HardwareTarget, hookimpl
    >>> @hookimpl
    ... def mithril_targets():
    ...     rates = {"float32": 1.9e13, "float16": 7.7e13}
    ...     return [HardwareTarget("my_board", family="gpu", peak_flops=rates, bandwidth=6e11, memory=8 << 30)]
    """


@_hookspec
def mithril_detect_targets() -> Sequence[Found]:  # type: ignore[empty-body]
    """Return the targets present on this machine. The highest rank wins, then the first name.

    >>> import os
    >>> from mithril import Found, hookimpl
    >>> @hookimpl
    ... def mithril_detect_targets():
    ...     return [Found("my_board", 10, "found /dev/my0")] if os.path.exists("/dev/my0") else []
    """


@_hookspec
def mithril_profilers() -> Sequence[ProfilerSpec]:  # type: ignore[empty-body]
    """Return the profilers that users can select by name.

    >>> from mithril import ProfilerSpec, hookimpl
    >>> @hookimpl
    ... def mithril_profilers():
    ...     return [ProfilerSpec("energy", "my_meter.profiler:EnergyProfiler", "joules per operation")]
    """


@_hookspec
def mithril_options() -> Sequence[Option]:  # type: ignore[empty-body]
    """Return the options of ``ml.compile`` that this distribution implements. Each option has exactly one owner.

    >>> from typing import Literal
    >>> from mithril import Option, hookimpl
    >>> @hookimpl
    ... def mithril_options():
    ...     return [Option("tiling", Literal["small", "large"], "small", "Tile size of my pass.")]
    """


@_hookspec
def mithril_ops() -> Sequence[OpsSpec]:  # type: ignore[empty-body]
    """Return the modules that declare operations with ``ml.op`` or ``ml.composite``; each is imported on first use.

    >>> from mithril import OpsSpec, hookimpl
    >>> @hookimpl
    ... def mithril_ops():
    ...     return [OpsSpec("my_ops.special", names=("bessel_j0", "gamma"))]
    """


@_hookspec
def mithril_lowerings(backend: str) -> Sequence[Lowering]:  # type: ignore[empty-body]
    """Return additional or faster lowerings of operations for ``backend``. Decisions name each lowering that is used.

    If two plugins lower the same operation, the plugin that declares the operation wins; otherwise it is an error.

    >>> from mithril import Lowering, hookimpl
    >>> @hookimpl
    ... def mithril_lowerings(backend):
    ...     return [Lowering("softmax", "my_kernels.torch:softmax")] if backend == "torch" else []
    """


@_hookspec
def mithril_exports() -> Sequence[Export]:  # type: ignore[empty-body]
    """Return names to export from ``mithril``. The ``class_name`` of a backend is exported automatically.

    >>> from mithril import Export, hookimpl
    >>> @hookimpl
    ... def mithril_exports():
    ...     return [Export("Trainer", "mithril_train.loop.trainer:Trainer")]
    """


@_hookspec
def mithril_formats() -> Sequence[FileFormat]:  # type: ignore[empty-body]
    """Return the file formats that compiled models can be exported to or loaded from.

    >>> from mithril import FileFormat, hookimpl
    >>> @hookimpl
    ... def mithril_formats():
    ...     return [FileFormat("gguf", (".gguf",), saves="my_files.write:export", loads="my_files.read:load")]
    """


@_hookspec
def mithril_architectures() -> Sequence[Architecture]:  # type: ignore[empty-body]
    """Return model families of GGUF files, for the plugin that reads and writes these files.

    >>> from mithril import Architecture, hookimpl
    >>> @hookimpl
    ... def mithril_architectures():
    ...     return [Architecture("llama", loads="my_models.gguf:load", saves="my_models.gguf:save")]
    """


@_hookspec
def mithril_frontends() -> Sequence[FrontendSpec]:  # type: ignore[empty-body]
    """Return the model types that ``ml.compile`` accepts, with the code that converts them to graphs.

    >>> from mithril import FrontendSpec, hookimpl
    >>> @hookimpl
    ... def mithril_frontends():
    ...     return [FrontendSpec("exported", ("torch.export.exported_program.ExportedProgram",), "my_kit:Source")]
    """


@_hookspec
def mithril_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Return subcommands of the ``mithril`` command line.

    >>> from mithril import Command, hookimpl
    >>> @hookimpl
    ... def mithril_commands():
    ...     return [Command("greet", "my_tools.cli:greet", "Say hello.")]
    """


@_hookspec
def mithril_amend_pipeline(draft: PipelineDraft, target: HardwareTarget | None, level: str) -> None:
    """Add, remove or replace passes of the draft by name. Called once per compile; conflicting changes are an error.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_amend_pipeline(draft, target, level):
    ...     if target is not None and target.family == "tpu":
    ...         draft.remove("convolution-as-matmul")
    """


@_hookspec(firstresult=True)
def mithril_run_pass(pass_: Any, graph: Graph, context: Any) -> Graph | None:
    """Return the graph after ``pass_``. The core implements it last; wrap the hook to time, trace, dump or cache.

    >>> import time
    >>> from mithril import hookimpl
    >>> @hookimpl(wrapper=True)
    ... def mithril_run_pass(pass_, graph):
    ...     start = time.perf_counter()
    ...     result = yield
    ...     print(pass_.name, time.perf_counter() - start)
    ...     return result
    """


@_hookspec(firstresult=True)
def mithril_build(graph: Graph, backend: Any, target: HardwareTarget | None) -> Any:
    """Return the executable for ``graph``. The core implements it last, with ``backend.build``; wrap it to add a cache.

    >>> from mithril import hookimpl
    >>> @hookimpl(wrapper=True)
    ... def mithril_build(graph, backend):
    ...     executable = yield
    ...     print("built", backend.name)
    ...     return executable
    """


@_hookspec
def mithril_advise(  # type: ignore[empty-body]
    model: Any, backend: Any, options: Mapping[str, Any], user_options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return options that were measured as fastest. Called once per compile; never overrides ``user_options``.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_advise(options, user_options):
    ...     return {"jit": True} if options["optimization_level"] == "high" and "jit" not in user_options else {}
    """


@_hookspec
def mithril_observers(context: CompileContext) -> Sequence[Any]:  # type: ignore[empty-body]
    """Return observers of one compilation, with the methods ``stage(name, graph, start, seconds)``, ``passed(name,
    before, after, start, seconds)`` and ``end(result, error)``. An attribute ``watcher`` also observes model calls, a
    method ``built(program)`` new programs.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_observers(context):
    ...     return [Progress(context)] if context.options["verbose"] else []
    """


@_hookspec
def mithril_compile_begin(context: CompileContext) -> None:
    """Observe the start of ``ml.compile``. Exceptions are decisions with the plugin's name, raised by ``strict=True``,
    except ``OptionError``, which means that the user passed an invalid option.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_compile_begin(context):
    ...     context.scratch["my-plugin"] = []
    """


@_hookspec
def mithril_compile_stage(context: CompileContext, stage: str, graph: Graph | None) -> None:
    """Observe the end of a stage: flatten, resolve (no graph yet), shapes, types, gradients, optimize, generate, build.
    A program from the disk cache has one stage ``cached`` (without a graph) in place of shapes and all later stages.
    Programs of gradients and of other sizes are compiled at their first call: their stages follow the end.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_compile_stage(context, stage, graph):
    ...     context.scratch["my-plugin"].append((stage, len(graph.nodes) if graph else 0))
    """


@_hookspec
def mithril_compile_end(context: CompileContext, result: Any, error: BaseException | None) -> None:
    """Observe the end of ``ml.compile``, with the compiled model or the exception that it is about to raise.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_compile_end(context, error):
    ...     print("failed" if error else "compiled", context.scratch["my-plugin"])
    """
