"""The C backend against other CPU engines: torch, oneDNN, onnxruntime, OpenVINO, hand-written C, TVM's default.

``python benchmarks/bench_c.py [words of the rows] [--threads 2] [--compile] [--tvm] [--high]``: the best of many
interleaved rounds. A peer's number is its time over ours: above 1, mithril is faster. ``mithril`` takes weights as
arguments of every call; ``bound`` has them fixed (``static_inference``), as onnxruntime and OpenVINO do. Peers that are
not installed are left out. ``--compile`` adds torch.compile, ``--tvm`` TVM's own pipeline, ``--high`` schedules
measured for these shapes. For the time to the first result see ``bench_start.py``, for single operators and gradients
of convolutions ``bench_operators.py``.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import models
import numpy as np
import torch
import torch.nn.functional as F
from hand_torch import Hand
from harness import THREADS
from peers import Call, onnxruntime_call, openvino_call, quiet

import mithril as ml
from mithril import ops
from mithril.models import Conv2d, IOKey, Model

FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"]
Params = Mapping[str, Any]


@dataclass
class Work:
    """A model, its input shapes, its torch counterpart, its minimal flops and bytes, and optionally hand-written C."""

    model: Model
    shapes: dict[str, tuple[int, ...]]
    torch: Callable[[Any, Params, Any], Any]  # of the framework's functions, parameters, inputs
    flops: float
    bytes: float = 0.0
    c: str = ""  # the body of void f(const float *x, const float *w, float *y)


# -- the work -----------------------------------------------------------------------------------------------------
def _model(function: Callable[..., Any], *names: str) -> Model:
    keys = [IOKey(n) for n in names]
    return Model.create(inputs=keys, outputs=function(*keys))


def product(n: int) -> Work:
    hand = f"""
    for (int i = 0; i < {n}; i++) {{
        for (int j = 0; j < {n}; j++) y[i * {n} + j] = 0;
        for (int k = 0; k < {n}; k++)
            for (int j = 0; j < {n}; j++) y[i * {n} + j] += x[i * {n} + k] * w[k * {n} + j];
    }}"""
    model = _model(lambda x, w: x @ w, "x", "w")
    return Work(
        model, {"x": (n, n), "w": (n, n)}, lambda f, p, g: f.matmul(g["x"], g["w"]), 2.0 * n**3, 12.0 * n * n, hand
    )


def contraction(m: int, n: int, k: int, left: str = "mk", right: str = "kn") -> Work:
    """Build a matrix product with operands in row-major or transposed order."""
    size = {"m": m, "n": n, "k": k}

    def as_rows(x: Any, axes: str, target_axes: str) -> Any:
        if axes == target_axes:
            return x
        return x.t() if isinstance(x, torch.Tensor) else ops.transpose(x, perm=(1, 0))

    def made(x: Any, w: Any, product: Callable[[Any, Any], Any]) -> Any:
        return product(as_rows(x, left, "mk"), as_rows(w, right, "kn"))

    model = _model(lambda x, w: made(x, w, ops.matmul), "x", "w")
    shapes = {name: (size[axes[0]], size[axes[1]]) for name, axes in (("x", left), ("w", right))}
    work = 4.0 * (m * k + k * n + m * n)
    return Work(model, shapes, lambda f, p, g: made(g["x"], g["w"], f.matmul), 2.0 * m * n * k, work)


def scores() -> Work:
    """Build the products of attention: two batch axes, one contracted axis."""
    how = {"contract_a": (3,), "contract_b": (3,), "batch_a": (0, 2), "batch_b": (0, 2)}
    model = _model(lambda q, k: ops.dot(q, k, **how), "q", "k")
    shapes = {"q": (4, 128, 8, 64), "k": (4, 128, 8, 64)}
    flops = 2.0 * 32 * 128 * 128 * 64
    return Work(model, shapes, lambda f, p, g: torch.einsum("bihd,bjhd->bhij", g["q"], g["k"]), flops)


def of_case(case: models.Case, flops: float, bytes_moved: float = 0.0) -> Work:
    """Return the work of a model that all frameworks share."""
    shapes = {"input": case.shape}
    return Work(case.model, shapes, lambda f, p, g: case.by_hand(f, p, g["input"]), flops, bytes_moved)


def dense(batch: int) -> Work:
    weights = 784 * 512 + 512 * 512 + 512 * 10
    return of_case(models.mlp(batch), 2.0 * batch * weights, 4.0 * weights)


def resnet(size: int) -> Work:
    return of_case(models.resnet(1, size), 3.64e9 * (size / 224) ** 2, 46.8e6)


def transformer() -> Work:
    flops = 6 * 2.0 * 128 * (12 * 384 * 384 + 2 * 128 * 384)
    return of_case(models.encoder(6, 384, 12, 1, 128), flops, 6 * 48.0 * 384**2)


def convolution(
    channels: int, size: int, kernel: int = 3, stride: int = 1, out_channels: int = 0, groups: int = 1
) -> Work:
    out_channels = out_channels or channels
    pad = kernel // 2
    layer = Conv2d(channels, out_channels, kernel_size=kernel, stride=stride, padding=pad, groups=groups, name="conv")
    x = IOKey("input")
    model = Model.create(inputs=x, outputs=layer(x))
    out = (size + 2 * pad - kernel) // stride + 1

    def by_hand(f: Any, p: Params, g: Any) -> Any:
        return f.conv2d(g["input"], p["conv.weight"], p["conv.bias"], stride, pad, 1, groups)

    flops = 2.0 * out_channels * channels // groups * kernel**2 * out**2
    return Work(
        model, {"input": (1, channels, size, size)}, by_hand, flops, 4.0 * (channels * size**2 + out_channels * out**2)
    )


def attention(heads: int, tokens: int, size: int, causal: bool = False, queries: int = 0) -> Work:
    queries = queries or tokens
    keys = (1, heads, tokens, size)
    flops = 4.0 * heads * queries * tokens * size / (2 if causal else 1)

    def by_hand(f: Any, p: Params, g: Any) -> Any:
        return F.scaled_dot_product_attention(g["q"], g["k"], g["v"], is_causal=causal)

    model = _model(lambda q, k, v: ops.attention(q, k, v, causal=causal), "q", "k", "v")
    shapes = {"q": (1, heads, queries, size), "k": keys, "v": keys}
    return Work(model, shapes, by_hand, flops, 8.0 * heads * (queries + tokens) * size)


def pooled(channels: int, pixels: int, kernel: int, stride: int, padding: int) -> Work:
    shape, pads = (1, channels, pixels, pixels), ((padding, padding),) * 2
    pairs = (kernel, kernel), (stride, stride)
    model = _model(lambda x: ops.max_pool(x, kernel=pairs[0], stride=pairs[1], padding=pads), "x")
    out_pixels = (pixels + 2 * padding - kernel) // stride + 1
    bytes_moved = 4.0 * channels * (pixels**2 + out_pixels**2)
    return Work(model, {"x": shape}, lambda f, p, g: F.max_pool2d(g["x"], kernel, stride, padding), 0.0, bytes_moved)


def rows(
    function: Callable[..., Any], hand: Callable[..., Any], per_element: int, c: str = "", passes: int = 2
) -> Work:
    shape = (1024, 1024)
    model = _model(function, "x")
    return Work(model, {"x": shape}, lambda f, p, g: hand(g["x"]), per_element * 1024.0**2, 4.0 * passes * 1024**2, c)


def chain() -> Work:
    """(x * 1.5 + 0.5), gelu, times sigmoid, tanh of it, plus x."""

    def in_mithril(x: Any) -> Any:
        y = x * 1.5 + 0.5
        return ops.tanh(ops.gelu(y) * ops.sigmoid(y)) + x

    def in_torch(x: Any) -> Any:
        y = x * 1.5 + 0.5
        return torch.tanh(F.gelu(y) * torch.sigmoid(y)) + x

    c = """
    for (int i = 0; i < 1024 * 1024; i++) {
        float a = x[i] * 1.5f + 0.5f;
        float g = 0.5f * a * (1.0f + erff(a * 0.70710678f)) / (1.0f + expf(-a));
        y[i] = tanhf(g) + x[i];
    }"""
    return rows(in_mithril, in_torch, 40, c)


SOFTMAX = """
    for (int i = 0; i < 1024; i++) {
        const float *r = x + 1024 * i; float *o = y + 1024 * i, m = r[0], s = 0;
        for (int j = 0; j < 1024; j++) m = r[j] > m ? r[j] : m;
        for (int j = 0; j < 1024; j++) { o[j] = expf(r[j] - m); s += o[j]; }
        for (int j = 0; j < 1024; j++) o[j] /= s;
    }"""
NORM = """
    for (int i = 0; i < 1024; i++) {
        const float *r = x + 1024 * i; float *o = y + 1024 * i, m = 0, v = 0;
        for (int j = 0; j < 1024; j++) m += r[j];
        m /= 1024;
        for (int j = 0; j < 1024; j++) v += (r[j] - m) * (r[j] - m);
        v = 1.0f / sqrtf(v / 1024 + 1e-5f);
        for (int j = 0; j < 1024; j++) o[j] = (r[j] - m) * v;
    }"""

WORKS: dict[str, Callable[[], Work]] = {
    "matmul 512": lambda: product(512),
    "matmul 1024": lambda: product(1024),
    "matmul 2048": lambda: product(2048),
    "matmul 512x512, sums of 4096": lambda: contraction(512, 512, 4096),
    "weight gradient 784x512, sums of 128": lambda: contraction(784, 512, 128, "km"),
    "weight gradient 768x768, sums of 2048": lambda: contraction(768, 768, 2048, "km"),
    "dot bihd,bjhd->bhij": scores,
    "1 row times 2048x2048": lambda: contraction(1, 2048, 2048),
    "1 row times 2048x2048, transposed": lambda: contraction(1, 2048, 2048, right="nk"),
    "4 rows times 2048x2048": lambda: contraction(4, 2048, 2048),
    "MLP batch 1": lambda: dense(1),
    "MLP batch 32": lambda: dense(32),
    "MLP batch 256": lambda: dense(256),
    "conv 3x3 64->64 at 56": lambda: convolution(64, 56),
    "conv 3x3 128->128 at 28": lambda: convolution(128, 28),
    "conv 3x3 64->128 stride 2 at 56": lambda: convolution(64, 56, 3, 2, 128),
    "conv 3x3 512->512 at 7": lambda: convolution(512, 7),
    "conv 7x7 3->64 stride 2 at 224": lambda: convolution(3, 224, 7, 2, 64),
    "conv 1x1 256->256 at 14": lambda: convolution(256, 14, 1),
    "depthwise 3x3 128 at 56": lambda: convolution(128, 56, groups=128),
    "depthwise 3x3 128 stride 2 at 56": lambda: convolution(128, 56, 3, 2, groups=128),
    "ResNet-18 at 64": lambda: resnet(64),
    "ResNet-18 at 224": lambda: resnet(224),
    "encoder 6 layers, 384": transformer,
    "attention 8 heads of 64, 512 tokens": lambda: attention(8, 512, 64),
    "attention 8 heads of 64, 512 tokens, causal": lambda: attention(8, 512, 64, causal=True),
    "attention 12 heads of 64, 1 of 1024 tokens": lambda: attention(12, 1024, 64, queries=1),
    "max pool 3x3 stride 2, 64 at 112": lambda: pooled(64, 112, 3, 2, 1),
    "max pool 2x2, 32 at 128": lambda: pooled(32, 128, 2, 2, 0),
    "element-wise chain 1M": chain,
    "softmax 1024x1024": lambda: rows(lambda x: ops.softmax(x, axis=-1), lambda x: torch.softmax(x, -1), 12, SOFTMAX),
    "layer norm 1024x1024": lambda: rows(lambda x: ops.layer_norm(x), lambda x: F.layer_norm(x, (1024,)), 8, NORM),
    "sum of columns 1024x1024": lambda: rows(lambda x: ops.sum(x, axis=0), lambda x: x.sum(0), 1, passes=1),
    "transpose 1024x1024": lambda: rows(lambda x: ops.transpose(x, perm=(1, 0)), lambda x: x.t().contiguous(), 0),
    "tiny graph of 3": lambda: Work(
        _model(lambda x: ops.tanh(x * 2.0 + 1.0), "x"), {"x": (4,)}, lambda f, p, g: torch.tanh(g["x"] * 2.0 + 1.0), 12
    ),
}


# -- peers --------------------------------------------------------------------------------------------------------
class Plain(Hand):
    matmul = torch.matmul
    conv2d = F.conv2d


class OneDNN(Plain):
    """Products by oneDNN where torch would take MKL; its convolutions are oneDNN's anyway."""

    @staticmethod
    def linear(x: Any, w: Any, b: Any) -> Any:
        return torch.ops.mkldnn._linear_pointwise.default(x, w, b, "none", [], "")

    @staticmethod
    def matmul(x: Any, w: Any) -> Any:
        return torch.ops.mkldnn._linear_pointwise.default(x, w.t(), None, "none", [], "")


