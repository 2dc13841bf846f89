"""Register tiles of int8x4 products as LLVM IR, for the instructions of the CPU.

A tile multiplies a few rows of int8x4 groups with a packed block of 32-bit int8x4 groups, [depth][columns], and stores
its sums. an int8x4 group has two bfloat16 or four 8-bit integers, unsigned on the left and signed on the right; all
sums are exact or float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mithril.graph import DType, float32, int32
from mithril_cbackend.instructions import AMX, BYTES, NATIVE, PAIRS, PAIRWISE, PORTABLE, fastest, function

AMX_ROWS, AMX_INT8X4 = 16, 16  # of one AMX tile
ACCUMULATORS = 8  # independent sums that hide the latency of an instruction


@dataclass(frozen=True)
class Instructions:
    """The instructions of a kind of int8x4 groups on a CPU: vectors of ``lanes`` int8x4 groups."""

    kind: str
    level: str
    lanes: int
    block: int = AMX_INT8X4  # int8x4 groups that an AMX tile has of each row
    height: int = AMX_ROWS  # rows of an AMX tile

    @property
    def per(self) -> int:
        """Return the number of elements of an int8x4 group."""
        return 2 if self.kind == PAIRS else 4

    @property
    def sums(self) -> DType:
        """Return the dtype of the sums."""
        return float32 if self.kind == PAIRS else int32

    @property
    def depth(self) -> int:
        """Return the number of int8x4 groups that the depth of a packed block is a multiple of."""
        return self.block if self.level == AMX else 1

    def of_runs(self, int8x4s: int) -> Instructions:
        """Return the instructions whose blocks exceed runs of this length by as few int8x4 groups as possible.

        Those of pairs exceed them by none: an int8x4 group after a run may be inf or nan, whose products with 0 are
        nan.
        """
        if self.kind == PAIRS:
            return replace(self, block=max(n for n in range(1, AMX_INT8X4 + 1) if int8x4s % n == 0))
        # Zeros of bytes add nothing, whatever the weights are, so that blocks may exceed a run.
        return replace(self, block=-(-int8x4s // -(-int8x4s // AMX_INT8X4)))

    def heights(self, rows: int) -> list[int]:
        """Return the rows of each AMX tile."""
        return [min(self.height, rows - first) for first in range(0, rows, self.height)]

    def name(self, rows: int, columns: int) -> str:
        """Return the name of a tile."""
        shape = f"_{self.height}x{self.block}" if self.level == AMX else ""
        return f"dot_{self.kind}_{rows}x{columns}{shape}"

    @property
    def rows(self) -> int:
        """Return the number of rows of a full tile of two vectors."""
        # AMX has eight tile registers: 2 x 2 of them are sums, two are rows and two columns. Vectors
        # have 8 x 2 sums with 32 registers, 4 x 2 with 16.
        return 2 * AMX_ROWS if self.level == AMX else 8 if self.lanes == 16 else 4

    @property
    def highest(self) -> int:
        """Return the largest height of the tiles that a program of any size has next to full ones."""
        return min(AMX_ROWS, self.rows - 1)


def instructions(kind: str, features: frozenset[str], lanes: int) -> Instructions:
    """Return the fastest instructions of a CPU with these features, in LLVM's names."""
    return Instructions(kind, fastest(kind, features, lanes), lanes)


