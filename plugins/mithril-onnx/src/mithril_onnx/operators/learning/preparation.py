"""Preparations of columns: scaling, imputing, encoding, selecting."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import OperationError, UnsupportedError, dtype as as_dtype
from mithril_onnx.operators.common import int64
from mithril_onnx.operators.learning.scores import as_float, as_matrix, learned
from mithril_onnx.table import Item, Known
from mithril_onnx.values import Strings


@learned
def ArrayFeatureExtractor(x: Item, y, *, context):
    if isinstance(x, Strings):
        return x
    x = context.importer.operand(x, "Operand")
    if isinstance(x, np.ndarray) and x.dtype.kind == "U":
        return Strings("the elements", x.reshape(-1).tolist())
    flat = ops.reshape(int64(y), shape=(-1,))
    columns = ops.take(x, flat, axis=x.ndim - 1)
    return ops.reshape(columns, shape=(1, *columns.shape)) if x.ndim == 1 else columns


@learned
def Binarizer(x, *, threshold=0.0):
    return ops.cast(ops.greater(x, threshold), dtype=x.dtype)


@learned
def FeatureVectorizer(*parts, inputdimensions=None):
    sizes = inputdimensions or [p.shape[-1] for p in parts]
    columns = [as_matrix(as_float(p)) for p in parts]
    return ops.concat(*[_width(c, n) for c, n in zip(columns, sizes, strict=True)], axis=1)


def _width(x, count):
    """Return the first columns of x, with zeros where it has fewer."""
    if x.shape[1] > count:
        return ops.slice(x, starts=(0,), stops=(count,), steps=(1,), axes=(1,))
    return ops.pad(x, widths=((0, 0), (0, count - x.shape[1]))) if x.shape[1] < count else x


@learned
def Imputer(
    x, *, imputed_value_floats=None, imputed_value_int64s=None, replaced_value_float=0.0, replaced_value_int64=0
):
    is_float = as_dtype(x.dtype).is_float
    values = imputed_value_floats if is_float else imputed_value_int64s
    if not values or (len(values) > 1 and len(values) != x.shape[-1]):
        raise OperationError(
            f"Imputer has {len(values or ())} values for {x.shape[-1]} columns of {as_dtype(x.dtype).name}",
            facts=["expected: one value, or one for each column"],
        )
    replaced = replaced_value_float if is_float else replaced_value_int64
    is_missing = ops.isnan(x) if replaced != replaced else ops.equal(x, replaced)
    return ops.where(is_missing, np.asarray(values, as_dtype(x.dtype).numpy), x)


@learned
def LabelEncoder(
    x, *, classes_strings=None, default_float=-0.0, default_int64=-1, default_string="_Unused", default_tensor=None,
    keys_floats=None, keys_int64s=None, keys_strings=None, keys_tensor=None, values_floats=None, values_int64s=None,
    values_strings=None, values_tensor=None,
):  # fmt: skip
    """Replace keys by values; other elements become the default."""
    if classes_strings or keys_strings or (keys_tensor is not None and keys_tensor.dtype.kind == "U"):
        raise UnsupportedError("LabelEncoder of strings is not supported")
    keys = next(k for k in (keys_tensor, keys_int64s, keys_floats) if k is not None)
    if values_strings or (values_tensor is not None and values_tensor.dtype.kind == "U"):
        return Strings("the labels", values_strings or values_tensor.tolist())
    if values_tensor is not None:
        values, default = values_tensor, default_tensor
    elif values_int64s is not None:
        values, default = np.asarray(values_int64s, np.int64), default_int64
    else:
        values, default = np.asarray(values_floats, np.float32), default_float
    keys = np.asarray(keys, as_dtype(x.dtype).numpy)
    if keys.size != values.size:
        raise OperationError(f"LabelEncoder has {keys.size} keys and {values.size} values")
    order = np.argsort(keys, kind="stable")  # nan is the last; the first of equal keys counts
    keys, values = keys[order], values.reshape(-1)[order]
    default = np.zeros((), values.dtype) if default is None else np.asarray(default, values.dtype).reshape(())
    numbers = keys[keys == keys]
    result = default if not numbers.size else _found(x, numbers, values[: numbers.size], default)
    if numbers.size < keys.size:
        result = ops.where(ops.isnan(x), values[numbers.size], result)
    return ops.broadcast_to(result, shape=x.shape)


def _found(x, keys, values, default):
    """Return the value of each element of x that is among the sorted keys, the default for the others."""
    position = ops.minimum(ops.searchsorted(keys, x), keys.size - 1)
    is_key = ops.equal(ops.take(keys, position, axis=0), x)
    return ops.where(is_key, ops.take(values, position, axis=0), default)


@learned
def Normalizer(x, *, norm="MAX"):
    x = as_float(x)
    if norm == "MAX":  # of the elements, not of their sizes
        size = ops.max(x, axis=-1, keepdims=True)
    elif norm == "L1":
        size = ops.sum(ops.abs(x), axis=-1, keepdims=True)
    elif norm == "L2":
        size = ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True))
    else:
        raise OperationError(f"Normalizer has the norm '{norm}'", facts=["expected: MAX, L1, L2"])
    is_zero = ops.equal(size, 0.0)
    return ops.where(is_zero, x, x / ops.where(is_zero, 1.0, size))


@learned
def OneHotEncoder(x, *, cats_int64s=None, cats_strings=None, zeros=1):
    if cats_strings:
        raise UnsupportedError("OneHotEncoder of strings is not supported")
    categories = np.asarray(cats_int64s, np.int64)
    return ops.cast(ops.equal(ops.unsqueeze(int64(x), axis=(-1,)), categories), dtype="float32")


@learned
def Scaler(x, *, offset=None, scale=None):
    x = as_float(x)
    kind = as_dtype(x.dtype).numpy
    shifted = x if offset is None else x - np.asarray(offset, kind)
    return shifted if scale is None else shifted * np.asarray(scale, kind)


@learned
def ZipMap(x, *, classlabels_int64s=None, classlabels_strings=None):
    """Return the matrix of scores; its columns are in the order of the labels that the maps would have."""
    return x


@learned
def CastMap(x: Known, *, cast_to="TO_FLOAT", map_form="DENSE", max_map=1):
    raise UnsupportedError("maps are not supported")