class Whole(torch.nn.Module):
    """The work as a module, for peers that take modules."""

    def __init__(self, work: Work, f: Any, params: Params) -> None:
        super().__init__()
        self.work, self.f = work, f
        self.names = {n: n.replace(".", "_") for n in params}
        for n, x in params.items():
            self.register_buffer(self.names[n], x)

    def forward(self, *given: Any) -> Any:
        params = {n: getattr(self, name) for n, name in self.names.items()}
        return self.work.torch(self.f, params, dict(zip(self.work.shapes, given, strict=True)))


def with_onnx(work: Work, params: Params, inputs: Mapping[str, Any]) -> dict[str, Call]:
    """onnxruntime and OpenVINO, on the model as torch writes it."""
    if find_spec("onnxscript") is None or not (find_spec("onnxruntime") or find_spec("openvino")):
        return {}
    arrays = [x.numpy() for x in inputs.values()]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        with quiet():
            torch.onnx.export(Whole(work, Plain, params), tuple(inputs.values()), file, dynamo=True, verbose=False)
        engines = {"onnxruntime": onnxruntime_call, "openvino": openvino_call}
        return {name: call(file, arrays) for name, call in engines.items() if find_spec(name)}


def library(body: str, name: str, arguments: str) -> Any:
    """C by hand, compiled here and now."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "f.c", Path(folder) / "f.so"
        source.write_text(f"#include <math.h>\nvoid {name}({arguments}) {{{body}\n}}\n")
        subprocess.run(["gcc", *FLAGS, "-shared", "-fPIC", str(source), "-o", str(library), "-lm"], check=True)
        return ctypes.CDLL(str(library))


def in_c(work: Work, inputs: Mapping[str, Any]) -> dict[str, Call]:
    if not work.c or THREADS > 1:
        return {}
    arrays = [x.numpy() for x in inputs.values()]
    out = np.empty(arrays[0].shape, np.float32)
    code = library(work.c, "f", "const float *restrict x, const float *restrict w, float *restrict y")
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (arrays[0], arrays[-1], out)]

    def call() -> Any:
        code.f(*pointers)
        return out

    return {"C by hand": call}


def in_torch(work: Work, params: Params, inputs: Mapping[str, Any], compiles: bool) -> dict[str, Call]:
    values = tuple(inputs.values())
    calls: dict[str, Call] = {}
    for name, f in (("torch", Plain), ("oneDNN", OneDNN)):
        module = Whole(work, f, params)
        calls[name] = lambda module=module: module(*values)
    if compiles:
        compiled = torch.compile(Whole(work, Plain, params))
        calls["torch.compile"] = lambda: compiled(*values)
    return calls


def tvm_default(work: Work, params: Params, inputs: Mapping[str, Any]) -> dict[str, Call]:
    """Compile the same module with TVM's own pipeline."""
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    with quiet():
        exported = torch.export.export(Whole(work, Plain, params), tuple(inputs.values()))
        module = from_exported_program(exported, unwrap_unit_return_tuple=True)
        host = tvm.get_global_func("target.llvm_get_system_cpu")()
        target = tvm.target.Target({"kind": "llvm", "mcpu": host, "num-cores": THREADS})
        built = tvm.compile(module, target, relax_pipeline=relax.get_default_pipeline(target))
    run = relax.VirtualMachine(built, tvm.cpu())["main"]
    arrays = [tvm.runtime.tensor(x.numpy()) for x in inputs.values()]
    return {"tvm": lambda: run(*arrays).numpy()}


