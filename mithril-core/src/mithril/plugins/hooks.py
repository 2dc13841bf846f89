"""Every hook that a plugin may answer.

A plugin is a light module named by an entry point of the group ``mithril``. It defines any of the functions below,
marked ``@hookimpl``, with the same parameter names (fewer are allowed), and answers with descriptors of ``specs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from mithril.plugins.specs import (
    BackendSpec,
    Command,
    CompileContext,
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
    from mithril.ir import Graph

hookimpl = pluggy.HookimplMarker("mithril")
_hookspec = pluggy.HookspecMarker("mithril")

# No parameter has a default: pluggy would not pass it. Order between plugins has no meaning anywhere.


@_hookspec
def mithril_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Backends that this distribution brings. All plugins are asked; keep it cheap: import nothing heavy.

    >>> from mithril import BackendSpec, hookimpl
    >>> @hookimpl
    ... def mithril_backends():
    ...     return [BackendSpec("tiny", "TinyBackend", "mithril_tiny.backend:TinyBackend", requires=("array",))]
    """


@_hookspec
def mithril_passes() -> Sequence[PassSpec]:  # type: ignore[empty-body]
    """Passes that this distribution brings. ``loads`` names a function ``graph -> graph`` or a pass class.

    >>> from mithril import PassSpec, hookimpl
    >>> @hookimpl
    ... def mithril_passes():
    ...     return [PassSpec("fold-scale", "my_passes.scale:fold_scale", stage="fuse", level="medium")]
    """


@_hookspec
def mithril_targets() -> Sequence[HardwareTarget]:  # type: ignore[empty-body]
    """Hardware that ``target_hardware=`` may name.

    >>> from mithril import HardwareTarget, hookimpl
    >>> @hookimpl
    ... def mithril_targets():
    ...     rates = {"float32": 1.9e13, "float16": 7.7e13}
    ...     return [HardwareTarget("my_board", family="gpu", peak_flops=rates, bandwidth=6e11, memory=8 << 30)]
    """


@_hookspec
def mithril_detect_targets() -> Sequence[Found]:  # type: ignore[empty-body]
    """Which of your targets this machine has. The core takes the highest rank, then the first name.

    >>> import os
    >>> from mithril import Found, hookimpl
    >>> @hookimpl
    ... def mithril_detect_targets():
    ...     return [Found("my_board", 10, "found /dev/my0")] if os.path.exists("/dev/my0") else []
    """


@_hookspec
def mithril_profilers() -> Sequence[ProfilerSpec]:  # type: ignore[empty-body]
    """Profilers that a user may choose by name.

    >>> from mithril import ProfilerSpec, hookimpl
    >>> @hookimpl
    ... def mithril_profilers():
    ...     return [ProfilerSpec("energy", "my_meter.profiler:EnergyProfiler", "joules per operation")]
    """


@_hookspec
def mithril_options() -> Sequence[Option]:  # type: ignore[empty-body]
    """Keywords of ``ml.compile`` that this distribution honours. A keyword has exactly one owner.

    >>> from typing import Literal
    >>> from mithril import Option, hookimpl
    >>> @hookimpl
    ... def mithril_options():
    ...     return [Option("tiling", Literal["small", "large"], "small", "Size of the tiles my pass cuts.")]
    """


@_hookspec
def mithril_ops() -> Sequence[OpsSpec]:  # type: ignore[empty-body]
    """Modules that declare operations with ``ml.op`` or ``ml.composite``; imported when a name is first mentioned.

    >>> from mithril import OpsSpec, hookimpl
    >>> @hookimpl
    ... def mithril_ops():
    ...     return [OpsSpec("my_ops.special", names=("bessel_j0", "gamma"))]
    """


@_hookspec
def mithril_lowerings(backend: str) -> Sequence[Lowering]:  # type: ignore[empty-body]
    """Extra or better ways to run operations on ``backend``. Each that a compilation uses is named in its decisions.

    Of two plugins that lower one operation, the one that declares it wins; between strangers it is an error.

    >>> from mithril import Lowering, hookimpl
    >>> @hookimpl
    ... def mithril_lowerings(backend):
    ...     return [Lowering("softmax", "my_kernels.torch:softmax")] if backend == "torch" else []
    """


