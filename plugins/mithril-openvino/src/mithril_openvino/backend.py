"""``ml.OpenVINOBackend``: the generated function builds a model of OpenVINO, which is compiled for each size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import openvino
import openvino.opset15 as ov

from mithril.backend import BuildOptions, Capabilities, Forward, Lowerings, SourceBackend, as_numpy
from mithril.graph import DType, Graph, bool_, dtype as as_dtype, float32, int32, iterate
from mithril_openvino.lowering import DIFFERENT, native, table
from mithril_openvino.nodes import result_of


class OpenVINOBackend(SourceBackend):
    """Arrays are NumPy's. ``num_threads`` of ``ml.compile`` limits the threads of a program."""

    name = "openvino"
    dtypes: ClassVar[frozenset[DType]] = frozenset({bool_, float32, int32})  # the CPU computes others as one of these
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": native}

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, recompiles=True, threads=True)

    def array(self, data: Any, dtype: Any = None) -> Any:
        array = as_numpy(data, self.dtype)
        return np.array(array, None if dtype is None else as_dtype(dtype).numpy)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, np.ndarray | np.generic)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        if options.semantics == "native":
            for name in sorted(DIFFERENT & {node.op.name for node, _ in iterate(graph)}):
                options.decisions.record("choice", f"'{name}' as OpenVINO has it: nan may be ignored")
        return Program(forward, graph, options)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        return {"openvino": openvino.get_version(), "devices": ", ".join(openvino.Core().available_devices)}


class Program:
    """The function of a program: one compiled model for each combination of shapes."""

    def __init__(self, forward: Forward, graph: Graph, options: BuildOptions) -> None:
        self.forward = forward
        self.inputs = [(i.name, i.role == "param", np.dtype(i.type.dtype.numpy)) for i in graph.arguments]
        self.settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}  # else bfloat16 where the CPU has it
        if options.num_threads is not None:
            self.settings["INFERENCE_NUM_THREADS"] = options.num_threads
        self.models: dict[Any, Compiled] = {}
        self.lock = Lock()  # a request runs one call at a time

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        arrays = [
            np.asarray((params if is_param else inputs)[name], dtype, "C") for name, is_param, dtype in self.inputs
        ]
        shapes = tuple(a.shape for a in arrays)
        with self.lock:
            if shapes not in self.models:
                self.models[shapes] = Compiled(self, arrays)
            return self.models[shapes](arrays)

    def forget_sizes(self) -> None:
        """Release all compiled models."""
        self.models.clear()


class Compiled:
    """A model that is compiled for the shapes of some arrays."""

    def __init__(self, program: Program, arrays: list[Any]) -> None:
        arguments: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        parameters = [ov.parameter(array.shape, array.dtype) for array in arrays]
        for (name, is_param, _), parameter in zip(program.inputs, parameters, strict=True):
            arguments[is_param][name] = parameter.output(0)
        outputs = program.forward(arguments[True], arguments[False])
        # OpenVINO does not write a result that is a parameter
        sources = {y: result_of(x).get_node().get_friendly_name() for y, x in outputs.items()}
        positions = {parameter.get_friendly_name(): k for k, parameter in enumerate(parameters)}
        self.copied = {y: positions[source] for y, source in sources.items() if source in positions}
        self.names = list(outputs)
        results = {y: ov.result(x) for y, x in outputs.items() if y not in self.copied}
        self.types = {
            y: (tuple(x.get_output_shape(0)), x.get_output_element_type(0).to_dtype()) for y, x in results.items()
        }
        model = openvino.Model(list(results.values()), parameters)
        self.request = openvino.Core().compile_model(model, "CPU", program.settings).create_infer_request()

    def __call__(self, arrays: list[Any]) -> dict[str, Any]:
        results = {y: np.empty(shape, dtype) for y, (shape, dtype) in self.types.items()}
        for k, array in enumerate(arrays):
            self.request.set_input_tensor(k, openvino.Tensor(array, shared_memory=True))
        for k, array in enumerate(results.values()):
            self.request.set_output_tensor(k, openvino.Tensor(array, shared_memory=True))
        self.request.infer()
        results.update((y, arrays[k].copy()) for y, k in self.copied.items())
        return {y: results[y] for y in self.names}
