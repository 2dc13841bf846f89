"""Descriptors that plugins return from hooks, and the two objects that hooks receive.

Descriptors refer to code as ``"package.module:attribute"``, which is imported on first use and never for listings.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from mithril.graph import PASS_LEVELS, STAGES, Decisions, __version__, closest

T = TypeVar("T")

_LOADS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"[^\s,;:=]+")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _check_loads(owner: object, loads: str) -> None:
    if not isinstance(loads, str) or not _LOADS.fullmatch(loads):
        raise ValueError(f"{type(owner).__name__}: loads={loads!r} is not of the form 'package.module:attribute'")


def _check_name(owner: object, name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{type(owner).__name__}: name={name!r} must be a word without spaces or any of , ; : =")


class PluginWarning(UserWarning):
    """A plugin failed, or passed something unknown, and the operation continued without it."""


def _tolerant(kind: type[T]) -> type[T]:
    """Let a descriptor ignore fields of later versions, with a warning, so that a plugin for these runs here, too."""
    create: Any = kind.__init__
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]

    @wraps(create)
    def init(self: T, *values: Any, **keywords: Any) -> None:
        for name in [name for name in keywords if name not in names]:
            del keywords[name]
            similar = f"; did the author mean '{closest(name, names)[0]}'?" if closest(name, names) else ""
            warnings.warn(
                f"{kind.__name__}: mithril-core {__version__} ignores the unknown field '{name}'{similar}",
                PluginWarning,
                stacklevel=2,
            )
        create(self, *values, **keywords)

    kind.__init__ = init  # type: ignore[assignment]
    return kind


class _Named:
    """Check of the name of a descriptor and of its references to code."""

    __slots__ = ()
    name: str

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        for reference in ("loads", "saves"):
            if hasattr(self, reference):
                _check_loads(self, getattr(self, reference))


@_tolerant
@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend. ``class_name`` is also exported from ``mithril``: ``ml.JaxBackend``."""

    name: str
    class_name: str
    loads: str
    requires: tuple[str, ...] = ()  # importable top-level modules without which the backend cannot load
    summary: str = ""

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        _check_name(self, self.class_name)
        _check_loads(self, self.loads)


@_tolerant
@dataclass(frozen=True, slots=True)
class PassSpec:
    """A pass. ``level`` is the lowest optimization level that includes it, or None if it runs only on request."""

    name: str
    loads: str
    stage: str
    level: str | None
    aliases: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # names that enable or disable several passes: optimizations={"fusion": False}
    favors: str = ""  # "throughput" or "latency": value of optimize_for= that enables it; the other disables it
    options: tuple[str, ...] = ()  # options of ml.compile that enable it when set
    before: tuple[str, ...] = ()  # passes of the same stage that must come later
    after: tuple[str, ...] = ()  # passes of the same stage that must come earlier
    version: int = 1  # increment when the result of the pass changes: part of every cache key
    summary: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            _check_name(self, name)
        _check_loads(self, self.loads)
        if self.stage not in STAGES:
            raise ValueError(f"PassSpec '{self.name}': stage={self.stage!r} is none of {', '.join(STAGES)}")
        if self.level is not None and self.level not in PASS_LEVELS:
            raise ValueError(
                f"PassSpec '{self.name}': level={self.level!r} is none of {', '.join(PASS_LEVELS)} or None"
            )


