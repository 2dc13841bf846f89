"""Printer of kernels as C11, for export and for ``compiled.source``.

Vector loops are printed as loops that compilers vectorize: together with the loop around them where both are over one
row, so that compilers select the width. Those that only load, multiply, add and store, such as register tiles, use the
vector extension of GCC and Clang instead, since compilers do not keep such tiles in registers.
Integer arithmetic wraps around: compile with ``-fwrapv``.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from mithril_cbackend import tir as t
from mithril_cbackend.tir.expr import dtype_of, kind_of, mentions, pointed
from mithril_cbackend.tir.tvm_api import nodes as n

TYPES = {
    "bool": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t",
    "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t", "float16": "_Float16", "float32": "float",
    "float64": "double", "handle": "void *",
}  # fmt: skip
# Buffers of several types share the arena: the elements of a kernel's arrays may alias those of other types.
ELEMENTS = {
    **TYPES, "int16": "i16", "int32": "i32", "int64": "i64", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float16": "f16", "float32": "f32", "float64": "f64",
}  # fmt: skip
# Operator precedence of C. Only arithmetic and comparisons rely on it: for the rest compilers warn without parentheses.
OR, AND, BIT, COMPARED, SUM, PRODUCT, UNARY, ATOM = range(1, 9)
SIGNS = {
    n.Add: ("+", SUM), n.Sub: ("-", SUM), n.Mul: ("*", PRODUCT), n.Div: ("/", PRODUCT), n.Mod: ("%", PRODUCT),
    n.EQ: ("==", COMPARED), n.NE: ("!=", COMPARED), n.LT: ("<", COMPARED), n.LE: ("<=", COMPARED),
    n.GT: (">", COMPARED), n.GE: (">=", COMPARED), n.And: ("&&", AND), n.Or: ("||", OR),
    n.RShift: (">>", BIT), n.BitwiseAnd: ("&", BIT), n.BitwiseOr: ("|", BIT), n.BitwiseXor: ("^", BIT),
}  # fmt: skip
NARROW = ("int8", "int16", "uint8", "uint16")
COMPUTED = (
    n.Add, n.Sub, n.Mul, n.Div, n.Mod, n.LShift, n.RShift, n.BitwiseAnd, n.BitwiseOr, n.BitwiseXor, n.BitwiseNot,
    n.Select, n.Call,
)  # fmt: skip
OPERANDS = {OR: COMPARED, AND: COMPARED, BIT: UNARY, COMPARED: SUM}  # minimum precedence of both operands
BITS = {
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "shift_right": ">>",
}  # fmt: skip
INCLUDES = """\
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
"""
HOSTED = """\
#if __STDC_HOSTED__
#include <math.h>
#include <string.h>
#else /* the functions that a freestanding program links */
void *memcpy(void *restrict, const void *restrict, size_t);
void *memset(void *, int, size_t);
int strcmp(const char *, const char *);
#define isnan(x) __builtin_isnan(x)
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
FUNCTIONS#endif
"""
TWO_OPERANDS = ("atan2", "copysign", "fmod", "pow")  # functions of the C library; the others have one operand
ALIASING = """\
#ifdef __GNUC__
#define MAY_ALIAS __attribute__((may_alias))
#else
#define MAY_ALIAS
#endif
"""
HELPERS = {  # identifier -> its definition
    **{name: f"typedef {TYPES[dtype]} MAY_ALIAS {name};\n" for dtype, name in ELEMENTS.items() if name != TYPES[dtype]},
    "PARALLEL": """\
#ifdef _OPENMP
#define PARALLEL _Pragma("omp parallel for")
#else
#define PARALLEL
#endif
""",
    "WIDE": """\
#if defined(__clang__) && defined(__x86_64__) /* for some CPUs, clang would split registers of 512 bits */
#define WIDE __attribute__((min_vector_width(512)))
#else
#define WIDE
#endif
""",
    "ROLLED": """\
#if defined(__GNUC__) && !defined(__clang__)
#define ROLLED _Pragma("GCC unroll 1") /* gcc would unroll the loop before it could vectorize it */
#else
#define ROLLED
#endif
""",
    "PREFETCH": """\
#ifdef __GNUC__
#define PREFETCH(x) __builtin_prefetch(x)
#else
#define PREFETCH(x) ((void)(x))
#endif
""",
    "VECTOR": """\
typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define VECTOR(x) (*(vector *)&(x)) /* a register of floats, starting at x */
#define CONST_VECTOR(x) (*(const vector *)&(x))
#define EVERY(x) ((x) - (vector){0}) /* x in every lane */
""",
    "SHUFFLE": """\
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t lanes __attribute__((vector_size(LANES * 4)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif
""",
    "bits_int32": "static inline int32_t bits_int32(float x) { int32_t y; memcpy(&y, &x, 4); return y; }\n",
    "bits_uint32": "static inline uint32_t bits_uint32(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }\n",
    "bits_int64": "static inline int64_t bits_int64(double x) { int64_t y; memcpy(&y, &x, 8); return y; }\n",
    "float_of_int32": "static inline float float_of_int32(int32_t x) { float y; memcpy(&y, &x, 4); return y; }\n",
    "float_of_uint32": "static inline float float_of_uint32(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }\n",
    "double_of_int64": "static inline double double_of_int64(int64_t x) { double y; memcpy(&y, &x, 8); return y; }\n",
    "at": "static inline void *at(int64_t address) { return (void *)(intptr_t)address; }\n",
}


def parameters(function: t.Function) -> dict[str, str]:
    """Return the declarations of a function's parameters by name."""
    body = function.primfunc.body
    statements = list(body.seq) if isinstance(body, n.SeqStmt) else [body]
    declared = {s.data.name: s.buffer for s in statements if isinstance(s, n.DeclBuffer)}
    texts = {}
    for k, p in enumerate(function.primfunc.params):
        if p.name in declared:
            const = "const " if k < function.read else ""
            texts[p.name] = f"{const}{ELEMENTS[str(declared[p.name].dtype)]} *restrict {p.name}"
        else:  # a number
            texts[p.name] = f"{TYPES[dtype_of(p)]} {p.name}"
    return texts


class ReadApart(Exception):
    """A variable of two joined loops is read without the other one."""


class Printer:
    """Printer of one function."""

    def __init__(self, function: t.Function, lanes: int) -> None:
        self.function = function
        self.lanes = lanes
        self.written: list[tuple[str, str | None, set[str]]] = []  # line, name it defines, names it uses
        self.reading: set[str] = set()
        self.depth = 1
        self.row_loops: tuple[Any, Any, int] | None = None  # variables of loops printed as one, and lanes
        self.constant = {str(p.name) for p in list(function.primfunc.params)[: function.read]}  # read-only arrays
        self.arguments: list[str | None] = []  # declarations of the parameters, None for one that sizes leave unused

    def text(self, name: str) -> str:
        self.statement(self.function.primfunc.body)
        text = self.body()
        declared = parameters(self.function).items()
        self.arguments = [p if re.search(rf"\b{n}\b", text) else None for n, p in declared]
        arguments = ", ".join(filter(None, self.arguments)) or "void"
        return f"{wide(self.lanes)}static void {name}({arguments}) {{\n{text}\n}}\n"

    def line(self, text: str, gives: str | None = None) -> None:
        self.written.append(("  " * self.depth + text, gives, self.reading))
        self.reading = set()

    def body(self) -> str:
        """Return the lines without definitions of unused values."""
        live_lines: list[str] = []
        needed: set[str] = set()
        for text, gives, reads in reversed(self.written):
            if gives is None or gives in needed:
                live_lines.append(text)
                needed |= reads
        return "\n".join(reversed(live_lines))

    # -- statements -----------------------------------------------------------------------------------------------
    def statement(self, s: Any) -> None:
        if isinstance(s, n.SeqStmt):
            for part in s.seq:
                self.statement(part)
        elif isinstance(s, n.AttrStmt):
            self.statement(s.body)
        elif isinstance(s, n.For):
            self.loop(s)
        elif isinstance(s, n.BufferStore):
            self.store(s)
        elif isinstance(s, n.AllocBuffer):
            self.allocate(s.buffer)
        elif isinstance(s, n.IfThenElse) and self.is_rare(s):
            self.rare(s)
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
        elif isinstance(s, n.Bind):  # of addresses only
            self.line(f"const {TYPES[pointed(s.var)]} *{s.var.name} = {self.expr(s.value)};")
        elif not isinstance(s, (n.DeclBuffer, n.Return)):
            raise TypeError(f"unsupported TIR statement: {type(s).__name__}")

    def inside(self, s: Any) -> None:
        self.depth += 1
        self.statement(s)
        self.depth -= 1

    def is_rare(self, s: Any) -> bool:
        """Whether a statement is one of ``Code.rarely``: both branches store the same named value."""
        return isinstance(s.else_case, n.BufferStore) and s.else_case.buffer.name in self.function.names

    def is_store(self, s: Any) -> bool:
        """Whether a statement stores an element, and does not name a value."""
        return isinstance(s, n.BufferStore) and s.buffer.name not in self.function.names

    def rare(self, s: Any) -> None:
        usual, far = s.else_case, s.then_case
        name = usual.buffer.name
        self.line(f"{TYPES[str(usual.buffer.dtype)]} {name} = {self.expr(usual.value)};")
        *steps, last = list(far.seq) if isinstance(far, n.SeqStmt) else [far]
        self.line(f"if ({self.expr(last.value.condition)}) {{")  # of this lane
        self.depth += 1
        for step in steps:
            self.statement(step)
        self.line(f"{name} = {self.expr(last.value.true_value)};")
        self.depth -= 1
        self.line("}")

    def allocate(self, buffer: Any) -> None:
        if buffer.name not in self.function.names:
            self.line(f"_Alignas(64) {TYPES[str(buffer.dtype)]} {buffer.name}[{int(buffer.shape[0])}];")

    def store(self, s: Any) -> None:
        if isinstance(s.indices[0], n.Ramp):
            self.line(f"VECTOR({s.buffer.name}[{self.expr(s.indices[0].base)}]) = {self.expr(s.value)};")
            return
        if s.buffer.name in self.function.names:
            self.line(f"const {TYPES[str(s.buffer.dtype)]} {s.buffer.name} = {self.expr(s.value)};", s.buffer.name)
        else:
            self.line(f"{s.buffer.name}[{self.expr(s.indices[0])}] = {self.expr(s.value)};")

    def loop(self, s: Any) -> None:
        i = s.loop_var.name
        if s.kind == t.VECTORIZED and isinstance(s.body, n.SeqStmt) and all(map(self.is_store, s.body.seq)):
            for store in s.body.seq:  # compilers keep the vectors of each in registers
                self.loop(n.For(s.loop_var, s.min, s.extent, s.kind, store, None, None))
            return
        if s.kind == t.VECTORIZED and isinstance(s.body, n.BufferStore):
            vector_store = self.as_vector(s.body, s.loop_var, int(s.extent))
            if vector_store is not None:
                self.line(vector_store)
                return
        # A loop over vectors around one over lanes: compilers vectorize the joined loop, but unroll the
        # inner one first.
        if s.kind == t.SERIAL and self.join(s):
            return
        if s.kind == t.PARALLEL:
            self.line("PARALLEL")
        if s.kind == t.VECTORIZED:
            self.line("ROLLED")
        self.line(f"for (int32_t {i} = 0; {i} < {self.expr(s.extent)}; ++{i}) {{")
        self.inside(s.body)
        self.line("}")

    def join(self, outer: Any) -> bool:
        """Print loops over vectors and over the lanes of each as one; return False if they are not over one row."""
        body = list(outer.body.seq) if isinstance(outer.body, n.SeqStmt) else [outer.body]
        body = [s for s in body if not isinstance(s, n.AllocBuffer) or s.buffer.name not in self.function.names]
        # Any other statement between the loops would run once per element in the joined loop.
        if len(body) != 1 or not isinstance(body[0], n.For) or body[0].kind != t.VECTORIZED:
            return False
        inner = body[0]
        i, lanes, depth, first = inner.loop_var.name, int(inner.extent), self.depth, len(self.written)
        # The vector extension is better for such bodies: compilers do not keep tiles of joined loops in
        # registers.
        if isinstance(inner.body, n.BufferStore) and self.as_vector(inner.body, inner.loop_var, lanes) is not None:
            return False
        count, reading = outer.extent, self.reading
        extent = int(count) * lanes if isinstance(count, n.IntImm) else f"{self.expr(count, PRODUCT)} * {lanes}"
        self.row_loops = outer.loop_var, inner.loop_var, lanes
        try:
            self.line(f"for (int32_t {i} = 0; {i} < {extent}; ++{i}) {{")
            self.inside(inner.body)
            self.line("}")
        # The attempt has printed lines already; these are removed, and two loops are printed.
        except ReadApart:
            del self.written[first:]
            self.depth, self.reading = depth, reading
            return False
        finally:
            self.row_loops = None
        return True

    def in_row(self, x: Any) -> tuple[str, int] | None:
        """Return a sum of positions in terms of the variable of joined loops, or None if it has no such position."""
        if self.row_loops is None or not isinstance(x, n.Add):
            return None
        vector, lane, lanes = self.row_loops
        terms = terms_of(x)
        rest = [y for y in terms if not is_multiple(y, vector, lanes)]
        if len(rest) != len(terms) - 1 or sum(y.same_as(lane) for y in rest) != 1:
            return None
        texts = [lane.name if y.same_as(lane) else self.expr(y, SUM) for y in rest]
        return " + ".join(texts), SUM if len(texts) > 1 else ATOM

    # -- vectors --------------------------------------------------------------------------------------------------
    def as_vector(self, s: Any, lane: Any, extent: int) -> str | None:
        """Return a store of a full vector if its value uses only sums and products of float32, or None."""
        if extent != self.lanes or str(s.buffer.dtype) != "float32" or s.buffer.name in self.function.names:
            return None
        start = self.start(s.indices[0], lane)
        value = self.vector(s.value, lane)
        if start is None or value is None:
            return None
        target = f"VECTOR({s.buffer.name}[{start}])"
        text, is_vector = value
        if not is_vector:
            return f"{target} = EVERY({text});"
        if text.startswith(f"{target} + "):
            return f"{target} += {text.removeprefix(f'{target} + ')};"
        return f"{target} = {text};"

    def vector(self, x: Any, lane: Any, level: int = 0) -> tuple[str, bool] | None:
        """Return a vector expression and whether its lanes differ, or None if it needs other operations."""
        if isinstance(x, n.FloatImm):
            return self.expr(x), False
        if isinstance(x, n.Load):
            if str(x.source.dtype) != "float32":
                return None
            if not mentions(x.indices[0], lane):
                return self.expr(x), False
            if x.source.name in self.function.names:
                return None
            start = self.start(x.indices[0], lane)
            if start is None:
                return None
            const = "CONST_" if x.source.name in self.constant else ""
            return f"{const}VECTOR({x.source.name}[{start}])", True
        if isinstance(x, (n.Add, n.Mul)):
            sign, precedence = SIGNS[type(x)]
            a, b = self.vector(x.a, lane, precedence), self.vector(x.b, lane, precedence + 1)
            if a is None or b is None:
                return None
            text = f"{a[0]} {sign} {b[0]}"
            return f"({text})" if precedence < level else text, a[1] or b[1]
        return None

    def start(self, index: Any, lane: Any) -> str | None:
        """Return the index of lane 0, or None if the lanes are not contiguous."""
        if isinstance(index, n.Var):
            return "0" if index.same_as(lane) else None
        if isinstance(index, n.Add):
            a, b = mentions(index.a, lane), mentions(index.b, lane)
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
    def expr(self, x: Any, level: int = 0) -> str:
        """Return an expression, in parentheses if its precedence is lower than ``level``."""
        text, precedence = self.term(x)
        return f"({text})" if precedence < level else text

    def term(self, x: Any) -> tuple[str, int]:
        """Return an expression and its precedence; small integers are converted, since C computes in int."""
        text, precedence = self.plain_term(x)
        # uint8 200 + 100 is 300 in C and 44 in the program.
        if isinstance(x, COMPUTED) and kind_of(x) in NARROW:
            return f"({TYPES[dtype_of(x)]}){text if precedence >= UNARY else f'({text})'}", UNARY
        return text, precedence

    def plain_term(self, x: Any) -> tuple[str, int]:
        position = self.in_row(x)
        if position is not None:
            return position
        if type(x) in SIGNS:
            sign, precedence = SIGNS[type(x)]
            left = OPERANDS.get(precedence, precedence)
            # a + (b + c) differs from a + b + c by rounding, except for integers.
            right = precedence if sign == "+" and "int" in dtype_of(x) else OPERANDS.get(precedence, precedence + 1)
            return f"{self.expr(x.a, left)} {sign} {self.expr(x.b, right)}", precedence
        if isinstance(x, n.Var):
            if self.row_loops is not None and any(x.same_as(v) for v in self.row_loops[:2]):
                raise ReadApart
            return str(x.name), ATOM
        if isinstance(x, n.IntImm):
            return integer(int(x.value), dtype_of(x)), ATOM
        if isinstance(x, n.FloatImm):
            return number(float(x.value), dtype_of(x)), ATOM
        if isinstance(x, n.Load):
            name = str(x.source.name)
            self.reading.add(name)
            if isinstance(x.indices[0], n.Ramp):
                const = "CONST_" if name in self.constant else ""
                return f"{const}VECTOR({name}[{self.expr(x.indices[0].base)}])", ATOM
            return name if name in self.function.names else f"{name}[{self.expr(x.indices[0])}]", ATOM
        if isinstance(x, n.LShift):
            return self.shifted(x.a, x.b), UNARY
        if isinstance(x, n.Not):
            inner = x.a
            # TIR has no test for nan but this one (see ``isnan`` in tir/expr.py).
            if isinstance(inner, n.LE) and isinstance(inner.b, n.FloatImm) and float(inner.b.value) == math.inf:
                return f"isnan({self.expr(inner.a)})", ATOM
            return f"!{self.expr(inner, UNARY)}", UNARY
        if isinstance(x, n.BitwiseNot):
            return f"~{self.expr(x.a, UNARY)}", UNARY
        if isinstance(x, n.Select):
            return self.select(x.condition, x.true_value, x.false_value), ATOM
        if isinstance(x, n.Cast):
            return f"({TYPES[dtype_of(x)]}){self.expr(x.value, UNARY)}", UNARY
        if isinstance(x, n.Shuffle):
            vectors = ", ".join(self.expr(v) for v in x.vectors)
            return f"SHUFFLE({vectors}, {', '.join(self.expr(k) for k in x.indices)})", ATOM
        if isinstance(x, n.Call):
            return self.call(x)
        raise TypeError(f"unsupported TIR expression: {type(x).__name__}")

    def select(self, condition: Any, yes: Any, no: Any) -> str:
        return f"({self.expr(condition)} ? {self.expr(yes)} : {self.expr(no)})"

    def shifted(self, a: Any, b: Any) -> str:
        """Return a left shift; signed operands are shifted as unsigned, since C leaves their overflow undefined."""
        kind = TYPES[dtype_of(a)]
        text = f"({self.expr(a, UNARY)} << {self.expr(b, UNARY)})"
        return text if kind.startswith("u") else f"({kind})((u{kind}){text[1:]}"

    def call(self, x: Any) -> tuple[str, int]:
        name = str(x.op.name).rpartition(".")[2]
        if name in ("call_extern", "call_pure_extern"):
            function = x.args[0]
            return f"{function.value}({', '.join(self.expr(a) for a in list(x.args)[1:])})", ATOM
        if name in BITS:
            a, b = x.args
            return f"{self.expr(a, UNARY)} {BITS[name]} {self.expr(b, UNARY)}", BIT
        if name == "shift_left":
            return self.shifted(*x.args), UNARY
        if name == "bitwise_not":
            return f"~{self.expr(x.args[0], UNARY)}", UNARY
        if name == "if_then_else":
            return self.select(*x.args), ATOM
        if name == "address_of":
            const = "const " if str(x.args[0].source.name) in self.constant else ""
            return f"({const}void *)&{self.expr(x.args[0], UNARY)}", UNARY
        if name == "prefetch":
            return f"PREFETCH({self.expr(x.args[0])})", ATOM
        if name == "reinterpret":
            return self.reinterpreted(x), ATOM
        suffix = "f" if dtype_of(x) == "float32" else ""
        return f"{name.removeprefix('llvm_')}{suffix}({self.expr(x.args[0])})", ATOM

    def reinterpreted(self, x: Any) -> str:
        target, source = kind_of(x), dtype_of(x.args[0])
        inner = self.expr(x.args[0])
        if target == "handle":
            return f"at({inner})"
        stem = {"float32": f"float_of_{source}", "float64": f"double_of_{source}"}.get(target, f"bits_{target}")
        return f"{stem}({inner})"


def wide(lanes: int) -> str:
    """Return the attribute of functions with vectors of this many words."""
    return "WIDE " if lanes == 16 else ""


def terms_of(x: Any) -> list[Any]:
    return [*terms_of(x.a), *terms_of(x.b)] if isinstance(x, n.Add) else [x]


def is_multiple(x: Any, var: Any, factor: int) -> bool:
    return isinstance(x, n.Mul) and x.a.same_as(var) and isinstance(x.b, n.IntImm) and int(x.b) == factor


def integer(value: int, dtype: str) -> str:
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "int64":
        # -9223372036854775808 is the negation of a number that no signed type holds.
        return "INT64_MIN" if value == -(1 << 63) else f"INT64_C({value})"
    if dtype == "uint64":
        return f"UINT64_C({value})"
    if dtype == "int32" and value == -(1 << 31):
        return "INT32_MIN"
    return f"{value}u" if dtype == "uint32" else f"({value})" if value < 0 else str(value)


def number(value: float, dtype: str) -> str:
    suffix = "f" if dtype == "float32" else ""
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    # The shortest text that reads back as the same number of the dtype.
    exact = np.float32(value) if dtype == "float32" else np.float64(value)
    plain = value == 0 or 1e-4 <= abs(value) < 1e7
    text = (np.format_float_positional if plain else np.format_float_scientific)(exact, unique=True, trim="0")
    return f"({text}{suffix})" if text.startswith("-") else text + suffix
