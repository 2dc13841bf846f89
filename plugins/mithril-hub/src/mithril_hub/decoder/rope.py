"""Rotary positions: the frequencies of each scaling method, and the rotation of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError

Frequencies = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rope:
    """Rotation frequencies of one kind of layer: ``short`` up to ``limit`` positions, ``long`` for longer sequences.

    With ``growth``, the base of the frequencies grows with the sequence beyond ``limit`` (dynamic NTK scaling).
    """

    size: int  # rotated features of a head
    base: float
    short: tuple[float, ...]
    long: tuple[float, ...] = ()
    limit: int = 0
    factor: float = 1.0  # of cosine and sine
    growth: float = 0.0

    @staticmethod
    def plain(size: int, base: float) -> Frequencies:
        """Return the frequencies without scaling."""
        return base ** -(np.arange(0, size, 2) / size)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return bool(self.long or self.growth)

    def angles(self, places: Any, length: Any) -> Any:
        """Return the cosine and sine of integer positions [..., length], as [..., length, size / 2].

        ``length``, [] or [batch], is the number of tokens so far, with all of a prompt that is read in pieces.
        """
        rows = ops.reshape(ops.cast(places, dtype="float32"), shape=(*places.shape, 1))
        angles = rows * self._frequencies(length)
        cos, sin = ops.cos(angles), ops.sin(angles)
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)

    def _frequencies(self, length: Any) -> Any:
        frequencies = np.asarray(self.short, np.float32)
        if not self.depends_on_length:
            return frequencies
        if len(length.shape):
            length = ops.reshape(length, shape=(length.shape[0], 1, 1))
        if self.long:
            return ops.where(ops.greater(length, self.limit), np.asarray(self.long, np.float32), frequencies)
        longest = ops.cast(ops.maximum(length, self.limit), dtype="float32")
        stretch = longest * (self.growth / self.limit) - (self.growth - 1.0)
        base = ops.pow(stretch, self.size / (self.size - 2)) * self.base
        exponents = (np.arange(0, self.size, 2) / self.size).astype(np.float32)
        return ops.exp(ops.log(base) * -exponents)


def rotate(x: Any, angles: Any) -> Any:
    """Rotate the first features of [batch, heads, length, size] by angles that are shared or differ per row."""
    cos, sin = angles
    size = 2 * cos.shape[-1]
    if size != x.shape[-1]:
        rotated, rest = ops.split(x, sizes=(size, x.shape[-1] - size), axis=-1)
        return ops.concat(rotate(rotated, angles), rest, axis=-1)
    if len(cos.shape) == 2:
        return ops.rotary_embedding(x, ops.cast(cos, dtype=x.dtype), ops.cast(sin, dtype=x.dtype))
    shape = (cos.shape[0], 1, *cos.shape[1:])  # all heads of a row are at the same positions
    cos, sin = (ops.cast(ops.reshape(wave, shape=shape), dtype=x.dtype) for wave in (cos, sin))
    a, b = ops.split(x, sizes=(size // 2, size // 2), axis=-1)
    return ops.concat(a * cos - b * sin, b * cos + a * sin, axis=-1)


# -- scaling methods ----------------------------------------------------------------------------------------------
def rope_of(settings: Mapping[str, Any], head: int, longest: int) -> Rope:
    """Return the rotation for ``rope_parameters`` of a configuration; ``longest`` is its number of positions."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    method = METHODS.get(kind)
    if method is None:
        raise UnsupportedError(
            f"rotary positions of the type '{kind}' are not supported", facts=[f"supported: {', '.join(METHODS)}"]
        )
    if unknown := sorted(
        {name for name, v in settings.items() if v is not None} - {*SHARED, *PARAMETERS.get(kind, ())}
    ):
        raise UnsupportedError(
            f"rotary positions of the type '{kind}' have parameters that are not supported: {', '.join(unknown)}",
            facts=[f"supported: {', '.join((*SHARED, *PARAMETERS.get(kind, ())))}"],
            hint="remove a parameter that does not change the results of the model",
        )
    settings = {"original_max_position_embeddings": longest, **settings}
    size = int(head * (settings.get("partial_rotary_factor") or 1.0))
    base = float(settings.get("rope_theta") or 10000.0)
    return method(settings, size, base, longest)


def _tuple(frequencies: Frequencies) -> tuple[float, ...]:
    return tuple(float(f) for f in frequencies)


def _default(settings: Mapping[str, Any], size: int, base: float, longest: int) -> Rope:
    return Rope(size, base, _tuple(Rope.plain(size, base)))


def _linear(settings: Mapping[str, Any], size: int, base: float, longest: int) -> Rope:
    return Rope(size, base, _tuple(Rope.plain(size, base) / settings["factor"]))


def _dynamic(settings: Mapping[str, Any], size: int, base: float, longest: int) -> Rope:
    return Rope(size, base, _tuple(Rope.plain(size, base)), limit=longest, growth=float(settings["factor"]))


def _llama3(settings: Mapping[str, Any], size: int, base: float, longest: int) -> Rope:
    """Slow waves are stretched, fast ones are not, and those between are interpolated."""
    plain, factor = Rope.plain(size, base), settings["factor"]
    low, high, old = (settings[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    turns = old * plain / (2 * math.pi)  # of a wave within the original length
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Rope(size, base, _tuple((1 - smooth) * plain / factor + smooth * plain))


def _yarn(settings: Mapping[str, Any], size: int, base: float, longest: int) -> Rope:
    old = settings["original_max_position_embeddings"]
    factor = settings.get("factor") or longest / old
    scale = settings.get("attention_factor")
    if scale is None:
        one, all_ = settings.get("mscale"), settings.get("mscale_all_dim")
        scale = _magnitude(factor, one) / _magnitude(factor, all_) if one and all_ else _magnitude(factor, 1.0)

    def feature_of(turns: float) -> float:
        return size * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = feature_of(settings.get("beta_fast") or 32), feature_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    plain = Rope.plain(size, base)
    return Rope(size, base, _tuple(plain / factor * ramp + plain * (1 - ramp)), factor=float(scale))


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(settings: Mapping[str, Any], size: int, base: float, longest: int) -> Rope:
    old = settings["original_max_position_embeddings"]
    factor = settings.get("factor") or longest / old
    scale = settings.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old))
    plain = Rope.plain(size, base)
    short, long = (_tuple(plain / np.asarray(settings[k])) for k in ("short_factor", "long_factor"))
    return Rope(size, base, short, long, limit=old, factor=float(scale))


METHODS: dict[str, Callable[[Mapping[str, Any], int, float, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in early Phi-3 files
}
SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
LONG = ("factor", "attention_factor", "short_factor", "long_factor")
PARAMETERS = {  # of each method, next to those of all
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": LONG,
    "su": LONG,
}