@_tolerant
@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A memory that each core has between its registers and the main memory.

    The size of a cache selects kernels and the blocks that they read. A kernel addresses a scratchpad itself, so nodes
    are fused only if the rows that their kernel keeps fit.
    """

    name: str
    size: int  # bytes
    scratchpad: bool = False

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        if self.size < 1:
            raise ValueError(f"MemoryLevel '{self.name}' has {self.size} bytes, expected 1 or more")


@_tolerant
@dataclass(frozen=True, slots=True)
class HardwareTarget:
    """Hardware to compile for: vendor's rates, levels of memory, and costs.

    ``instructions`` are the operations that one element of an operation takes, by its name: ``{"exp": 20.0}``; they
    replace its declared flops in estimates. ``costs`` are for estimates of time and memory: "efficiency" is the share
    of the peak that products reach, "vector_flops" the operations per second outside of products, "launch" the seconds
    before a kernel, "interconnect" the bytes per second between devices, "hop" the seconds of a message,
    "usable_memory" the bytes that programs get, "cores", "clock", "devices_per_chip", and the compute "capability" of
    a GPU. Keys of your own are for passes of your own.
    """

    name: str
    family: str  # the device kind a backend must run on: "cpu", "gpu", "tpu", "mobile", ...
    aliases: tuple[str, ...] = ()
    peak_flops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)  # by dtype
    bandwidth: float | None = None  # bytes per second to main memory
    memory: int | None = None  # bytes
    dtypes: tuple[str, ...] = ()  # dtypes it computes in natively, best first
    costs: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    summary: str = ""
    levels: tuple[MemoryLevel, ...] = ()  # nearest to the registers first
    instructions: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases, self.family):
            _check_name(self, name)

    @property
    def cache(self) -> int | None:
        """Bytes of the largest level of memory, or None if no level is described."""
        return max((level.size for level in self.levels), default=None)

    @property
    def scratchpad(self) -> int | None:
        """Bytes that the intermediate rows of a kernel may take, or None if there is no such limit."""
        return min((level.size for level in self.levels if level.scratchpad), default=None)


@_tolerant
@dataclass(frozen=True, slots=True)
class Found:
    """A detected hardware target: its name, its rank (the highest wins), and the evidence."""

    name: str
    rank: int
    why: str


@_tolerant
@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device that another backend compiles for: ``ml.CBackend(device="opencl")``. ``loads`` names a backend class."""

    name: str
    loads: str
    family: str = "gpu"
    summary: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, self.family):
            _check_name(self, name)
        _check_loads(self, self.loads)


@_tolerant
@dataclass(frozen=True, slots=True)
class ProfilerSpec(_Named):
    """A profiler for compiled models, selected by name."""

    name: str
    loads: str
    summary: str = ""


@_tolerant
@dataclass(frozen=True, slots=True)
class Option:
    """An option of ``ml.compile``, declared by the distribution that implements it.

    ``type`` is any annotation (``int | None``, ``Literal["a", "b"]``, ``Mapping[str, int]``). An alias is another
    keyword or ``"group.key"``, a key of a dictionary option. ``keys`` lists the valid keys of a dictionary option with
    the types of their values. ``backends`` lists the backends that read the option; others record it as ignored.
    ``example`` is a typical value as Python writes it; listings and errors show it.

    Three fields concern ``cache=True``: options with ``affects="shown"`` are not part of the cache key, options with
    ``needs_steps`` run all steps while they are set (no read of the cache), and a ``file`` is keyed by its contents.
    """

    name: str
    type: Any
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    backends: tuple[str, ...] = ()
    affects: Literal["program", "shown"] = "program"
    needs_steps: bool = False
    file: bool = False
    example: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"Option: {name!r} is not a keyword")
        if not self.name.isidentifier():
            raise ValueError(f"Option: {self.name!r} is not a keyword; only an alias can be 'group.key'")
        if not self.help:
            raise ValueError(f"Option '{self.name}' requires help: one line that describes it")
        if self.affects not in ("program", "shown"):
            raise ValueError(f"Option '{self.name}': affects={self.affects!r} is neither 'program' nor 'shown'")


@_tolerant
@dataclass(frozen=True, slots=True)
class OpsSpec:
    """A module that declares operations, and their names; it is imported on first use of one of them."""

    module: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.module, str) or not _MODULE.fullmatch(self.module):
            raise ValueError(f"OpsSpec: module={self.module!r} is not a module name")
        for name in self.names:
            _check_name(self, name)


@_tolerant
@dataclass(frozen=True, slots=True)
class Lowering:
    """The implementation of one operation on the requested backend. ``loads`` names one of:

    * a kernel: a function of arrays whose parameters have the names of operands and attributes of the operation
      (``dtype`` and ``shape`` are those of the result). Arrays are the backend's, NumPy's on ``ggml`` and ``c``;
    * a string such as ``"np.sinc({x})"``: an expression of generated Python (``numpy``, ``jax``, ``torch``, ``mlx``);
    * a function that writes code, recognized by the name of its first parameter: ``(call: Call) -> str`` for generated
      Python, ``(draft, node, *operands)`` for ``ggml``, ``(kernel, name, machine)`` for ``c``.

    ``when`` names a predicate of the node; if it returns False, the backend's own lowering is used.
    """

    op: str
    loads: str
    when: str | None = None

    def __post_init__(self) -> None:
        _check_name(self, self.op)
        _check_loads(self, self.loads)
        if self.when is not None:
            _check_loads(self, self.when)


