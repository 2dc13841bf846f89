"""The base class of backends: array functions, supported operations, and ``build``."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar
from weakref import ref

import numpy as np

from mithril import ops
from mithril.backend import memory_plan
from mithril.backend.arrays import EncodedWeight, as_numpy, is_plain, to_numpy
from mithril.backend.build_options import BuildOptions
from mithril.backend.capabilities import Capabilities
from mithril.backend.checked_calls import CheckedType
from mithril.backend.forking import require_unforked
from mithril.graph import (
    ALL,
    BackendError,
    DType,
    DTypeError,
    Graph,
    Node,
    Op,
    OptionError,
    UnsupportedError,
    decompose,
    dtype as as_dtype,
    is_view,
    iterate,
    parse,
    recognize,
    sample_nodes,
    unknown,
)
from mithril.ops import scan_op

if TYPE_CHECKING:
    from mithril.backend.plugin_lowering import PluginLowering

T = TypeVar("T")


class LazyGraph:
    """A graph whose first ``get()`` parses the text or calls the function; attributes are forwarded to the graph.

    Functions rebuild graphs with embedded weights, which a program has in a form of its own: such a graph lives as long
    as its users.
    """

    __slots__ = ("_graph", "_make", "_rebuilt")

    def __init__(self, graph: Graph | str | Callable[[], Graph]) -> None:
        self._graph = graph if isinstance(graph, Graph) else None
        self._make = None if isinstance(graph, Graph) else graph
        self._rebuilt: ref[Graph] | None = None

    def get(self) -> Graph:
        graph = self._graph if self._rebuilt is None else self._rebuilt()
        if graph is not None:
            return graph
        if callable(self._make):
            graph = self._make()
            self._rebuilt = ref(graph)
        else:
            assert self._make is not None
            graph = self._graph = parse(self._make)
            self._make = None
        return graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)


DLPACK_CPU = 1  # the type of devices in main memory, kDLCPU
PRECISIONS = ("float32", "float16", "bfloat16", "float64")


class Executable(Protocol):
    """A compiled program."""

    @property
    def graph(self) -> Graph: ...  # the graph that is executed

    @property
    def source(self) -> str | None: ...  # generated source, if any

    @property
    def lowered(self) -> frozenset[str]: ...  # operations that the backend runs itself

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]: ...


class ExactSizesRequired(UnsupportedError):
    """Raised by ``build`` for a graph of symbolic sizes that the backend runs only as one program for each size."""


class BackendType(CheckedType):
    """Metaclass of backends: an instance remembers the arguments of its constructor."""

    def __call__(cls: type[T], *args: Any, **options: Any) -> T:
        backend = CheckedType.__call__(cls, *args, **options)
        # A constructor can return the backend of another class, which has been called with other arguments.
        vars(backend).setdefault("_arguments", (args, options))
        return backend


class Backend(metaclass=BackendType):
    """Base class of all backends. ``dtype`` is the dtype of parameters, ``precision`` the compute dtype."""

    name: ClassVar[str] = ""
    dtypes: ClassVar[frozenset[DType]] = frozenset(ALL)
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    passes: tuple[str, ...] = ()  # passes to run in addition to those of the level and of options
    embedded_copies: ClassVar[float] = 1.0  # copies of the weights that a program with embedded ones holds
    unforkable: ClassVar[str] = ""  # its framework, if that does not survive a fork
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]  # of the constructor

    def __init__(self, *, device: str | None = None, dtype: Any = None, precision: str | None = None) -> None:
        self.check_fork()
        self.device = self._device(device)
        if precision is not None and precision not in PRECISIONS:
            message, facts, hint = unknown("precision", str(precision), PRECISIONS)
            raise OptionError(message, facts=facts, hint=hint)
        self.precision = precision
        self.dtype = as_dtype(dtype if dtype is not None else precision or "float32")
        if not self.dtype.is_float:
            raise OptionError(f"dtype={self.dtype} is not a floating point dtype, as parameters require")
        self.require(self.dtype)
        recognize({self.native_dtype(d): d for d in self.dtypes})
        self._seed = 0
        self._drawn = 0

    def check_fork(self) -> None:
        """Raise in a process forked after the framework had started, if the framework does not survive a fork."""
        if self.unforkable:
            require_unforked(self.unforkable)

    def _device(self, device: str | None) -> str:
        if device is None:
            return self.devices[0]
        if device.partition(":")[0] not in self.devices:
            message, facts, hint = unknown(f"device of backend '{self.name}'", device, self.devices)
            raise BackendError(message, facts=facts, hint=hint)
        return device

    def with_precision(self, precision: str) -> Self:
        """Return a copy of this backend, with all of its settings, that computes in another precision."""
        backend = copy(self)
        backend.precision, backend.dtype = precision, as_dtype(precision)
        backend.require(backend.dtype)
        return backend

    def __copy__(self) -> Self:
        backend = object.__new__(type(self))
        vars(backend).update(vars(self))
        return backend

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor: devices, meshes and stores of a framework belong to one process."""
        args, options = self._arguments
        return partial(type(self), *args, **options), (), {"precision": self.precision, "dtype": self.dtype}

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of the backend and its bases, whose options and file formats apply to it."""
        return frozenset(getattr(base, "name", "") for base in cls.__mro__) - {""}

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the backend on its device; subclasses ``replace`` fields."""
        family = self.device.partition(":")[0]
        return Capabilities(family=family, families=(family,))

    def branches(self, options: BuildOptions) -> bool:
        """Whether ``if`` in a program built with these options executes only one branch."""
        return False

    def has_whole_parameters(self, options: BuildOptions) -> bool:
        """Whether programs of this process read whole parameters, not parts of several devices."""
        return self.capabilities.local

    def identity(self) -> tuple[Any, ...]:
        """Return the class and public fields of the backend, which can affect a program, for cache keys."""
        public = ((name, str(value)) for name, value in sorted(vars(self).items()) if not name.startswith("_"))
        return (f"{type(self).__module__}.{type(self).__qualname__}", *public)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        """Return facts for ``mithril doctor``: devices, threads, advice."""
        return {}

    def require(self, dtype: DType) -> None:
        """Raise if the backend does not support the dtype."""
        if dtype not in self.dtypes:
            raise DTypeError(
                f"backend '{self.name}' does not support {dtype}",
                facts=["supported: " + ", ".join(d.name for d in ALL if d in self.dtypes)],
                hint="convert the inputs and constants of the model to one of these",
            )

    def check(self, graph: Graph) -> None:
        """Raise if the graph contains a dtype that the backend does not support."""
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
        """Whether the backend lowers the node; other composites are decomposed first."""
        raise BackendError(f"backend '{self.name}' does not implement lowers()")

    def plugin_lowering(self, node: Node, options: BuildOptions | None = None) -> PluginLowering | None:
        """Return the lowering that a plugin provides for the node, or None if there is none."""
        return None

    def falls_back(self, node: Node, options: BuildOptions | None = None) -> bool:
        """Whether the backend runs the NumPy reference of a primitive that it does not lower."""
        return False

    def decomposed(self, graph: Graph, options: BuildOptions) -> Graph:
        """Decompose the graph for ``build``; record lowerings of plugins and fallbacks as decisions."""
        lowered = decompose(graph, lambda node: self.lowers(node, options) or self.falls_back(node, options), self.name)
        for node, _ in iterate(lowered):
            if (lowering := self.plugin_lowering(node, options)) is not None:
                options.decisions.record("plugin", f"'{node.op.name}' on {self.name}: lowering by {lowering.origin}")
            elif self.falls_back(node, options):
                options.decisions.record(
                    "fallback", f"'{node.op.name}' on {self.name}: no lowering, so its NumPy reference runs"
                )
        return lowered

    def check_options(self, options: BuildOptions) -> None:
        """Raise OptionError for options that no program of this backend can have, before the first one is built."""

    def build(self, graph: Graph, options: BuildOptions | None = None) -> Executable:
        """Build the executable of a decomposed graph."""
        raise BackendError(f"backend '{self.name}' does not implement build()")

    def build_step(self, graph: Graph) -> Executable:
        """Build the executable of a single operation, for timing or inspection."""
        return self.build(graph, BuildOptions(jit=False))

    def dump(self, executable: Any) -> Mapping[str, bytes | bytearray] | None:
        """Serialize an executable for the disk cache, or return None if that is not possible; see ``revive``.

        The part "constants" is mapped when it is revived, at a multiple of 64 bytes, so that processes share it.
        """
        return None

    def revive(self, parts: Mapping[str, Any], graph: LazyGraph, options: BuildOptions) -> Executable:
        """Restore an executable from the bytes of ``dump``; ``graph`` is the graph that it was built from."""
        raise BackendError(f"backend '{self.name}' does not implement revive()")

    def adopt(self, executable: Any, constants: Any) -> None:
        """Read the constants of a program that was just dumped from their mapped file, and release its own."""

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> Executable:
        """Build the executable of a forward graph that the framework differentiates (``autodiff="native"``).

        Its inputs include a cotangent for each name in ``of``; its results include a gradient for each in ``wrt``.
        """
        raise UnsupportedError(
            f"backend '{self.name}' has no automatic differentiation of its own", hint='use autodiff="graph" instead'
        )

    def differentiates(self, options: BuildOptions) -> bool:
        """Whether gradients must be those of ``build_with_gradients``, also in a step of training."""
        return False

    def differentiable(self, graph: Graph, options: BuildOptions | None = None) -> Callable[..., dict[str, Any]]:
        """Return ``forward(params, inputs)`` of a graph, in operations that the framework differentiates."""
        raise UnsupportedError(
            f"backend '{self.name}' has no automatic differentiation of its own",
            hint="compile for torch, jax or mlx, or pass output_gradients= to evaluate",
        )

    # -- memory ------------------------------------------------------------------------------------------------------
    def is_view(self, node: Node) -> bool:
        """Whether the results of the node alias its operands."""
        return is_view(node)

    def overwrites(self, node: Node) -> bool:
        """Whether the node writes its result in place, over an operand at its last use."""
        return memory_plan.overwrites(node)

    def workspace(self, node: Node, sizes: Mapping[str, int]) -> int:
        """Return the bytes of scratch memory of a node; a scan stacks its rows there."""
        return sum(memory_plan.nbytes(v.type, sizes) for v in node.results) if node.op is scan_op else 0

    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        """Return the exact bytes of a program's values and results with their source, or None if unknown."""
        return None

    def weight_bytes(self, executable: Any) -> Mapping[str, int]:
        """Return the bytes in memory of weights that a program holds in a form of its own, by name of the input."""
        return {}

    def packed_weights(
        self, executable: Any, options: BuildOptions, weights: dict[str, Any], forms: MutableMapping[str, Any]
    ) -> dict[str, Any]:
        """Return the weights of a binding in the forms that a program with ``bound`` parameters reads.

        ``forms`` has those that other programs of this binding read, by names that the backend gives.
        """
        return weights

    def reading_quantized(self, weight: EncodedWeight) -> tuple[Op, Mapping[str, Any]] | None:
        """Return an operation of the parts of a weight that yields it; None: programs read float32."""
        return weight.reading if self.multiplies_sparse else None

    @property
    def multiplies_sparse(self) -> bool:
        """Whether products read the stored elements of sparse matrices."""
        return all(map(self.lowers, sample_nodes(ops.sparse_matmul)))

    def embedded_weights(self, executable: Any, size: int) -> tuple[Sequence[Any], int]:
        """Return the arrays of weights that a program holds, and the estimated bytes of those that it embeds.

        The weights have ``size`` bytes in the graph.
        """
        return (), round(self.embedded_copies * size)

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        """Run once and return the peak bytes of values and results, including a persistent arena."""
        results = run()  # warm up; held, so that the next call cannot reuse the memory of these results
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            initial = tracemalloc.get_traced_memory()[0]
            self.synchronize(run())
            return tracemalloc.get_traced_memory()[1] - initial
        finally:
            del results
            if not tracing:
                tracemalloc.stop()

    # -- arrays ------------------------------------------------------------------------------------------------------
    def native_dtype(self, dtype: DType) -> Any:
        """Return the framework's dtype object, as reported by its arrays."""
        return dtype.numpy

    def array(self, data: Any, dtype: Any = None) -> Any:
        """Convert anything array-like to an array on the device. Python floats become ``self.dtype``.

        This method and the next ones are those of backends whose arrays are NumPy's.
        """
        return np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)

    def copied(self, array: Any) -> Any:
        """Return a copy of an array of this backend, with memory of its own."""
        return self.array(self.to_numpy(array))

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def to_main_memory(self, array: Any) -> np.ndarray[Any, Any] | None:
        """Return an array of any framework as a NumPy array, or None if that needs a transfer from a device."""
        if hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] != DLPACK_CPU:
            return None
        return to_numpy(array)

    def from_local_rows(self, rows: np.ndarray[Any, Any]) -> Any:
        """Return the array of the rows of all processes, of which this one passes its own."""
        raise BackendError(f"backend '{self.name}' does not compute in several processes")

    def join_processes(self) -> None:
        """Join the processes of the backend's mesh, if it has one; some frameworks have to start them."""

    def is_array(self, x: Any) -> bool:
        return is_plain(x) or isinstance(x, np.generic)

    def synchronize(self, value: Any = None) -> None:
        """Wait until pending computations have finished."""

    def resized(self, array: Any, axis: int, size: int) -> Any:
        """Truncate the array to ``size`` along an axis, or pad it with copies of the last row."""
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
        """Restart the sequence of ``randn`` and ``rand`` from a seed."""
        self._seed, self._drawn = seed, 0

    def randn(self, shape: Iterable[int], dtype: Any = None) -> Any:
        """Draw standard normal numbers from the portable generator: the same on every backend."""
        return self._draw("normal", shape, dtype)

    def rand(self, shape: Iterable[int], dtype: Any = None) -> Any:
        """Draw uniform numbers in [0, 1) from the portable generator."""
        return self._draw("uniform", shape, dtype)

    def _draw(self, kind: str, shape: Iterable[int], dtype: Any) -> Any:
        from mithril.graph import operation

        key = operation("fold_in")(np.array([0, self._seed & 0xFFFFFFFF], np.uint32), np.uint32(self._drawn))
        self._drawn += 1
        numbers = operation(kind)(key, shape=tuple(shape), dtype=as_dtype(dtype) if dtype is not None else self.dtype)
        return self.array(numbers)

    def __repr__(self) -> str:
        extra = f", precision='{self.precision}'" if self.precision else ""
        return f"{type(self).__name__}(device='{self.device}'{extra})"
