"""One row times 4-bit weights: the C backend against ggml, onnxruntime and OpenVINO.

``[OMP_NUM_THREADS=2] python benchmarks/bench_four_bits.py``: microseconds, the least of interleaved rounds in one
process (of processor time with one thread), and gigabytes of quantized values and scales per second. Peers that are not
installed are left out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from interleaved import interleaved

import mithril as ml
from mithril.models import Linear

THREADS = int(os.environ["OMP_NUM_THREADS"])
RNG = np.random.default_rng(0)
SIZES = [(2048, 2048), (4096, 4096), (4096, 16384)]
GROUP = 32
SETTINGS = {
    "int4": {"weights": "int4"},
    "nf4": {"weights": "nf4"},
    "int4, bytes": {"weights": "int4", "activations": "dynamic"},
}
Call = Callable[[], Any]


def ours(x: np.ndarray, weights: np.ndarray) -> dict[str, Call]:
    """Return calls of the C backend."""
    n, k = weights.shape
    model = ml.Model()
    model += Linear(k, n, bias=False, name="l")
    calls = {}
    for title, setting in SETTINGS.items():
        compiled = ml.compile(
            model, "c", shapes={"input": [1, k]}, static_inference=True, quantization=setting, num_threads=THREADS
        )
        compiled.bind({"l.weight": weights})
        compiled({"input": x})
        calls[title] = lambda compiled=compiled: compiled({"input": x})
    return calls


def onnxruntime_calls(x: np.ndarray, weights: np.ndarray) -> dict[str, Call]:
    """Return calls of MatMulNBits with float32 and with 8-bit sums."""
    import onnx
    import onnxruntime

    n, k = weights.shape
    quantized = RNG.integers(0, 256, (n, k // GROUP, GROUP // 2), np.uint8)
    scales = RNG.uniform(0.01, 0.02, n * k // GROUP).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    calls = {}
    for level in (1, 4):
        sizes = {"K": k, "N": n, "bits": 4, "block_size": GROUP, "accuracy_level": level}
        node = onnx.helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)
        values = [onnx.helper.make_tensor_value_info(name, 1, [1, size]) for name, size in (("x", k), ("y", n))]
        tensors = [onnx.numpy_helper.from_array(a, name) for a, name in ((quantized, "w"), (scales, "s"))]
        graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], tensors)
        opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
        content = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
        calls[f"onnxruntime level {level}"] = lambda session=session: session.run(None, {"x": x})
    return calls


def openvino_calls(x: np.ndarray, weights: np.ndarray) -> dict[str, Call]:
    """Return a call of OpenVINO with signed 4-bit weights and a scale per group."""
    import openvino
    from openvino import opset13 as o

    n, k = weights.shape
    packed = RNG.integers(0, 256, n * k // 2, np.uint8)
    tensor = openvino.Tensor(packed, [n, k // GROUP, GROUP], openvino.Type.i4)
    numbers = o.convert(o.constant(tensor), np.float16)
    scaled = o.multiply(numbers, o.constant(RNG.uniform(0.01, 0.02, (n, k // GROUP, 1)).astype(np.float16)))
    matrix = o.convert(o.reshape(scaled, o.constant(np.array([n, k])), False), np.float32)
    row = o.parameter([1, k], np.float32)
    model = openvino.Model([o.matmul(row, matrix, False, True)], [row])
    settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return {"openvino": lambda: request.infer([x], share_inputs=True, share_outputs=True)}


def ggml_calls(x: np.ndarray, weights: np.ndarray) -> dict[str, Call]:
    """Return calls of ggml by its backend of this project."""
    model = ml.Model()
    model += Linear(weights.shape[1], weights.shape[0], bias=False, name="l")
    calls = {}
    for kind in ("q4_k", "q4_0"):
        backend = ml.GGMLBackend(quantize=kind, num_threads=THREADS)
        compiled = ml.compile(model, backend, shapes={"input": list(x.shape)}, inference=True)
        compiled.bind({"l.weight": weights})
        compiled({"input": x})
        calls[f"ggml {kind}"] = lambda compiled=compiled: compiled({"input": x})
    return calls


def main() -> None:
    clock = time.process_time if THREADS == 1 else time.perf_counter
    for k, n in SIZES:
        x = RNG.standard_normal((1, k)).astype(np.float32)
        weights = RNG.standard_normal((n, k)).astype(np.float32) * 0.05
        calls = ours(x, weights)
        for package, peer in (
            ("onnxruntime", onnxruntime_calls),
            ("openvino", openvino_calls),
            ("mithril_ggml", ggml_calls),
        ):
            if find_spec(package):
                calls |= peer(x, weights)
        seconds = interleaved(calls, 2.0, min_rounds=10, clock=clock)
        size = n * k / 2 + 2 * n * k / GROUP
        print(
            f"1x{k}x{n}", ", ".join(f"{t} {s * 1e6:.0f} ({size / s / 1e9:.1f})" for t, s in seconds.items()), flush=True
        )


if __name__ == "__main__":
    main()
