"""ATen operators that draw random numbers: equal in distribution, with mithril's generator."""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril_torch.importing.table import cast, dtype_name, is_tensor, row, sizes_of


def _size(argument: Any) -> Any:
    return sizes_of(argument) if is_tensor(argument) else tuple(argument)


def _uniform(shape: Any, layer: Any) -> Any:
    """Return numbers in (0, 1)."""
    return ops.maximum(ops.uniform(layer.key(), shape=tuple(shape)), 2.0**-25)


@row("rand", "rand_like")
def rand(size: Any, dtype: Any = None, like: Any = None, layer: Any = None) -> Any:
    return ops.uniform(layer.key(), shape=_size(size), dtype=dtype_name(like.dtype))


@row("randn", "randn_like")
def randn(size: Any, dtype: Any = None, like: Any = None, layer: Any = None) -> Any:
    return ops.normal(layer.key(), shape=_size(size), dtype=dtype_name(like.dtype))


@row("randint", "randint.low", "randint_like", "randint_like.low_dtype")
def randint(*arguments: Any, dtype: Any = None, like: Any = None, layer: Any = None) -> Any:
    """Return integers below the last number among the arguments, from the one before it."""
    bounds = [a for a in arguments if isinstance(a, (int, float)) and not isinstance(a, bool)]
    low, high = (0, *bounds)[-2:]
    return cast(ops.randint(layer.key(), shape=tuple(like.shape), low=int(low), high=int(high)), like.dtype)


@row("randperm")
def randperm(n: int, dtype: Any = None, like: Any = None, layer: Any = None) -> Any:
    return cast(ops.argsort(ops.uniform(layer.key(), shape=(n,))), like.dtype)


@row("bernoulli.p")
def bernoulli_of(x: Any, p: float = 0.5, like: Any = None, layer: Any = None) -> Any:
    return cast(ops.bernoulli(layer.key(), shape=sizes_of(x), p=float(p)), like.dtype)


@row("bernoulli", "bernoulli.Tensor")
def bernoulli(x: Any, p: Any = None, like: Any = None, layer: Any = None) -> Any:
    drawn = ops.uniform(layer.key(), shape=sizes_of(x))
    return cast(ops.less(drawn, cast(x if p is None else p, "float32")), like.dtype)


@row("uniform")
def uniform(x: Any, low: float = 0.0, high: float = 1.0, like: Any = None, layer: Any = None) -> Any:
    return cast(ops.uniform(layer.key(), shape=sizes_of(x), low=float(low), high=float(high)), like.dtype)


@row("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", "normal.float_float")
def normal(
    mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, like: Any = None, layer: Any = None
) -> Any:
    drawn = ops.normal(layer.key(), shape=tuple(like.shape), dtype=dtype_name(like.dtype))
    mean, std = (cast(v, like.dtype) if is_tensor(v) else float(v) for v in (mean, std))
    return ops.add(ops.mul(drawn, std), mean)


@row("normal_functional")
def normal_like(x: Any, mean: float = 0.0, std: float = 1.0, like: Any = None, layer: Any = None) -> Any:
    return normal(mean, std, like=like, layer=layer)


@row("exponential")
def exponential(x: Any, rate: float = 1.0, like: Any = None, layer: Any = None) -> Any:
    return cast(ops.mul(ops.log(_uniform(sizes_of(x), layer)), -1.0 / rate), like.dtype)


@row("log_normal")
def log_normal(x: Any, mean: float = 1.0, deviation: float = 2.0, like: Any = None, layer: Any = None) -> Any:
    drawn = ops.normal(layer.key(), shape=sizes_of(x))
    return cast(ops.exp(ops.add(ops.mul(drawn, float(deviation)), float(mean))), like.dtype)


@row("cauchy")
def cauchy(x: Any, median: float = 0.0, sigma: float = 1.0, like: Any = None, layer: Any = None) -> Any:
    angle = ops.mul(ops.sub(_uniform(sizes_of(x), layer), 0.5), math.pi)
    return cast(ops.add(ops.mul(ops.tan(angle), float(sigma)), float(median)), like.dtype)


@row("geometric")
def geometric(x: Any, p: float, like: Any = None, layer: Any = None) -> Any:
    trials = ops.mul(ops.log(_uniform(sizes_of(x), layer)), 1.0 / math.log1p(-p))
    return cast(ops.ceil(trials), like.dtype)


@row("poisson")
def poisson(x: Any, like: Any = None, layer: Any = None) -> Any:
    """Count the arrivals of a Poisson process in time x; means above 64 are drawn from the normal distribution."""
    count = 160
    gaps = ops.neg(ops.log(_uniform((count, *sizes_of(x)), layer)))
    arrivals = ops.sum(cast(ops.less_equal(ops.cumsum(gaps, axis=0), cast(x, "float32")), "float32"), axis=(0,))
    normal_counts = ops.round(ops.add(x, ops.mul(ops.sqrt(x), ops.normal(layer.key(), shape=sizes_of(x)))))
    return cast(ops.where(ops.greater(x, 64.0), normal_counts, arrivals), like.dtype)


@row("multinomial")
def multinomial(weights: Any, count: int, replacement: bool = False, like: Any = None, layer: Any = None) -> Any:
    """Return categories by the largest of their logarithms with Gumbel noise."""
    scores = ops.log(cast(weights, "float32"))
    if replacement:
        scores = ops.unsqueeze(scores, axis=-2)
        shape = (*scores.shape[:-2], count, scores.shape[-1])
        noise = ops.neg(ops.log(ops.neg(ops.log(_uniform(shape, layer)))))
        return cast(ops.argmax(ops.add(scores, noise), axis=-1), "int64")
    noise = ops.neg(ops.log(ops.neg(ops.log(_uniform(sizes_of(scores), layer)))))
    return cast(ops.argsort(ops.add(scores, noise), axis=-1, descending=True)[..., :count], "int64")


@row("rrelu_with_noise_functional")
def rrelu(
    x: Any,
    noise: Any,
    low: float = 1 / 8,
    high: float = 1 / 3,
    train: bool = False,
    like: Any = None,
    layer: Any = None,
) -> Any:
    """Return leaky rectified numbers, in training with random slopes, and the slopes."""
    if train:
        slope = ops.uniform(layer.key(), shape=sizes_of(x), low=float(low), high=float(high), dtype=str(x.dtype))
    else:
        slope = ops.add(ops.mul(x, 0.0), (low + high) / 2)
    positive = ops.greater(x, 0.0)
    return ops.where(positive, x, ops.mul(x, slope)), ops.where(positive, 1.0, slope)
