"""The same kernels and driver as C11: what is exported, and what ``compiled.source`` shows.

Vector loops are printed as loops that compilers vectorise; those that only load, multiply, add and store, as register
tiles do, with the vector extension that GCC and Clang share, because there compilers do not find the registers alone.
"""

from __future__ import annotations

import math
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.program import Program

n = t.nodes
TYPES = {
    "bool": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t",
    "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t", "float16": "_Float16", "float32": "float",
    "float64": "double", "handle": "void *",
}  # fmt: skip
SIGNS = {
    n.Add: "+", n.Sub: "-", n.Mul: "*", n.Div: "/", n.Mod: "%", n.EQ: "==", n.NE: "!=", n.LT: "<", n.LE: "<=",
    n.GT: ">", n.GE: ">=", n.And: "&&", n.Or: "||", n.LShift: "<<", n.RShift: ">>", n.BitwiseAnd: "&",
    n.BitwiseOr: "|", n.BitwiseXor: "^",
}  # fmt: skip
BITS = {
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "shift_left": "<<", "shift_right": ">>",
}  # fmt: skip
PRELUDE = """\
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#define PARALLEL _Pragma("omp parallel for")
#else
#define PARALLEL
#endif

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline int32_t bits_int32(float x) { int32_t y; memcpy(&y, &x, 4); return y; }
static inline uint32_t bits_uint32(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
static inline float bits_float_i(int32_t x) { float y; memcpy(&y, &x, 4); return y; }
static inline float bits_float_u(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
"""


class Printer:
    """One function."""

    def __init__(self, function: t.Function, lanes: int) -> None:
        self.function = function
        self.lanes = lanes
        self.written: list[tuple[str, str | None, set[str]]] = []  # a line, the name it gives, the names it reads
        self.reading: set[str] = set()
        self.depth = 1

    def text(self, name: str) -> str:
        body = self.function.made.body
        declared: dict[str, Any] = {}
        for s in body.seq if isinstance(body, n.SeqStmt) else [body]:
            if isinstance(s, n.DeclBuffer):
                declared[s.data.name] = s.buffer
        parameters = []
        for k, p in enumerate(self.function.made.params):
            const = "const " if k < self.function.read else ""
            parameters.append(f"{const}{TYPES[str(declared[p.name].dtype)]} *restrict {p.name}")
        self.statement(body)
        return f"static void {name}({', '.join(parameters)}) {{\n{self.body()}\n}}\n"

    def line(self, text: str, gives: str | None = None) -> None:
        self.written.append(("  " * self.depth + text, gives, self.reading))
        self.reading = set()

    def body(self) -> str:
        """The lines, without those that name a value which nothing reads."""
        kept: list[str] = []
        needed: set[str] = set()
        for text, gives, reads in reversed(self.written):
            if gives is None or gives in needed:
                kept.append(text)
                needed |= reads
        return "\n".join(reversed(kept))

    # -- statements -----------------------------------------------------------------------------------------------
    def statement(self, s: Any) -> None:
        if isinstance(s, n.SeqStmt):
            for part in s.seq:
                self.statement(part)
        elif isinstance(s, n.For):
            self.loop(s)
        elif isinstance(s, n.BufferStore):
            self.store(s)
        elif isinstance(s, n.AllocBuffer):
            self.allocate(s.buffer)
        elif isinstance(s, n.IfThenElse):
            self.line(f"if ({self.expr(s.condition)}) {{")
            self.inside(s.then_case)
            if s.else_case is not None:
                self.line("} else {")
                self.inside(s.else_case)
            self.line("}")
        elif isinstance(s, n.While):
            self.line(f"while ({self.expr(s.condition)}) {{")
            self.inside(s.body)
            self.line("}")
        elif isinstance(s, n.Evaluate):
            if isinstance(s.value, n.Call):
                self.line(self.expr(s.value) + ";")
        elif not isinstance(s, (n.DeclBuffer, n.Return)):
            raise TypeError(f"a statement that C has no words for: {type(s).__name__}")

    def inside(self, s: Any) -> None:
        self.depth += 1
        self.statement(s)
        self.depth -= 1

    def allocate(self, buffer: Any) -> None:
        if buffer.name not in self.function.names:
            self.line(f"_Alignas(64) {TYPES[str(buffer.dtype)]} {buffer.name}[{int(buffer.shape[0])}];")

    def store(self, s: Any) -> None:
        if s.buffer.name in self.function.names:
            self.line(f"const {TYPES[str(s.buffer.dtype)]} {s.buffer.name} = {self.expr(s.value)};", s.buffer.name)
        else:
            self.line(f"{s.buffer.name}[{self.expr(s.indices[0])}] = {self.expr(s.value)};")

    def loop(self, s: Any) -> None:
        i = s.loop_var.name
        if s.kind == t.VECTORIZED and isinstance(s.body, n.BufferStore):
            whole = self.as_vector(s.body, s.loop_var, int(s.extent))
            if whole is not None:
                self.line(whole)
                return
        if s.kind == t.PARALLEL:
            self.line("PARALLEL")
        self.line(f"for (int32_t {i} = 0; {i} < {self.expr(s.extent)}; ++{i}) {{")
        self.inside(s.body)
        self.line("}")

    # -- vectors --------------------------------------------------------------------------------------------------
    def as_vector(self, s: Any, lane: Any, extent: int) -> str | None:
        """A store of a whole vector, where it only takes sums and products of float32."""
        if extent != self.lanes or str(s.buffer.dtype) != "float32" or s.buffer.name in self.function.names:
            return None
        target = self.start(s.indices[0], lane)
        value = self.vector(s.value, lane)
        if target is None or value is None:
            return None
        text = value if value.startswith("(vector") or "*(" in value else f"(vector){{0}} + {value}"
        return f"*(vector *)&{s.buffer.name}[{target}] = {text};"

    def vector(self, x: Any, lane: Any) -> str | None:
        if isinstance(x, n.FloatImm):
            return self.expr(x)
        if isinstance(x, n.Load):
            if str(x.source.dtype) != "float32":
                return None
            if not uses(x.indices[0], lane):
                return self.expr(x) if x.source.name not in self.function.names or not uses_name(x, lane) else None
            if x.source.name in self.function.names:
                return None
            start = self.start(x.indices[0], lane)
            return None if start is None else f"*(const vector *)&{x.source.name}[{start}]"
        if isinstance(x, (n.Add, n.Mul)):
            a, b = self.vector(x.a, lane), self.vector(x.b, lane)
            return None if a is None or b is None else f"({a} {SIGNS[type(x)]} {b})"
        return None

    def start(self, index: Any, lane: Any) -> str | None:
        """The position of lane 0, if the lanes follow each other."""
        if isinstance(index, n.Var):
            return "0" if index.same_as(lane) else None
        if isinstance(index, n.Add):
            a, b = uses(index.a, lane), uses(index.b, lane)
            if a and not b:
                first = self.start(index.a, lane)
                return (
                    None if first is None else f"{first} + {self.expr(index.b)}" if first != "0" else self.expr(index.b)
                )
            if b and not a:
                first = self.start(index.b, lane)
                return (
                    None if first is None else f"{self.expr(index.a)} + {first}" if first != "0" else self.expr(index.a)
                )
        return None

    # -- expressions ----------------------------------------------------------------------------------------------
    def expr(self, x: Any) -> str:
        sign = SIGNS.get(type(x))
        if sign is not None:
            return f"({self.expr(x.a)} {sign} {self.expr(x.b)})"
        if isinstance(x, n.Var):
            return str(x.name)
        if isinstance(x, n.IntImm):
            return integer(int(x.value), t.dtype_of(x))
        if isinstance(x, n.FloatImm):
            return number(float(x.value), t.dtype_of(x))
        if isinstance(x, n.Load):
            name = str(x.source.name)
            self.reading.add(name)
            return name if name in self.function.names else f"{name}[{self.expr(x.indices[0])}]"
        if isinstance(x, n.Not):
            return f"!{self.expr(x.a)}"
        if isinstance(x, n.BitwiseNot):
            return f"(~{self.expr(x.a)})"
        if isinstance(x, n.Select):
            return f"({self.expr(x.condition)} ? {self.expr(x.true_value)} : {self.expr(x.false_value)})"
        if isinstance(x, n.Cast):
            return f"({TYPES[t.dtype_of(x)]}){self.expr(x.value)}"
        if isinstance(x, n.Call):
            return self.call(x)
        raise TypeError(f"an expression that C has no words for: {type(x).__name__}")

    def call(self, x: Any) -> str:
        name = str(x.op.name).rpartition(".")[2]
        if name in ("call_extern", "call_pure_extern"):
            function = x.args[0]
            return f"{function.value}({', '.join(self.expr(a) for a in list(x.args)[1:])})"
        if name in BITS:
            a, b = x.args
            return f"({self.expr(a)} {BITS[name]} {self.expr(b)})"
        if name == "bitwise_not":
            return f"(~{self.expr(x.args[0])})"
        if name == "reinterpret":
            return self.reinterpreted(x)
        suffix = "f" if t.dtype_of(x) == "float32" else ""
        return f"{name.removeprefix('llvm_')}{suffix}({self.expr(x.args[0])})"

    def reinterpreted(self, x: Any) -> str:
        to, source = t.kind_of(x), t.dtype_of(x.args[0])
        inner = self.expr(x.args[0])
        if to == "handle":
            return f"(void *)(intptr_t)({inner})"
        if to == "float32":
            return f"bits_float_{'i' if source == 'int32' else 'u'}({inner})"
        return f"bits_{to}({inner})"


