"""What a backend is: array helpers, what it runs itself, and ``build``."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from mithril.backend import memory_plan
from mithril.backend.capabilities import Capabilities
from mithril.backend.checked_calls import CheckedType
from mithril.backend.forking import started
from mithril.base import (
    ALL,
    BackendError,
    Decisions,
    DType,
    DTypeError,
    OptionError,
    UnsupportedError,
    dtype as as_dtype,
    unknown,
)
from mithril.ir import Graph, LazyGraph, Node, decompose, is_view, iterate
from mithril.ops import scan_op

if TYPE_CHECKING:
    from mithril.plugins import PluginLowering

PRECISIONS = ("float32", "float16", "bfloat16")

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "jit": None,  # the backend's best choice
        "jit_options": MappingProxyType({}),
        "num_threads": None,
        "semantics": "portable",
        "checks": False,
        "static_inference": False,
        "memory_planning": True,
        "optimizations": MappingProxyType({}),
        "file_path": None,
        "template_path": None,
        "code_transformers": (),
    }
)


class BuildOptions:
    """What ``ml.compile`` was told that concerns making the executable.

    ``settings`` holds all options, those that plugins own among them. An option is read from there when a backend asks
    for it, so that what nobody asked for can be reported as ignored. Without settings: defaults, and what is given.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        inference: bool = False,
        decisions: Decisions | None = None,
        **given: Any,
    ) -> None:
        self.settings = {**DEFAULTS, **given} if settings is None else settings
        self.inference = inference
        self.decisions = decisions if decisions is not None else Decisions()

    @property
    def jit(self) -> bool | None:
        return self.settings["jit"]  # type: ignore[no-any-return]

    @property
    def jit_options(self) -> Mapping[str, Any]:
        return self.settings["jit_options"]  # type: ignore[no-any-return]

    @property
    def memory_plan(self) -> str | Callable[..., Any]:
        """The strategy of the arena's plan: ``"smallest"`` unless another is named, ``"apart"`` where it is off."""
        chosen = self.settings["memory_planning"]
        return {True: "smallest", False: "apart"}[chosen] if isinstance(chosen, bool) else chosen

    @property
    def fuses(self) -> bool:
        """Whether the backend may join operations: not under ``optimizations={"fusion": False}``."""
        switches = self.settings["optimizations"]
        return all(switches.get(name) is not False for name in ("fusion", "operator_fusion"))

    @property
    def num_threads(self) -> int | None:
        return self.settings["num_threads"]  # type: ignore[no-any-return]

    @property
    def semantics(self) -> str:
        return self.settings["semantics"]  # type: ignore[no-any-return]

    @property
    def checks(self) -> bool:
        return self.settings["checks"]  # type: ignore[no-any-return]

    @property
    def static(self) -> bool:
        return self.settings["static_inference"]  # type: ignore[no-any-return]

    @property
    def file_path(self) -> str | Path | None:
        return self.settings["file_path"]  # type: ignore[no-any-return]

    @property
    def template_path(self) -> str | Path | None:
        return self.settings["template_path"]  # type: ignore[no-any-return]

    def source_path(self, graph: Graph, gradients: bool = False) -> Path | None:
        """Where the source of a program is written: ``model.c``, and of one with gradients ``model.grad.c``."""
        if self.file_path is None:
            return None
        path = Path(self.file_path)
        if not gradients and not graph.results_of("gradient"):
            return path
        path = path.with_suffix(f".grad{path.suffix}")
        self.decisions.record("choice", f"file_path: the program with gradients is written to '{path}'")
        return path

    def refuse(self, backend: str, names: Sequence[str], why: str) -> None:
        """Raise where an option is set that a backend cannot follow."""
        for name in names:
            if self.settings[name]:
                raise OptionError(
                    f"{name}= cannot be followed by the backend '{backend}': {why}",
                    hint=f"leave {name} out, or compile for a backend with generated Python, such as 'numpy'",
                )

    @property
    def code_transformers(self) -> Sequence[Callable[[str], str]]:
        return self.settings["code_transformers"]  # type: ignore[no-any-return]


class Executable(Protocol):
    """A built program."""

    @property
    def graph(self) -> Graph: ...  # what really runs

    @property
    def source(self) -> str | None: ...  # generated source, where there is one

    @property
    def lowered(self) -> frozenset[str]: ...  # operations that the backend runs itself

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]: ...


