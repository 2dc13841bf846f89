"""The one module that knows TVM: words for expressions, statements, functions, and turning them into machine code.

TVM renames things from release to release; whatever it calls them, the rest of the backend says what stands here.
Arithmetic is built without TVM's constant folding, which takes ``x * 0.0`` for zero although x may be nan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from mithril.base.errors import BackendError
from mithril_cbackend.cpu_info import processors
from mithril_cbackend.program.module_loader import without_torch
from mithril_cbackend.tir.c_names import is_taken


def _import_tvm() -> Any:
    os.environ.setdefault("TVM_NUM_THREADS", str(processors()))  # the most that its pool will ever have
    with without_torch():
        import tvm
        import tvm_ffi  # noqa: F401
    return tvm


tvm = _import_tvm()
from tvm import tirx  # noqa: E402
from tvm.ir import PointerType, PrimType  # noqa: E402
from tvm.tirx import stmt as _stmt  # noqa: E402

nodes = SimpleNamespace(  # what the printer of C tells apart
    **{
        n: getattr(tirx, n)
        for n in [
            "Add", "Sub", "Mul", "Div", "Mod", "EQ", "NE", "LT", "LE", "GT", "GE", "And", "Or", "Not", "Select",
            "Cast", "LShift", "RShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
        ]
    },
    **{
        n: getattr(_stmt, n)
        for n in [
            "Bind", "For", "While", "BufferStore", "AllocBuffer", "DeclBuffer", "IfThenElse", "SeqStmt",
            "Evaluate", "Return",
        ]
    },
    Var=tirx.Var,
    Ramp=tirx.Ramp,
    Shuffle=tirx.Shuffle,
    IntImm=tirx.IntImm,
    FloatImm=tirx.FloatImm,
    StringImm=tvm.ir.StringImm if hasattr(tvm.ir, "StringImm") else tirx.StringImm,
    Load=tvm.ir.TensorLoad,
    Call=tvm.ir.Call,
)  # fmt: skip
Expr = Any  # an expression of TVM
Stmt = Any
Buffer = Any

SERIAL, PARALLEL, VECTORIZED, UNROLLED = (_stmt.ForKind(k) for k in range(4))


# -- expressions --------------------------------------------------------------------------------------------------
def const(value: Any, dtype: str) -> Expr:
    if dtype == "bool":
        return tirx.IntImm("bool", int(bool(value)))
    if dtype.startswith("float"):
        return tirx.FloatImm(dtype, float(value))
    number = int(value)
    return tirx.const(number, dtype) if dtype == "uint64" else tirx.IntImm(dtype, number)  # IntImm takes signed ones


def index(value: Any) -> Expr:
    """A position: numbers become 32-bit constants."""
    return tirx.IntImm("int32", value) if isinstance(value, int) else value


def dtype_of(x: Expr) -> str:
    return str(x.ty.dtype)


_BINARY = {
    "add": tirx.Add,
    "sub": tirx.Sub,
    "mul": tirx.Mul,
    "div": tirx.Div,
    "rem": tirx.Mod,
    "eq": tirx.EQ,
    "ne": tirx.NE,
    "lt": tirx.LT,
    "le": tirx.LE,
    "gt": tirx.GT,
    "ge": tirx.GE,
    "and": tirx.And,
    "or": tirx.Or,
}


def binary(name: str, a: Expr, b: Expr) -> Expr:
    return _BINARY[name](a, b)


def logical_not(a: Expr) -> Expr:
    return tirx.Not(a)


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    """a or b, both computed."""
    return tirx.Select(condition, a, b)


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    """a or b, only that one computed: for loads that may be out of bounds."""
    return tirx.if_then_else(condition, a, b)


def cast(x: Expr, dtype: str) -> Expr:
    if dtype_of(x) == dtype:
        return x
    if dtype_of(x) == "bool":  # TVM's analysis stumbles over vectors of bools that are cast
        return tirx.Select(x, const(1, dtype), const(0, dtype))
    return tirx.Cast(dtype, x)


def bits(x: Expr, dtype: str) -> Expr:
    """The same bits read as another dtype."""
    return tirx.reinterpret(dtype, x)


def isnan(x: Expr) -> Expr:
    """Not even at most infinity. ``x != x`` would not do: TVM takes it for false."""
    return tirx.Not(tirx.LE(x, tirx.FloatImm(dtype_of(x), float("inf"))))


def bitwise(name: str, a: Expr, b: Expr | None = None) -> Expr:
    function = getattr(tirx, {"shl": "shift_left", "shr": "shift_right"}.get(name, f"bitwise_{name}"))
    return function(a) if b is None else function(a, b)


def intrinsic(name: str, x: Expr) -> Expr:
    """floor, ceil, trunc, nearbyint, sqrt, abs: single instructions."""
    return getattr(tirx, name)(x)


def libm(name: str, *xs: Expr) -> Expr:
    """A function of the C library in the operands' precision."""
    dtype = dtype_of(xs[0])
    return tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), *xs)


