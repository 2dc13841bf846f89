"""The C backend in 8 bits, 4 bits and bfloat16, against onnxruntime, OpenVINO, torch and ggml.

``python benchmarks/bench_bits.py products|signals|rows [words of the rows] [--threads 2]``, ``... files FILE ...``:
microseconds of processor time on one thread, of time on the clock on several, the least of interleaved rounds in one
process, and errors of results. Peers that are not installed are left out.

``products`` are products and networks that take and return float32; ``signals`` a network of one spatial axis; ``rows``
one row times 4-bit weights in groups of 32, with gigabytes of quantized values and scales per second. ``files``
quantizes each file by onnxruntime, statically (uint8 activations, int8 weights per channel) or with ``--dynamic``; all
engines run the quantized file: the error of each one's results against onnxruntime's of the float32 file, and the share
of inputs whose largest result is the same.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from harness import THREADS
from models import RNG, Array, perceptron, random
from peers import Call, onnxruntime_call, onnxruntime_session, openvino_call, openvino_request, quantize, quiet

import mithril as ml
from mithril.models import Add, Conv1d, Flatten, GlobalAvgPool1d, Linear, MaxPool1d, Model, Relu

torch.set_num_threads(THREADS)
ROUNDS = 5 if THREADS == 1 else 25
Inputs = dict[str, Array]


def distance(result: Any, expected: Any) -> float:
    """Return the error relative to the norm."""
    return float(np.linalg.norm(np.asarray(result, np.float32) - expected) / np.linalg.norm(expected))


def ours(model: Any, params: Any, inputs: Inputs, kinds: dict[str, dict[str, Any]], state: Any = None) -> Any:
    """Return calls of the C backend in float32 and other kinds of numbers, whose errors are returned, too.

    The option ``"ranges"`` represents ranges that are calibrated by random samples.
    """
    shapes = {n: list(x.shape) for n, x in inputs.items()}
    exact = ml.compile(model, "c", shapes=shapes, static_inference=True, num_threads=THREADS)
    exact.bind(exact.randomize_params(seed=0) if params is None else params, state)
    rows = next(iter(inputs.values())).shape[0]
    samples = [inputs, *({n: random(*x.shape) for n, x in inputs.items()} for _ in range(max(2, 64 // rows)))]
    ranges = ml.calibrate_ranges(exact, samples)
    expected = np.array(exact(inputs)["output"])
    calls: dict[str, Call] = {"f32": partial(exact, inputs)}
    errors = {}
    for kind, options in kinds.items():
        if options.get("quantization") == "ranges":
            options = {"quantization": {"ranges": ranges}}
        compiled = ml.compile(model, "c", shapes=shapes, static_inference=True, num_threads=THREADS, **options)
        compiled.bind(exact.params, state)
        errors[kind] = distance(compiled(inputs)["output"], expected)
        calls[kind] = partial(compiled, inputs)
    return calls, errors


# -- products and networks --------------------------------------------------------------------------------------------
SIZES = [(512, 512, 512), (1024, 1024, 1024), (32, 768, 512), (1, 2048, 2048), (1, 4096, 4096)]
PRODUCTS: dict[str, tuple[tuple[int, ...], int]] = {
    **{f"linear {m}x{k}x{n}": ((k, n), m) for m, k, n in SIZES},
    "MLP batch 32": ((784, 512, 512, 10), 32),
    "MLP batch 1": ((784, 512, 512, 10), 1),
}
NETWORKS = ("ResNet-18 at 64", "ResNet-18 at 224", "encoder 6 layers, 384")  # rows of bench_c.py
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": True},
    "int8": {"quantization": "ranges"},
    "int8 dynamic": {"quantization": {"activations": "dynamic"}},
}


def peers(module: torch.nn.Module, x: Array) -> dict[str, Call]:
    tensor = torch.from_numpy(x)
    calls: dict[str, Call] = {"torch f32": lambda: module(tensor)}
    small, rounded = copy.deepcopy(module).bfloat16(), tensor.bfloat16()
    calls["torch bf16"] = lambda: small(rounded)
    if isinstance(module, torch.nn.Sequential) and len(module) == 1:
        calls["onednn u8s8 of bytes"] = onednn_product(module[0], tensor)
    if find_spec("onnxscript") is None or find_spec("onnxruntime") is None:
        return calls
    folder = Path(tempfile.mkdtemp())
    files = {kind: str(folder / f"{kind}.onnx") for kind in ("f32", "int8", "dynamic")}
    samples = [{"input": random(*x.shape)} for _ in range(max(2, 64 // len(x)))]
    with quiet():
        torch.onnx.export(module, (tensor,), files["f32"], dynamo=True, input_names=["input"], verbose=False)
    quantize(files["f32"], files["int8"], files["dynamic"], samples)
    calls |= {f"ort {kind}": onnxruntime_call(file, [x]) for kind, file in files.items()}
    if find_spec("openvino"):
        for kind, file, precision in (("f32", "f32", "f32"), ("bf16", "f32", "bf16"), ("int8", "int8", "f32")):
            calls[f"openvino {kind}"] = openvino_call(files[file], [x], precision)
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


def multilayer(widths: tuple[int, ...], rows: int) -> tuple[Any, ...]:
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers[:-1]).eval()
    weights = enumerate(module.named_parameters())
    params = {f"l{k // 2}.{n.rpartition('.')[2]}": p.detach().numpy() for k, (n, p) in weights}
    return perceptron(*widths[1:]), params, None, module, random(rows, widths[0])


def network(title: str) -> tuple[Any, ...]:
    """Return a row of ``bench_c.py``; the peers have the same random weights."""
    import bench_c

    work = bench_c.WORKS[title]()
    (shape,) = work.shapes.values()
    plain = ml.compile(work.model, "numpy", shapes={"input": list(shape)}, inference=True)
    params, state = plain.randomize_params(0), plain.initial_state()
    tensors = {n: torch.from_numpy(np.array(v)) for n, v in {**params, **state}.items()}
    return work.model, params, state, bench_c.Whole(work, bench_c.Plain, tensors).eval(), random(*shape)


def products(words: list[str], dynamic: bool) -> None:
    rows: dict[str, Callable[[], tuple[Any, ...]]] = {n: partial(multilayer, *row) for n, row in PRODUCTS.items()}
    rows |= {name: partial(network, name) for name in NETWORKS}
    for title, make in harness.selected(rows, words).items():
        with torch.no_grad():
            model, params, state, module, x = make()
            calls, errors = ours(model, params, {"input": x}, KINDS, state)
            seconds = harness.interleaved(calls | peers(module, x), 1.5, min_rounds=ROUNDS)
        print(title, ", ".join(f"{n} {s * 1e6:.0f}" for n, s in seconds.items()))
        print("  errors:", ", ".join(f"{n} {e:.3%}" for n, e in errors.items()), flush=True)


# -- one spatial axis -------------------------------------------------------------------------------------------------
CHANNELS, BLOCKS = 64, 4


def of_signals() -> Any:
    """Return blocks of two convolutions, the second one dilated, and a classifier."""
    model = Model()
    model |= Conv1d(16, CHANNELS, 7, stride=2, padding=3, name="stem")(input="input", output="h")
    model |= Relu()(input="h", output="r")
    model |= MaxPool1d(3, stride=2, padding=1)(input="r", output="x")
    x = "x"
    for k in range(BLOCKS):
        model |= Conv1d(CHANNELS, CHANNELS, 3, padding=1, name=f"first{k}")(input=x, output=f"a{k}")
        model |= Relu()(input=f"a{k}", output=f"b{k}")
        model |= Conv1d(CHANNELS, CHANNELS, 3, padding=2, dilation=2, name=f"second{k}")(input=f"b{k}", output=f"c{k}")
        model |= Add()(left=f"c{k}", right=x, output=f"d{k}")
        model |= Relu()(input=f"d{k}", output=f"block{k}")
        x = f"block{k}"
    model |= GlobalAvgPool1d()(input=x, output="mean")
    model |= Flatten()(input="mean", output="row")
    model |= Linear(10, name="head")(input="row", output="output")
    return model


def signals(words: list[str], dynamic: bool) -> None:
    kinds: dict[str, dict[str, Any]] = {"bfloat16": {"precision": "bfloat16"}, "int8": {"quantization": "ranges"}}
    rows = {f"{batch} x {length}": (batch, 16, length) for batch, length in ((1, 1024), (8, 1024), (1, 16000))}
    for title, shape in harness.selected(rows, words).items():
        calls, errors = ours(of_signals(), None, {"input": random(*shape)}, kinds)
        seconds = harness.interleaved(calls, seconds=3)
        cells = (f"{k} {1e6 * s:.0f} ({errors.get(k, 0.0):.2%})" for k, s in seconds.items())
        print(f"{title}: {', '.join(cells)}", flush=True)


# -- one row times 4-bit weights --------------------------------------------------------------------------------------
COLUMNS = [(2048, 2048), (4096, 4096), (4096, 16384)]
GROUP = 32
SETTINGS = {
    "int4": {"weights": "int4"},
    "nf4": {"weights": "nf4"},
    "int4, bytes": {"weights": "int4", "activations": "dynamic"},
}


def mithril_calls(x: Array, weights: Array) -> dict[str, Call]:
    """Return calls of the C backend, and of ggml by its backend of this project."""
    n, k = weights.shape
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        title: ("c", {"static_inference": True, "quantization": setting, "num_threads": THREADS})
        for title, setting in SETTINGS.items()
    }
    if find_spec("mithril_ggml"):
        for kind in ("q4_k", "q4_0"):
            ways[f"ggml {kind}"] = ml.GGMLBackend(quantize=kind, num_threads=THREADS), {"inference": True}
    calls: dict[str, Call] = {}
    for title, (backend, options) in ways.items():
        model = Model(Linear(k, n, bias=False, name="l"))
        compiled = ml.compile(model, backend, shapes={"input": [1, k]}, **options).bind({"l.weight": weights})
        calls[title] = partial(compiled, {"input": x})
    return calls


def onnxruntime_calls(x: Array, weights: Array) -> dict[str, Call]:
    """Return calls of MatMulNBits with float32 and with 8-bit sums."""
    import onnx

    n, k = weights.shape
    quantized = RNG.integers(0, 256, (n, k // GROUP, GROUP // 2), np.uint8)
    scales = RNG.uniform(0.01, 0.02, n * k // GROUP).astype(np.float32)
    calls = {}
    for level in (1, 4):
        sizes = {"K": k, "N": n, "bits": 4, "block_size": GROUP, "accuracy_level": level}
        node = onnx.helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)
        values = [onnx.helper.make_tensor_value_info(name, 1, [1, size]) for name, size in (("x", k), ("y", n))]
        tensors = [onnx.numpy_helper.from_array(a, name) for a, name in ((quantized, "w"), (scales, "s"))]
        graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], tensors)
        opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
        content = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        calls[f"onnxruntime level {level}"] = onnxruntime_call(content, [x])
    return calls


def openvino_calls(x: Array, weights: Array) -> dict[str, Call]:
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
    return {"openvino": openvino_call(openvino.Model([o.matmul(row, matrix, False, True)], [row]), [x])}


def rows(words: list[str], dynamic: bool) -> None:
    for title, (k, n) in harness.selected({f"1x{k}x{n}": (k, n) for k, n in COLUMNS}, words).items():
        x, weights = random(1, k), random(n, k, scale=0.05)
        calls = mithril_calls(x, weights)
        for package, peer in (("onnxruntime", onnxruntime_calls), ("openvino", openvino_calls)):
            calls |= peer(x, weights) if find_spec(package) else {}
        size = n * k / 2 + 2 * n * k / GROUP
        seconds = harness.interleaved(calls, 2.0, min_rounds=10)
        print(title, ", ".join(f"{t} {s * 1e6:.0f} ({size / s / 1e9:.1f})" for t, s in seconds.items()), flush=True)


# -- files ------------------------------------------------------------------------------------------------------------
SAMPLES = 16  # inputs of the calibration, and of the comparison


def similar(inputs: Inputs) -> Inputs:
    """Return other random inputs of the same types."""

    def other(x: Array) -> Array:
        is_float = x.dtype.kind == "f"
        return random(*x.shape).astype(x.dtype) if is_float else RNG.permuted(x.reshape(-1)).reshape(x.shape)

    return {n: other(x) for n, x in inputs.items()}


def engines(file: str, inputs: Inputs) -> dict[str, Callable[[Inputs], Any]]:
    """Return a function of the inputs for each engine."""
    shapes = {n: list(x.shape) for n, x in inputs.items()}
    compiled = ml.compile(ml.from_onnx(file), "c", static_inference=True, shapes=shapes, num_threads=THREADS)
    runtime = onnxruntime_session(file)
    (output,) = [o.name for o in runtime.get_outputs()][:1]
    calls: dict[str, Callable[[Inputs], Any]] = {
        "mithril": lambda x: next(iter(compiled(x).values())),
        "onnxruntime": lambda x: runtime.run([output], x)[0],
    }
    if find_spec("openvino"):
        import openvino

        model = openvino.Core().read_model(file)
        model.reshape(shapes)
        request = openvino_request(model)
        calls["openvino"] = lambda x: request.infer(x, share_inputs=True)[0]
    return calls


def files(paths: list[str], dynamic: bool) -> None:
    import onnx
    from bench_onnx import declared_inputs

    for path in paths:
        inputs = declared_inputs(onnx.load(path))
        tested = [inputs, *(similar(inputs) for _ in range(SAMPLES - 1))]
        with tempfile.TemporaryDirectory() as folder:
            names = [f"{folder}/{kind}.onnx" for kind in ("static", "dynamic")]
            quantize(path, *names, [inputs, *(similar(inputs) for _ in range(SAMPLES - 1))])
            calls, exact = engines(names[dynamic], inputs), onnxruntime_session(path)
            references = [exact.run(None, x)[0] for x in tested]
            seconds = harness.interleaved({n: partial(f, inputs) for n, f in calls.items()}, 3.0, min_rounds=10)
            print(f"{Path(path).stem}, {THREADS} threads")
            for name, call in calls.items():
                pairs = [(np.array(call(x)), y) for x, y in zip(tested, references, strict=True)]
                error = np.mean([distance(y, r) for y, r in pairs])
                agreement = np.mean([np.argmax(y) == np.argmax(r) for y, r in pairs])
                figures = f"{seconds[name] * 1e6:8.0f} us, error {error:.2%}, same largest {agreement:.0%}"
                print(f"  {name:12} {figures}", flush=True)


PARTS: dict[str, Callable[[list[str], bool], None]] = {
    "products": products, "signals": signals, "rows": rows, "files": files,
}  # fmt: skip


def main() -> None:
    settings = harness.arguments(__doc__, "PART [WORD]", dynamic=False)
    part, *words = settings.words or [""]
    for name in [part] if part else PARTS:
        PARTS[name](words, settings.dynamic)


if __name__ == "__main__":
    main()
