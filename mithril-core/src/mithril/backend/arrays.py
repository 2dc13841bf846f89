"""Conversion of arrays of any framework to NumPy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.graph import DType, InputError, Op, dtype as as_dtype


def is_plain(x: Any) -> bool:
    """Whether x is an array of NumPy itself: to a matrix or a masked array ``*`` and ``+`` mean something else."""
    return type(x) is np.ndarray or type(x) is np.memmap


def check_readable(x: Any, noun: str = "the array") -> None:
    """Refuse tensors of PyTorch whose elements no other framework can read."""
    layout = str(getattr(x, "layout", ""))
    if layout.startswith("torch.") and layout != "torch.strided":
        raise InputError(
            f"{noun} is a sparse tensor of PyTorch ({layout})",
            hint="x.to_dense(); IOKey(..., sparse='csr') declares inputs that are arrays of scipy.sparse",
        )
    if str(getattr(x, "device", "")) == "meta":
        raise InputError(f"{noun} is on the device 'meta', where tensors have no elements")


def to_numpy(x: Any, noun: str = "the array") -> np.ndarray[Any, Any]:
    """Convert an array of any framework, bfloat16 included, to NumPy in native byte order."""
    if isinstance(x, np.ndarray):
        if not is_plain(x):
            if count := int(np.sum(getattr(x, "mask", False))):
                raise InputError(
                    f"{noun} is masked: an operation has no value for {count} of {x.size} elements",
                    hint="x.filled(0), or pass the mask as an input of the model",
                )
            x = np.asarray(x)
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))  # type: ignore[no-any-return]
    if hasattr(x, "detach"):
        check_readable(x, noun)
        x = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu()  # one in parts on a mesh is joined
        if str(x.dtype).endswith("bfloat16"):
            return x.float().numpy().astype(as_dtype("bfloat16").numpy)  # type: ignore[no-any-return]
        return x.numpy()  # type: ignore[no-any-return]
    try:
        return np.asarray(x)
    except ValueError:  # NumPy reads no buffers of bfloat16
        if not str(getattr(x, "dtype", "")).endswith("bfloat16"):
            raise
        data = memoryview(x).tobytes()
        return np.frombuffer(data, as_dtype("bfloat16").numpy).reshape(x.shape)


def is_sparse(x: Any) -> bool:
    """Whether an object is an array or matrix of scipy.sparse, which is not imported for this test."""
    return type(x).__module__.startswith("scipy.sparse")


def as_numpy(data: Any, default: DType) -> np.ndarray[Any, Any]:
    """Convert anything array-like to NumPy; Python numbers get the default dtypes."""
    array = to_numpy(data)
    if not hasattr(data, "dtype"):
        if array.dtype == np.float64:
            array = array.astype(default.numpy)
        elif array.dtype == np.int64:
            array = array.astype(np.int32)
    return array


Array = np.ndarray[Any, Any]


class EncodedWeight(ABC):
    """An array of float32 that is stored as bytes [rows, bytes of a row]; ``order`` selects the row of each row."""

    dtype = np.dtype(np.float32)

    def __init__(self, quantized: Array, shape: tuple[int, ...], order: Array | None = None) -> None:
        self.quantized, self.shape, self.order = quantized, shape, order

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def parts(self) -> dict[str, Array]:
        """The arrays that represent it, by the name of the operand of the operation that reads them."""
        return (
            {"quantized": self.quantized} if self.order is None else {"quantized": self.quantized, "order": self.order}
        )

    @property
    def reading(self) -> tuple[Op, Mapping[str, Any]] | None:
        """The operation of every backend, with its attributes, that yields the array; None if only some have one."""
        return None

    @property
    def nbytes(self) -> int:
        """The bytes of the quantized values."""
        return int(self.quantized.nbytes)

    @abstractmethod
    def decoded(self) -> Array:
        """Return the numbers."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.decoded(), dtype)