@_tolerant
@dataclass(frozen=True, slots=True)
class Export:
    """A name exported from ``mithril``: ``Export("Trainer", "mithril_train.loop.trainer:Trainer")`` is ``ml.Trainer``.

    With ``on="CompiledModel"``, a method of compiled models: the function receives the model as first argument.
    """

    name: str
    loads: str
    on: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name.startswith("_"):
            raise ValueError(f"Export: {self.name!r} is not a public name")
        _check_loads(self, self.loads)


@_tolerant
@dataclass(frozen=True, slots=True)
class FrontendSpec(_Named):
    """A model type that ``ml.compile`` accepts. ``accepts`` lists qualified class names, compared as strings.

    ``loads`` names a function ``(model, *, outputs, inference) -> Source`` (``mithril.compiler.Source``).
    """

    name: str
    accepts: tuple[str, ...]
    loads: str


@_tolerant
@dataclass(frozen=True, slots=True)
class FileFormat:
    """A file format for compiled models: ``compiled.export(path)`` calls ``saves``, ``ml.load(path)`` calls ``loads``.

    ``saves(compiled, path, **options)`` may return a ``mithril.compiler.Exported``, ``loads(path, **options)`` returns
    a compiled model and ``models(path)``, for ``ml.compile(path, backend)``, a model. A format without ``suffixes`` is
    a directory, selected by name; ``marker`` is a file that only its folders have. ``backends`` limits the models that
    can be exported; folders of the first one have this format by default.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    saves: str | None = None
    loads: str | None = None
    models: str | None = None
    summary: str = ""
    backends: tuple[str, ...] = ()
    marker: str = ""

    def __post_init__(self) -> None:
        _check_name(self, self.name)
        for loads in (self.saves, self.loads, self.models):
            if loads is not None:
                _check_loads(self, loads)
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise ValueError(f"FileFormat '{self.name}': suffix {suffix!r} must begin with a dot")


@_tolerant
@dataclass(frozen=True, slots=True)
class Architecture(_Named):
    """A model family in GGUF files, by its ``general.architecture``.

    ``loads(metadata, tensors, *, context)`` returns the model and the tensor of each parameter, ``saves(model)`` the
    metadata and the tensor of each parameter: its name, the order of the rows that it stores or None, the number added
    to its elements, and the index of the part that is the parameter: () for all of it, (3,) for the fourth expert.
    """

    name: str
    loads: str
    saves: str


@_tolerant
@dataclass(frozen=True, slots=True)
class Command(_Named):
    """A subcommand of ``mithril``: ``loads`` names a ``click.Command``, imported when it runs."""

    name: str
    loads: str
    summary: str = ""


@dataclass(slots=True)
class CompileContext:
    """One run of ``ml.compile``, passed to hooks. Observers store their state in ``scratch`` under their name."""

    model: Any
    backend: Any
    options: Mapping[str, Any]
    level: str = ""
    target: HardwareTarget | None = None
    decisions: Decisions = field(default_factory=Decisions)
    scratch: dict[str, Any] = field(default_factory=dict)


class PipelineDraft:
    """The passes of a compilation and the changes that one plugin requests; all changes are merged afterwards."""

    __slots__ = ("_names", "added", "changes", "removed", "replaced")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.added: list[str] = []
        self.removed: list[str] = []
        self.replaced: dict[str, str] = {}
        self.changes: list[str] = []  # one line per plugin with changes, for the decisions

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the passes selected by level and options, in pipeline order, before any change."""
        return self._names

    def add(self, name: str) -> None:
        """Add the installed pass ``name``, placed by its stage."""
        self.added.append(name)

    def remove(self, name: str) -> None:
        """Remove the pass ``name``."""
        self.removed.append(name)

    def replace(self, name: str, by: str) -> None:
        """Run the installed pass ``by`` in place of ``name``."""
        self.replaced[name] = by
