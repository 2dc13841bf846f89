"""``ml.CBackend``: compiles a graph to machine code, one function that calls fused kernels over one arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, Self, cast

import numpy as np

from mithril import plugins
from mithril.backend import (
    Backend,
    BuildOptions,
    Capabilities,
    EncodedWeight,
    LazyGraph,
    PluginLowering,
    as_numpy,
    is_plain,
)
from mithril.graph import (
    ALL,
    BackendError,
    DType,
    Graph,
    Node,
    Op,
    OptionError,
    UnsupportedError,
    dtype as as_dtype,
    unknown,
)
from mithril_cbackend.cpu_info import fingerprint, processors
from mithril_cbackend.schedule.schedules import Schedules

SCHEDULERS = ("auto", "own", "tvm")


class CBackend(Backend):
    """Backend on NumPy arrays; symbolic sizes are arguments of a program. TVM is imported when the first one is built.

    ``schedules`` is a file of the fastest measured schedules, read by the constructor. ``num_threads`` is the default
    for compilations whose options do not set it. ``scheduler`` selects the scheduler of kernels: ``"own"``
    templates, ``"tvm"`` (the primitives of TVM, where a schedule exists), or ``"auto"``: TVM where it is as fast.
    """

    name = "c"
    dtypes: ClassVar[frozenset[DType]] = frozenset(ALL)

    def __new__(cls, *, device: str | None = None, **settings: Any) -> Self:
        """Return the backend of a device of another distribution, ``device="opencl"``, in place of this one."""
        name, _, number = (device or "cpu").partition(":")
        if name == "cpu" or name not in plugins.devices():
            return super().__new__(cls)
        for key in ("schedules", "num_threads", "scheduler"):
            if settings.pop(key, None) is not None:
                raise OptionError(f"CBackend: {key}= concerns CPUs, not the device '{device}'", hint=f"omit {key}=")
        kind = plugins.load_device(name)
        return cast("Self", kind(device=f"{kind.devices[0]}:{number}" if number else None, **settings))

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        schedules: str | PathLike[str] | Schedules | None = None,
        num_threads: int | None = None,
        scheduler: str = "auto",
    ) -> None:
        super().__init__(device=device, dtype=dtype, precision=precision)
        if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
            raise OptionError(f"CBackend: num_threads={num_threads!r} is not a positive int", hint="pass num_threads=2")
        if scheduler not in SCHEDULERS:
            message, facts, hint = unknown("scheduler of CBackend", str(scheduler), SCHEDULERS)
            raise OptionError(message, facts=facts, hint=hint)
        self.num_threads, self.scheduler = num_threads, scheduler
        loaded = schedules if schedules is not None else Schedules()
        self.schedules = loaded if isinstance(loaded, Schedules) else Schedules.load(loaded)
        self.processor = f"{fingerprint()}, {processors()} threads"  # part of the key of cached programs

    def _device(self, device: str | None) -> str:
        names = (*self.devices, *plugins.devices())
        if device is not None and device.partition(":")[0] not in names:
            message, facts, hint = unknown("device of backend 'c'", device, names)
            raise BackendError(message, facts=facts, hint=hint)
        return super()._device(device)

    def decomposed(self, graph: Graph, options: BuildOptions) -> Graph:
        from mithril_cbackend.build import checked
        from mithril_cbackend.graph.half_floats import in_float32

        _, machine = checked(options, self.num_threads, self.scheduler)
        return super().decomposed(in_float32(graph, machine, options.decisions), options)

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        from mithril_cbackend.graph import fusion, integer_products

        return fusion.is_lowered(node) or integer_products.is_kept(node)

    def plugin_lowering(self, node: Node, options: BuildOptions | None = None) -> PluginLowering | None:
        from mithril_cbackend.graph import foreign

        return foreign.plugin_lowering(node)

    def falls_back(self, node: Node, options: BuildOptions | None = None) -> bool:
        from mithril_cbackend.graph import fusion

        return not fusion.is_lowered(node) and fusion.runs_on_host(node)

    @property
    def capabilities(self) -> Capabilities:
        from mithril_cbackend import toolchains

        return replace(
            super().capabilities,
            families=("cpu", "mobile"),
            keeps="nothing" if toolchains.HOST.compiler() is None else "binary",
            threads=True,
            memory="arena",
        )

    def branches(self, options: BuildOptions) -> bool:
        return True

    def check_options(self, options: BuildOptions) -> None:
        from mithril_cbackend.build import checked

        checked(options, self.num_threads, self.scheduler)

    def build(self, graph: Graph, options: BuildOptions | None = None) -> Any:
        from mithril_cbackend.build import build

        self.check(graph)
        check_sizes(graph)
        return build(graph, options or BuildOptions(), self.schedules, self.num_threads, self.scheduler)

    def dump(self, executable: Any) -> Mapping[str, bytes | bytearray] | None:
        from mithril_cbackend.program import program_cache

        return program_cache.dump(executable)

    def revive(self, parts: Mapping[str, Any], graph: LazyGraph, options: BuildOptions) -> Any:
        from mithril_cbackend.program import program_cache

        return program_cache.revive(parts, graph, options)

    def adopt(self, executable: Any, constants: Any) -> None:
        executable.adopt(constants)

    def packed_weights(
        self, executable: Any, options: BuildOptions, weights: dict[str, Any], forms: MutableMapping[str, Any]
    ) -> dict[str, Any]:
        # A program of several backends, or of a plugin, has none.
        layout = getattr(executable, "layout", None)
        return weights if layout is None else layout.bound(weights, forms)

    def reading_quantized(self, weight: EncodedWeight) -> tuple[Op, Mapping[str, Any]] | None:
        """Return the operation that reads a matrix in blocks of a file."""
        from mithril_cbackend.lowering.int8x4.group_operation import block_matrix
        from mithril_gguf.matrix import BlockMatrix

        if not isinstance(weight, BlockMatrix) or weight.ndim != 2:
            return super().reading_quantized(weight)
        return block_matrix, {"format": weight.format.name, "transposed": weight.transposed}

    # -- memory ------------------------------------------------------------------------------------------------------
    def embedded_weights(self, executable: Any, size: int) -> tuple[Sequence[Any], int]:
        # A program of several backends, or of a plugin, has none.
        layout = getattr(executable, "layout", None)
        if layout is None:
            return super().embedded_weights(executable, size)
        return [*layout.constants.values()], 0

    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        from mithril_cbackend.program.any_size import AnySizeExecutable
        from mithril_cbackend.program.executable import Executable

        if not isinstance(executable, Executable):
            return None  # a program of several backends, or of a plugin
        if isinstance(executable, AnySizeExecutable):
            return executable.memory_of(sizes), "arena"
        results = sum(math.prod(shape) * as_dtype(kind).itemsize for _, _, shape, kind in executable.layout.results)
        return executable.layout.arena + results, "arena"

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        return super().measured_memory(run) + getattr(getattr(executable, "arena", None), "nbytes", 0)

    # -- arrays ------------------------------------------------------------------------------------------------------
    def array(self, data: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
        return np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return is_plain(x)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        """Return the rows that ``mithril doctor`` prints."""
        from mithril_cbackend import toolchains
        from mithril_cbackend.tir import machine_code

        compiler = toolchains.HOST.compiler() or "not found: no shared libraries, no cache"
        return {"processor": machine_code.host_cpu(), "threads": str(processors()), "C compiler": compiler}


def check_sizes(graph: Graph) -> None:
    """Check that the static sizes of all inputs have at most 31 bits."""
    for i in graph.inputs:
        # Positions in arrays are numbers of 32 bits.
        if any(isinstance(n, int) and n >= 1 << 31 for n in i.type.shape):
            raise UnsupportedError(f"input '{i.name}' is too large: {i.type} has an axis of 2**31 elements or more")