class Text:
    """Lines of an LLVM function, with numbered values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.declared: set[str] = set()

    def let(self, expression: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {expression}")
        return f"%v{self.count}"

    def do(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def declare(self, line: str) -> None:
        self.declared.add(line)


def tile(name: str, use: Instructions, rows: int, vectors: int) -> str:
    """Return a module with one function ``name(a, stride, below, b, c, int8x4s, offsets, runs, ahead, pace)``.

    ``a`` has rows at a distance of ``stride`` bytes, the rows of further AMX tiles ``below`` bytes after the first
    ones. Each of the ``runs`` begins at an offset in bytes and has ``int8x4s`` int8x4 groups in every row and in the
    packed block ``b``. ``c`` is an array of the sums. High tiles of vectors prefetch ``pace`` bytes from ``ahead`` on
    with every int8x4 group.
    """
    text = Text()
    if use.level == AMX:
        _amx(text, name, use, rows, vectors)
    else:
        _vectors(text, name, use, rows, vectors)
    left, right = "ptr noalias %a, i32 %stride, i32 %below", "ptr noalias %b, ptr noalias %c, i32 %int8x4s"
    rest = "ptr noalias %offsets, i32 %runs, ptr %ahead, i32 %pace"
    head = f"define linkonce_odr i32 @{name}({left}, {right}, {rest})"
    body = "\n".join(text.lines)
    globals_ = [d for d in sorted(text.declared) if d.startswith("@")]
    declared = [d for d in sorted(text.declared) if not d.startswith("@")]
    return "\n".join([*globals_, *declared, f"{head} #0 {{", body, "}", "attributes #0 = { nounwind }", ""])


# -- vectors ------------------------------------------------------------------------------------------------------
def _vectors(text: Text, name: str, use: Instructions, rows: int, vectors: int) -> None:
    """Write a loop over int8x4 groups; few rows have several accumulators each, which are added at the end."""
    lanes, kind = use.lanes, "float" if use.kind == PAIRS else "i32"
    vector = f"<{lanes} x {kind}>"
    cells = rows * vectors
    # One row of two vectors has two sums: each instruction would wait for the one before it. Copies
    # of the loop body with sums of their own keep the multipliers busy; portable code is bound by its
    # arithmetic instead.
    unroll = max(1, min(4, ACCUMULATORS // cells)) if use.level != PORTABLE else 1
    sums = [(u, i, v) for u in range(unroll) for i in range(rows) for v in range(vectors)]
    text.label("entry")
    if use.level == NATIVE:
        _free_registers(text, lanes)
    text.do("%stride64 = sext i32 %stride to i64")
    text.do("%n = sext i32 %int8x4s to i64")
    text.do("%last = sext i32 %runs to i64")
    text.do(f"%main = {'and i64 %n, ' + str(-unroll) if unroll > 1 else 'add i64 %n, 0'}")
    text.do("%any = icmp sgt i64 %main, 0")
    text.do("br label %run")
    text.label("run")
    text.do("%r = phi i64 [ 0, %entry ], [ %r2, %next ]")
    for u, i, v in sums:
        text.do(f"%o{u}_{i}_{v} = phi {vector} [ zeroinitializer, %entry ], [ %d{u}_{i}_{v}, %next ]")
    _start_run(text, 4 * vectors * lanes)
    for i in range(rows):
        offset = text.let(f"mul i64 %stride64, {i}")
        text.do(f"%row{i} = getelementptr i8, ptr %first, i64 {offset}")
    text.do("br i1 %any, label %loop, label %join")
    text.label("loop")
    text.do("%k = phi i64 [ 0, %run ], [ %k2, %loop ]")
    for u, i, v in sums:
        text.do(f"%s{u}_{i}_{v} = phi {vector} [ %o{u}_{i}_{v}, %run ], [ %t{u}_{i}_{v}, %loop ]")
    for u in range(unroll):
        position = "%k" if u == 0 else text.let(f"add i64 %k, {u}")
        _step(text, use, rows, vectors, position, f"%s{u}", f"%t{u}")
    if unroll == 1 and use.level == NATIVE:
        _prefetch(text)
    text.do(f"%k2 = add i64 %k, {unroll}")
    text.do("%more = icmp slt i64 %k2, %main")
    text.do("br i1 %more, label %loop, label %join")
    text.label("join")
    for u, i, v in sums:
        text.do(f"%j{u}_{i}_{v} = phi {vector} [ %o{u}_{i}_{v}, %run ], [ %t{u}_{i}_{v}, %loop ]")
    if unroll > 1:
        text.do("%left = icmp slt i64 %main, %n")
        text.do("br i1 %left, label %rest, label %next")
        text.label("rest")
        text.do("%m = phi i64 [ %main, %join ], [ %m2, %rest ]")
        for i in range(rows):
            for v in range(vectors):
                text.do(f"%p_{i}_{v} = phi {vector} [ %j0_{i}_{v}, %join ], [ %q_{i}_{v}, %rest ]")
        _step(text, use, rows, vectors, "%m", "%p", "%q")
        text.do("%m2 = add i64 %m, 1")
        text.do("%again = icmp slt i64 %m2, %n")
        text.do("br i1 %again, label %rest, label %next")
    else:
        text.do("br label %next")
    text.label("next")
    for u, i, v in sums:
        rest = f", [ %q_{i}_{v}, %rest ]" if u == 0 else f", [ %j{u}_{i}_{v}, %rest ]"
        text.do(f"%d{u}_{i}_{v} = phi {vector} [ %j{u}_{i}_{v}, %join ]" + (rest if unroll > 1 else ""))
    _end_run(text)
    text.label("end")
    _store_sums(text, use, rows, vectors, unroll)


def _free_registers(text: Text, lanes: int) -> None:
    """Leave all registers to the sums: those of an epilogue's constants, loaded before the loops, would be missing."""
    kind, number = ("zmm", 32) if lanes == 16 else ("ymm", 16)
    used = ",".join(f"~{{{kind}{k}}}" for k in range(number))
    text.do(f'call void asm sideeffect "", "{used}"()')


