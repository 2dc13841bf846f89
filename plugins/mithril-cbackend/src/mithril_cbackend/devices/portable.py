"""Kernels in the part of TIR that TVM prints correctly in every language of devices.

TVM's generators print float32 with seven digits, reinterpretations by taking the address of a value, and infinity by a
name that WGSL lacks; none has all functions and dtypes that kernels use. ``Portable`` replaces these by calls of
functions that each language defines in its prelude (``languages.py``), and small numbers by words where the device has
no others. Values that are computed once become names: in a kernel of the CPU they are arrays of one element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril_cbackend import tir as t
from mithril_cbackend.devices.languages import Language
from mithril_cbackend.tir.expr import dtype_of
from mithril_cbackend.tir.tvm_api import PointerType, PrimType, nodes as n, stmt, tirx

BINARY = (
    *(n.Add, n.Sub, n.Mul, n.Div, n.Mod, n.EQ, n.NE, n.LT, n.LE, n.GT, n.GE, n.And, n.Or),
    *(n.LShift, n.RShift, n.BitwiseAnd, n.BitwiseOr, n.BitwiseXor),
)
FUNCTIONS = {"nearbyint": "rint", "fabs": "fabs", "abs": "fabs"}  # intrinsics that C names differently
WORDS = {"int8": "int32", "int16": "int32", "int64": "int32", "uint8": "uint32", "uint16": "uint32", "uint64": "uint32"}


def integer(value: int, dtype: str) -> Any:
    return t.const(value, dtype).node


def called(dtype: str, name: str, *arguments: Any) -> Any:
    return tirx.call_pure_extern(dtype, name, *arguments)


class Portable:
    """Translation of the statements of one kernel."""

    def __init__(self, function: t.Function, language: Language) -> None:
        self.function, self.language = function, language
        self.buffers: dict[str, t.Buffer] = {}
        self.names: dict[str, Any] = {}  # variables by the name of the array of one element that they replace
        self.parameters: dict[str, Any] = {}

    def dtype(self, name: str) -> str:
        """Return the dtype that represents another one on the device."""
        bits = {"float16": "uint16"}.get(name, name)
        return WORDS.get(bits, bits) if self.language.narrows else bits

    def parameter(self, variable: Any) -> Any:
        """Return the pointer in place of a parameter."""
        if variable.name not in self.parameters:
            element = self.dtype(str(variable.ty.element_type.dtype))
            self.parameters[variable.name] = tirx.Var(self.safe(variable.name), PointerType(PrimType(element)))
        return self.parameters[variable.name]

    def safe(self, name: str) -> str:
        return f"{name}_" if name in self.language.reserved else name

    def buffer(self, old: t.Buffer) -> t.Buffer:
        if old.name not in self.buffers:
            size, scope = (int(old.shape[0]),), str(old.scope())
            self.buffers[old.name] = tirx.decl_buffer(
                size, self.dtype(str(old.dtype)), name=self.safe(old.name), scope=scope, layout=None
            )
        return self.buffers[old.name]

    def is_name(self, buffer: t.Buffer) -> bool:
        return self.language.binds and buffer.name in self.function.names and int(buffer.shape[0]) == 1

    # -- statements ---------------------------------------------------------------------------------------------------
    def statement(self, s: Any) -> list[Any]:
        """Return the statements in place of one."""
        if isinstance(s, n.SeqStmt):
            return [part for x in s.seq for part in self.statement(x)]
        if isinstance(s, n.For):
            kind = s.kind if s.kind == t.PARALLEL else t.SERIAL
            body = t.sequence(self.statement(s.body))
            return [stmt.For(s.loop_var, s.min, self.expr(s.extent), kind, body, None, s.annotations)]
        if isinstance(s, n.IfThenElse):
            branches = [None if b is None else t.sequence(self.statement(b)) for b in (s.then_case, s.else_case)]
            return [stmt.IfThenElse(self.expr(s.condition), *branches)]
        if isinstance(s, n.While):
            return [stmt.While(self.expr(s.condition), t.sequence(self.statement(s.body)))]
        if isinstance(s, n.BufferStore):
            if self.is_name(s.buffer):
                self.names[s.buffer.name] = tirx.Var(self.safe(s.buffer.name), self.dtype(str(s.buffer.dtype)))
                return [stmt.Bind(self.names[s.buffer.name], self.expr(s.value))]
            return [stmt.BufferStore(self.buffer(s.buffer), self.expr(s.value), [self.expr(i) for i in s.indices])]
        if isinstance(s, n.AllocBuffer):
            return [] if self.is_name(s.buffer) else [stmt.AllocBuffer(self.buffer(s.buffer))]
        if isinstance(s, n.DeclBuffer):
            return [stmt.DeclBuffer(self.buffer(s.buffer), data=self.parameter(s.data))]
        if isinstance(s, n.Bind):
            return [stmt.Bind(s.var, self.expr(s.value))]
        if isinstance(s, n.Evaluate):
            return [s]  # a barrier
        raise TypeError(f"a launch cannot contain the TIR statement {type(s).__name__}")

    # -- expressions --------------------------------------------------------------------------------------------------
    def expr(self, x: Any) -> Any:
        if isinstance(x, n.Var):
            return x
        if isinstance(x, n.IntImm):
            return integer(int(x.value), self.dtype(dtype_of(x)))
        if isinstance(x, n.FloatImm):
            return self.number(float(x.value), dtype_of(x))
        if isinstance(x, n.Load):
            if self.is_name(x.source):
                return self.names[x.source.name]
            return self.buffer(x.source)[self.expr(x.indices[0])]
        if isinstance(x, BINARY):
            return type(x)(self.expr(x.a), self.expr(x.b))
        if self.language.tests_nan and _tests_nan(x):
            return called("bool", "is_nan", self.expr(x.a.a))
        if isinstance(x, (n.Not, n.BitwiseNot)):
            return type(x)(self.expr(x.a))
        if isinstance(x, n.Select):
            return self.select(*(self.expr(y) for y in (x.condition, x.true_value, x.false_value)))
        if isinstance(x, n.Cast):
            return self.cast(self.expr(x.value), dtype_of(x.value), dtype_of(x))
        if isinstance(x, n.Call):
            return self.call(x, str(x.op.name).rpartition(".")[2])
        raise TypeError(f"a launch cannot contain the TIR expression {type(x).__name__}")

    def select(self, condition: Any, yes: Any, no: Any) -> Any:
        # TVM prints Select as a function that OpenCL finds ambiguous for some widths.
        return tirx.Select(condition, yes, no) if self.language.selects else tirx.if_then_else(condition, yes, no)

    def number(self, value: float, dtype: str) -> Any:
        printed = float(np.dtype(dtype).type(float(f"{value:e}"))) if math.isfinite(value) else math.nan
        exact = np.dtype(dtype).type(value)
        if printed == float(exact) and not (value == 0 and math.copysign(1, value) < 0):
            return tirx.FloatImm(dtype, value)
        bits = f"int{exact.dtype.itemsize * 8}"
        return called(dtype, f"{dtype}_from_{bits}", integer(int(exact.view(bits)), bits))

    def cast(self, x: Any, source: str, target: str) -> Any:
        if source == "float16":
            x, source = called("float32", "float_from_half", x), "float32"
        if target == "float16":
            bits = self.dtype(target)
            return called(bits, "half_from_float", x if source == "float32" else tirx.Cast("float32", x))
        kind = self.dtype(target)
        result = x if dtype_of(x) == kind else tirx.Cast(kind, x)
        width = int(target.removeprefix("u").removeprefix("int")) if "int" in target else 64
        if width >= 32 or kind == target:
            return result
        if kind == "uint32":
            return tirx.bitwise_and(result, integer((1 << width) - 1, kind))
        up = integer(32 - width, "int32")
        return tirx.shift_right(tirx.shift_left(result, up), up)

    def call(self, x: Any, name: str) -> Any:
        if name in ("call_extern", "call_pure_extern"):
            return called(dtype_of(x), str(x.args[0].value), *(self.expr(a) for a in list(x.args)[1:]))
        arguments = [self.expr(a) for a in x.args]
        if name == "reinterpret":
            target, source = self.dtype(dtype_of(x)), dtype_of(arguments[0])
            return arguments[0] if target == source else called(target, f"{target}_from_{source}", arguments[0])
        if name == "if_then_else":
            return tirx.if_then_else(*arguments)
        dtype = dtype_of(x)
        return called(dtype, FUNCTIONS.get(name, name) + ("f" if dtype == "float32" else ""), *arguments)


def _tests_nan(x: Any) -> bool:
    """Whether an expression is that of ``tir.isnan``, ``not x <= inf``."""
    return isinstance(x, n.Not) and isinstance(x.a, n.LE) and isinstance(x.a.b, n.FloatImm) and x.a.b.value == math.inf


def portable(function: t.Function, language: Language) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the statements of a kernel, and its parameters by the names that they had."""
    translation = Portable(function, language)
    body = [s for s in _statements(function.primfunc.body) if not isinstance(s, n.Return)]
    for p in function.primfunc.params:
        translation.parameter(p)
    return [part for s in body for part in translation.statement(s)], translation.parameters


def _statements(body: Any) -> list[Any]:
    return [s for x in body.seq for s in _statements(x)] if isinstance(body, n.SeqStmt) else [body]
