"""Fourier transforms, windows, mel weights."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import OperationError, UnsupportedError
from mithril_onnx.table import Known, operator
from mithril_onnx.tensors import dtype_of_code


def _matrix(size, length, inverse):
    """Return cos and sin of the transform of ``size`` elements, padded or cut to ``length``."""
    angle = -2 * np.pi * np.outer(np.arange(size), np.arange(length)) / length
    angle = -angle if inverse else angle
    scale = 1.0 / length if inverse else 1.0
    exact = np.round(angle / (2 * np.pi) * length).astype(np.int64) % length
    cos, sin = np.cos(2 * np.pi * exact / length), np.sin(2 * np.pi * exact / length)
    return cos * scale, sin * scale


def dft(x, axis, length=None, inverse=False, onesided=False):
    """Transform [..., n, ..., 1 or 2] along an axis, as products with matrices in float64."""
    rank = x.ndim - 1
    if axis < 0:
        axis += x.ndim
    if not 0 <= axis < rank:
        raise OperationError(f"DFT has no axis {axis}")
    size = x.shape[axis]
    if type(size) is not int:
        raise UnsupportedError(f"DFT requires a static size, axis {axis} is {size}")
    kind = x.dtype
    upcast = ops.cast(x, dtype="float64")
    order = (*(k for k in range(rank) if k != axis), axis)
    parts = [ops.transpose(ops.select(upcast, index=(k,), axes=(rank,)), perm=order) for k in range(int(x.shape[rank]))]
    if inverse and onesided:
        length = length or 2 * (size - 1)
        parts = _completed(parts, size, length)
        size = length
    length = length or size
    if size > length:
        parts = [ops.slice(p, starts=(0,), stops=(length,), steps=(1,), axes=(rank - 1,)) for p in parts]
        size = length
    cos, sin = _matrix(size, length, inverse)
    if onesided and not inverse:
        cos, sin = cos[:, : length // 2 + 1], sin[:, : length // 2 + 1]
    real = ops.matmul(parts[0], cos)
    imaginary = ops.matmul(parts[0], sin)
    if len(parts) == 2:
        real, imaginary = real - ops.matmul(parts[1], sin), imaginary + ops.matmul(parts[1], cos)
    results = [real] if inverse and onesided else [real, imaginary]
    back = tuple(order.index(k) for k in range(rank))
    return ops.cast(ops.stack(*[ops.transpose(r, perm=back) for r in results], axis=-1), dtype=kind)


def _completed(parts, size, length):
    """Return all frequencies of a real signal from those up to the middle."""
    mirror = np.asarray([k if k < size else length - k for k in range(length)])
    sign = np.where(np.arange(length) < size, 1.0, -1.0)
    full = [ops.take(p, mirror, axis=p.ndim - 1) for p in parts]
    return [full[0], full[1] * sign] if len(full) == 2 else full


@operator(since=20)
def DFT(x, dft_length: Known = None, axis: Known = None, *, inverse=0, onesided=0):
    place = -2 if axis is None else int(np.ravel(axis)[0])
    return dft(x, place, _length(dft_length), bool(inverse), bool(onesided))


@operator(name="DFT", since=17)
def _DFT17(x, dft_length: Known = None, *, axis=1, inverse=0, onesided=0):
    return dft(x, axis, _length(dft_length), bool(inverse), bool(onesided))


def _length(v):
    return None if v is None else int(np.ravel(v)[0])


@operator
def STFT(x, frame_step: Known, window=None, frame_length: Known = None, *, onesided=1):
    step = int(np.ravel(frame_step)[0])
    length = _length(frame_length) or (int(window.shape[0]) if window is not None else None)
    size = x.shape[1]
    if length is None or type(size) is not int or step < 1:
        raise OperationError("STFT requires a frame length and a static signal length")
    if x.ndim == 2:
        x = ops.unsqueeze(x, axis=(2,))
    count = (size - length) // step + 1
    index = np.arange(count)[:, None] * step + np.arange(length)
    frames = ops.take(x, index, axis=1)  # [batch, frames, length, 1 or 2]
    if window is not None:
        frames = frames * ops.reshape(window, shape=(1, 1, -1, 1))
    return dft(frames, 2, None, False, bool(onesided))


def _window(name, coefficients):
    def apply(size: Known, *, output_datatype=1, periodic=1):
        n = int(np.ravel(size)[0])
        if not 0 <= n <= 1 << 24:
            raise OperationError(f"{name} has the size {n}")
        angle = 2 * np.pi * np.arange(n) / max(n if periodic else n - 1, 1)
        window = sum(c * np.cos(k * angle) for k, c in enumerate(coefficients))
        return np.asarray(window).astype(dtype_of_code(output_datatype).numpy)

    apply.__annotations__["size"] = "Known"
    operator(apply, name=name, folds=False)


_window("HannWindow", (0.5, -0.5))
_window("HammingWindow", (25 / 46, -21 / 46))
_window("BlackmanWindow", (0.42, -0.5, 0.08))


@operator(folds=False)
def MelWeightMatrix(
    num_mel_bins: Known, dft_length: Known, sample_rate: Known, lower_edge_hertz: Known, upper_edge_hertz: Known, *,
    output_datatype=1,
):  # fmt: skip
    bins, length, rate = (int(np.ravel(v)[0]) for v in (num_mel_bins, dft_length, sample_rate))
    low, high = (float(np.ravel(v)[0]) for v in (lower_edge_hertz, upper_edge_hertz))
    spectrum = length // 2 + 1
    low_mel, high_mel = (2595 * np.log10(1 + f / 700) for f in (low, high))
    edges = low_mel + np.arange(bins + 2) * ((high_mel - low_mel) / (bins + 2))
    places = np.floor((length + 1) * (700 * (10 ** (edges / 2595) - 1)) / rate).astype(int)
    out = np.zeros((spectrum, bins))
    for k in range(bins):
        left, center, right = places[k : k + 3]
        if center == left:
            out[center, k] = 1
        else:
            for j in range(left, center + 1):
                out[j, k] = (j - left) / (center - left)
        for j in range(center, right if right > center else center):
            out[j, k] = (right - j) / (right - center)
    return out.astype(dtype_of_code(output_datatype).numpy)