class Backend(metaclass=CheckedType):
    """Base of all backends. ``dtype`` is that of parameters; ``precision`` the one computed in."""

    name: ClassVar[str] = ""
    dtypes: ClassVar[frozenset[DType]] = frozenset(ALL)
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    passes: tuple[str, ...] = ()  # those that it was made to run, besides the level's and the options'
    unforkable: ClassVar[str] = ""  # its framework, if that does not go on running in a forked process

    def __init__(self, *, device: str | None = None, dtype: Any = None, precision: str | None = None) -> None:
        self.check_fork()
        self.device = self._device(device)
        if precision is not None and precision not in PRECISIONS:
            what, facts, hint = unknown("precision", str(precision), PRECISIONS)
            raise OptionError(what, facts=facts, hint=hint)
        self.precision = precision
        self.dtype = as_dtype(dtype if dtype is not None else precision or "float32")
        if not self.dtype.is_float:
            raise OptionError(f"dtype={self.dtype} is no floating point dtype: parameters cannot have it")
        self.require(self.dtype)
        self._seed = 0
        self._drawn = 0

    def check_fork(self) -> None:
        """Raise in a process that was forked after the framework had started, if it does not survive that."""
        if self.unforkable:
            started(self.unforkable)

    def _device(self, device: str | None) -> str:
        if device is None:
            return self.devices[0]
        if device.partition(":")[0] not in self.devices:
            what, facts, hint = unknown(f"device of backend '{self.name}'", device, self.devices)
            raise BackendError(what, facts=facts, hint=hint)
        return device

    def with_precision(self, precision: str) -> Backend:
        """The same backend computing in another precision."""
        return type(self)(device=self.device, precision=precision)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return its name and those of its bases: options and file formats for any of these are for it."""
        return frozenset(getattr(base, "name", "") for base in cls.__mro__) - {""}

    @property
    def capabilities(self) -> Capabilities:
        """Claims of this backend, on its device; subclasses ``replace`` fields of these."""
        family = self.device.partition(":")[0]
        return Capabilities(family=family, families=(family,))

    def branches(self, options: BuildOptions) -> bool:
        """Whether an ``if`` of a program built with these options runs one side only, as cheaply as it can."""
        return False

    def identity(self) -> tuple[Any, ...]:
        """Everything about this backend that may change a program, for keys of caches: its class and public fields."""
        public = ((name, str(value)) for name, value in sorted(vars(self).items()) if not name.startswith("_"))
        return (f"{type(self).__module__}.{type(self).__qualname__}", *public)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        """Facts for ``mithril doctor``: devices, threads, advice."""
        return {}

    def require(self, dtype: DType) -> None:
        """Raise where the backend does not have a dtype."""
        if dtype not in self.dtypes:
            raise DTypeError(
                f"backend '{self.name}' has no {dtype}",
                facts=["it has: " + ", ".join(d.name for d in ALL if d in self.dtypes)],
                hint="convert the model's inputs and constants to one of these",
            )

    def check(self, graph: Graph) -> None:
        """Raise where a graph holds a dtype that the backend does not have."""
        missing = {v.dtype: (v.name, node) for node in graph.nodes for v in node.results if v.dtype not in self.dtypes}
        for i in graph.inputs:
            if i.type.dtype not in self.dtypes:
                self.require(i.type.dtype)
        for dtype, (name, node) in missing.items():
            try:
                self.require(dtype)
            except DTypeError as error:
                raise error.with_facts(f"needed by %{name} = {node.op.name}", str(node.origin)) from None

    # -- building ----------------------------------------------------------------------------------------------------
    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        """Whether this backend runs a node itself; composites it does not are decomposed first."""
        raise BackendError(f"backend '{self.name}' does not say what it lowers")

    def plugin_lowering(self, node: Node, options: BuildOptions | None = None) -> PluginLowering | None:
        """The lowering that a plugin provides for a node; backends that ask for none have none."""
        return None

    def falls_back(self, node: Node, options: BuildOptions | None = None) -> bool:
        """Whether a primitive that this backend does not lower runs as its NumPy reference."""
        return False

    def decomposed(self, graph: Graph, options: BuildOptions) -> Graph:
        """The graph of the operations that ``build`` takes; plugins' lowerings and fallbacks become decisions."""
        lowered = decompose(graph, lambda node: self.lowers(node, options) or self.falls_back(node, options), self.name)
        for node, _ in iterate(lowered):
            if (lowering := self.plugin_lowering(node, options)) is not None:
                options.decisions.record("choice", f"'{node.op.name}' on {self.name}: lowering by {lowering.origin}")
            elif self.falls_back(node, options):
                options.decisions.record(
                    "fallback", f"'{node.op.name}' on {self.name}: no lowering, so its NumPy reference runs"
                )
        return lowered

    def build(self, graph: Graph, options: BuildOptions | None = None) -> Executable:
        """The executable for a decomposed graph."""
        raise BackendError(f"backend '{self.name}' cannot build")

    def build_step(self, graph: Graph) -> Executable:
        """The executable for a single operation, to be timed or looked at on its own."""
        return self.build(graph, BuildOptions(jit=False))

    def dump(self, executable: Any) -> Mapping[str, bytes] | None:
        """An executable as bytes to keep on disk, from which ``revive`` makes it again; None where that cannot be."""
        return None

    def revive(self, parts: Mapping[str, bytes], graph: LazyGraph, options: BuildOptions) -> Executable:
        """An executable from what ``dump`` gave. ``graph`` reads as the graph it was built for."""
        raise BackendError(f"backend '{self.name}' keeps no executables")

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> Executable:
        """The executable for a forward graph that its framework differentiates (``autodiff="native"``).

        It takes a cotangent for each name in ``of`` among its inputs, and gives a gradient for each in
        ``wrt``.
        """
        raise UnsupportedError(
            f"backend '{self.name}' has no automatic differentiation of its own", hint='leave autodiff="graph"'
        )

    # -- memory ------------------------------------------------------------------------------------------------------
    def is_view(self, node: Node) -> bool:
        """Whether the results of a node share the memory of its operands."""
        return is_view(node)

    def overwrites(self, node: Node) -> bool:
        """Whether a node writes its result over an operand that is read for the last time."""
        return memory_plan.overwrites(node)

    def workspace(self, node: Node, sizes: Mapping[str, int]) -> int:
        """Return the bytes that a node takes while it runs, besides operands and results; a scan stacks its rows."""
        return sum(memory_plan.nbytes(v.type, sizes) for v in node.results) if node.op is scan_op else 0

    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        """Return the bytes of values and results of a program, and who knows them; None where only an estimate is."""
        return None

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        """Run once; return the most bytes that values and results took at once, a standing arena included."""
        held = run()  # so that its results are not taken for those of the next call
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            self.synchronize(run())
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            del held
            if not tracing:
                tracemalloc.stop()

    # -- arrays ------------------------------------------------------------------------------------------------------
    def native_dtype(self, dtype: DType) -> Any:
        """The framework's own object for a dtype, as its arrays show it."""
        return dtype.numpy

    def array(self, data: Any, dtype: Any = None) -> Any:
        """An array of this backend on its device, from anything array-like. Python floats become ``self.dtype``."""
        raise BackendError(f"backend '{self.name}' makes no arrays")

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        raise BackendError(f"backend '{self.name}' gives no NumPy arrays")

    def is_array(self, x: Any) -> bool:
        raise BackendError(f"backend '{self.name}' has no arrays")

    def synchronize(self, value: Any = None) -> None:
        """Wait until what was started has finished."""

    def resized(self, array: Any, axis: int, size: int) -> Any:
        """The array cut to ``size`` along an axis, or filled up with copies of the last row there."""
        x = self.to_numpy(array)
        rows = np.minimum(np.arange(size), x.shape[axis] - 1)
        return self.array(np.take(x, rows, axis) if size > x.shape[axis] else x[(slice(None),) * axis + (slice(size),)])

    def zeros(self, shape: Iterable[int], dtype: Any = None) -> Any:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Iterable[int], dtype: Any = None) -> Any:
        return self.full(shape, 1, dtype)

    def full(self, shape: Iterable[int], value: Any, dtype: Any = None) -> Any:
        kind = as_dtype(dtype) if dtype is not None else self.dtype
        return self.array(np.full(tuple(shape), value, kind.numpy))

    def arange(self, start: int, stop: int | None = None, step: int = 1, dtype: Any = None) -> Any:
        first, last = (0, start) if stop is None else (start, stop)
        return self.array(np.arange(first, last, step, dtype=as_dtype(dtype or "int32").numpy))

    def set_seed(self, seed: int) -> None:
        """Begin the sequence of ``randn`` and ``rand`` anew."""
        self._seed, self._drawn = seed, 0

    def randn(self, shape: Iterable[int], dtype: Any = None) -> Any:
        """Standard normal numbers from the portable generator: the same on every backend."""
        return self._draw("normal", shape, dtype)

    def rand(self, shape: Iterable[int], dtype: Any = None) -> Any:
        """Uniform numbers in [0, 1) from the portable generator."""
        return self._draw("uniform", shape, dtype)

    def _draw(self, kind: str, shape: Iterable[int], dtype: Any) -> Any:
        from mithril.base import operation

        key = operation("fold_in")(np.array([0, self._seed & 0xFFFFFFFF], np.uint32), np.uint32(self._drawn))
        self._drawn += 1
        made = operation(kind)(key, shape=tuple(shape), dtype=as_dtype(dtype) if dtype is not None else self.dtype)
        return self.array(made)

    def __repr__(self) -> str:
        extra = f", precision='{self.precision}'" if self.precision else ""
        return f"{type(self).__name__}(device='{self.device}'{extra})"
