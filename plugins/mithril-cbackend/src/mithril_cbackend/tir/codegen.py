"""Statements and functions of TIR: loops, named values, stores, calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from mithril_cbackend.c_names import is_taken
from mithril_cbackend.tir.expr import (
    Buffer,
    Expr,
    address_of,
    any_above,
    cast,
    index,
    load,
    not_equal,
    reads,
    select,
    shuffle,
    vector,
)
from mithril_cbackend.tir.tvm_api import PointerType, PrimType, nodes, stmt, tirx, tvm, tvm_ffi, undefined_vars

Stmt = Any
SERIAL, PARALLEL, VECTORIZED, UNROLLED = (stmt.ForKind(k) for k in range(4))


@dataclass(frozen=True)
class VectorLoop:
    """A loop whose iterations are the lanes of vectors."""

    variable: Expr
    lanes: int
    enclosing: list[Stmt]  # the statements before it
    varying: set[str]  # variables and named values that differ between lanes, or are unknown before the loop


class Code:
    """Builder of the statements of one function; without ``own_functions``, exp and the like are library calls."""

    def __init__(self, own_functions: bool = True) -> None:
        self.own_functions = own_functions
        self._open: list[list[Stmt]] = [[]]
        self._names: dict[str, int] = {}
        self.names: dict[str, Buffer] = {}  # arrays of ``let``, which are written once
        self.read_only: set[str] = set()  # names of arrays that nothing writes
        self.helpers: dict[str, Function] = {}  # called functions by name
        self.pieces: dict[str, Piece] = {}  # called functions that are not TIR
        self._vector: VectorLoop | None = None  # the current vector loop

    def name(self, stem: str) -> str:
        """Return a name that is still unused in this function."""
        clean = "".join(c if c.isalnum() and c.isascii() else "_" for c in stem) or "v"
        if clean[0].isdigit() or is_taken(clean):
            clean = "v_" + clean
        count = self._names.get(clean, 0)
        self._names[clean] = count + 1
        return clean if count == 0 else self.name(f"{clean}_{count}")

    def emit(self, statement: Stmt) -> None:
        self._open[-1].append(statement)

    def is_named(self, x: Expr) -> bool:
        """Whether a value is a number, a loop variable or a result of ``let``."""
        node = x.node
        # ``let`` stores a bool as a byte and reads it back as ``byte != 0``.
        if isinstance(node, tirx.NE):
            node = node.a
        elif isinstance(node, tirx.Cast):
            node = node.value
        if isinstance(node, tvm.ir.TensorLoad):
            return node.source.name in self.names
        return isinstance(node, (tirx.Var, tirx.IntImm, tirx.FloatImm))

    def let(self, value: Expr, name: str = "t") -> Expr:
        """Name a value that is used more than once."""
        if self.is_named(value):
            return value
        # TVM's own bindings are unsuitable: its analysis substitutes them back, in exponential time, and fails on
        # vectors of bools. It does not touch an array of one element (in vector loops, of one vector).
        stored_dtype = "uint8" if value.dtype == "bool" else value.dtype
        stored_value, vector, position = cast(value, stored_dtype), self._vector, index(0)
        if vector is None:
            buffer = self.alloc(name, 1, stored_dtype)
            self.store(buffer, 0, stored_value)
        elif self._is_uniform(value, vector):
            # As a vector it would turn the loads and stores at positions that it is part of into gathers and scatters.
            buffer = self._local(name, 1, stored_dtype)
            vector.enclosing.append(stmt.AllocBuffer(buffer))
            vector.enclosing.append(stmt.BufferStore(buffer, stored_value.node, [position.node]))
        else:
            position = vector.variable
            buffer = self._local(name, vector.lanes, stored_dtype)
            vector.enclosing.append(stmt.AllocBuffer(buffer))
            vector.varying.add(buffer.name)
            self.store(buffer, position, stored_value)
        self.names[buffer.name] = buffer
        element = load(buffer, position)
        return not_equal(element, 0) if value.dtype == "bool" else element

    def rarely(self, size: Expr, limit: float, usual: Expr, far: Callable[[], Expr]) -> Expr:
        """Return `usual`, and `far()` where a size is above a limit.

        Among vectors, the second is computed for those that have a lane above the limit.
        """
        size = self.let(size, "size")
        over = size > limit
        vector, position, condition = self._vector, index(0), over
        if vector is None:
            result = self._local("far", 1, usual.dtype)
            self.emit(stmt.AllocBuffer(result))
        else:
            position = vector.variable
            result = self._local("far", vector.lanes, usual.dtype)
            vector.enclosing.append(stmt.AllocBuffer(result))
            vector.varying.add(result.name)
            condition = any_above(size, limit, vector.lanes)
        self.names[result.name] = result
        with self.block() as yes:
            self.store(result, position, select(over, far(), usual))
        with self.block() as no:
            self.store(result, position, usual)
        self.either(condition, yes, no)
        return load(result, position)

    def _is_uniform(self, value: Expr, vector: VectorLoop) -> bool:
        """Whether a value is a position that is the same for all lanes, and known before the vector loop.

        Positions of gathers are read from arrays of any integers.
        """
        if not value.dtype.startswith(("int", "uint")):
            return False
        fixed = self.names.keys() | self.read_only
        return all(name not in vector.varying and (is_variable or name in fixed) for name, is_variable in reads(value))

    def _local(self, name: str, size: int, dtype: str) -> Buffer:
        return tirx.decl_buffer((index(size).node,), dtype, name=self.name(name), scope="local", layout=None)

    def alloc(self, name: str, size: int, dtype: str) -> Buffer:
        """Allocate a small local array, in registers or on the stack."""
        buffer = self._local(name, size, dtype)
        self.emit(stmt.AllocBuffer(buffer))
        return buffer

    def view(self, name: str, dtype: str, address: Expr) -> Buffer:
        """Return the elements that an address points at as a buffer."""
        parameter, buffer = pointer(self.name(name), dtype)
        self.emit(stmt.Bind(parameter, tirx.reinterpret(parameter.ty, address.node.args[0])))
        self.emit(stmt.DeclBuffer(buffer, data=parameter))
        return buffer

    def bind(self, variable: Expr, value: Expr) -> None:
        """Define a variable for the statements that follow."""
        self.emit(stmt.Bind(variable.node, value.node))

    def store(self, buffer: Buffer, position: Any, value: Expr) -> None:
        self.emit(stmt.BufferStore(buffer, value.node, [index(position).node]))

    def call(self, function: str, *arguments: Expr) -> None:
        self.emit(stmt.Evaluate(tirx.call_extern("int32", function, *[x.node for x in arguments])))

    def call_piece(self, piece: Piece, *arguments: Expr) -> None:
        self.pieces[piece.name] = piece
        self.call(piece.name, *arguments)

    def call_part(self, stem: str, body: list[Stmt], arrays: Sequence[tuple[Any, Buffer]], read: int) -> None:
        """Call statements as a function of their own, whose name is the same wherever the statements are equal.

        Its parameters are those of the arrays that it uses, of which the first ``read`` are only read, and the numbers
        that are defined outside.
        """
        free = {v.name: v for v in undefined_vars(sequence(body), [])}
        read = sum(b.name in free for _, b in arrays[:read])
        used = [(p, b) for p, b in arrays if free.pop(b.name, None) is not None]
        parameters, arguments = [p for p, _ in used], [address_of(b, 0) for _, b in used]
        statements: list[Stmt] = []
        for name, variable in free.items():
            buffer = self.names.get(name)
            if buffer is None:  # a loop variable or a size
                parameters.append(variable)
                arguments.append(Expr(variable))
                continue
            parameter = tirx.Var(self.name(name), str(buffer.dtype))
            parameters.append(parameter)
            arguments.append(load(buffer, 0))
            statements += [stmt.AllocBuffer(buffer), stmt.BufferStore(buffer, parameter, [index(0).node])]
        content = _global(parameters, used, sequence([*statements, *body]), stem)
        # TVM's hash does not suffice: it is the same for ``to[i * 3 + 2]`` and ``to[i * 6 + 44]``.
        name = f"{stem}_{tvm_ffi.structural_hash(content) & 0xFFFFFFFFFFFF:x}_{read}"
        name, part = shared(name, Function(content, frozenset(self.names), read))
        self.helpers[name] = part
        self.call(name, *arguments)

    def prefetch(self, buffer: Buffer, position: Any) -> None:
        """Ask for the cache line of an element, which may be past the end of the buffer."""
        address = tirx.call_intrin("handle", "tirx.address_of", load(buffer, position).node)
        arguments = [index(x).node for x in (0, 3, 1)]  # to read, soon and often, as data
        self.emit(stmt.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *arguments)))

    def transpose(
        self, lanes: int, source: Buffer, start: Any, stride: Any, target: Buffer, target_start: Any, target_stride: Any
    ) -> None:
        """Transpose a float32 square of the vector length; strides lead from row to row of source and target."""
        name = f"turn_{lanes}"
        self.helpers[name] = _square_transpose(name, lanes)
        addresses = [address_of(b, i) for b, i in ((source, start), (target, target_start))]
        self.call(name, addresses[0], index(stride), addresses[1], index(target_stride))

    @contextmanager
    def block(self) -> Iterator[list[Stmt]]:
        """Collect statements in a separate list."""
        statements: list[Stmt] = []
        self._open.append(statements)
        try:
            yield statements
        finally:
            self._open.pop()

    @contextmanager
    def loop(self, name: str, extent: Any, kind: Any = SERIAL, **annotations: Any) -> Iterator[Any]:
        """Write a loop: ``with code.loop("i", 8) as i``; a single iteration needs none, and ``i`` is 0."""
        if isinstance(extent, int) and extent == 1:
            yield 0
            return
        variable = Expr(tirx.Var(self.name(name), "int32"))
        enclosing = self._vector
        if kind == VECTORIZED:
            self._vector = VectorLoop(variable, extent, self._open[-1], {variable.node.name})
        elif enclosing is not None:
            enclosing.varying.add(variable.node.name)
        with self.block() as body:
            yield variable
        self._vector = enclosing
        if body:
            bounds = index(0).node, index(extent).node
            self.emit(stmt.For(variable.node, *bounds, kind, sequence(body), None, annotations or None))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        with self.block() as body:
            yield
        self.emit(stmt.IfThenElse(condition.node, sequence(body), None))

    def either(self, condition: Expr, yes: list[Stmt], no: list[Stmt]) -> None:
        self.emit(stmt.IfThenElse(condition.node, sequence(yes), sequence(no)))

    def repeat(self, condition: Expr, body: list[Stmt]) -> None:
        self.emit(stmt.While(condition.node, sequence(body)))

    def leave(self, value: int) -> None:
        """Return a number."""
        self.emit(stmt.Return(index(value).node))

    def finish(self) -> Stmt:
        (body,) = self._open
        return sequence(body)


def sequence(body: list[Stmt]) -> Stmt:
    if not body:
        return stmt.Evaluate(index(0).node)
    return body[0] if len(body) == 1 else stmt.SeqStmt(body)


# -- functions ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """A function of pointers and numbers, as LLVM IR for the target's CPU and as C for every CPU."""

    name: str
    llvm: str
    c: str