def uses(x: Any, lane: Any) -> bool:
    """Whether a position depends on a loop's variable."""
    return t.mentions(x, lane)


def uses_name(x: Any, lane: Any) -> bool:
    return t.mentions(x.indices[0], lane)


def integer(value: int, dtype: str) -> str:
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "int64":
        return "INT64_MIN" if value == -(1 << 63) else f"INT64_C({value})"
    if dtype == "int32" and value == -(1 << 31):
        return "INT32_MIN"
    return f"{value}u" if dtype == "uint32" else f"({value})" if value < 0 else str(value)


def number(value: float, dtype: str) -> str:
    suffix = "f" if dtype == "float32" else ""
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    if dtype == "float32":
        import numpy as np

        text = np.format_float_scientific(np.float32(value), unique=True, trim="0")
    else:
        text = repr(value)
    if "." not in text and "e" not in text:
        text += ".0"
    return f"({text}{suffix})" if value < 0 else text + suffix


def prelude(lanes: int) -> str:
    """What every file begins with."""
    return PRELUDE.replace("LANES", str(lanes))


def module_text(program: Program, lanes: int = 16) -> str:
    """All kernels, and the driver as a function of the table of addresses."""
    parts = [prelude(lanes)]
    for name, function in program.functions.items():
        parts.append(Printer(function, lanes).text(name))
    printer = Printer(t.Function(program.driver, frozenset(), 0), lanes)
    printer.statement(program.driver.body)
    parts.append("static void run(int64_t *table) {\n" + printer.body() + "\n}\n")
    return "\n".join(parts)
