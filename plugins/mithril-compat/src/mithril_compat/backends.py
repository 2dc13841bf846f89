"""Today's backends with the predecessor's functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import mithril as today
from mithril import BackendError, dtype as as_dtype
from mithril_compat.notices import old_name


class Arrays:
    """Functions of arrays, which are computed by NumPy in main memory."""

    inf, nan, pi, e = math.inf, math.nan, math.pi, math.e
    DataType = Any
    backend_type: str
    array: Callable[..., Any]
    to_numpy: Callable[[Any], Any]
    dtype: Any

    @property
    def _dtype(self) -> Any:
        return self.dtype

    def _make(self, x: Any, dtype: Any = None) -> Any:
        x = np.asarray(x)
        kind = as_dtype(dtype).numpy if dtype is not None else self.dtype.numpy if x.dtype.kind == "f" else x.dtype
        return self.array(x.astype(kind))

    def _shape(self, sizes: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else tuple(sizes)

    def zeros(self, *shape: Any, dtype: Any = None, device_mesh: Any = None) -> Any:
        return self._filled(0, shape, dtype, device_mesh)

    def ones(self, *shape: Any, dtype: Any = None, device_mesh: Any = None) -> Any:
        return self._filled(1, shape, dtype, device_mesh)

    def _filled(self, value: int, shape: tuple[Any, ...], dtype: Any, device_mesh: Any) -> Any:
        shape, dtype = self._with_dtype(shape, dtype)
        if device_mesh is not None:
            old_name("device_mesh=")
        return self.full(shape, value, dtype)  # type: ignore[attr-defined]

    def _with_dtype(self, shape: tuple[Any, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
        """Return shape and dtype of a call of today, ``ones((2, 3), "float32")``, or of the predecessor."""
        if len(shape) == 2 and not isinstance(shape[0], int) and not isinstance(shape[1], int):
            return tuple(shape[0]), shape[1]
        return self._shape(shape), dtype

    def randn(self, *shape: Any, dtype: Any = None, device_mesh: Any = None, key: int | None = None) -> Any:
        sizes, dtype = self._with_dtype(shape, dtype)
        return super().randn(sizes, dtype)  # type: ignore[misc]

    def rand(self, *shape: Any, dtype: Any = None, device_mesh: Any = None, key: int | None = None) -> Any:
        sizes, dtype = self._with_dtype(shape, dtype)
        return super().rand(sizes, dtype)  # type: ignore[misc]

    def rand_uniform(self, low: Any, high: Any, *shape: Any, dtype: Any = None, key: int | None = None) -> Any:
        unit = self.to_numpy(self.rand(*(shape or ((),)), dtype=dtype))
        return self._make(unit * (self._plain(high) - self._plain(low)) + self._plain(low), dtype)

    def randint(self, low: int, high: int, *shape: Any, dtype: Any = None, key: int | None = None) -> Any:
        unit = self.to_numpy(self.rand(*(shape or ((),))))
        numbers = np.minimum(np.floor(unit * (high - low)) + low, high - 1)
        return self._make(numbers, dtype or "int32")

    def linspace(self, start: Any, stop: Any, steps: int, dtype: Any = None, device_mesh: Any = None) -> Any:
        return self._make(np.linspace(self._plain(start), self._plain(stop), steps), dtype)

    def arange(self, *limits: Any, dtype: Any = None, device_mesh: Any = None) -> Any:
        kind = dtype or (self.dtype if any(isinstance(x, float) for x in limits) else "int32")
        return self._make(np.arange(*map(self._plain, limits)), kind)

    def ones_like(self, x: Any, **settings: Any) -> Any:
        return self._make(np.ones_like(self._plain(x)), settings.get("dtype"))

    def zeros_like(self, x: Any, **settings: Any) -> Any:
        return self._make(np.zeros_like(self._plain(x)), settings.get("dtype"))

    def _plain(self, x: Any) -> Any:
        return self.to_numpy(x) if self.is_array(x) else x  # type: ignore[attr-defined]

    def cast(self, x: Any, dtype: Any = None) -> Any:
        return self.array(self._plain(x), dtype=dtype or self.dtype)

    def sort(self, x: Any, axis: int = -1, descending: bool = False) -> Any:
        y = np.sort(self._plain(x), axis=axis)
        return self._make(np.flip(y, axis) if descending else y)

    def topk(self, x: Any, k: int) -> Any:
        return self._make(-np.sort(-self._plain(x), axis=-1)[..., :k])

    def multinomial(self, probs: Any, num_samples: int, replacement: bool = False, **kwargs: Any) -> Any:
        p = np.atleast_2d(self._plain(probs)).astype(np.float64)
        noise = -np.log(-np.log(self.to_numpy(self.rand(*p.shape)).astype(np.float64) + 1e-20) + 1e-20)
        if replacement and num_samples > 1:
            raise BackendError("multinomial with replacement of several samples is not offered")
        samples = np.argsort(-(np.log(p + 1e-300) + noise), axis=-1)[:, :num_samples]
        return self._make(samples.reshape(*np.shape(self._plain(probs))[:-1], num_samples), "int32")

    def softmax(self, x: Any, dim: int = -1) -> Any:
        y = self._plain(x)
        y = np.exp(y - y.max(axis=dim, keepdims=True))
        return self._make(y / y.sum(axis=dim, keepdims=True))

    def pad(self, x: Any, pad_width: Any) -> Any:
        flat = pad_width and isinstance(pad_width[0], int) and isinstance(x, object) and not isinstance(pad_width, int)
        y = self._plain(x)
        if flat and len(pad_width) == 2 * y.ndim:  # PyTorch's order: the last axis first
            pad_width = [tuple(pad_width[2 * k : 2 * k + 2]) for k in range(y.ndim)][::-1]
        return self._make(np.pad(y, [tuple(map(int, p)) for p in pad_width]))

    def get_device(self) -> str:
        return str(self.device)  # type: ignore[attr-defined]

    def to_device(self, x: Any, device: str | None = None, asynchronous: bool = True) -> Any:
        return self.array(x)

    def block_until_ready(self, x: Any) -> Any:
        self.synchronize(x)  # type: ignore[attr-defined]
        return x

    def empty_cache(self) -> None:
        """Do nothing: engines release their memory themselves."""


def _elementwise(name: str, function: Callable[..., Any]) -> None:
    def method(self: Arrays, x: Any, *args: Any, **settings: Any) -> Any:
        return self._make(function(self._plain(x), *map(self._plain, args), **settings))

    method.__name__ = name
    setattr(Arrays, name, method)


def _joined(name: str, function: Callable[..., Any]) -> None:
    def method(self: Arrays, xs: Any, axis: int = 0) -> Any:
        return self._make(function([self._plain(x) for x in xs], axis=axis))

    method.__name__ = name
    setattr(Arrays, name, method)


_NUMPY = (
    *("abs", "sign", "sin", "cos", "tanh", "log", "exp", "sqrt", "isnan", "all", "any", "squeeze", "unique", "where"),
    *("atleast_1d", "atleast_2d", "reshape", "transpose", "argmax", "clip", "expand_dims"),
)
for _name in _NUMPY:
    _elementwise(_name, getattr(np, _name))
_elementwise("sigmoid", lambda x: 1.0 / (1.0 + np.exp(-x)))
_elementwise("relu", lambda x: np.maximum(x, 0))
_elementwise("leaky_relu", lambda x, slope=0.01: np.where(x > 0, x, x * slope))
_elementwise("softplus", lambda x: np.logaddexp(x, 0.0))
_elementwise(
    "flatten",
    lambda x, start_dim=0, end_dim=-1: x.reshape(-1) if start_dim == 0 else x.reshape(*x.shape[:start_dim], -1),
)
for _name in ("cat", "concat"):
    _joined(_name, np.concatenate)
_joined("stack", np.stack)


@cache
def backend_class(name: str) -> type:
    """Return today's backend with the predecessor's functions of arrays: ``backend_class("JaxBackend")``."""
    base = getattr(today, name)

    class WithArrays(Arrays, base):  # type: ignore[misc, valid-type]
        backend_type = base.name

        def __class_getitem__(cls, item: Any) -> type:
            return cls

    WithArrays.__name__ = WithArrays.__qualname__ = name
    return WithArrays