def _prefetch(text: Text) -> None:
    """Ask for the bytes ahead that belong to an int8x4 group."""
    text.declare("declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)")
    position = text.let(f"add i64 {text.let('mul i64 %r, %n')}, %k")
    distance = text.let(f"mul i64 {position}, {text.let('sext i32 %pace to i64')}")
    place = text.let(f"getelementptr i8, ptr %ahead, i64 {distance}")
    text.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")


def _start_run(text: Text, int8x4: int) -> None:
    """Write the addresses of a run's first row and of its part of the packed block, in groups of ``int8x4`` bytes."""
    place = text.let("getelementptr i32, ptr %offsets, i64 %r")
    offset = text.let(f"load i32, ptr {place}, align 4")
    distance = text.let(f"sext i32 {offset} to i64")
    text.do(f"%first = getelementptr i8, ptr %a, i64 {distance}")
    begin = text.let(f"mul i64 {text.let('mul i64 %r, %n')}, {int8x4}")
    text.do(f"%packed_block = getelementptr i8, ptr %b, i64 {begin}")


def _end_run(text: Text) -> None:
    text.do("%r2 = add i64 %r, 1")
    text.do("%further = icmp slt i64 %r2, %last")
    text.do("br i1 %further, label %run, label %end")


def _store_sums(text: Text, use: Instructions, rows: int, vectors: int, unroll: int) -> None:
    """Add the accumulators of each sum, and store it."""
    lanes, add = use.lanes, "fadd" if use.kind == PAIRS else "add"
    vector = f"<{lanes} x {'float' if use.kind == PAIRS else 'i32'}>"
    for i in range(rows):
        for v in range(vectors):
            value = f"%d0_{i}_{v}"
            for u in range(1, unroll):
                value = text.let(f"{add} {vector} {value}, %d{u}_{i}_{v}")
            place = text.let(f"getelementptr i32, ptr %c, i64 {(i * vectors + v) * lanes}")
            text.do(f"store {vector} {value}, ptr {place}, align 4")
    text.do("ret i32 0")


def _step(text: Text, use: Instructions, rows: int, vectors: int, k: str, before: str, after: str) -> None:
    """Write the products of one int8x4 group of each row with the vectors of the packed block."""
    lanes = use.lanes
    int8x4s = f"<{lanes} x i32>"
    start = text.let(f"mul i64 {k}, {vectors * lanes}")
    packed_block = []
    for v in range(vectors):
        offset = start if v == 0 else text.let(f"add i64 {start}, {v * lanes}")
        place = text.let(f"getelementptr i32, ptr %packed_block, i64 {offset}")
        packed_block.append(text.let(f"load {int8x4s}, ptr {place}, align 4"))
    right = [_prepare_right(text, use, b) for b in packed_block]
    for i in range(rows):
        place = text.let(f"getelementptr i32, ptr %row{i}, i64 {k}")
        int8x4 = text.let(f"load i32, ptr {place}, align 1")
        left = _prepare_left(text, use, int8x4)
        for v in range(vectors):
            _multiply(text, use, f"{before}_{i}_{v}", left, right[v], f"{after}_{i}_{v}")


def _broadcast(text: Text, lanes: int, kind: str, x: str) -> str:
    one = text.let(f"insertelement <{lanes} x {kind}> poison, {kind} {x}, i64 0")
    return text.let(
        f"shufflevector <{lanes} x {kind}> {one}, <{lanes} x {kind}> poison, <{lanes} x i32> zeroinitializer"
    )


