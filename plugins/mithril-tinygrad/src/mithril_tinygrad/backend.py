"""``ml.TinygradBackend``: the generated function calls tensors of tinygrad, and a TinyJit for each size repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from tinygrad import Context, Tensor, TinyJit, dtypes

from mithril.backend import (
    BuildOptions,
    Capabilities,
    Forward,
    Lowerings,
    ProgramBySizes,
    SourceBackend,
    as_numpy,
    corrections,
)
from mithril.graph import DType, Graph, dtype as as_dtype, iterate
from mithril_tinygrad.arrays import clang, copied, empty, in_buffer, of_numpy
from mithril_tinygrad.lowering import DTYPES, EAGER, native, table


class TinygradBackend(SourceBackend):
    """Arrays are tensors of tinygrad on the CPU."""

    name = "tinygrad"
    dtypes: ClassVar[frozenset[DType]] = DTYPES
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": native}
    differences: ClassVar[Mapping[str, str]] = corrections.NAN_IGNORED

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        clang()

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, recompiles=True, memory="holds")

    def native_dtype(self, dtype: DType) -> Any:
        return getattr(dtypes, dtype.numpy.name)

    def array(self, data: Any, dtype: Any = None) -> Tensor:
        kind = None if dtype is None else as_dtype(dtype)
        if isinstance(data, Tensor):
            return in_buffer(data if kind is None else data.cast(self.native_dtype(kind)))
        array = as_numpy(data, self.dtype)
        return of_numpy(array if kind is None else array.astype(kind.numpy))

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return array.numpy() if isinstance(array, Tensor) else np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        nodes = [node for node, _ in iterate(graph)]
        reasons = {node.op.name for node in nodes if node.op in EAGER or self.falls_back(node, options)}
        if reasons:
            options.decisions.record("choice", f"no TinyJit, as Python runs at each call: {', '.join(sorted(reasons))}")
        return Program(forward, graph, jit=not reasons and options.jit is not False)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        return {"device": "CPU", "compiler": clang()[0]}


class Program(ProgramBySizes):
    """The function of a program: one TinyJit for each combination of shapes."""

    def __init__(self, forward: Forward, graph: Graph, jit: bool) -> None:
        super().__init__(forward, graph)
        self.jit = jit

    def array(self, x: Any, dtype: DType) -> Tensor:
        return in_buffer(x)

    def compile(self, arrays: list[Any]) -> Captured:
        return Captured(self, arrays)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with Context(PARALLEL=0):  # else tinygrad 0.14 starts processes that compile
            return super().__call__(params, inputs)


class Captured:
    """The kernels of a program for the shapes of some arrays, which write results to new buffers."""

    def __init__(self, program: Program, arrays: list[Tensor]) -> None:
        self.program = program
        self.types = {name: (y.shape, y.dtype) for name, y in program.results(arrays).items()} if program.jit else {}
        shapes = [*(x.shape for x in arrays), *(shape for shape, _ in self.types.values())]
        self.is_plain = not self.types or any(0 in shape for shape in shapes)
        self.jit = TinyJit(self.run)

    def run(self, *buffers: Tensor) -> None:
        count = len(self.types)
        store(self.program.results(buffers[count:]), buffers[:count])

    def __call__(self, arrays: list[Tensor]) -> dict[str, Any]:
        if self.is_plain:
            values = self.program.results(arrays)
            results = {name: empty(y.shape, y.dtype) for name, y in values.items()}
            store(values, results.values())
            return results
        results = {name: empty(shape, dtype) for name, (shape, dtype) in self.types.items()}
        bases = [x.uop.base for x in (*results.values(), *arrays)]
        if len(set(bases)) < len(bases):  # a TinyJit refuses the same buffer twice
            arrays = [copied(x) for x in arrays]
            bases[len(results) :] = [x.uop.base for x in arrays]
        if self.jit.captured is None:
            self.jit(*results.values(), *arrays)  # the second call captures the kernels
        else:
            self.jit.captured(bases, {})  # the last step of TinyJit.__call__, whose checks are slow
        return results


def store(values: Mapping[str, Tensor], results: Iterable[Tensor]) -> None:
    """Compute values into the buffers of results."""
    written = [result.assign(y) for result, y in zip(results, values.values(), strict=True) if 0 not in y.shape]
    if written:
        Tensor.realize(*written)
