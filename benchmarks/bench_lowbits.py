"""Products and models in 8 bits and bfloat16 on the C backend, against onnxruntime, OpenVINO and torch.

``python benchmarks/bench_lowbits.py [words of the rows] [--threads 2]``: microseconds of process time on one thread,
or of wall-clock time on several, the least of interleaved rounds in one process, and the error of our results against
float32. Models take and return float32. Peers that are not installed are left out.
"""

from __future__ import annotations

import os
import sys

os.environ["OMP_NUM_THREADS"] = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "1"
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]

import contextlib
import copy
import io
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import interleaved

import mithril as ml
from mithril.models import Linear, Relu

THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)
CLOCK = time.process_time if THREADS == 1 else time.perf_counter
REST = 0.0 if THREADS == 1 else 0.1  # seconds: others' threads spin after their turn, on the other cores
ROUNDS = 5 if THREADS == 1 else 25
RNG = np.random.default_rng(0)
Call = Callable[[], Any]
SIZES = [(512, 512, 512), (1024, 1024, 1024), (32, 768, 512), (1, 2048, 2048), (1, 4096, 4096)]


def mlp(*widths: int) -> tuple[Any, torch.nn.Module]:
    model, layers = ml.Model(), []
    for k, (size, width) in enumerate(itertools.pairwise(widths)):
        if k:
            model += Relu()
            layers.append(torch.nn.ReLU())
        model += Linear(size, width, name=f"l{k}")
        layers.append(torch.nn.Linear(size, width))
    return model, torch.nn.Sequential(*layers).eval()


