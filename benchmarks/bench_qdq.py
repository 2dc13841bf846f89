"""Where results of a quantized ONNX file begin to differ: onnxruntime, this project and exact sums, node by node.

``python benchmarks/bench_qdq.py FILE.onnx``: each node of onnxruntime, without its rewrites, against ONNX's reference
on the same operands; then the quantized values of each QuantizeLinear that differ if sums are float64; last the
results.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime
from bench_onnx import declared_inputs
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mithril as ml

Arrays = dict[str, np.ndarray[Any, Any]]


def all_values(model: onnx.ModelProto, inputs: Arrays) -> Arrays:
    """Return every value that onnxruntime computes without rewrites."""
    names = [o for n in model.graph.node for o in n.output if o]
    full = onnx.ModelProto()
    full.CopyFrom(model)
    del full.graph.output[:]
    full.graph.output.extend([helper.make_empty_tensor_value_info(n) for n in names])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(full.SerializeToString(), options, ["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, inputs), strict=True))


def by_reference(model: onnx.ModelProto, node: onnx.NodeProto, values: Arrays) -> Arrays:
    """Evaluate one node by ONNX's reference, products with float64 sums."""
    if node.op_type == "MatMul":
        a, b = (values[n] for n in node.input)
        return {node.output[0]: (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype)}
    operands = {n: values[n] for n in node.input if n}
    kinds = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in operands.items()
    ]
    results = [n for n in node.output if n]
    graph = helper.make_graph([node], "node", kinds, [helper.make_empty_tensor_value_info(n) for n in results])
    single = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    computed = ReferenceEvaluator(single).run(None, operands)
    return {n: np.asarray(x) for n, x in zip(results, computed, strict=True)}


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Return the largest difference over the largest number."""
    return float(np.abs(a.astype(np.float64) - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))


def compare(path: str) -> None:
    model = onnx.load(path)
    inputs = declared_inputs(model)
    values = all_values(model, inputs)
    constants = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    runtime, exact = constants | inputs | values, constants | inputs
    worst: dict[str, float] = {}
    for node in model.graph.node:
        try:
            expected, computed = by_reference(model, node, runtime), by_reference(model, node, exact)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"no reference of {node.op_type}: {str(error).splitlines()[0][:60]}")
            expected = computed = {n: values[n] for n in node.output if n}
        exact |= computed
        for name, array in expected.items():
            if array.dtype.kind in "fiu":
                worst[node.op_type] = max(worst.get(node.op_type, 0.0), distance(values[name], array))
        if node.op_type == "QuantizeLinear":
            steps = np.abs(values[node.output[0]].astype(int) - exact[node.output[0]].astype(int))
            print(
                f"{node.name:50} {np.count_nonzero(steps):7} of {steps.size} quantized differ, by up to {steps.max()}"
            )
    print("onnxruntime, node by node:", ", ".join(f"{op} {d:.0e}" for op, d in sorted(worst.items())))
    name = model.graph.output[0].name
    shapes = {n: list(x.shape) for n, x in inputs.items()}
    result = np.asarray(
        next(iter(ml.compile(ml.from_onnx(path), "numpy", inference=True, shapes=shapes)(inputs).values()))
    )
    exact_result, runtime_result = exact[name], values[name]
    print(f"onnxruntime against exact sums {distance(runtime_result, exact_result):.1e}")
    print(f"mithril against exact sums {distance(result, exact_result):.1e}")
    print(f"mithril against onnxruntime {distance(result, runtime_result):.1e}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        compare(argument)