@_hookspec
def mithril_exports() -> Sequence[Export]:  # type: ignore[empty-body]
    """Names for the public face. A backend's ``class_name`` is exported without being listed here.

    >>> from mithril import Export, hookimpl
    >>> @hookimpl
    ... def mithril_exports():
    ...     return [Export("Trainer", "mithril_train.loop.trainer:Trainer")]
    """


@_hookspec
def mithril_formats() -> Sequence[FileFormat]:  # type: ignore[empty-body]
    """Files or folders that models can be exported to, or loaded from.

    >>> from mithril import FileFormat, hookimpl
    >>> @hookimpl
    ... def mithril_formats():
    ...     return [FileFormat("gguf", (".gguf",), saves="my_files.write:export", loads="my_files.read:load")]
    """


@_hookspec
def mithril_frontends() -> Sequence[FrontendSpec]:  # type: ignore[empty-body]
    """Kinds of models that ``ml.compile`` takes.

    >>> from mithril import FrontendSpec, hookimpl
    >>> @hookimpl
    ... def mithril_frontends():
    ...     return [FrontendSpec("exported", ("torch.export.exported_program.ExportedProgram",), "my_kit:Source")]
    """


@_hookspec
def mithril_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Sub-commands of the ``mithril`` command line.

    >>> from mithril import Command, hookimpl
    >>> @hookimpl
    ... def mithril_commands():
    ...     return [Command("greet", "my_tools.cli:greet", "Say hello.")]
    """


@_hookspec
def mithril_amend_pipeline(draft: PipelineDraft, target: HardwareTarget | None, level: str) -> None:
    """Add, remove or replace passes by name, once per compile. Contradicting plugins are an error that names both.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_amend_pipeline(draft, target, level):
    ...     if target is not None and target.family == "tpu":
    ...         draft.remove("convolution-as-matmul")
    """


@_hookspec(firstresult=True)
def mithril_run_pass(pass_: Any, graph: Graph, context: Any) -> Graph | None:
    """The graph after ``pass_``. The core answers last; wrap it to time, trace, dump or cache.

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
    """The executable for ``graph``. The core answers last, by ``backend.build``; wrap it or answer from a cache.

    >>> from mithril import hookimpl
    >>> @hookimpl(wrapper=True)
    ... def mithril_build(graph, backend):
    ...     executable = yield
    ...     print("built", backend.name)
    ...     return executable
    """


@_hookspec
def mithril_advise(model: Any, backend: Any, options: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Options that measurements found best for a model on a backend, once per compile; nothing that the user has given.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_advise(options, given):
    ...     return {"jit": True} if options["optimization_level"] == "high" and "jit" not in given else {}
    """


@_hookspec
def mithril_observers(context: CompileContext) -> Sequence[Any]:  # type: ignore[empty-body]
    """Observers of one compilation: objects with ``stage(name, graph, start, seconds)``, ``passed(name, before, after,
    start, seconds)`` and ``end(result, error)``. An attribute ``watcher`` watches the model's calls as well.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_observers(context):
    ...     return [Progress(context)] if context.options["verbose"] else []
    """


@_hookspec
def mithril_compile_begin(context: CompileContext) -> None:
    """``ml.compile`` begins. An observer: what it raises is reported with its name and does not stop compiling;
    only an ``OptionError`` does, which says that the user asked for something wrong.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_compile_begin(context):
    ...     context.scratch["my-plugin"] = []
    """


@_hookspec
def mithril_compile_stage(context: CompileContext, stage: str, graph: Graph | None) -> None:
    """A stage has ended: flatten, resolve (no graph yet), shapes, types, gradients, optimize, generate, build;
    or ``cached`` (without a graph) in the place of all from shapes on.

    An observer.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_compile_stage(context, stage, graph):
    ...     context.scratch["my-plugin"].append((stage, len(graph.nodes) if graph else 0))
    """


@_hookspec
def mithril_compile_end(context: CompileContext, result: Any, error: BaseException | None) -> None:
    """``ml.compile`` ends, with the compiled model or with the error it is about to raise. An observer.

    >>> from mithril import hookimpl
    >>> @hookimpl
    ... def mithril_compile_end(context, error):
    ...     print("failed" if error else "compiled", context.scratch.pop("my-plugin"))
    """
