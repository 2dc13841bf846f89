"""``ml.TinygradBackend``: the generated function calls tensors of tinygrad, and a TinyJit for each size repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar

import numpy as np
from tinygrad import Context, Tensor, TinyJit, dtypes

from mithril.backend import BuildOptions, Capabilities, Forward, Lowerings, SourceBackend, as_numpy
from mithril.graph import DType, Graph, dtype as as_dtype, iterate
from mithril_tinygrad.arrays import clang, copied, empty, in_buffer, of_numpy
from mithril_tinygrad.lowering import DIFFERENT, DTYPES, EAGER, native, table


class TinygradBackend(SourceBackend):
    """Arrays are tensors of tinygrad on the CPU."""

    name = "tinygrad"
    dtypes: ClassVar[frozenset[DType]] = DTYPES
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": native}

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
        if options.semantics == "native":
            for name in sorted(DIFFERENT & {node.op.name for node in nodes}):
                options.decisions.record("choice", f"'{name}' as tinygrad has it: nan may be ignored")
        reasons = {node.op.name for node in nodes}.intersection(EAGER)
        reasons |= {node.op.name for node in nodes if self.falls_back(node, options)}
        if reasons:
            options.decisions.record("choice", f"no TinyJit, as Python runs at each call: {', '.join(sorted(reasons))}")
        return Program(forward, graph, jit=not reasons and options.jit is not False)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        return {"device": "CPU", "compiler": clang()[0]}


class Program:
    """The function of a program: one TinyJit for each combination of shapes."""

    def __init__(self, forward: Forward, graph: Graph, jit: bool) -> None:
        self.forward = forward
        self.inputs = [(i.name, i.role == "param") for i in graph.arguments]
        self.jit = jit
        self.captured: dict[Any, Captured] = {}
        self.lock = Lock()  # a TinyJit runs one call at a time

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock, Context(PARALLEL=0):  # else tinygrad 0.14 starts processes that compile
            arrays = [in_buffer((params if is_param else inputs)[name]) for name, is_param in self.inputs]
            shapes = tuple(x.shape for x in arrays)
            if shapes not in self.captured:
                self.captured[shapes] = Captured(self, arrays)
            return self.captured[shapes](arrays)

    def lazy(self, arrays: Any) -> dict[str, Any]:
        """Return the results, not computed yet."""
        arguments: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        for (name, is_param), array in zip(self.inputs, arrays, strict=True):
            arguments[is_param][name] = array
        return self.forward(arguments[True], arguments[False])

    def forget_sizes(self) -> None:
        """Release all captured kernels."""
        self.captured.clear()


class Captured:
    """The kernels of a program for the shapes of some arrays, which write results to new buffers."""

    def __init__(self, program: Program, arrays: list[Tensor]) -> None:
        self.program = program
        self.types = {name: (y.shape, y.dtype) for name, y in program.lazy(arrays).items()} if program.jit else {}
        shapes = [*(x.shape for x in arrays), *(shape for shape, _ in self.types.values())]
        self.is_plain = not self.types or any(0 in shape for shape in shapes)
        self.jit = TinyJit(self.run)

    def run(self, *buffers: Tensor) -> None:
        count = len(self.types)
        store(self.program.lazy(buffers[count:]), buffers[:count])

    def __call__(self, arrays: list[Tensor]) -> dict[str, Any]:
        if self.is_plain:
            values = self.program.lazy(arrays)
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