def _prepare_left(text: Text, use: Instructions, int8x4: str) -> list[str]:
    """Return the vectors that the product of one int8x4 group needs."""
    lanes = use.lanes
    if use.level == NATIVE:
        return [_broadcast(text, lanes, "i32", int8x4)]
    if use.kind == PAIRS:
        low, high = text.let(f"shl i32 {int8x4}, 16"), text.let(f"and i32 {int8x4}, -65536")
        parts = [text.let(f"bitcast i32 {x} to float") for x in (low, high)]
        return [_broadcast(text, lanes, "float", x) for x in parts]
    if use.level == PAIRWISE:  # pairs of 16-bit integers: bytes 0 and 2, bytes 1 and 3
        even = text.let(f"and i32 {int8x4}, {0x00FF00FF}")
        odd = text.let(f"and i32 {text.let(f'lshr i32 {int8x4}, 8')}, {0x00FF00FF}")
        return [_broadcast(text, lanes, "i32", x) for x in (even, odd)]
    parts = [text.let(f"and i32 {text.let(f'lshr i32 {int8x4}, {8 * p}')}, 255") for p in range(4)]
    return [_broadcast(text, lanes, "i32", x) for x in parts]


def _prepare_right(text: Text, use: Instructions, int8x4s: str) -> list[str]:
    lanes = use.lanes

    def every(value: int, kind: str, count: int) -> str:
        return f"<{', '.join([f'{kind} {value}'] * count)}>"

    if use.level == NATIVE:
        return [int8x4s]
    kind = f"<{lanes} x i32>"
    if use.kind == PAIRS:
        low = text.let(f"shl {kind} {int8x4s}, {every(16, 'i32', lanes)}")
        high = text.let(f"and {kind} {int8x4s}, {every(-65536, 'i32', lanes)}")
        return [text.let(f"bitcast {kind} {x} to <{lanes} x float>") for x in (low, high)]
    if use.level == PAIRWISE:
        halves = f"<{2 * lanes} x i16>"
        x = text.let(f"bitcast {kind} {int8x4s} to {halves}")
        eight = every(8, "i16", 2 * lanes)
        even = text.let(f"ashr {halves} {text.let(f'shl {halves} {x}, {eight}')}, {eight}")
        odd = text.let(f"ashr {halves} {x}, {eight}")
        return [even, odd]
    shift = every(24, "i32", lanes)
    return [
        text.let(f"ashr {kind} {text.let(f'shl {kind} {int8x4s}, ' + every(24 - 8 * p, 'i32', lanes))}, {shift}")
        for p in range(4)
    ]


def _multiply(text: Text, use: Instructions, total: str, left: list[str], right: list[str], result: str) -> None:
    """Write ``result = total + left * right``."""
    lanes = use.lanes
    int8x4s, floats, bytes_ = f"<{lanes} x i32>", f"<{lanes} x float>", f"<{4 * lanes} x i8>"
    pairs, halves = f"<{2 * lanes} x bfloat>", f"<{2 * lanes} x i16>"
    if use.level == NATIVE and use.kind == PAIRS:
        name = function(PAIRS, NATIVE, lanes)
        text.declare(f"declare {floats} @{name}({floats}, {pairs}, {pairs})")
        a, b = (text.let(f"bitcast {int8x4s} {x} to {pairs}") for x in (left[0], right[0]))
        text.do(f"{result} = call {floats} @{name}({floats} {total}, {pairs} {a}, {pairs} {b})")
    elif use.level == NATIVE:
        name = function(BYTES, NATIVE, lanes)
        text.declare(f"declare {int8x4s} @{name}({int8x4s}, {bytes_}, {bytes_})")
        a, b = (text.let(f"bitcast {int8x4s} {x} to {bytes_}") for x in (left[0], right[0]))
        text.do(f"{result} = call {int8x4s} @{name}({int8x4s} {total}, {bytes_} {a}, {bytes_} {b})")
    elif use.kind == PAIRS:
        name = f"llvm.fmuladd.v{lanes}f32"
        text.declare(f"declare {floats} @{name}({floats}, {floats}, {floats})")
        call = f"call {floats} @{name}({floats} {{}}, {floats} {{}}, {floats} {{}})"
        first = text.let(call.format(left[0], right[0], total))
        text.do(f"{result} = " + call.format(left[1], right[1], first))
    elif use.level == PAIRWISE:
        name = function(BYTES, PAIRWISE, lanes)
        text.declare(f"declare {int8x4s} @{name}({halves}, {halves})")
        for part, (a, b) in enumerate(zip(left, right, strict=True)):
            x = text.let(f"bitcast {int8x4s} {a} to {halves}")
            product = text.let(f"call {int8x4s} @{name}({halves} {x}, {halves} {b})")
            if part == 0:
                total = text.let(f"add {int8x4s} {total}, {product}")
            else:
                text.do(f"{result} = add {int8x4s} {total}, {product}")
    else:
        for part, (a, b) in enumerate(zip(left, right, strict=True)):
            product = text.let(f"mul {int8x4s} {a}, {b}")
            if part < 3:
                total = text.let(f"add {int8x4s} {total}, {product}")
            else:
                text.do(f"{result} = add {int8x4s} {total}, {product}")