# -- measuring ----------------------------------------------------------------------------------------------------
def peaks() -> tuple[float, float]:
    """This machine's float32 operations and bytes read per second, in billions, on as many threads as are used."""
    loop = """
    typedef float v __attribute__((vector_size(64)));
    v a[16]; for (int k = 0; k < 16; k++) a[k] = (v){0} + (float)k;
    v m = (v){0} + x[0], c = (v){0} + x[1];
    for (int i = 0; i < 1000000; i++) {
        #pragma GCC unroll 16
        for (int k = 0; k < 16; k++) a[k] = a[k] * m + c;
    }
    for (int k = 1; k < 16; k++) a[0] += a[k];
    y[0] = a[0][0];"""
    read = """
    float s = 0; for (long i = 0; i < 16777216; i++) s += x[i];
    y[0] = s;"""
    arguments = "const float *restrict x, float *restrict y"
    compute, memory = library(loop, "f", arguments), library(read, "f", arguments)
    arrays = [(np.full(1 << 24, 0.5, np.float32), np.zeros(16, np.float32)) for _ in range(THREADS)]
    places = [[ctypes.c_void_p(a.ctypes.data) for a in pair] for pair in arrays]
    with ThreadPoolExecutor(THREADS) as pool:

        def everywhere(function: Any) -> Call:
            return lambda: list(pool.map(lambda at: function(*at), places))

        seconds = harness.interleaved({"compute": everywhere(compute.f), "memory": everywhere(memory.f)}, 2.0, 5)
    return THREADS * 16 * 32e-3 / seconds["compute"], THREADS * 67.108864e-3 / seconds["memory"]


