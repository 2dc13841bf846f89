"""Every hook that a plugin may answer, and the frozen descriptors it answers with.

A plugin is a light module named by an entry point of the group ``mithril``. It defines any of the functions below,
marked ``@hookimpl``, with the same parameter names (fewer are allowed). Descriptors name heavy things as
``"package.module:attribute"``; these are imported when they are first used, never when they are listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from mithril.base.decisions import Decisions

if TYPE_CHECKING:
    from mithril.ir import Graph

hookimpl = pluggy.HookimplMarker("mithril")
_hookspec = pluggy.HookspecMarker("mithril")

STAGES = ("clean", "canonical", "fuse", "specialise", "precision", "layout", "memory", "final")
LEVELS = ("low", "medium", "high")
_LOADS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _check_loads(owner: object, loads: str) -> None:
    if not isinstance(loads, str) or not _LOADS.fullmatch(loads):
        raise ValueError(f"{type(owner).__name__}: loads={loads!r} is not of the form 'package.module:attribute'")


def _check_name(owner: object, name: str) -> None:
    if not isinstance(name, str) or not name or any(c.isspace() or c in ",;:=" for c in name):
        raise ValueError(f"{type(owner).__name__}: name={name!r} must be a word without spaces or any of , ; : =")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend. ``class_name`` also becomes a name of the public face: ``ml.JaxBackend``."""

    name: str
    class_name: str
    loads: str
    requires: tuple[str, ...] = ()  # importable top-level modules without which the backend cannot load
    summary: str = ""

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        _check_name(self, self.class_name)
        _check_loads(self, self.loads)


@dataclass(frozen=True, slots=True)
class PassSpec:
    """A pass. ``level`` is the lowest optimization level that includes it; ``None`` = only where a user names it."""

    name: str
    loads: str
    stage: str
    level: str | None
    aliases: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # words that switch this pass together with others: optimizations={"fusion": False}
    favors: str = ""  # "throughput" or "latency": optimize_for= that brings it in; it is left out for the other
    options: tuple[str, ...] = ()  # options of ml.compile that bring it in where one of them is set
    before: tuple[str, ...] = ()  # passes of the same stage that must come later
    after: tuple[str, ...] = ()  # passes of the same stage that must come earlier
    version: int = 1  # raise it when the pass's result changes: it is part of every cache key
    summary: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            _check_name(self, name)
        _check_loads(self, self.loads)
        if self.stage not in STAGES:
            raise ValueError(f"PassSpec '{self.name}': stage={self.stage!r} is none of {', '.join(STAGES)}")
        if self.level is not None and self.level not in LEVELS:
            raise ValueError(f"PassSpec '{self.name}': level={self.level!r} is none of {', '.join(LEVELS)} or None")


@dataclass(frozen=True, slots=True)
class HardwareTarget:
    """A piece of hardware to compile for. Rates are what the vendor states; ``costs`` refine the cost model."""

    name: str
    family: str  # the device kind a backend must run on: "cpu", "gpu", "tpu", "mobile", ...
    aliases: tuple[str, ...] = ()
    peak_flops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)  # by dtype
    bandwidth: float | None = None  # bytes per second to main memory
    memory: int | None = None  # bytes
    dtypes: tuple[str, ...] = ()  # dtypes it computes in natively, best first
    costs: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    summary: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases, self.family):
            _check_name(self, name)