# -- positions: folded by hand, because readable code and fast passes need small expressions ------------------------
def iadd(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int) and a == 0:
        return b
    if isinstance(b, int) and b == 0:
        return a
    return tirx.Add(index(a), index(b))


def imul(a: Any, b: int) -> Any:
    if isinstance(a, int):
        return a * b
    if b == 1:
        return a
    return 0 if b == 0 else tirx.Mul(a, index(b))


def isub(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return a if isinstance(b, int) and b == 0 else tirx.Sub(index(a), index(b))


def idiv(a: Any, b: int) -> Any:
    """Of positions, which are never negative."""
    if isinstance(a, int):
        return a // b
    return a if b == 1 else tirx.Div(a, index(b))


def imod(a: Any, b: int) -> Any:
    if isinstance(a, int):
        return a % b
    return 0 if b == 1 else tirx.Mod(a, index(b))


def is_affine(a: Expr) -> bool:
    """Whether a position is made of sums, differences and products with numbers only."""
    pending = [a]
    while pending:
        x = pending.pop()
        if isinstance(x, (tirx.Add, tirx.Sub, tirx.Mul)):
            pending += [x.a, x.b]
        elif not isinstance(x, (tirx.Var, tirx.IntImm)):
            return False
    return True


# -- statements ---------------------------------------------------------------------------------------------------
class Code:
    """Statements being written: loops, bound names, stores. One per kernel."""

    def __init__(self) -> None:
        self._open: list[list[Stmt]] = [[]]
        self._names: dict[str, int] = {}
        self.names: set[str] = set()  # of what ``let`` has given: arrays that are written once
        self.helpers: dict[str, Function] = {}  # functions that are called, by name
        self._vector: tuple[Any, int, list[Stmt]] | None = None  # the vector loop we are in, and the block around it

    def name(self, stem: str) -> str:
        """A name not used before in this function."""
        clean = "".join(c if c.isalnum() and c.isascii() else "_" for c in stem) or "v"
        if clean[0].isdigit() or is_taken(clean):
            clean = "v_" + clean
        count = self._names.get(clean, 0)
        self._names[clean] = count + 1
        return clean if count == 0 else self.name(f"{clean}_{count}")

    def emit(self, stmt: Stmt) -> None:
        self._open[-1].append(stmt)

    def is_named(self, x: Expr) -> bool:
        """Whether a value is a number, a loop's variable or what ``let`` has given."""
        if isinstance(x, tirx.NE):
            x = x.a
        elif isinstance(x, tirx.Cast):
            x = x.value
        if isinstance(x, tvm.ir.TensorLoad):
            return x.source.name in self.names
        return isinstance(x, (tirx.Var, tirx.IntImm, tirx.FloatImm))

    def let(self, value: Expr, name: str = "t") -> Expr:
        """A name for a value that is used more than once."""
        if self.is_named(value):
            return value
        # TVM's own bindings do not do: its analysis puts their values back where they are used, in exponential time,
        # and stumbles over vectors of bools. An array of one element (in vector loops, of one vector) it leaves alone.
        dtype = dtype_of(value)
        held = "uint8" if dtype == "bool" else dtype
        if self._vector is None:
            buffer, at = self.alloc(name, 1, held), 0
        else:
            var, lanes, outside = self._vector
            buffer, at = tirx.decl_buffer((index(lanes),), held, name=self.name(name), scope="local", layout=None), var
            outside.append(_stmt.AllocBuffer(buffer))
        self.names.add(buffer.name)
        self.store(buffer, at, cast(value, held))
        made = load(buffer, at)
        return tirx.NE(made, tirx.IntImm("uint8", 0)) if dtype == "bool" else made

    def alloc(self, name: str, size: int, dtype: str) -> Buffer:
        """A small array of this block's own, in registers or on the stack."""
        made = tirx.decl_buffer((index(size),), dtype, name=self.name(name), scope="local", layout=None)
        self.emit(_stmt.AllocBuffer(made))
        return made

    def view(self, name: str, dtype: str, address: Expr, size: int = 1) -> Buffer:
        """The elements that an address points at."""
        parameter, made = pointer(self.name(name), dtype, size)
        self.emit(_stmt.Bind(parameter, tirx.reinterpret(parameter.ty, address.args[0])))
        self.emit(_stmt.DeclBuffer(made, data=parameter))
        return made

    def store(self, buffer: Buffer, at: Any, value: Expr) -> None:
        self.emit(_stmt.BufferStore(buffer, value, [index(at)]))

    def call(self, function: str, *arguments: Expr) -> None:
        self.emit(_stmt.Evaluate(tirx.call_extern("int32", function, *arguments)))

    def turn(self, lanes: int, source: Buffer, at: Any, stride: Any, target: Buffer, to: Any, to_stride: Any) -> None:
        """Transpose a square of float32, as long as a vector: rows at ``stride`` become columns at ``to_stride``."""
        name = f"turn_{lanes}"
        self.helpers[name] = _turning(name, lanes)
        here, there = (
            tirx.call_intrin("handle", "tirx.address_of", load(b, i)) for b, i in ((source, at), (target, to))
        )
        self.call(name, here, index(stride), there, index(to_stride))

    @contextmanager
    def block(self) -> Iterator[list[Stmt]]:
        """Statements collected apart."""
        mine: list[Stmt] = []
        self._open.append(mine)
        try:
            yield mine
        finally:
            self._open.pop()

    @contextmanager
    def loop(self, name: str, extent: Any, kind: Any = SERIAL, **annotations: Any) -> Iterator[Any]:
        """``with code.loop("i", 8) as i``: a loop from 0; of one round, no loop at all."""
        if isinstance(extent, int) and extent == 1:
            yield 0
            return
        var = tirx.Var(self.name(name), "int32")
        around = self._vector
        if kind == VECTORIZED:
            self._vector = (var, extent, self._open[-1])
        with self.block() as body:
            yield var
        self._vector = around
        if body:
            self.emit(_stmt.For(var, index(0), index(extent), kind, sequence(body), None, annotations or None))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        with self.block() as body:
            yield
        self.emit(_stmt.IfThenElse(condition, sequence(body), None))

    def either(self, condition: Expr, yes: list[Stmt], no: list[Stmt]) -> None:
        self.emit(_stmt.IfThenElse(condition, sequence(yes), sequence(no)))

    def repeat(self, condition: Expr, body: list[Stmt]) -> None:
        self.emit(_stmt.While(condition, sequence(body)))

    def leave(self, value: int) -> None:
        """Return a number."""
        self.emit(_stmt.Return(index(value)))

    def finish(self) -> Stmt:
        (body,) = self._open
        return sequence(body)


def sequence(body: list[Stmt]) -> Stmt:
    if not body:
        return _stmt.Evaluate(index(0))
    return body[0] if len(body) == 1 else _stmt.SeqStmt(body)


def load(buffer: Buffer, at: Any) -> Expr:
    return buffer[index(at)]


def vector(start: Any, lanes: int) -> Any:
    """The positions of a vector that begins at ``start``."""
    return index(start) if lanes == 1 else tirx.Ramp(index(start), index(1), lanes)


def shuffle(a: Expr, b: Expr, places: Sequence[int]) -> Expr:
    """The elements at some places of two vectors, one after the other."""
    return tirx.Shuffle([a, b], [index(k) for k in places])


# -- functions ----------------------------------------------------------------------------------------------------
def pointer(name: str, dtype: str, size: int) -> tuple[Any, Buffer]:
    """A pointer that a function takes, and the buffer of so many elements it points at."""
    parameter = tirx.Var(name, PointerType(PrimType(dtype)))
    return parameter, tirx.decl_buffer((index(max(size, 1)),), dtype, name=name, layout=None)


@dataclass(frozen=True)
class Function:
    """A function, which of its arrays are names for values, and how many of its parameters are only read."""

    made: Any
    names: frozenset[str]
    read: int
    helpers: Mapping[str, Function] = field(default_factory=dict)  # other functions that it calls


def function(name: str, parameters: Sequence[tuple[Any, Buffer]], body: Stmt) -> Any:
    """A function of plain pointers that do not overlap."""
    declared = [_stmt.DeclBuffer(buffer, data=parameter) for parameter, buffer in parameters]
    # It returns 0: what TVM makes of a parallel loop returns an error's number.
    body = sequence([*declared, body, _stmt.Return(index(0))])
    made = tirx.PrimFunc([p for p, _ in parameters], body, PrimType("int32"))
    made = made.with_attr("global_symbol", name).with_attr("tirx.noalias", True)
    return made.with_attr("tirx.is_global_func", True)


@cache
def _turning(name: str, lanes: int) -> Function:
    """A square transposed in registers: in each step, rows exchange every second part with rows that far away."""
    (source, rows), (target, columns) = pointer("source", "float32", 1 << 30), pointer("target", "float32", 1 << 30)
    stride, to_stride = tirx.Var("stride", "int32"), tirx.Var("to_stride", "int32")
    code = Code()

    def whole(start: Any) -> Any:
        return vector(start, lanes)

    held = code.alloc("held", lanes * lanes, "float32")
    for i in range(lanes):
        code.store(held, whole(i * lanes), load(rows, whole(tirx.Mul(index(i), stride))))
    step = 1
    while step < lanes:
        after = code.alloc("held", lanes * lanes, "float32")
        for i in (i for i in range(lanes) if not i & step):
            pair = [load(held, whole(k * lanes)) for k in (i, i | step)]
            low = [k if not k & step else lanes + (k ^ step) for k in range(lanes)]
            high = [lanes + k if k & step else k | step for k in range(lanes)]
            code.store(after, whole(i * lanes), shuffle(pair[0], pair[1], low))
            code.store(after, whole((i | step) * lanes), shuffle(pair[0], pair[1], high))
        held, step = after, 2 * step
    for i in range(lanes):
        code.store(columns, whole(tirx.Mul(index(i), to_stride)), load(held, whole(i * lanes)))
    declared = [_stmt.DeclBuffer(rows, data=source), _stmt.DeclBuffer(columns, data=target)]
    body = sequence([*declared, code.finish(), _stmt.Return(index(0))])
    made = tirx.PrimFunc([source, stride, target, to_stride], body, PrimType("int32"))
    made = made.with_attr("global_symbol", name).with_attr("tirx.noalias", True).with_attr("tirx.is_global_func", True)
    return Function(made, frozenset(), 1)


def number(name: str) -> Expr:
    """A number that a function takes, of 64 bits."""
    return tirx.Var(name, "int64")


def pointing(number: Expr) -> Expr:
    """A number as an address."""
    return tirx.reinterpret("handle", number)


def entry(name: str, parameters: Sequence[Expr], body: Stmt) -> Any:
    """A function of numbers that Python calls."""
    made = tirx.PrimFunc(list(parameters), body, PrimType("int32"))
    return made.with_attr("global_symbol", name).with_attr("tirx.is_entry_func", True)


def address(table: Buffer, slot: int, offset: int = 0) -> Expr:
    """The pointer in a slot of the table of addresses, ``offset`` bytes further on."""
    base = load(table, slot)
    return tirx.reinterpret("handle", base if offset == 0 else tirx.Add(base, tirx.IntImm("int64", offset)))


def moved(table: Buffer, slot: int, offset: Expr) -> Expr:
    """The pointer in a slot, moved by a number of bytes computed at run time (int64)."""
    return tirx.reinterpret("handle", tirx.Add(load(table, slot), offset))


# -- machine code -------------------------------------------------------------------------------------------------
def host_cpu() -> str:
    """LLVM's name for this machine's processor."""
    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


def cpu_names() -> list[str]:
    """The processors of this computer's kind that LLVM knows."""
    return [str(n) for n in tvm.get_global_func("target.llvm_get_cpu_archlist")(target(host_cpu(), 1))]


def lacking(cpu: str) -> list[str]:
    """What a processor can do and this computer's cannot."""
    of = tvm.get_global_func("target.llvm_get_cpu_features")
    here = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    more = {str(f) for f in of(target(cpu, 1))} - {str(f) for f in of(target(host_cpu(), 1))}
    return sorted(f for f in more if f in here and not here[f])


# LLVM 22 folds VPMOV*2M and KMOV into VMOVMSK, which has no encoding for the registers 16 to 31: it reads another
# register instead (llvm-project issue 191304), or a mask that is still needed is gone (pull request 198220). Both
# need 128- or 256-bit vectors with the wider encoding; the 512-bit vectors that kernels use are not affected.
UNSOUND = "avx512vl"


def target(cpu: str, threads: int) -> Any:
    """Return the target of code for a processor; without the features that LLVM compiles wrongly."""
    chosen = _target(cpu, threads)
    if UNSOUND in {str(f) for f in tvm.get_global_func("target.llvm_get_cpu_features")(chosen)}:
        return _target(cpu, threads, mattr=[f"-{UNSOUND}"])
    return chosen


def _target(cpu: str, threads: int, **options: Any) -> Any:
    # TVM gives every buffer an alias class of its own, which is wrong once a kernel is inlined in the driver, where
    # buffers of two kernels are the same bytes.
    # Nor are kernels worth inlining: hundreds of calls made a driver that LLVM worked on for half a minute.
    plain = ["-enable-tbaa:bool=false", "-inline-instr-cost:int=10000"]
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": max(threads, 1), "cl-opt": plain, **options})


def compiled(functions: Mapping[str, Any], entries: Mapping[str, Any], cpu: str, threads: int) -> Any:
    """The module of machine code, for functions by name and those that Python calls."""
    chosen = target(cpu, threads)
    lower = tirx.transform
    # Intrinsics are lowered before loops become vectors: TVM's analysis of integers stumbles over vectors of bools.
    for_kernels = [lower.UnrollLoop(), lower.LowerIntrin(), lower.VectorizeLoop(True)]
    for_entries = [lower.MakePackedAPI(), lower.SkipAssert(), lower.LowerTVMBuiltin(), lower.LowerIntrin()]
    try:
        made = {}
        for some, passes in ((functions, for_kernels), (entries, for_entries)):
            module = lower.BindTarget(chosen.with_host(chosen))(tvm.IRModule(dict(some)))
            lowered = tvm.ir.transform.Sequential(passes)(module).functions
            made.update({g.name_hint: f for g, f in lowered.items()})
        return tvm.get_global_func("target.build.llvm")(tvm.IRModule(made), chosen)
    except Exception as cause:
        first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise BackendError(
            f"TVM could not make machine code: {first}",
            facts=[f"processor '{cpu}', {len(functions)} functions"],
            hint="this is a fault of mithril-cbackend: please report it with str(compiled.graph)",
        ) from cause


def set_threads(count: int) -> None:
    """The size of TVM's pool of threads, which all programs of the process share."""
    tvm.get_global_func("runtime.config_threadpool")(1, count)


def listing(built: Any, what: str) -> str:
    """``ll`` or ``asm``: what LLVM made."""
    return str(built.inspect_source(what))


def kind_of(x: Expr) -> str:
    """The dtype of an expression, ``handle`` for pointers."""
    return "handle" if isinstance(x.ty, PointerType) else dtype_of(x)


def pointed(x: Expr) -> str:
    """The dtype of what a pointer points at."""
    return str(x.ty.element_type.dtype)


def mentions(x: Expr, var: Any) -> bool:
    """Whether an expression reads a variable."""
    pending = [x]
    while pending:
        y = pending.pop()
        if isinstance(y, tirx.Var):
            if y.same_as(var):
                return True
        elif isinstance(y, tvm.ir.TensorLoad):
            pending += list(y.indices)
        elif isinstance(y, tvm.ir.Call):
            pending += list(y.args)
        else:
            pending += [
                getattr(y, k) for k in ("a", "b", "value", "condition", "true_value", "false_value") if hasattr(y, k)
            ]
            pending = [z for z in pending if not isinstance(z, (int, float, str))]
    return False


def text(made: Any) -> str:
    """A function for people."""
    return str(made.script())


__all__ = [n for n in dir() if not n.startswith("_") and n not in ("np", "sys")]