def measure(work: Work, settings: Any) -> dict[str, float]:
    inputs = {n: models.random(*s) for n, s in work.shapes.items()}
    shapes = {n: list(s) for n, s in work.shapes.items()}
    tensors = {n: torch.from_numpy(x) for n, x in inputs.items()}
    calls: dict[str, Call] = {}
    ways: dict[str, dict[str, Any]] = {"mithril": {"inference": True}, "bound": {"static_inference": True}}
    if settings.high:
        ways["high"] = {"static_inference": True, "optimization_level": "high"}
    values: dict[str, Any] = {}
    for name, options in ways.items():
        compiled = ml.compile(work.model, "c", shapes=shapes, num_threads=THREADS, **options)
        params = compiled.randomize_params(0)
        state = compiled.initial_state()
        values = values or {**params, **state}
        if name == "mithril":
            calls[name] = lambda c=compiled, p=params: next(iter(c.evaluate(p, inputs).values()))
        elif params:  # else there is nothing to fix
            compiled.bind(params, state)
            calls[name] = lambda c=compiled: next(iter(c.evaluate(inputs).values()))
    fixed = {n: torch.from_numpy(np.asarray(x)) for n, x in values.items()}
    with torch.no_grad():
        calls |= in_torch(work, fixed, tensors, settings.compile)
        calls |= with_onnx(work, fixed, tensors) | in_c(work, tensors)
        calls |= tvm_default(work, fixed, tensors) if settings.tvm else {}
        expected = np.asarray(calls["torch"]())
        for name, call in calls.items():
            np.testing.assert_allclose(np.asarray(call()), expected, rtol=1e-2, atol=2e-3, err_msg=name)
        return harness.interleaved(calls, 3.0, min_rounds=7)


