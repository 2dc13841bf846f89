"""Tensors of ONNX files as arrays; sizes and offsets are checked before anything is allocated or mapped."""

from __future__ import annotations

import math
import os
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from mithril.graph import DType, InputError, UnsupportedError, dtype as as_dtype
from mithril.system import files

Array = np.ndarray[Any, Any]
T = onnx.TensorProto

# Element types with a dtype of their own.
DTYPES = {
    T.FLOAT: "float32", T.UINT8: "uint8", T.INT8: "int8", T.UINT16: "uint16", T.INT16: "int16", T.INT32: "int32",
    T.INT64: "int64", T.BOOL: "bool", T.FLOAT16: "float16", T.DOUBLE: "float64", T.UINT32: "uint32",
    T.UINT64: "uint64", T.BFLOAT16: "bfloat16",
}  # fmt: skip
# Element types that are stored in fewer bits than the dtype that computes with them, which has all their values.
PACKED = {
    T.INT4: ("int8", 4),
    T.UINT4: ("uint8", 4),
    getattr(T, "INT2", 25): ("int8", 2),
    getattr(T, "UINT2", 26): ("uint8", 2),
}
SMALL_FLOATS = {
    T.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn, T.FLOAT8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    T.FLOAT8E5M2: ml_dtypes.float8_e5m2, T.FLOAT8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
LARGEST = 1 << 48  # elements; larger sizes are damage


def dtype_of_code(code: int) -> DType:
    """Return the dtype that computes with an element type."""
    if code in DTYPES:
        return as_dtype(DTYPES[code])
    if code in PACKED:
        return as_dtype(PACKED[code][0])
    if code in SMALL_FLOATS:
        return as_dtype("float32")
    raise UnsupportedError(
        f"tensors of the ONNX element type {type_name(code)} are not supported",
        facts=["accepted: bool, integers of 2 to 64 bits, floats of 16 to 64 bits"],
    )


def type_name(code: int) -> str:
    try:
        return str(T.DataType.Name(code))
    except ValueError:
        return f"number {code}"


def code_of_dtype(dtype: Any) -> int:
    """Return the element type of a dtype."""
    codes: dict[str, int] = {name: code for code, name in DTYPES.items()}
    return codes[as_dtype(dtype).name]


def to_array(tensor: Any, folder: str | None = None, mapped: Array | None = None) -> Array:
    """Return a tensor as an array; external data is mapped read-only, never copied, as are the bytes ``mapped``."""
    shape = tuple(tensor.dims)
    count = math.prod(shape)
    if any(n < 0 for n in shape) or count > LARGEST:
        raise _damaged(tensor, f"its sizes are {list(shape)[:8]}")
    code = tensor.data_type
    if code == T.STRING:  # only for operators that do not compute with them, such as those of labels
        if len(tensor.string_data) != count:
            raise _damaged(tensor, f"it has {len(tensor.string_data)} strings, expected {count}")
        return np.asarray([s.decode("utf-8", "replace") for s in tensor.string_data], np.str_).reshape(shape)
    dtype_of_code(code)  # raises for complex numbers
    if tensor.data_location == T.EXTERNAL:
        raw = _external(tensor, _bytes(code, count), folder)
    elif mapped is not None:
        raw = mapped
    elif tensor.HasField("raw_data"):
        raw = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        return _typed(tensor, code, shape, count)
    if raw.size != _bytes(code, count):
        raise _damaged(tensor, f"it has {raw.size} bytes, {list(shape)} of {type_name(code)} are {_bytes(code, count)}")
    return _decoded(raw, code, count).reshape(shape)


def _bytes(code: int, count: int) -> int:
    if code in PACKED:
        return int(-(-count * PACKED[code][1] // 8))
    size: int = count if code in SMALL_FLOATS else count * as_dtype(DTYPES[code]).itemsize
    return size


def _decoded(raw: Array, code: int, count: int) -> Array:
    if code in PACKED:
        return _unpacked(raw, *PACKED[code], count)
    if code in SMALL_FLOATS:
        small: Array = raw.view(SMALL_FLOATS[code]).astype(np.float32)
        return small
    if code == T.BOOL:
        return raw.astype(np.bool_)
    return raw.view(as_dtype(DTYPES[code]).numpy)


def _unpacked(raw: Array, name: str, bits: int, count: int) -> Array:
    """Return integers of 2 or 4 bits as bytes; the lowest bits come first."""
    parts = [(raw >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    values = np.stack(parts, -1).reshape(-1)[:count]
    if name == "uint8":
        return values
    sign = 1 << (bits - 1)
    return ((values.astype(np.int8) ^ sign) - sign).astype(np.int8)


def _typed(tensor: Any, code: int, shape: tuple[int, ...], count: int) -> Array:
    """Return the elements of the repeated field that belongs to the element type."""
    if code in (T.FLOAT,):
        data = np.asarray(tensor.float_data, np.float32)
    elif code == T.DOUBLE:
        data = np.asarray(tensor.double_data, np.float64)
    elif code == T.INT64:
        data = np.asarray(tensor.int64_data, np.int64)
    elif code in (T.UINT32, T.UINT64):
        data = np.asarray(tensor.uint64_data, np.uint64).astype(as_dtype(DTYPES[code]).numpy)
    else:
        words = np.asarray(tensor.int32_data, np.int32)
        if code in PACKED or code in SMALL_FLOATS:
            data = _decoded(words.astype(np.uint8), code, count)
        elif code in (T.FLOAT16, T.BFLOAT16):
            data = words.astype(np.uint16).view(as_dtype(DTYPES[code]).numpy)
        else:
            data = words.astype(as_dtype(DTYPES[code]).numpy)
    if data.size != count:
        raise _damaged(tensor, f"it has {data.size} elements, its sizes {list(shape)} require {count}")
    return data.reshape(shape)


def _external(tensor: Any, size: int, folder: str | None) -> Array:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise InputError(
            f"the data of tensor '{tensor.name}' is stored in the file '{location}'",
            hint="load the model by its path: ml.from_onnx('model.onnx')",
        )
    try:
        path = files.inside(folder, location)
    except InputError as error:
        raise InputError(
            f"tensor '{tensor.name}' refers to the file '{location}' outside the folder of the model",
            facts=[error.what, *error.facts],
            hint="store the data next to the model: onnx.save(model, path, save_as_external_data=True)",
        ) from None
    if not path.is_file():
        raise InputError(f"tensor '{tensor.name}': there is no file '{path}'")
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or size)
    except ValueError:
        raise _damaged(tensor, "its offset or length is not a number") from None
    if offset < 0 or length != size or offset + length > os.path.getsize(path):
        raise _damaged(tensor, f"bytes {offset} to {offset + length} of '{location}' are not its {size} bytes")
    if not size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r", offset, (length,))


def _damaged(tensor: Any, reason: str) -> InputError:
    return InputError(f"tensor '{tensor.name:.80}' of the ONNX file is damaged", facts=[reason])
