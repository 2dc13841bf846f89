"""The networks of the timed probes, written for an engine by hand: the times that the engine needs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], Any]
FIRST, SECOND = "first by hand", "second by hand"


def in_two_types(engine: str, index: int, x: np.ndarray[Any, Any]) -> dict[str, Call]:
    """Return calls in float32 and in bfloat16; none for an engine that has no language of its own."""
    if engine not in ENGINES:
        return {}
    make = ENGINES[engine]
    return {FIRST: make(index, x, "float32", False), SECOND: make(index, x, "bfloat16", False)}


def without_and_with_jit(engine: str, index: int, x: np.ndarray[Any, Any]) -> dict[str, Call]:
    """Return calls without and with the engine's just-in-time compiler."""
    make = ENGINES[engine]
    return {FIRST: make(index, x, "float32", False), SECOND: make(index, x, "float32", True)}


# -- modules of PyTorch and MLX -----------------------------------------------------------------------------------
def of_torch(index: int, x: np.ndarray[Any, Any], dtype: str, jit: bool) -> Call:
    import torch
    from torch import nn

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.inner_norm, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            active = torch.relu(self.norm(self.stem(x)))
            combined = torch.relu(self.inner_norm(self.inner(active)) + active)
            return self.head(combined.mean((2, 3)))

    makers: list[Callable[[], Any]] = [
        lambda: nn.Sequential(
            nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4)
        ),
        Convolutions,
        lambda: nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 4)),
        lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))),
    ]
    kind = getattr(torch, dtype)
    module, image = makers[index]().eval().to(kind), torch.tensor(x).to(kind)
    run = torch.compile(module) if jit else module

    def call() -> Any:
        with torch.no_grad():
            return run(image)

    return call


def of_mlx(index: int, x: np.ndarray[Any, Any], dtype: str, jit: bool) -> Call:
    import mlx.core as mx
    from mlx import nn

    class Convolutions(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.inner_norm, self.head = nn.BatchNorm(8), nn.BatchNorm(8), nn.Linear(8, 4)

        def __call__(self, x: Any) -> Any:
            active = nn.relu(self.norm(self.stem(x)))
            combined = nn.relu(self.inner_norm(self.inner(active)) + active)
            return self.head(combined.mean((1, 2)))

    class Encoder(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(64, 4, 128, norm_first=False), nn.Linear(64, 4)

        def __call__(self, x: Any) -> Any:
            return self.head(self.layer(x, None))

    makers: list[Callable[[], Any]] = [
        lambda: nn.Sequential(
            nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4)
        ),
        Convolutions,
        Encoder,
        lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))),
    ]
    module = makers[index]()
    module.eval()
    module.set_dtype(getattr(mx, dtype))
    order = (0, 2, 3, 1) if x.ndim == 4 else tuple(range(x.ndim))  # MLX's images are channels last
    image = mx.array(x.transpose(order)).astype(getattr(mx, dtype))
    mx.eval(module.parameters(), image)
    run = mx.compile(module) if jit else module
    return lambda: run(image)


# -- functions of NumPy and JAX -----------------------------------------------------------------------------------
def norm(xp: Any, x: Any, axes: Any = -1) -> Any:
    single = x.astype(np.float32)
    centered = single - single.mean(axes, keepdims=True)
    return (centered / xp.sqrt((centered * centered).mean(axes, keepdims=True) + 1e-5)).astype(x.dtype)


def softmax(xp: Any, x: Any) -> Any:
    powers = xp.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def heads(x: Any) -> Any:
    return x.reshape(4, 32, 4, 16).transpose(0, 2, 1, 3)


def network(xp: Any, index: int, x: Any, weight: Callable[..., Any], multiply: Any, convolve: Any, erf: Any) -> Any:
    """Compute a network; both kinds of products add in float32."""

    def layer(x: Any, n: int, m: int) -> Any:
        return multiply(x, weight(n, m)) + weight(m)

    if index == 3:
        for _ in range(6):
            x = layer(x, 2048, 2048)
        return x
    if index == 0:
        x = layer(xp.maximum(norm(xp, layer(x, 256, 256)), 0).astype(x.dtype), 256, 256)
        return layer((x * 0.5 * (1 + erf(x * 0.7071))).astype(x.dtype), 256, 4)
    if index == 1:
        scale, shift = weight(1, 8, 1, 1), weight(1, 8, 1, 1)
        active = xp.maximum(convolve(x, weight(8, 3, 3, 3)) * scale + shift, 0).astype(x.dtype)
        combined = xp.maximum(convolve(active, weight(8, 8, 3, 3)) * scale + shift + active, 0)
        return layer(combined.astype(np.float32).mean((2, 3)).astype(x.dtype), 8, 4)
    q, k, v = (heads(layer(x, 64, 64)) for _ in range(3))
    scores = multiply(q, k.transpose(0, 1, 3, 2)).astype(np.float32) / 4
    attended = multiply(softmax(xp, scores).astype(x.dtype), v).transpose(0, 2, 1, 3).reshape(4, 32, 64)
    x = norm(xp, x + layer(attended, 64, 64))
    x = norm(xp, x + layer(xp.maximum(layer(x, 64, 128), 0).astype(x.dtype), 128, 64))
    return layer(x, 64, 4)


def weights(index: int, x: Any, dtype: Any) -> list[np.ndarray[Any, Any]]:
    """Return random weights of a network, in the order of their use."""
    rng, drawn = np.random.default_rng(0), []

    def weight(*shape: int) -> Any:
        drawn.append((rng.standard_normal(shape) / np.prod(shape[:-1] or (1,)) ** 0.5).astype(dtype))
        return drawn[-1]

    network(np, index, x.astype(dtype), weight, _multiply, _convolve, _erf)
    return drawn


def _multiply(a: Any, b: Any) -> Any:
    return np.matmul(_widened(a), _widened(b)).astype(a.dtype, copy=False)


def _widened(x: Any) -> Any:
    return x.astype(np.float32, copy=False)


def _convolve(x: Any, w: Any) -> Any:
    padded = np.pad(_widened(x), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.tensordot(windows, _widened(w), ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2).astype(x.dtype)


def _erf(x: Any) -> Any:
    from scipy.special import erf

    return erf(_widened(x)).astype(x.dtype)


def of_numpy(index: int, x: np.ndarray[Any, Any], dtype: str, jit: bool) -> Call:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    drawn, image = weights(index, x, kind), x.astype(kind)

    def call() -> Any:
        rest = iter(drawn)
        return network(np, index, image, lambda *shape: next(rest), _multiply, _convolve, _erf)

    return call


def of_jax(index: int, x: np.ndarray[Any, Any], dtype: str, jit: bool) -> Call:
    import jax
    import jax.numpy as jnp

    def multiply(a: Any, b: Any) -> Any:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)

    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", preferred_element_type=jnp.float32).astype(x.dtype)

    def run(drawn: Any, image: Any) -> Any:
        rest = iter(drawn)
        return network(jnp, index, image, lambda *shape: next(rest), multiply, convolve, jax.scipy.special.erf)

    kind = getattr(jnp, dtype)
    drawn, image, jitted = [jnp.asarray(w) for w in weights(index, x, kind)], jnp.asarray(x, kind), jax.jit(run)
    return lambda: jitted(drawn, image)


ENGINES = {"torch": of_torch, "mlx": of_mlx, "numpy": of_numpy, "jax": of_jax}
