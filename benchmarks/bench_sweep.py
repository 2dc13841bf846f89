"""Operator cases drawn by a seed: the time of the C backend over that of the better of torch and onnxruntime.

``python benchmarks/bench_sweep.py [--cases N] [--seed S] [FAMILY ...]``: processor time of one thread, the best of
interleaved rounds. Below 1 is faster. Every case is a module of torch, which ``ml.from_torch``
imports; results are compared with torch's.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
import torch
import torch.nn.functional as nn
from peers import onnxruntime_session

import mithril as ml

Drawn = tuple[str, torch.nn.Module, tuple[torch.Tensor, ...]]
SLOWER = 1.2
LONG_COMPILE = 1.0  # seconds of processor time


class Draw:
    """Sizes of one case; the generator is that of its family, so that families can be measured separately."""

    def __init__(self, seed: int, family: str) -> None:
        self.rng = np.random.default_rng([seed, *family.encode()])

    def size(self, low: int, high: int) -> int:
        """Return a size; small and large ones are as likely, and half of them are multiples of 8."""
        drawn = round(float(np.exp(self.rng.uniform(np.log(low), np.log(high)))))
        return max(low, drawn // 8 * 8) if drawn > 8 and self.rng.random() < 0.5 else drawn

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))

    def places(self, below: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(0, below, shape))

    def tensor(self, elements: int, minimum: int = 1) -> torch.Tensor:
        """Return two to four axes with about as many elements."""
        axes = int(self.rng.integers(2, 5))
        shape = [self.size(minimum, 64) for _ in range(axes - 1)]
        return self.floats(*shape, max(minimum, elements // int(np.prod(shape))))


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arrays: torch.Tensor) -> torch.Tensor:
        return self.function(*arrays)


FAMILIES: dict[str, Callable[[Draw], Drawn]] = {}


def family(draw: Callable[[Draw], Drawn]) -> Callable[[Draw], Drawn]:
    FAMILIES[draw.__name__] = draw
    return draw


@family
def product(d: Draw) -> Drawn:
    m, k, n = d.size(1, 512), d.size(3, 2048), d.size(1, 512)
    return f"{m}x{n}x{k}", Call(torch.matmul), (d.floats(m, k), d.floats(k, n))


@family
def long_product(d: Draw) -> Drawn:
    m, k, n = d.size(1, 16), d.size(10_000, 100_000), d.size(1, 16)
    return f"{m}x{n}x{k}", Call(torch.matmul), (d.floats(m, k), d.floats(k, n))


@family
def batched_product(d: Draw) -> Drawn:
    b, m, k, n = d.size(2, 64), d.size(1, 128), d.size(4, 128), d.size(1, 128)
    return f"{b}x{m}x{n}x{k}", Call(torch.matmul), (d.floats(b, m, k), d.floats(b, k, n))


@family
def gram(d: Draw) -> Drawn:
    m, n = d.size(500, 20_000), d.size(2, 64)
    return f"{m}x{n}", Call(lambda x: x.T @ x), (d.floats(m, n),)


@family
def linear(d: Draw) -> Drawn:
    m, k, n = d.size(1, 256), d.size(8, 2048), d.size(1, 1024)
    then = d.one(torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Identity())
    return f"{m}x{n}x{k} {then}", torch.nn.Sequential(torch.nn.Linear(k, n), then), (d.floats(m, k),)


@family
def convolution(d: Draw) -> Drawn:
    kernel, stride, c, out, size = (
        d.one(1, 3, 3, 5, 7),
        d.one(1, 1, 2, 3),
        d.size(1, 128),
        d.size(2, 128),
        d.size(7, 64),
    )
    module = torch.nn.Conv2d(c, out, kernel, stride, kernel // 2, dilation=d.one(1, 1, 1, 2))
    return f"{module} at {size}", module, (d.floats(d.one(1, 1, 4), c, size, size),)


@family
def patches(d: Draw) -> Drawn:
    kernel, c, out, count = d.one(2, 4, 8, 14, 16, 32), d.one(1, 3), d.size(16, 384), d.size(4, 14)
    module = torch.nn.Conv2d(c, out, kernel, kernel)
    return f"{module} at {count * kernel}", module, (d.floats(1, c, count * kernel, count * kernel),)


@family
def depthwise(d: Draw) -> Drawn:
    kernel, c, size = d.one(3, 5, 7, 9, 13, 31), d.size(8, 256), d.size(7, 64)
    module = torch.nn.Conv2d(c, c, kernel, d.one(1, 1, 2), kernel // 2, groups=c)
    return f"{module} at {size}", module, (d.floats(1, c, size, size),)


@family
def grouped(d: Draw) -> Drawn:
    groups, width, size = d.one(2, 4, 8), d.size(4, 32), d.size(7, 56)
    module = torch.nn.Conv2d(groups * width, groups * width, 3, d.one(1, 2), 1, groups=groups)
    return f"{module} at {size}", module, (d.floats(1, groups * width, size, size),)


@family
def signal(d: Draw) -> Drawn:
    stride = d.one(1, 1, 2, 4, 8, 20, 160)
    kernel, c, out = max(stride, d.one(3, 5, 9, 25)) * d.one(1, 2), d.one(1, 4, 16, 64), d.size(4, 128)
    module = torch.nn.Conv1d(c, out, kernel, stride, kernel // 2)
    return f"{module} of {stride * 200}", module, (d.floats(d.one(1, 4), c, stride * 200),)


@family
def volume(d: Draw) -> Drawn:
    c, out, size = d.size(1, 32), d.size(4, 32), d.size(6, 20)
    module = torch.nn.Conv3d(c, out, 3, d.one(1, 2), 1)
    return f"{module} at {size}", module, (d.floats(1, c, size, size, size),)


@family
def transposed(d: Draw) -> Drawn:
    stride, c, out, size = d.one(1, 2, 2, 4, 8), d.size(4, 64), d.size(2, 64), d.size(4, 28)
    module = torch.nn.ConvTranspose2d(c, out, stride * d.one(1, 2) + (stride == 1) * 2, stride, stride // 2)
    return f"{module} at {size}", module, (d.floats(1, c, size, size),)


@family
def pool(d: Draw) -> Drawn:
    kernel, c, size = d.one(2, 3, 5, 7), d.size(4, 256), d.size(8, 64)
    kind = d.one(torch.nn.MaxPool2d, torch.nn.AvgPool2d)
    module = kind(kernel, d.one(1, 2, kernel), kernel // 2 * d.one(0, 1))
    return f"{module} of {c} at {size}", module, (d.floats(1, c, size, size),)


@family
def adaptive(d: Draw) -> Drawn:
    module, c, size = torch.nn.AdaptiveAvgPool2d(d.one(1, 1, 2, 6)), d.size(8, 512), d.one(6, 12, 24, 48)
    return f"{module} of {c} at {size}", module, (d.floats(1, c, size, size),)


@family
def reduction(d: Draw) -> Drawn:
    x = d.tensor(d.size(1000, 500_000))
    axes = tuple(sorted(d.rng.choice(x.ndim, int(d.rng.integers(1, x.ndim + 1)), replace=False).tolist()))
    name = d.one("sum", "mean", "amax", "var")
    return f"{name} {tuple(x.shape)} over {axes}", Call(lambda x: getattr(torch, name)(x, axes)), (x,)


@family
def position(d: Draw) -> Drawn:
    x, name = d.tensor(d.size(1000, 200_000)), d.one("argmax", "argmin")
    axis = int(d.rng.integers(x.ndim))
    return f"{name} {tuple(x.shape)} over {axis}", Call(lambda x: getattr(torch, name)(x, axis)), (x,)


@family
def rows(d: Draw) -> Drawn:
    m, n = d.size(1, 1000), d.size(4, 4000)
    n = min(n, 1_000_000 // m)
    module = d.one(
        torch.nn.Softmax(-1), torch.nn.LogSoftmax(-1), torch.nn.LayerNorm(n), torch.nn.RMSNorm(n),
        Call(lambda x: torch.logsumexp(x, -1)), Call(lambda x: nn.normalize(x, dim=-1)),
    )  # fmt: skip
    return f"{type(module).__name__} {m}x{n}", module, (d.floats(m, n),)


@family
def channels(d: Draw) -> Drawn:
    c, size = d.size(2, 32) * 4, d.size(4, 48)
    module = d.one(
        torch.nn.Softmax(1), torch.nn.BatchNorm2d(c), torch.nn.GroupNorm(4, c), torch.nn.InstanceNorm2d(c),
        torch.nn.LocalResponseNorm(5),
    )  # fmt: skip
    return f"{module} of {c} at {size}", module, (d.floats(d.one(1, 4), c, size, size),)


ELEMENTARY = (
    torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh, torch.tanh,
    torch.asinh, torch.acosh, torch.atanh, torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log1p,
    torch.erf, torch.erfc, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.sigmoid, torch.floor, torch.round,
    torch.sign, torch.abs, torch.square,
)  # fmt: skip


@family
def elementary(d: Draw) -> Drawn:
    function, x = d.one(*ELEMENTARY), d.floats(d.size(1000, 200_000))
    name = function.__name__
    x = {"asin": x.tanh(), "acos": x.tanh(), "atanh": x.tanh(), "acosh": x.abs() + 1}.get(name, x)
    x = x.abs() + 0.1 if name in ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal") else x
    return f"{name} {len(x)}", Call(function), (x,)


@family
def activation(d: Draw) -> Drawn:
    module = d.one(
        torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.SiLU(), torch.nn.Mish(), torch.nn.Softplus(), torch.nn.ELU(),
        torch.nn.SELU(), torch.nn.Hardswish(), torch.nn.LeakyReLU(), torch.nn.Hardtanh(), torch.nn.LogSigmoid(),
    )  # fmt: skip
    x = d.tensor(d.size(1000, 500_000))
    return f"{module} {tuple(x.shape)}", module, (x,)


@family
def binary(d: Draw) -> Drawn:
    name, x = d.one("add", "mul", "div", "maximum", "atan2", "pow", "fmod", "remainder", "ge"), d.tensor(100_000)
    other = d.floats(*(n if d.rng.random() < 0.6 else 1 for n in x.shape))
    x = x.abs() + 0.1 if name == "pow" else x
    return f"{name} {tuple(x.shape)} {tuple(other.shape)}", Call(getattr(torch, name)), (x, other)


@family
def chain(d: Draw) -> Drawn:
    x = d.tensor(d.size(1000, 500_000))
    scale, shift = d.floats(x.shape[-1]), d.floats(*x.shape[:1], *[1] * (x.ndim - 1))
    return f"{tuple(x.shape)}", Call(lambda x, s, b: torch.tanh(x * s + b) * torch.sigmoid(x) + x), (x, scale, shift)


@family
def permutation(d: Draw) -> Drawn:
    x = d.tensor(d.size(1000, 500_000))
    axes = tuple(d.rng.permutation(x.ndim).tolist())
    return f"{tuple(x.shape)} by {axes}", Call(lambda x: x.permute(axes).contiguous() + 0.0), (x,)


@family
def padding(d: Draw) -> Drawn:
    mode, (low, high), c, size = (
        d.one("constant", "reflect", "replicate", "circular"),
        (d.size(1, 5), d.size(1, 5)),
        d.size(3, 128),
        d.size(8, 64),
    )
    return (
        f"{mode} {low}, {high} of {c} at {size}",
        Call(lambda x: nn.pad(x, (low, high, high, low), mode)),
        (d.floats(1, c, size, size),),
    )


@family
def slices(d: Draw) -> Drawn:
    x, step, axis = d.tensor(d.size(5000, 300_000), 4), d.one(2, 3), d.one(-1, -2, "both")
    first, second = (step if axis in (k, "both") else 1 for k in (-2, -1))
    return (
        f"{tuple(x.shape)} steps {first}, {second}",
        Call(lambda x: x[..., ::first, 1::second].contiguous() + 0.0),
        (x,),
    )


@family
def joining(d: Draw) -> Drawn:
    x = d.tensor(d.size(1000, 200_000))
    axis = int(d.rng.integers(x.ndim))
    return f"{tuple(x.shape)} along {axis}", Call(lambda x, y: torch.cat((x, y, x), axis)), (x, d.floats(*x.shape))


@family
def flipping(d: Draw) -> Drawn:
    x = d.tensor(d.size(1000, 300_000))
    axis = int(d.rng.integers(x.ndim))
    function = d.one(lambda x: torch.flip(x, (axis,)), lambda x: torch.roll(x, 3, axis))
    return f"{tuple(x.shape)} of {axis}", Call(function), (x,)


@family
def resizing(d: Draw) -> Drawn:
    mode, c, size, out = (
        d.one("bilinear", "bilinear", "nearest", "bicubic"),
        d.size(1, 64),
        d.size(8, 240),
        d.size(8, 240),
    )
    c = max(1, min(c, 2_000_000 // out**2))
    aligned = {} if mode == "nearest" else {"align_corners": d.one(False, False, True)}
    return (
        f"{mode} {c}x{size} to {out}",
        Call(lambda x: nn.interpolate(x, (out, out), mode=mode, **aligned)),
        (d.floats(1, c, size, size),),
    )


@family
def upsampling(d: Draw) -> Drawn:
    mode, factor, c, size = d.one("nearest", "bilinear"), d.one(2, 2, 3, 4), d.size(4, 128), d.size(4, 64)
    module = torch.nn.Upsample(scale_factor=factor, mode=mode)
    return f"{module} of {c} at {size}", module, (d.floats(1, c, size, size),)


@family
def top(d: Draw) -> Drawn:
    m, n = d.size(1, 100), d.size(64, 50_000)
    m, k = max(1, min(m, 200_000 // n)), d.size(1, 50)
    part = d.one(0, 1)
    return f"{k} of {m}x{n}, {part}", Call(lambda x: torch.topk(x, k)[part]), (d.floats(m, n),)


@family
def sorting(d: Draw) -> Drawn:
    n = d.size(8, 50_000)
    m, name = max(1, min(d.size(1, 1000), 100_000 // n)), d.one("sort", "argsort")
    part = {"sort": lambda x: torch.sort(x, -1)[0], "argsort": lambda x: torch.argsort(x, -1)}[name]
    distinct = torch.from_numpy(d.rng.permutation(m * n).astype(np.float32))
    return f"{name} {m}x{n}", Call(part), (distinct.reshape(m, n),)


@family
def cumulative(d: Draw) -> Drawn:
    x, name = d.tensor(d.size(1000, 300_000)), d.one("cumsum", "cumsum", "cumprod")
    axis = int(d.rng.integers(x.ndim))
    return f"{name} {tuple(x.shape)} of {axis}", Call(lambda x: getattr(torch, name)(x, axis)), (x,)


@family
def gathering(d: Draw) -> Drawn:
    rows, width, count = d.size(10, 30_000), d.size(1, 512), d.size(1, 512)
    axis = d.one(0, 0, 1)
    x = d.floats(rows, min(width, 2_000_000 // rows))
    return (
        f"{count} of {tuple(x.shape)} along {axis}",
        Call(lambda x, i: torch.index_select(x, axis, i)),
        (x, d.places(x.shape[axis], count)),
    )


@family
def taking_along(d: Draw) -> Drawn:
    m, n, k = d.size(1, 500), d.size(4, 500), d.size(1, 200)
    return f"{k} of {m}x{n}", Call(lambda x, i: torch.gather(x, 1, i)), (d.floats(m, n), d.places(n, m, k))


@family
def bags(d: Draw) -> Drawn:
    rows, width, count, bag = d.size(100, 10_000), d.size(4, 256), d.size(1, 256), d.size(2, 50)
    function, table = d.one(torch.sum, torch.mean), d.floats(rows, width)
    return (
        f"{function.__name__} {count}x{bag} of {rows}x{width}",
        Call(lambda i, t: function(nn.embedding(i, t), 1)),
        (d.places(rows, count, bag), table),
    )


@family
def scattering(d: Draw) -> Drawn:
    rows, width, count = d.size(10, 1000), d.size(1, 128), d.size(10, 5000)
    return (
        f"{count} rows to {rows}x{width}",
        Call(lambda x, i, y: x.index_add(0, i, y)),
        (d.floats(rows, width), d.places(rows, count), d.floats(count, width)),
    )


@family
def one_hot(d: Draw) -> Drawn:
    count, classes = d.size(1, 500), d.size(2, 1000)
    return f"{count}x{classes}", Call(lambda i: nn.one_hot(i, classes).float()), (d.places(classes, count),)


@family
def attention(d: Draw) -> Drawn:
    heads, m, n, width = d.size(1, 12), d.size(1, 256), d.size(8, 256), d.one(16, 32, 40, 64, 128)
    return (
        f"{heads} heads {m}x{n}x{width}",
        Call(nn.scaled_dot_product_attention),
        tuple(d.floats(1, heads, k, width) for k in (m, n, n)),
    )


@family
def einsum(d: Draw) -> Drawn:
    text, sizes = d.one("bij,bjk->bik", "bhid,bhjd->bhij", "ij,jk,kl->il", "bi,bj->bij", "bij,ij->b", "ijk,k->ij"), {}
    sizes = {c: d.size(2, 48) for c in "bhdijkl"}
    arrays = tuple(d.floats(*(sizes[c] for c in part)) for part in text.split("->")[0].split(","))
    return f"{text} {sizes}", Call(lambda *xs: torch.einsum(text, *xs)), arrays


@family
def masked(d: Draw) -> Drawn:
    x = d.tensor(d.size(1000, 300_000))
    function = d.one(
        lambda x: torch.where(x > 0, x, x.exp() - 1),
        lambda x: x.masked_fill(x < 0, -1e9),
        lambda x: torch.tril(x),
        lambda x: torch.triu(x, 1),
    )
    return f"{tuple(x.shape)}", Call(function), (x,)


@family
def loss(d: Draw) -> Drawn:
    m, n = d.size(1, 500), d.size(2, 2000)
    if d.one(True, False):
        return f"cross entropy {m}x{n}", Call(nn.cross_entropy), (d.floats(m, n), d.places(n, m))
    function = d.one(
        nn.mse_loss, nn.l1_loss, nn.smooth_l1_loss, nn.binary_cross_entropy_with_logits, nn.cosine_similarity
    )
    return f"{function.__name__} {m}x{n}", Call(function), (d.floats(m, n), d.floats(m, n).sigmoid())


@family
def recurrent(d: Draw) -> Drawn:
    width, steps, kind = d.size(8, 128), d.size(4, 64), d.one(torch.nn.LSTM, torch.nn.GRU)
    module = kind(d.size(4, 64), width, batch_first=True)

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    return f"{module}, {steps} steps", First(), (d.floats(d.one(1, 4), steps, module.input_size),)


@dataclass(frozen=True)
class Result:
    """Seconds of one case."""

    label: str
    c: float
    torch: float
    onnxruntime: float | None
    compiling: float

    @property
    def ratio(self) -> float:
        return self.c / min(self.torch, self.onnxruntime or self.torch)


def session(module: torch.nn.Module, arrays: tuple[torch.Tensor, ...]) -> Callable[[], Any] | None:
    """Return a call of onnxruntime, or None if torch cannot export the module or onnxruntime has no kernel."""
    file = io.BytesIO()
    names = [f"x{k}" for k in range(len(arrays))]
    try:
        torch.onnx.export(module, arrays, file, input_names=names, dynamo=False)
        built = onnxruntime_session(file.getvalue())
        data = {n: a.numpy() for n, a in zip(names, arrays, strict=True) if n in {i.name for i in built.get_inputs()}}
        built.run(None, data)
    except Exception:  # every exporter and engine has errors of its own kind
        return None
    return lambda: built.run(None, data)


def measured(family_name: str, drawn: Drawn) -> Result:
    label, module, arrays = drawn
    module = module.eval()
    expected = module(*arrays).numpy()
    model = ml.from_torch(module, arrays)
    start = time.process_time()
    program = ml.compile(model, ml.CBackend(num_threads=1), inference=True)
    data = dict(zip(model.inputs, (a.numpy() for a in arrays), strict=True))
    (result,) = program(data).values()
    compiling = time.process_time() - start
    largest = float(np.abs(expected).max(initial=1e-6)) if expected.dtype.kind == "f" else 1.0
    if float(np.abs(np.asarray(result, np.float64) - expected).max(initial=0.0)) > 1e-4 * largest:
        raise AssertionError("another result than torch's")
    ways: dict[str, Callable[[], Any]] = {"c": lambda: program(data), "torch": lambda: module(*arrays)}
    if (run := session(module, arrays)) is not None:
        ways["onnxruntime"] = run
    best = harness.interleaved(ways, seconds=0.25, min_rounds=5)
    return Result(f"{family_name} {label}", best["c"], best["torch"], best.get("onnxruntime"), compiling)


def cases(count: int, seed: int, names: list[str]) -> Iterator[tuple[str, Drawn]]:
    draws = {name: Draw(seed, name) for name in FAMILIES if not names or name in names}
    for k in range(count):
        name = list(draws)[k % len(draws)]
        yield name, FAMILIES[name](draws[name])


def print_rows(title: str, results: list[Result], key: Callable[[Result], float]) -> None:
    print(f"\n{title}: {len(results)}\n")
    print("| case | C over the better | C, us | torch, us | onnxruntime, us | compiled, s |\n|---|---|---|---|---|---|")
    for r in sorted(results, key=key, reverse=True):
        other = "" if r.onnxruntime is None else f"{r.onnxruntime * 1e6:.1f}"
        print(f"| {r.label} | {r.ratio:.2f} | {r.c * 1e6:.1f} | {r.torch * 1e6:.1f} | {other} | {r.compiling:.2f} |")


def main() -> None:
    options = harness.arguments(__doc__, "FAMILY", cases=600, seed=0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    measured("first", ("1", Call(torch.neg), (torch.ones(1),)))  # imports TVM
    results, refused = [], []
    for name, drawn in cases(options.cases, options.seed, options.words):
        torch.manual_seed(0)
        try:
            results.append(measured(name, drawn))
        except (ml.MithrilError, RuntimeError, TypeError, AssertionError) as error:
            refused.append(f"{name} {drawn[0]}: {str(error).splitlines()[0]}")
        else:
            print(f"{results[-1].label}: {results[-1].ratio:.2f}", file=sys.stderr, flush=True)
    print_rows(f"Above {SLOWER}", [r for r in results if r.ratio > SLOWER], lambda r: r.ratio)
    print_rows(
        f"Compiled for more than {LONG_COMPILE} s",
        [r for r in results if r.compiling > LONG_COMPILE],
        lambda r: r.compiling,
    )
    print("\nNot imported, not compiled, or of another result:", *(refused or ["none"]), sep="\n* ")
    mean, faster = statistics.geometric_mean(r.ratio for r in results), sum(r.ratio < 1 for r in results)
    seconds = sorted(r.compiling for r in results)
    longest = seconds[int(len(seconds) * 0.95)], seconds[-1]
    print(f"\n{len(results)} cases: geometric mean {mean:.3f}, faster than both {faster}; compiled in")
    print(f"{statistics.median(seconds):.2f} s of processor time (median), {longest[0]:.2f} (95 %), {longest[1]:.2f}")


if __name__ == "__main__":
    main()
