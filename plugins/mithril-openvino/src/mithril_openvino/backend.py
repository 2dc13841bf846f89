"""``ml.OpenVINOBackend``: the generated function builds a model of OpenVINO, which is compiled for each size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import openvino
import openvino.opset15 as ov

from mithril.backend import BuildOptions, Capabilities, Forward, Lowerings, ProgramBySizes, SourceBackend, corrections
from mithril.graph import DType, Graph, bool_, evaluate, float32, int32
from mithril_openvino.lowering import native, table
from mithril_openvino.nodes import dtype_of, shape_of


class OpenVINOBackend(SourceBackend):
    """Arrays are NumPy's. ``num_threads`` of ``ml.compile`` limits the threads of a program."""

    name = "openvino"
    dtypes: ClassVar[frozenset[DType]] = frozenset({bool_, float32, int32})  # the CPU computes others as one of these
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": native}
    differences: ClassVar[Mapping[str, str]] = corrections.NAN_IGNORED

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, recompiles=True, threads=True)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        return Program(forward, graph, options)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        return {"openvino": openvino.get_version(), "devices": ", ".join(openvino.Core().available_devices)}


class Program(ProgramBySizes):
    """The function of a program; its models compute in float32, also where the CPU has bfloat16."""

    def __init__(self, forward: Forward, graph: Graph, options: BuildOptions) -> None:
        super().__init__(forward, graph)
        self.graph, self.decisions = graph, options.decisions
        self.settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": options.num_threads or 0}

    def array(self, x: Any, dtype: DType) -> Any:
        return np.asarray(x, dtype.numpy, "C")

    def compile(self, arrays: list[Any]) -> Callable[[list[Any]], dict[str, Any]]:
        if any(0 in array.shape for array in arrays):  # OpenVINO 2026.4 ends the process for some of these
            self.decisions.record("fallback", "arrays without elements on openvino: the NumPy references run")
            names = [name for name, _, _ in self.arguments]
            return lambda arrays: evaluate(self.graph, dict(zip(names, arrays, strict=True)))
        return CompiledModel(self, arrays)


class CompiledModel:
    """A model that is compiled for the shapes of some arrays."""

    def __init__(self, program: Program, arrays: list[Any]) -> None:
        parameters = [ov.parameter(array.shape, array.dtype) for array in arrays]
        outputs = program.results([parameter.output(0) for parameter in parameters])
        self.types = {y: (shape_of(x), dtype_of(x)) for y, x in outputs.items()}
        model = openvino.Model([ov.result(x) for x in outputs.values()], parameters)
        try:
            compiled = openvino.Core().compile_model(model, "CPU", program.settings)
        except RuntimeError as error:
            if "Loop detected" not in str(error):
                raise
            # OpenVINO 2026.4 fails to join the element-wise operations of some graphs, and computes them one by one
            compiled = openvino.Core().compile_model(model, "CPU", {**program.settings, "SNIPPETS_MODE": "DISABLE"})
        self.request = compiled.create_infer_request()
        self.bound: dict[Any, int] = {}  # addresses, as setting a tensor takes 4 us: weights stay where they are

    def __call__(self, arrays: list[Any]) -> dict[str, Any]:
        results = {y: np.empty(shape, dtype) for y, (shape, dtype) in self.types.items()}
        self._bind(self.request.set_input_tensor, arrays)
        self._bind(self.request.set_output_tensor, results.values())
        self.request.infer()
        return results

    def _bind(self, set_tensor: Callable[..., None], arrays: Iterable[Any]) -> None:
        for k, array in enumerate(arrays):
            address = array.__array_interface__["data"][0]
            if self.bound.get((set_tensor.__name__, k)) != address:
                set_tensor(k, openvino.Tensor(array, shared_memory=True))
                self.bound[set_tensor.__name__, k] = address
