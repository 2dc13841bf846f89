"""Random numbers: Threefry-2x32 on counters, so that a key yields the same numbers on every backend.

Words, uniforms, splits and folds are bit-identical to those of ``jax.random`` (partitionable form).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril.graph import (
    RANDOM_KEY,
    DType,
    OperationError,
    Shape,
    ShapeError,
    bfloat16,
    composite,
    exactly,
    expect_rank,
    float16,
    float32,
    float64,
    int32,
    op,
    sample,
    uint32,
)
from mithril.ops.basic import cast
from mithril.ops.control_flow import scan
from mithril.ops.elementwise import CENTRAL, TAIL, erfinv, less, log, maximum, mod, shift_right, sqrt, where
from mithril.ops.shape import spread

Array = np.ndarray[Any, Any]
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# The constant of Threefry's third key, so that the three are not all zero for a key of zeros.
_PARITY = 0x1BD11BDA
KEY = exactly(0, 42, dtype="uint32")
OTHER_KEY = exactly(123456789, 987654321, dtype="uint32")
NO_GRADIENT = "random numbers are not differentiable"


def threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Apply the 20 rounds of Threefry-2x32 to pairs of 32-bit words."""
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    keys = (k0, k1, np.uint32(k0 ^ k1 ^ np.uint32(_PARITY)))
    with np.errstate(over="ignore"):
        x0, x1 = high + keys[0], low + keys[1]
        # Rotations and order of keys are those of Salmon et al., Parallel random numbers: as easy as 1,
        # 2, 3 (2011), which jax.random follows; another order yields other weights for a seed.
        for block in range(5):
            for r in _ROTATIONS[block % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))
                x1 = x1 ^ x0
            x0 = x0 + keys[(block + 1) % 3]
            x1 = x1 + np.uint32(keys[(block + 2) % 3] + np.uint32(block + 1))
    return x0, x1


def counters(n: int) -> tuple[Array, Array]:
    """Return the 64-bit counters 0 to n - 1 as high and low words."""
    count = np.arange(n, dtype=np.uint64)
    return (count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32)


def _check_key(key: Shape) -> None:
    expect_rank("key", key, 1)
    if key[0] != 2:
        raise ShapeError(f"a random key has 2 words, got {key[0]}", hint=RANDOM_KEY)


def _key_dtype(dtypes: Any, _: Any) -> DType:
    if dtypes[0] is not uint32:
        raise OperationError(f"a random key must be uint32, got {dtypes[0]}", hint=RANDOM_KEY)
    return uint32


def _bits_shape(key: Shape, *, shape: Shape) -> Shape:
    _check_key(key)
    return shape


@op(
    shape=_bits_shape,
    dtype=_key_dtype,
    flops=80,
    samples=[
        sample(KEY, shape=(5,), dtypes=False),
        sample(OTHER_KEY, shape=(2, 3, 7), label="3d", dtypes=False),
        sample(KEY, shape=(), label="scalar", dtypes=False),
    ],
    axes="r -> *s | r s whole",
    random=True,
)
def random_bits(key, *, shape: Shape):
    """Uniform 32-bit words: element i is Threefry of the counter i."""
    high, low = counters(math.prod(map(int, shape)))
    a, b = threefry(key, high, low)
    return (a ^ b).reshape(shape)


def _split_shape(key: Shape, *, num: int) -> Shape:
    _check_key(key)
    return (num, 2)


@op(
    shape=_split_shape,
    dtype=_key_dtype,
    flops=80,
    samples=[sample(KEY, dtypes=False), sample(OTHER_KEY, num=5, label="five", dtypes=False)],
    axes="r -> n s | r n s whole",
    random=True,
)
def split_key(key, *, num: int = 2):
    """``num`` independent keys derived from one, as rows."""
    high, low = counters(num)
    return np.stack(threefry(key, high, low), axis=1)


def _fold_shape(key: Shape, data: Shape) -> Shape:
    _check_key(key)
    expect_rank("data", data, 0)
    return (2,)


@op(
    shape=_fold_shape,
    dtype=_key_dtype,
    flops=80,
    samples=[
        sample(KEY, exactly(7, dtype="uint32", shape=()), dtypes=False),
        sample(KEY, exactly(-1, dtype="int32", shape=()), label="int", dtypes=False),
    ],
    axes="r, -> s | r s whole",
    random=True,
)
def fold_in(key, data):
    """The key mixed with an integer scalar."""
    word = np.asarray(data).astype(np.int64).astype(np.uint32).reshape(1)
    a, b = threefry(key, np.zeros(1, np.uint32), word)
    return np.concatenate([a, b])


for _op in (random_bits, split_key, fold_in):
    _op.no_vjp(NO_GRADIENT)


