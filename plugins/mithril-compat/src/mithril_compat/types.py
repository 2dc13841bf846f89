"""The names of the predecessor's ``mithril.types``."""

from __future__ import annotations

import builtins
from typing import Any, TypeVar

import numpy as np

import mithril as today
from mithril_compat.language.connection import Constant

DataType = TypeVar("DataType")
GenericDataType = Any


class Dtype:
    """The dtypes by name."""

    uint8, int8, int16, int32, int64 = today.uint8, today.int8, today.int16, today.int32, today.int64
    float16, bfloat16, float32, float64 = today.float16, today.bfloat16, today.float32, today.float64
    bool = today.bool_


bool = today.bool_
int8, int16, int32, int64, uint8 = today.int8, today.int16, today.int32, today.int64, today.uint8
float16, bfloat16, float32, float64 = today.float16, today.bfloat16, today.float32, today.float64
short, int, long, half, float, double = int16, int32, int64, float16, float32, float64
epsilon_table: dict[builtins.int, dict[Constant, builtins.float]] = {
    bits: {c: c.number(kind) for c in Constant} for bits, kind in ((16, np.float16), (32, np.float32), (64, np.float64))
}