@dataclass(frozen=True)
class Function:
    """A TIR function with the facts that the C printer needs."""

    primfunc: Any
    names: frozenset[str]  # one-element arrays that represent named values
    read: int  # number of leading read-only parameters
    helpers: Mapping[str, Function] = field(default_factory=dict)  # called functions by name
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # called functions that are not TIR


PARTS: WeakValueDictionary[str, Function] = WeakValueDictionary()  # by name, as long as programs hold them
NAMING = Lock()


def shared(name: str, part: Function) -> tuple[str, Function]:
    """Return the function of a name if it is equal to a part of kernels, else that of a longer name; with the name."""
    candidate = replace(part, primfunc=part.primfunc.with_attr("global_symbol", name))
    # setdefault of a WeakValueDictionary is Python code, between whose steps other threads run.
    with NAMING:
        function = PARTS.setdefault(name, candidate)
    if function is candidate or tvm_ffi.structural_equal(function.primfunc, candidate.primfunc):
        return name, function
    return shared(f"{name}_", part)


def importing(pieces: Iterable[Piece], body: Stmt) -> Stmt:
    """Return statements whose module contains the pieces."""
    for piece in pieces:
        body = stmt.AttrStmt(index(0).node, "pragma_import_llvm", nodes.StringImm(piece.llvm), body)
    return body


