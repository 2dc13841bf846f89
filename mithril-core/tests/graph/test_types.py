"""Dtypes: one object each, one promotion table, scalars that never widen arrays."""

from __future__ import annotations

import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest

from mithril.graph.dims import Dim, TensorType
from mithril.graph.dtypes import ALL, dtype, promote, promote_scalar
from mithril.graph.errors import DTypeError


@pytest.mark.parametrize("one", ALL, ids=str)
def test_dtypes_are_singletons(one):
    for spelling in (one, one.name, one.short, one.numpy, one.numpy.type, np.zeros(1, one.numpy).dtype):
        assert dtype(spelling) is one
    assert pickle.loads(pickle.dumps(one)) is one and copy.deepcopy(one) is one and copy.copy(one) is one
    assert one.numpy.itemsize == one.itemsize


def test_python_types_map_to_default_dtypes():
    assert [dtype(t).name for t in (bool, int, float)] == ["bool", "int32", "float32"]


def test_misspelled_dtype_is_suggested():
    with pytest.raises(DTypeError) as error:
        dtype("flaot32")
    assert "float32" in str(error.value)
    with pytest.raises(DTypeError):
        dtype([])


def common(a, b):
    try:
        return promote(a, b)
    except DTypeError:
        return None


def test_promotion_is_symmetric_and_holds_every_value_of_both_integers():
    for a, b in itertools.product(ALL, ALL):
        assert common(a, b) is common(b, a)
        assert promote(a, a) is a
        promoted = common(a, b)
        if promoted is not None and a.is_integer and b.is_integer:
            assert promoted.limits[0] <= min(a.limits[0], b.limits[0])
            assert promoted.limits[1] >= max(a.limits[1], b.limits[1])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("bool", "int8", "int8"),
        ("int64", "float16", "float16"),
        ("float16", "bfloat16", "float32"),
        ("int8", "uint8", "int16"),
        ("uint32", "int8", "int64"),
        ("uint16", "int32", "int32"),
        ("float32", "float64", "float64"),
    ],
)
def test_promotion_by_example(a, b, expected):
    assert promote(dtype(a), dtype(b)).name == expected


def test_unrepresentable_integers_are_errors_with_a_remedy():
    with pytest.raises(DTypeError) as error:
        promote(dtype("uint64"), dtype("int8"))
    assert str(error.value) == (
        "uint64 and int8 have no common integer dtype\nhint: cast one of them first, for example cast(x, dtype='int8')"
    )


@pytest.mark.parametrize(
    ("array", "scalar", "expected"),
    [
        ("float16", 2.5, "float16"),
        ("bfloat16", 3, "bfloat16"),
        ("int8", 300, "int8"),
        ("int8", 0.5, "float32"),
        ("bool", 1, "int32"),
        ("bool", True, "bool"),
        ("uint8", True, "uint8"),
    ],
)
def test_scalars_do_not_upcast(array, scalar, expected):
    assert promote_scalar(dtype(array), scalar).name == expected


def test_tensor_types_compare_by_dtype_and_shape():
    b = Dim("B")
    one, equal, other = (TensorType(dtype(d), (b, 3)) for d in ("float32", "f32", "int32"))
    assert one == equal and hash(one) == hash(equal) and one != other and one != "f32[B, 3]"
    assert str(one) == "f32[B, 3]" and not one.is_static and one.rank == 2


def test_bfloat16_is_that_of_ml_dtypes():
    assert dtype(ml_dtypes.bfloat16).numpy == np.dtype(ml_dtypes.bfloat16)
