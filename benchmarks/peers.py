"""Other engines of inference on CPUs, for benchmarks: sessions with the threads of the harness."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness import THREADS

Call = Callable[[], Any]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters and quantizers, which write to the console and the log."""
    logging.disable(logging.ERROR)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def onnxruntime_session(model: str | bytes) -> Any:
    """Return a session of a file or of its content."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = THREADS, 1, 4
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def onnxruntime_call(model: str | bytes, arrays: list[Any]) -> Call:
    """Return a call of onnxruntime with the arrays as its inputs, in order; it returns the first result."""
    session = onnxruntime_session(model)
    feed = dict(zip([i.name for i in session.get_inputs()], arrays, strict=True))
    return lambda: session.run(None, feed)[0]


def openvino_request(model: Any, precision: str = "f32", **more: Any) -> Any:
    """Return a request of OpenVINO for a model or the path of a file."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    return openvino.Core().compile_model(model, "CPU", settings | more).create_infer_request()


def openvino_call(model: Any, arrays: list[Any], precision: str = "f32", **more: Any) -> Call:
    """Return a call of OpenVINO with the arrays as its inputs, in order; it returns the first result."""
    request = openvino_request(model, precision, **more)
    return lambda: request.infer(arrays, share_inputs=True, share_outputs=True)[0]


def quantize(path: str, static: str, dynamic: str, samples: list[Mapping[str, Any]]) -> None:
    """Write a file quantized by onnxruntime: statically (uint8 activations, int8 weights per channel), dynamically."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.left = iter(samples)

        def get_next(self) -> Any:
            return next(self.left, None)

    with quiet():
        prepared = f"{static}.prepared"
        quant_pre_process(path, prepared)
        kinds = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
        quantization.quantize_static(prepared, static, Samples(), per_channel=True, **kinds)
        quantization.quantize_dynamic(prepared, dynamic, per_channel=True)