def pointer(name: str, dtype: str) -> tuple[Any, Buffer]:
    """Return a pointer parameter and the buffer that it points at, of a size that no analysis limits."""
    parameter = tirx.Var(name, PointerType(PrimType(dtype)))
    return parameter, tirx.decl_buffer((index(1 << 30).node,), dtype, name=name, layout=None)


def function(name: str, parameters: Sequence[tuple[Any, Buffer]], body: Stmt, sizes: Sequence[Expr] = ()) -> Any:
    """Build a function of plain pointers that do not overlap, and of sizes."""
    return _global([*(p for p, _ in parameters), *(s.node for s in sizes)], parameters, body, name)


def _global(parameters: Sequence[Any], pointers: Sequence[tuple[Any, Buffer]], body: Stmt, name: str) -> Any:
    declarations = [stmt.DeclBuffer(buffer, data=parameter) for parameter, buffer in pointers]
    # The result is 0: TVM turns a parallel loop into code that returns an error number.
    statements = sequence([*declarations, body, stmt.Return(index(0).node)])
    result = tirx.PrimFunc(list(parameters), statements, PrimType("int32"))
    return (
        result.with_attr("global_symbol", name).with_attr("tirx.noalias", True).with_attr("tirx.is_global_func", True)
    )


def entry(name: str, parameters: Sequence[Expr], body: Stmt) -> Any:
    """Build a function of numbers that Python calls."""
    result = tirx.PrimFunc([p.node for p in parameters], body, PrimType("int32"))
    return result.with_attr("global_symbol", name).with_attr("tirx.is_entry_func", True)