# -- keys that differ between rows: a scan, as the counters of each key start at 0 ---------------------------------
def _per_row(draw: Any, *operands: Any) -> Any:
    return scan(lambda carry, row: (carry, draw(*row)), (), operands)[1]


@random_bits.vmap
def _(rows, has_rows, key, *, shape):
    return _per_row(lambda row: random_bits(row, shape=shape), key)


@split_key.vmap
def _(rows, has_rows, key, *, num):
    return _per_row(lambda row: split_key(row, num=num), key)


@fold_in.vmap
def _(rows, has_rows, key, data):
    return _per_row(
        fold_in, *(v if mapped else spread(v, rows) for v, mapped in zip((key, data), has_rows, strict=True))
    )


# -- distributions ------------------------------------------------------------------------------------------------
@composite(
    samples=[
        sample(KEY, shape=(64,), dtypes=False),
        sample(KEY, shape=(3, 5), low=-2.0, high=3.0, label="range", dtypes=False),
    ]
)
def uniform(key, *, shape: Shape, low: float = 0.0, high: float = 1.0, dtype: DType = float32):
    """Uniform floats in [low, high)."""
    unit = _unit(key, shape, dtype)
    if low == 0.0 and high == 1.0:
        return unit
    # Rounding may give less than ``low``, which is not in the interval.
    return maximum(unit * (high - low) + low, low)


def _unit(key: Any, shape: Shape, dtype: DType) -> Any:
    """Return uniform multiples of 2**-mantissa in [0, 1)."""
    if dtype is float64:
        keys = split_key(key)
        upper = shift_right(random_bits(keys[0], shape=shape), 6)
        lower = shift_right(random_bits(keys[1], shape=shape), 6)
        return cast(upper, dtype=float64) * 2.0**-26 + cast(lower, dtype=float64) * 2.0**-52
    width = {float16: 10, bfloat16: 7}.get(dtype, 23)
    bits = random_bits(key, shape=shape)
    # 24-bit integers are exact in float32, so no backend rounds
    unit = cast(shift_right(bits, 32 - width), dtype="float32") * 2.0**-width
    return unit if width == 23 else cast(unit, dtype=dtype)


@composite(
    tolerance=4.0,
    samples=[
        sample(KEY, shape=(64,), dtypes=False),
        sample(OTHER_KEY, shape=(3, 5), dtype="float64", label="f64", dtypes=False),
    ],
)
def normal(key, *, shape: Shape, dtype: DType = float32):
    """Standard normal floats, computed with the inverse error function."""
    compute = float64 if dtype is float64 else float32
    # Above -1, where the inverse error function is infinite.
    smallest = -1.0 + (2.0**-53 if compute is float64 else 2.0**-24)
    z = maximum(_unit(key, shape, compute) * 2.0 + smallest, smallest)
    y = (erfinv(z) if compute is float64 else _single_erfinv(z)) * math.sqrt(2.0)
    return y if compute is dtype else cast(y, dtype=dtype)


def _single_erfinv(z: Any) -> Any:
    """Compute erfinv by polynomials: results of libraries differ, but a seed must yield the same weights everywhere."""
    w = -log((1.0 - z) * (1.0 + z))
    central, tail = w - 2.5, sqrt(maximum(w, 5.0)) - 3.0
    inner, outer = central * CENTRAL[0] + CENTRAL[1], tail * TAIL[0] + TAIL[1]
    for a, b in zip(CENTRAL[2:], TAIL[2:], strict=True):
        inner, outer = inner * central + a, outer * tail + b
    return where(less(w, 5.0), inner, outer) * z


@composite(samples=[sample(KEY, shape=(64,), p=0.3, dtypes=False)])
def bernoulli(key, *, shape: Shape, p: float):
    """True with probability p."""
    if not 0.0 <= p <= 1.0:
        raise OperationError(f"p={p} is not a probability", facts=["accepted: 0 to 1"])
    return less(uniform(key, shape=shape), p)


@composite(
    samples=[
        sample(KEY, shape=(64,), low=-3, high=4, dtypes=False),
        sample(OTHER_KEY, shape=(2, 3), high=2**31, label="largest", dtypes=False),
    ]
)
def randint(key, *, shape: Shape, low: int = 0, high: int):
    """Int32 numbers in [low, high) of equal probability, up to 2**-32: remainders of 32-bit words."""
    if not -(2**31) <= low < high <= 2**31 or high - low > 2**31:
        raise OperationError(f"randint: [{low}, {high}) is not a range of int32", facts=["accepted: low < high"])
    remainder = mod(random_bits(key, shape=shape), np.full((), high - low, np.uint32))
    return cast(remainder, dtype=int32) + np.full((), low, np.int32)


for _op in (uniform, normal, bernoulli, randint):
    _op.no_vjp(NO_GRADIENT)
