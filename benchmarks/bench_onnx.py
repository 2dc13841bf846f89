"""ONNX: node tests per backend, malformed files, imported models against onnxruntime and OpenVINO.

python benchmarks/bench_onnx.py nodes [numpy jax torch c]      passed, wrong, unsupported of the standard's cases
python benchmarks/bench_onnx.py suites                         expanded, simple and pytorch-operator suites on numpy
python benchmarks/bench_onnx.py fuzz [2000]                    outcomes of malformed files
python benchmarks/bench_onnx.py equal FILE.onnx ...            largest difference to onnxruntime, on numpy
python benchmarks/bench_onnx.py speed FILE.onnx ...            milliseconds on the C backend, one thread
python benchmarks/bench_onnx.py load FILE.onnx ...             seconds and peak memory of loading and the first call
python benchmarks/bench_onnx.py exported FOLDER [WORD ...]     networks exported by torch, imported, against PyTorch
python benchmarks/bench_onnx.py traced FOLDER [WORD ...]       the same by the older exporter of torch, which traces
python benchmarks/bench_onnx.py quantized FILE.onnx ...        files quantized by onnxruntime, on NumPy and in C
"""

from __future__ import annotations

import collections
import importlib
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import harness
import numpy as np
from peers import onnxruntime_session, openvino_call, quantize

import mithril as ml
from mithril_onnx import node_tests
from mithril_testing.damaged_files import attempts

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
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/mithril-onnx/tests"))
    from damaged_models import CHANGES, sources

    def read(content: bytes) -> None:
        ml.compile(ml.from_onnx(content), "numpy", inference=True)

    tried = collections.Counter[str]()
    for attempt in attempts(sources(), CHANGES, read, seed=1, count=int(count)):
        outcome = "foreign error" if attempt.is_foreign else "error of mithril" if attempt.error else "imports"
        tried[f"{attempt.change}: {outcome}"] += 1
        if attempt.is_foreign:
            print(str(attempt)[:200])
    for outcome, number in sorted(tried.items()):
        print(f"{number:6} {outcome}")


def equal(*paths: str) -> None:
    for path in paths:
        try:
            model = ml.from_onnx(path)
            inputs = random_inputs(path)
            compiled = ml.compile(model, "numpy", inference=True)
            mithril_seconds = [np.asarray(y) for y in compiled(inputs).values()]
        except ml.MithrilError as error:
            print(f"{Path(path).stem:24} {error}")
            continue
        session = onnxruntime_session(path)
        theirs = session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs.values())))
        worst = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in zip(mithril_seconds, theirs))
        print(f"{Path(path).stem:24} {len(session.get_outputs())} outputs, largest relative difference {worst:.1e}")


def _openvino(path: str, inputs: dict[str, Any]) -> Any:
    import openvino

    model = openvino.Core().read_model(path)
    model.reshape({k: list(x.shape) for k, x in enumerate(inputs.values())})
    return openvino_call(model, list(inputs.values()))


def speed(*paths: str) -> None:
    print(f"{'file':24}   ORT ms    OV ms  ours ms ORT/ours  OV/ours load+compile s  memory MB")
    for path in paths:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        model = ml.from_onnx(path)
        inputs = random_inputs(path)
        shapes = {n: list(x.shape) for n, x in inputs.items()}
        compiled = ml.compile(model, "c", inference=True, static_inference=True, shapes=shapes)
        compiled(inputs)
        seconds = time.perf_counter() - start
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        session = onnxruntime_session(path)
        feeds = dict(zip([i.name for i in session.get_inputs()], inputs.values()))
        ways = {
            "ort": lambda: session.run(None, feeds),
            "ov": _openvino(path, inputs),
            "ours": lambda: compiled(inputs),
        }
        t = harness.interleaved(ways, seconds=8.0, min_rounds=12)
        ort, ov, mithril_result = (t[k] * 1e3 for k in ("ort", "ov", "ours"))
        figures = f"{ort:8.2f} {ov:8.2f} {mithril_result:8.2f} {ort / mithril_result:8.2f} {ov / mithril_result:8.2f}"
        print(f"{Path(path).stem:24} {figures} {seconds:8.1f} {memory:12.0f}", flush=True)


ENGINES = ("onnxruntime", "openvino", "mithril", "mithril, cached")


def load(*paths: str) -> None:
    """Measure each engine in a process of its own, whose peak memory includes its libraries."""
    print(f"{'file':24} {'engine':16}  seconds   peak MB")
    for path in paths:
        for engine in ENGINES:
            for _ in range(2 if engine == ENGINES[-1] else 1):  # the first process fills the cache
                seconds, peak = harness.fresh(first, engine, str(Path(path).absolute()))
            print(f"{Path(path).stem:24} {engine:16} {seconds:8.2f} {peak:9.0f}", flush=True)


