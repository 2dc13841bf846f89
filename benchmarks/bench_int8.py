"""Networks in 8 bits on the C backend: speed and accuracy on one QDQ file, against onnxruntime and OpenVINO.

``python benchmarks/bench_int8.py FILE.onnx ...``: onnxruntime quantizes each file statically (uint8 activations, int8
weights per channel); all engines run the quantized file. Microseconds of process time on one thread, the least of
interleaved rounds (``THREADS=2``: of wall time on two), the error of each engine's results against onnxruntime's of the
float32 file, and the share of inputs whose largest result is the same. ``--dynamic`` quantizes dynamically instead.
"""

from __future__ import annotations

import os

os.environ["THREADS"] = os.environ.get("THREADS", "1")
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["THREADS"]

import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from bench_onnx import _declared_inputs
from interleaved import interleaved
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process

import mithril as ml

THREADS = int(os.environ["THREADS"])
SAMPLES, TESTED = 16, 16  # inputs of the calibration and of the comparison
RNG = np.random.default_rng(0)
Inputs = dict[str, np.ndarray[Any, Any]]


def similar(inputs: Inputs) -> Inputs:
    """Return other random inputs of the same types."""
    return {
        n: RNG.standard_normal(x.shape).astype(x.dtype)
        if x.dtype.kind == "f"
        else RNG.permuted(x.reshape(-1)).reshape(x.shape)
        for n, x in inputs.items()
    }


class Calibration(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
    def __init__(self, inputs: Inputs) -> None:
        self.left = iter([inputs, *(similar(inputs) for _ in range(SAMPLES - 1))])

    def get_next(self) -> Any:
        return next(self.left, None)


def session(file: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])


def openvino_request(file: str, inputs: Inputs) -> Any:
    import openvino

    model = openvino.Core().read_model(file)
    model.reshape({n: list(x.shape) for n, x in inputs.items()})
    settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    return openvino.Core().compile_model(model, "CPU", settings).create_infer_request()


def engines(file: str, inputs: Inputs) -> dict[str, Any]:
    """Return a function of the inputs for each engine."""
    shapes = {n: list(x.shape) for n, x in inputs.items()}
    compiled = ml.compile(ml.from_onnx(file), "c", static_inference=True, shapes=shapes, num_threads=THREADS)
    request, runtime = openvino_request(file, inputs), session(file)
    (output,) = [o.name for o in runtime.get_outputs()][:1]
    return {
        "mithril": lambda x: next(iter(compiled(x).values())),
        "onnxruntime": lambda x: runtime.run([output], x)[0],
        "openvino": lambda x: request.infer(x, share_inputs=True)[0],
    }


def measure(path: str, is_dynamic: bool) -> None:
    inputs = _declared_inputs(onnx.load(path))
    with tempfile.TemporaryDirectory() as folder:
        prepared, small = f"{folder}/prepared.onnx", f"{folder}/small.onnx"
        quant_pre_process(path, prepared)
        if is_dynamic:
            quantization.quantize_dynamic(prepared, small, per_channel=True)
        else:
            kinds = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
            quantization.quantize_static(prepared, small, Calibration(inputs), per_channel=True, **kinds)
        calls, exact = engines(small, inputs), session(path)
        tested = [inputs, *(similar(inputs) for _ in range(TESTED - 1))]
        references = [exact.run(None, x)[0] for x in tested]
        clock = time.process_time if THREADS == 1 else time.perf_counter
        seconds = interleaved({n: lambda f=f: f(inputs) for n, f in calls.items()}, 3.0, min_rounds=10, clock=clock)
        print(f"{Path(path).stem}, {THREADS} threads")
        for name, call in calls.items():
            results = [np.array(call(x)) for x in tested]
            errors = [np.linalg.norm(y - r) / np.linalg.norm(r) for y, r in zip(results, references, strict=True)]
            agreement = np.mean([np.argmax(y) == np.argmax(r) for y, r in zip(results, references, strict=True)])
            print(
                f"  {name:12} {seconds[name] * 1e6:8.0f} us, error {np.mean(errors):.2%}, same largest {agreement:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for argument in sys.argv[1:]:
        if not argument.startswith("--"):
            measure(argument, "--dynamic" in sys.argv)