@dataclass(frozen=True, slots=True)
class Found:
    """Hardware seen on this machine: a target's name, how much it is preferred (higher first), and what was seen."""

    name: str
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class ProfilerSpec:
    """A way to measure a compiled model, chosen by name."""

    name: str
    loads: str
    summary: str = ""

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        _check_loads(self, self.loads)


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword of ``ml.compile``, declared by the one who honours it.

    ``type`` is anything that may stand in an annotation (``int | None``, ``Literal["a", "b"]``, ``Mapping[str, int]``).
    An alias is another keyword, or ``"group.key"``: the key of an option that takes a dictionary. ``keys`` are those
    that a dictionary may have, with the types of their values; without it, any. ``backends`` names those that read the
    option, where not all may do so: on any other one it is recorded as ignored before anything is compiled.
    """

    name: str
    type: Any
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"Option: {name!r} is not a keyword")
        if not self.name.isidentifier():
            raise ValueError(f"Option: {self.name!r} is not a keyword; only an alias may name the key of a dictionary")
        if not self.help:
            raise ValueError(f"Option '{self.name}' needs help: one line that says what it does")


@dataclass(frozen=True, slots=True)
class OpsSpec:
    """A module that declares operations, and their names; it is imported when one of them is first mentioned."""

    module: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.module, str) or not _MODULE.fullmatch(self.module):
            raise ValueError(f"OpsSpec: module={self.module!r} is not the name of a module")
        for name in self.names:
            _check_name(self, name)


@dataclass(frozen=True, slots=True)
class Lowering:
    """How one operation runs on the backend that was asked about. ``loads`` names one of:

    * a kernel: a function of arrays whose parameters are named like operands and attributes of the operation
      (``dtype`` and ``shape`` are those of the result). The arrays are the backend's; on ``ggml`` and ``c`` NumPy's;
    * a text such as ``"np.sinc({x})"``: an expression of generated Python (``numpy``, ``jax``, ``torch``, ``mlx``);
    * a function that writes code, told by the name of its first parameter: ``(call: Call) -> str`` for generated
      Python, ``(draft, node, *operands)`` for ``ggml``, ``(kernel, name, machine)`` for ``c``.

    ``when`` names a predicate of the node; where it is False, the backend's own lowering applies.
    """

    op: str
    loads: str
    when: str | None = None

    def __post_init__(self) -> None:
        _check_name(self, self.op)
        _check_loads(self, self.loads)
        if self.when is not None:
            _check_loads(self, self.when)


@dataclass(frozen=True, slots=True)
class Export:
    """A name of the public face: ``Export("Trainer", "mithril_train.loop.trainer:Trainer")`` gives ``ml.Trainer``.

    With ``on="CompiledModel"`` it is a method of compiled models: the function gets the model first.
    """

    name: str
    loads: str
    on: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name.startswith("_"):
            raise ValueError(f"Export: {self.name!r} is not a public name")
        _check_loads(self, self.loads)


@dataclass(frozen=True, slots=True)
class FrontendSpec:
    """A kind of model that ``ml.compile`` takes. ``accepts`` are qualified names of classes, compared as text.

    ``loads`` names a function ``(model, *, outputs, inference) -> Source`` (``mithril.compiler.frontend``).
    """

    name: str
    accepts: tuple[str, ...]
    loads: str

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        _check_loads(self, self.loads)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """Files of models: ``compiled.export(path)`` calls what ``saves`` names, ``ml.load(path)`` what ``loads`` names.

    ``saves(compiled, path, **options)`` gives what it wishes; ``loads(path, **options)`` a compiled model. A format
    without ``suffixes`` is a folder, and is chosen by name. It writes models of the ``backends`` that it names, of any
    where it names none.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    saves: str | None = None
    loads: str | None = None
    summary: str = ""
    backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        for loads in (self.saves, self.loads):
            if loads is not None:
                _check_loads(self, loads)
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise ValueError(f"FileFormat '{self.name}': suffix {suffix!r} must begin with a dot")


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command of ``mithril``: ``loads`` names a ``click.Command``, imported when it is run."""

    name: str
    loads: str
    summary: str = ""

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        _check_loads(self, self.loads)


@dataclass(slots=True)
class CompileContext:
    """One run of ``ml.compile`` as hooks see it. Observers keep their own state in ``scratch`` under their name."""

    model: Any
    backend: Any
    options: Mapping[str, Any]
    level: str = "medium"
    target: HardwareTarget | None = None
    decisions: Decisions = field(default_factory=Decisions)
    scratch: dict[str, Any] = field(default_factory=dict)


class PipelineDraft:
    """The passes about to run, and what one plugin wants changed. Changes of all plugins are merged afterwards."""

    __slots__ = ("_names", "added", "changes", "removed", "replaced")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.added: list[str] = []
        self.removed: list[str] = []
        self.replaced: dict[str, str] = {}
        self.changes: list[str] = []  # one line per plugin that changed something, for the decisions

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the passes chosen by level and options, in running order, before any change."""
        return self._names

    def add(self, name: str) -> None:
        """Run the installed pass ``name`` too, at the place its stage gives it."""
        self.added.append(name)

    def remove(self, name: str) -> None:
        """Leave the pass ``name`` out."""
        self.removed.append(name)

    def replace(self, name: str, by: str) -> None:
        """Run the installed pass ``by`` where ``name`` would have run."""
        self.replaced[name] = by


# --------------------------------------------------------------------------------------------------------- the hooks
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