def ours(
    model: Any, params: Any, x: np.ndarray[Any, Any], state: Any = None
) -> tuple[dict[str, Call], dict[str, float]]:
    shapes = {"input": list(x.shape)}
    exact = ml.compile(model, "c", shapes=shapes, static_inference=True)
    exact.bind(params, state)
    samples = [{"input": RNG.standard_normal(x.shape).astype(np.float32)} for _ in range(max(1, 64 // len(x)))]
    ranges = ml.calibrate_ranges(exact, [{"input": x}, *samples])
    settings: dict[str, dict[str, Any]] = {
        "bf16": {"mixed_precision": True},
        "int8": {"quantization": {"ranges": ranges}},
        "int8 dynamic": {"quantization": {"activations": "dynamic"}},
    }
    calls, errors = {"f32": lambda: exact({"input": x})}, {}
    reference = exact({"input": x})["output"]
    for kind, options in settings.items():
        compiled = ml.compile(model, "c", shapes=shapes, static_inference=True, **options)
        compiled.bind(params, state)
        result = compiled({"input": x})["output"]
        errors[kind] = float(np.linalg.norm(result - reference) / np.linalg.norm(reference))
        calls[kind] = lambda compiled=compiled: compiled({"input": x})
    return calls, errors


@contextlib.contextmanager
def quiet() -> Any:
    logging.disable(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def peers(module: torch.nn.Module, x: np.ndarray[Any, Any]) -> dict[str, Call]:
    tensor = torch.from_numpy(x)

    calls: dict[str, Call] = {"torch f32": lambda: module(tensor)}
    small, rounded = copy.deepcopy(module).bfloat16(), tensor.bfloat16()
    calls["torch bf16"] = lambda: small(rounded)
    if isinstance(module, torch.nn.Sequential) and len(module) == 1:
        calls["onednn u8s8 of bytes"] = onednn_product(module[0], tensor)
    if find_spec("onnxscript") is None or find_spec("onnxruntime") is None:
        return calls
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = [
                {"input": RNG.standard_normal(x.shape).astype(np.float32)} for _ in range(max(2, 64 // len(x)))
            ]

        def get_next(self) -> Any:
            return self.rest.pop() if self.rest else None

    folder = Path(tempfile.mkdtemp())
    files = {kind: str(folder / f"{kind}.onnx") for kind in ("f32", "prepared", "int8", "dynamic")}
    with quiet():
        torch.onnx.export(module, (tensor,), files["f32"], dynamo=True, input_names=["input"], verbose=False)
        quant_pre_process(files["f32"], files["prepared"])
        quantize_static(files["prepared"], files["int8"], Reader(), per_channel=True, activation_type=QuantType.QUInt8)
        quantize_dynamic(files["prepared"], files["dynamic"], per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    for kind in ("f32", "int8", "dynamic"):
        session = onnxruntime.InferenceSession(files[kind], options, ["CPUExecutionProvider"])
        calls[f"ort {kind}"] = lambda session=session: session.run(None, {"input": x})
    if find_spec("openvino"):
        import openvino

        for kind, file, hint in (("f32", "f32", "f32"), ("bf16", "f32", "bf16"), ("int8", "int8", "f32")):
            limits = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
            settings = limits | {"INFERENCE_PRECISION_HINT": hint}
            request = openvino.Core().compile_model(files[file], "CPU", settings).create_infer_request()
            calls[f"openvino {kind}"] = lambda request=request: request.infer(
                [x], share_inputs=True, share_outputs=True
            )
    return calls


def onednn_product(layer: torch.nn.Linear, x: torch.Tensor) -> Call:
    """Return oneDNN's product of bytes with float32 results, as PyTorch calls it; x is rounded in advance."""
    weight = layer.weight.detach()
    scales = weight.abs().amax(dim=1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    onednn = torch.ops.onednn
    packed = onednn.qlinear_prepack((weight / scales[:, None]).round().to(torch.int8), list(x.shape))
    scale = float(x.max() - x.min()) / 255
    zero = round(-float(x.min()) / scale)
    rounded = (x / scale + zero).round().clamp(0, 255).to(torch.uint8)

    def run() -> torch.Tensor:
        return onednn.qlinear_pointwise(
            rounded, scale, zero, packed, scales, zeros, layer.bias, 1.0, 0, torch.float32, "none", [], ""
        )

    error = (run() - layer(x)).norm() / layer(x).norm()
    assert error < 0.05, f"oneDNN's product differs from float32 by {error:.1%}"
    return run


def measure(title: str, widths: tuple[int, ...], rows: int) -> None:
    model, module = mlp(*widths)
    x = RNG.standard_normal((rows, widths[0])).astype(np.float32)
    params = {
        f"l{k // 2}.{n.rpartition('.')[2]}": p.detach().numpy() for k, (n, p) in enumerate(module.named_parameters())
    }
    with torch.no_grad():
        calls, errors = ours(model, params, x)
        seconds = interleaved(calls | peers(module, x), 1.5, min_rounds=ROUNDS, clock=CLOCK, rest=REST)
    report(title, seconds, errors)


def report(title: str, seconds: dict[str, float], errors: dict[str, float]) -> None:
    print(title, ", ".join(f"{n} {s * 1e6:.0f}" for n, s in seconds.items()))
    print("  errors:", ", ".join(f"{n} {e:.3%}" for n, e in errors.items()), flush=True)


ROWS: dict[str, tuple[tuple[int, ...], int]] = {
    **{f"linear {m}x{k}x{n}": ((k, n), m) for m, k, n in SIZES},
    "MLP batch 32": ((784, 512, 512, 10), 32),
    "MLP batch 1": ((784, 512, 512, 10), 1),
}


NETWORKS = ("ResNet-18 at 64", "ResNet-18 at 224", "encoder 6 layers, 384")  # rows of bench_c.py


def network(title: str) -> None:
    """Measure a whole network; the peers have other random weights, which does not change their speed."""
    import bench_c

    work = bench_c.WORKS[title]()
    (shape,) = work.shapes.values()
    x = RNG.standard_normal(shape).astype(np.float32)
    plain = ml.compile(work.model, "numpy", shapes={"input": list(x.shape)}, inference=True)
    params, state = plain.randomize_params(0), plain.initial_state()
    tensors = {n: torch.from_numpy(np.array(v)) for n, v in {**params, **state}.items()}
    module = bench_c.Whole(work, bench_c.Plain, tensors).eval()
    with torch.no_grad():
        calls, errors = ours(work.model, params, x, state)
        seconds = interleaved(calls | peers(module, x), 4.0, min_rounds=ROUNDS, clock=CLOCK, rest=REST)
    report(title, seconds, errors)


if __name__ == "__main__":
    wanted = [word for word in sys.argv[1:] if word not in ("--threads", str(THREADS))]
    for title, (widths, rows) in ROWS.items():
        if all(word in title for word in wanted):
            measure(title, widths, rows)
    for title in NETWORKS:
        if all(word in title for word in wanted):
            network(title)
