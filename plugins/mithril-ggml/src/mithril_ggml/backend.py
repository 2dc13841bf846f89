"""``ml.GGMLBackend``: programs of ggml nodes and NumPy calls on one planned arena; quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from mithril.backend import (
    Backend,
    BuildOptions,
    Capabilities,
    Form,
    LazyGraph,
    PluginLowering,
    as_numpy,
    in_float32,
    is_plain,
    openblas,
    parse_bytes,
)
from mithril.graph import Graph, Node, OptionError, dtype as as_dtype
from mithril.ops import conv_input_grad, conv_weight_grad
from mithril_ggml import lowering
from mithril_ggml.library.library import features
from mithril_ggml.program.dynamic_shapes import SizedExecutable
from mithril_ggml.program.executable import GGMLExecutable
from mithril_ggml.program.program import build
from mithril_ggml.weights.packed_weights import PackedArray, Store
from mithril_ggml.weights.quantize_recipe import QuantizationRecipe


class GGMLBackend(Backend):
    """Arrays are NumPy's. ``quantize`` names the kind of weights in inference programs (``"q8_0"``, ``"q4_k"``, ...),
    or maps patterns of parameter names to kinds; ``mem_size`` (bytes, or text such as ``"2GiB"``) limits each program;
    ``num_threads`` limits ggml's threads (1 if omitted) and those of NumPy's products (NumPy's number if omitted).
    """

    name = "ggml"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(
        self,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        *,
        quantize: str | Mapping[str, str | None] | None = None,
        mem_size: int | str | None = None,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype, precision=precision)
        self.recipe = QuantizationRecipe.of(quantize)
        self._store = Store()
        self.mem_size = _bytes(mem_size)
        self.num_threads = _threads(num_threads)

    def with_precision(self, precision: str) -> Self:
        backend = super().with_precision(precision)
        backend._store = Store()  # weights are packed for one precision
        return backend

    @property
    def store(self) -> Store:
        """The packed weights so far, shared by all programs."""
        return self._store

    @property
    def capabilities(self) -> Capabilities:
        shifted = (Form.DEPTHWISE_SHIFTS,)
        return replace(
            super().capabilities,
            checks_indices=True,
            keeps="graph",
            threads=self.recipe is not None,  # products of float32 are NumPy's
            memory="arena",
            estimate_error=(-0.43, 0.0),  # operations that NumPy runs
            prefers={conv_input_grad: shifted, conv_weight_grad: shifted},
        )

    # -- building ----------------------------------------------------------------------------------------------------
    def decomposed(self, graph: Graph, options: BuildOptions) -> Graph:
        rewritten = in_float32(graph, lambda node, follows: True)
        if rewritten is not graph:
            message = "float32 computes faster than 16-bit floats here; inputs, weights and results have 16 bits"
            options.decisions.record("choice", message)
        return super().decomposed(rewritten, options)

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        return lowering.lowers(node)

    def plugin_lowering(self, node: Node, options: BuildOptions | None = None) -> PluginLowering | None:
        return lowering.plugin_lowering(node)

    def falls_back(self, node: Node, options: BuildOptions | None = None) -> bool:
        return lowering.falls_back(node)

    def check_options(self, options: BuildOptions) -> None:
        reason = "programs are graphs of ggml, not a text; compiled.export('model.gguf') writes a file"
        options.reject(self.name, ("file_path", "template_path", "code_transformers"), reason)
        _threads(options.num_threads)

    def build(self, graph: Graph, options: BuildOptions | None = None) -> GGMLExecutable | SizedExecutable:
        options = options or BuildOptions()
        self.check_options(options)
        self.check(graph)
        num_threads = _threads(options.num_threads) or self.num_threads
        if num_threads is not None and openblas() is None:
            message = f"num_threads={num_threads}: this NumPy multiplies by a library that is not asked here"
            options.decisions.record("ignored", message)
        return build(
            graph,
            options,
            recipe=self.recipe,
            store=self._store,
            threads=num_threads,
            limit=self.mem_size,
        )

    # -- keeping programs --------------------------------------------------------------------------------------------
    def dump(self, executable: Any) -> dict[str, bytes]:
        """Return a marker: the cache stores the graph after the passes, which is planned in milliseconds."""
        return {"planned": b"again"}

    def revive(self, parts: Mapping[str, bytes], graph: LazyGraph, options: BuildOptions) -> Any:
        return self.build(graph.get(), options)

    # -- memory ------------------------------------------------------------------------------------------------------
    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        if not isinstance(executable, (GGMLExecutable, SizedExecutable)):
            return None  # of several backends, or of a plugin's
        program = executable.of_sizes(sizes) if isinstance(executable, SizedExecutable) else executable
        return program.memory.total - program.memory.constants + program.result_bytes, "arena and NumPy"

    def weight_bytes(self, executable: Any) -> Mapping[str, int]:
        programs = executable.programs if isinstance(executable, SizedExecutable) else (executable,)
        return {n: size for p in programs if isinstance(p, GGMLExecutable) for n, size in p.weight_bytes().items()}

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        programs = executable.programs if isinstance(executable, SizedExecutable) else (executable,)
        memories = [p.memory for p in programs if isinstance(p, GGMLExecutable)]
        standing = max((memory.total - memory.constants for memory in memories), default=0)
        return super().measured_memory(run) + standing

    # -- arrays ------------------------------------------------------------------------------------------------------
    def array(self, data: Any, dtype: Any = None) -> Any:
        if isinstance(data, PackedArray) and dtype is None:
            return data
        return np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return is_plain(x) or isinstance(x, (np.generic, PackedArray))

    @classmethod
    def diagnose(cls) -> dict[str, str]:
        """Return the features of this build of ggml, for ``mithril doctor``."""
        return features()


def _bytes(limit: int | str | None) -> int | None:
    if limit is None:
        return None
    num_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise OptionError(
            f"mem_size={limit!r} is not a number of bytes", hint='write mem_size=512 * 2**20, or mem_size="512MiB"'
        )
    return num_bytes


def _threads(count: int | None) -> int | None:
    # GGML_MAX_N_THREADS of ggml.
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 512):
        raise OptionError(f"num_threads={count!r} is not a valid number of threads", facts=["accepted: 1 to 512"])
    return count