@cache
def _square_transpose(name: str, lanes: int) -> Function:
    """Build a transpose in registers: in step s, rows at distance s exchange every second block of s elements."""
    (source, rows), (target, columns) = pointer("source", "float32"), pointer("target", "float32")
    stride, target_stride = Expr(tirx.Var("stride", "int32")), Expr(tirx.Var("to_stride", "int32"))
    code = Code()

    def row(start: Any) -> Expr:
        return vector(start, lanes)

    square = code.alloc("held", lanes * lanes, "float32")
    for i in range(lanes):
        code.store(square, row(i * lanes), load(rows, row(index(i) * stride)))
    step = 1
    while step < lanes:
        exchanged = code.alloc("held", lanes * lanes, "float32")
        for i in (i for i in range(lanes) if not i & step):
            a, b = (load(square, row(k * lanes)) for k in (i, i | step))
            low = [k if not k & step else lanes + (k ^ step) for k in range(lanes)]
            high = [lanes + k if k & step else k | step for k in range(lanes)]
            code.store(exchanged, row(i * lanes), shuffle(a, b, low))
            code.store(exchanged, row((i | step) * lanes), shuffle(a, b, high))
        square, step = exchanged, 2 * step
    for i in range(lanes):
        code.store(columns, row(index(i) * target_stride), load(square, row(i * lanes)))
    parameters = [source, stride.node, target, target_stride.node]
    return Function(_global(parameters, [(source, rows), (target, columns)], code.finish(), name), frozenset(), 1)


def text(function: Any) -> str:
    """Return a function as TVM prints it."""
    return str(function.script())
