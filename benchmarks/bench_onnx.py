"""ONNX: node tests per backend, malformed files, imported models against onnxruntime and OpenVINO.

python benchmarks/bench_onnx.py nodes [numpy jax torch c]      passed, wrong, unsupported of the standard's cases
python benchmarks/bench_onnx.py suites                         expanded, simple and pytorch-operator suites on numpy
python benchmarks/bench_onnx.py fuzz [2000]                    outcomes of malformed files
python benchmarks/bench_onnx.py equal FILE.onnx ...            largest difference to onnxruntime, on numpy
python benchmarks/bench_onnx.py speed FILE.onnx ...            milliseconds on the C backend, one thread
"""

from __future__ import annotations

import collections
import random
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import interleaved

import mithril as ml
from mithril_onnx import fuzzing, node_tests

SIZES = {"batch": 1, "length": 128}


def nodes(*backends: str) -> None:
    for backend in backends or ("numpy", "jax", "torch", "c"):
        start = time.perf_counter()
        outcomes = [node_tests.run(case, backend) for case in node_tests.cases()]
        counts = node_tests.summary(outcomes)
        print(f"{backend:6}", f"{len(outcomes)} cases", dict(counts), f"{time.perf_counter() - start:.0f} s")


def suites() -> None:
    for title, kind, expanded in (
        ("expanded", "node", True),
        ("simple", "simple", False),
        ("pytorch-operator", "pytorch-operator", False),
        ("pytorch-converted", "pytorch-converted", False),
    ):
        outcomes = [node_tests.run(case, "numpy") for case in node_tests.cases(kind, expanded)]
        failing = [f"{o.name}: {o.status}" for o in outcomes if o.status != "pass"]
        print(f"{title:18}", dict(node_tests.summary(outcomes)), *failing)


def fuzz(count: str = "2000") -> None:
    tried = collections.Counter[str]()
    for attempt in fuzzing.attempts(fuzzing.sources(), random.Random(1), int(count)):
        outcome = "imports" if attempt.error is None else "error of mithril" if attempt.fine else "foreign error"
        tried[f"{attempt.mutation}: {outcome}"] += 1
        if not attempt.fine:
            print(attempt.mutation, repr(attempt.error)[:200])
    for outcome, number in sorted(tried.items()):
        print(f"{number:6} {outcome}")


def _inputs(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    arrays = {}
    for name, shape in model.shapes.items():
        sizes = [n if isinstance(n, int) else SIZES.get(str(n), 2) for n in shape]
        kind = model.types[name]
        if kind.is_float:
            arrays[name] = rng.normal(size=sizes).astype(kind.numpy)
        else:
            arrays[name] = (
                rng.integers(0, 100, sizes).astype(kind.numpy) if "mask" not in name else np.ones(sizes, kind.numpy)
            )
    return arrays


def _session(path: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def equal(*paths: str) -> None:
    for path in paths:
        try:
            model = ml.from_onnx(path)
            inputs = _inputs(model)
            compiled = ml.compile(model, "numpy", inference=True)
            mithril_seconds = [np.asarray(y) for y in compiled(inputs).values()]
        except ml.MithrilError as error:
            print(f"{Path(path).stem:24} {error}")
            continue
        session = _session(path)
        theirs = session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs.values())))
        worst = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in zip(mithril_seconds, theirs))
        print(f"{Path(path).stem:24} {len(session.get_outputs())} outputs, largest relative difference {worst:.1e}")


def _openvino(path: str, inputs: dict[str, Any]) -> Any:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    model.reshape({k: list(x.shape) for k, x in enumerate(inputs.values())})
    compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    arrays = dict(enumerate(inputs.values()))
    return lambda: request.infer(arrays)


def speed(*paths: str) -> None:
    print(f"{'file':24}   ORT ms    OV ms  ours ms ORT/ours  OV/ours load+compile s  memory MB")
    for path in paths:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        model = ml.from_onnx(path)
        inputs = _inputs(model)
        shapes = {n: list(x.shape) for n, x in inputs.items()}
        compiled = ml.compile(model, "c", inference=True, static_inference=True, shapes=shapes)
        compiled(inputs)
        seconds = time.perf_counter() - start
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        session = _session(path)
        feeds = dict(zip([i.name for i in session.get_inputs()], inputs.values()))
        ways = {
            "ort": lambda: session.run(None, feeds),
            "ov": _openvino(path, inputs),
            "ours": lambda: compiled(inputs),
        }
        t = interleaved(ways, seconds=8.0, min_rounds=12, clock=time.process_time)
        ort, ov, mithril_result = (t[k] * 1e3 for k in ("ort", "ov", "ours"))
        figures = f"{ort:8.2f} {ov:8.2f} {mithril_result:8.2f} {ort / mithril_result:8.2f} {ov / mithril_result:8.2f}"
        print(f"{Path(path).stem:24} {figures} {seconds:8.1f} {memory:12.0f}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    command, *arguments = sys.argv[1:]
    {"nodes": nodes, "suites": suites, "fuzz": fuzz, "equal": equal, "speed": speed}[command](*arguments)