# -- AMX ----------------------------------------------------------------------------------------------------------
def _amx(text: Text, name: str, use: Instructions, rows: int, vectors: int) -> None:
    """Write a loop over blocks of int8x4 groups: tiles 0 to 3 have the sums, 4 and 5 rows, 6 and 7 columns."""
    heights, depth = use.heights(rows), use.depth
    config = bytearray(64)
    # Palette 1 is the only one that CPUs have: eight tiles of at most 16 rows of 64 bytes.
    config[0] = 1

    def shape(number: int, height: int, width: int) -> None:
        config[16 + 2 * number], config[48 + number] = width, height

    for i, height in enumerate(heights):
        shape(4 + i, height, 4 * depth)
        for v in range(vectors):
            shape(2 * i + v, height, 64)
    for v in range(vectors):
        shape(6 + v, depth, 64)
    constant = ", ".join(f"i8 {x}" for x in config)
    text.declare(f"@{name}_shape = linkonce_odr constant [64 x i8] [{constant}], align 64")
    product = function(use.kind, AMX, use.lanes)
    text.declare("declare void @llvm.x86.ldtilecfg(ptr)")
    text.declare("declare void @llvm.x86.tilerelease()")
    text.declare("declare void @llvm.x86.tilezero(i8 immarg)")
    text.declare("declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)")
    text.declare("declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)")
    text.declare(f"declare void @{product}(i8 immarg, i8 immarg, i8 immarg)")
    width = vectors * 64
    cells = [(i, v) for i in range(len(heights)) for v in range(vectors)]
    text.label("entry")
    text.do("%stride64 = sext i32 %stride to i64")
    text.do("%below64 = sext i32 %below to i64")
    text.do("%n = sext i32 %int8x4s to i64")
    text.do("%last = sext i32 %runs to i64")
    text.do(f"call void @llvm.x86.ldtilecfg(ptr @{name}_shape)")
    for i, v in cells:
        text.do(f"call void @llvm.x86.tilezero(i8 {2 * i + v})")
    text.do("br label %run")
    text.label("run")
    text.do("%r = phi i64 [ 0, %entry ], [ %r2, %next ]")
    _start_run(text, width)
    text.do("br label %loop")
    text.label("loop")
    text.do("%k = phi i64 [ 0, %run ], [ %k2, %loop ]")
    bytes_ = text.let("mul i64 %k, 4")
    first = text.let(f"getelementptr i8, ptr %first, i64 {bytes_}")
    start = text.let(f"mul i64 %k, {width}")
    packed_block = text.let(f"getelementptr i8, ptr %packed_block, i64 {start}")
    for v in range(vectors):
        place = text.let(f"getelementptr i8, ptr {packed_block}, i64 {64 * v}")
        text.do(f"call void @llvm.x86.tileloadd64(i8 {6 + v}, ptr {place}, i64 {width})")
    for i in range(len(heights)):
        place = first if i == 0 else text.let(f"getelementptr i8, ptr {first}, i64 %below64")
        text.do(f"call void @llvm.x86.tileloadd64(i8 {4 + i}, ptr {place}, i64 %stride64)")
        for v in range(vectors):
            text.do(f"call void @{product}(i8 {2 * i + v}, i8 {4 + i}, i8 {6 + v})")
    text.do(f"%k2 = add i64 %k, {depth}")
    text.do("%more = icmp slt i64 %k2, %n")
    text.do("br i1 %more, label %loop, label %next")
    text.label("next")
    _end_run(text)
    text.label("end")
    for i, v in cells:
        place = text.let(f"getelementptr i8, ptr %c, i64 {sum(heights[:i]) * width + 64 * v}")
        text.do(f"call void @llvm.x86.tilestored64(i8 {2 * i + v}, ptr {place}, i64 {width})")
    # The state of the tiles is 8 KiB, which the kernel would otherwise save at each change of
    # threads.
    text.do("call void @llvm.x86.tilerelease()")
    text.do("ret i32 0")