def first(engine: str, path: str) -> tuple[float, float]:
    """Return the seconds from the file to the first result, without imports, and the peak memory of the process."""
    import onnx

    inputs = declared_inputs(onnx.load(path, load_external_data=False))
    if engine.startswith("mithril"):
        importlib.import_module("mithril_onnx.model"), importlib.import_module("mithril_cbackend.program.compile_graph")
    else:
        importlib.import_module(engine)
    start = time.perf_counter()
    if engine == "onnxruntime":
        onnxruntime_session(path).run(None, inputs)
    elif engine == "openvino":
        _openvino(path, inputs)()
    else:
        shapes = {n: list(x.shape) for n, x in inputs.items()}
        options = {"static_inference": True, "shapes": shapes, "cache": engine == ENGINES[-1]}
        ml.compile(path, "c", **options)(inputs)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def declared_inputs(proto: Any, rng: np.random.Generator | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of the declared shapes: ones, or random numbers except in masks."""
    from onnx import helper

    arrays = {}
    for declared in proto.graph.input:
        kind = declared.type.tensor_type
        sizes = [d.dim_value or SIZES.get(d.dim_param, 2) for d in kind.shape.dim]
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        array = np.ones(sizes, dtype)
        if rng is not None and "mask" not in declared.name:
            array = (rng.normal(size=sizes) if dtype.kind == "f" else rng.integers(0, 100, sizes)).astype(dtype)
        arrays[declared.name] = array
    return arrays


def random_inputs(path: str) -> dict[str, np.ndarray[Any, Any]]:
    import onnx

    return declared_inputs(onnx.load(path, load_external_data=False), np.random.default_rng(0))


def exported(folder: str, *words: str) -> None:
    """Export networks by torch and compare the imported files with PyTorch, on NumPy."""
    _exported(folder, words, {"dynamo": True, "external_data": False})


def traced(folder: str, *words: str) -> None:
    """Compare networks as ``exported`` does, with files of the older exporter."""
    _exported(folder, words, {"dynamo": False, "opset_version": 17})


def _exported(folder: str, words: tuple[str, ...], options: dict[str, Any]) -> None:
    import torch
    from bench_import_torch import images, language, tolerate_missing_kernels
    from onnx_models import randomize

    tolerate_missing_kernels()
    equal_networks, total = 0, 0
    for name, make, args, kwargs in (*images(), *language()):
        if words and not any(word in name for word in words):
            continue
        total += 1
        torch.manual_seed(0)
        network, path = randomize(make().eval()), Path(folder) / f"{name.replace('/', '_')}.onnx"
        try:
            torch.onnx.export(network, args, str(path), kwargs=dict(kwargs), verbose=False, **options)
            model = ml.from_onnx(str(path))
            arrays = dict(zip(model.inputs, (x.numpy() for x in (*args, *kwargs.values())), strict=True))
            results = [np.asarray(y) for y in ml.compile(model, "numpy", inference=True)(arrays).values()]
            with torch.no_grad():
                leaves = torch.utils._pytree.tree_leaves(network(*args, **kwargs))
            expected = [x.numpy() for x in leaves if x is not None]
            worst = max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(results, expected, strict=True))
        except Exception as error:
            print(f"failed  {name:40} {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        finally:
            path.unlink(missing_ok=True)
        equal_networks += worst <= 1e-5
        print(f"{'equal' if worst <= 1e-5 else 'WRONG'}  {name:40} {worst:.1e}", flush=True)
    print(f"{equal_networks} of {total} networks within 1e-5 of PyTorch")


def quantized(*paths: str) -> None:
    """Quantize files by onnxruntime, statically to QDQ and dynamically, and compare results with onnxruntime's."""
    import onnx

    for path in paths:
        inputs = declared_inputs(onnx.load(path))
        shapes = {n: list(x.shape) for n, x in inputs.items()}
        with tempfile.TemporaryDirectory() as folder:
            files = [f"{folder}/{kind}.onnx" for kind in ("static", "dynamic")]
            quantize(path, *files, [inputs])
            for file in files:
                theirs = onnxruntime_session(file).run(None, inputs)[0]
                for backend in ("numpy", "c"):
                    results = ml.compile(ml.from_onnx(file), backend, inference=True, shapes=shapes)(inputs)
                    y = np.asarray(next(iter(results.values())))
                    error = float(np.abs(y - theirs).max() / np.abs(theirs).max())
                    cosine = float((y * theirs).sum() / np.sqrt((y * y).sum() * (theirs * theirs).sum()))
                    print(f"{Path(path).stem:20} {Path(file).stem:8} {backend:6} error {error:.1e} cosine {cosine:.6f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    command, *arguments = harness.arguments(__doc__, "PART [FILE]").words
    commands = {"nodes": nodes, "suites": suites, "fuzz": fuzz, "equal": equal, "speed": speed, "load": load}
    commands |= {"exported": exported, "traced": traced, "quantized": quantized}
    commands[command](*arguments)