def report(name: str, work: Work, seconds: Mapping[str, float], peak: tuple[float, float]) -> None:
    best = min(seconds[n] for n in ("mithril", "bound", "high") if n in seconds)
    timings = ", ".join(f"{n} {seconds[n] * 1e6:.1f} us" for n in ("mithril", "bound", "high") if n in seconds)
    speed = f"{work.flops / best / 1e9:.0f} GFLOP/s ({work.flops / best / 1e7 / peak[0]:.0f} %)"
    if work.bytes:
        speed += f", {work.bytes / best / 1e9:.0f} GB/s ({work.bytes / best / 1e7 / peak[1]:.0f} %)"
    peers = ", ".join(f"{n} {t / best:.2f}" for n, t in seconds.items() if n not in ("mithril", "bound", "high"))
    print(f"{name}: {timings}; {speed}; {peers}", flush=True)


def main() -> None:
    settings = harness.arguments(__doc__, compile=False, tvm=False, high=False)
    peak = peaks()
    print(f"{THREADS} thread(s); this machine: {peak[0]:.0f} GFLOP/s, reads {peak[1]:.0f} GB/s", flush=True)
    for name, make in harness.selected(WORKS, settings.words).items():
        work = make()
        report(name, work, measure(work, settings), peak)


if __name__ == "__main__":
    main()
