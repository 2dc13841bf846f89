"""Tiles of products with quantized values as LLVM IR: bytes, or numbers of a table of 16, with a scale for each group
of rows.

A tile multiplies a few rows with a packed block of 32 columns and adds up its groups in float32. Each group of the
packed block is one piece of memory: its scales, its offsets if it has any, and int8x4 groups along the summed axis.
Byte j of an int8x4 group has the quantized values j (its lower half) and j + 4 (its upper half), so that masks yield
the bytes that dot products read, or it has one number plus 128. Quantized values of five or six bits are consecutive
integers; their lower four bits are in such int8x4 groups, after one int8x4 group of each column with the other bits of
the group: those of quantized value k in byte k % 4, in ascending order. Nested scales and offsets are bytes as well:
some groups share their factors, which precede them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mithril_cbackend.instructions import (
    BLENDED,
    BYTES,
    NATIVE,
    NUMBERS,
    PAIRWISE,
    PERMUTED,
    PORTABLE,
    SHUFFLES,
    fastest,
    function,
)
from mithril_cbackend.lowering.int8x4.llvm_tiles import ACCUMULATORS, Text

# One width on every machine, so that packed files and exported C need no tag of the CPU (decision
# 0021).
COLUMNS = 32  # of a packed block, on every machine
AHEAD = 1 << 12  # bytes between the quantized values that are read and those that are prefetched
LINE = 64  # bytes that one prefetch loads
Sums = dict[tuple[int, int, int], str]  # by number of the partial sum, row and vector


@dataclass(frozen=True)
class GroupLayout:
    """The layout of a packed block."""

    group: int  # quantized values with one scale
    has_offsets: bool
    is_half: bool  # whether scales and offsets, or the factors of nested ones, are float16
    bits: int  # of a quantized value
    nested: int  # groups that share the factors of their scales and offsets; 0: there are none

    @property
    def per(self) -> int:
        """Return the quantized values of an int8x4 group."""
        return 4 if self.bits == 8 else 8

    @property
    def upper(self) -> int:
        """Return the bytes of the int8x4 groups that have the bits after the lower four of each quantized value."""
        return COLUMNS * 4 if self.bits in (5, 6) else 0

    @property
    def numbers(self) -> int:
        """Return the bytes of the scales of a group, or of its offsets."""
        return COLUMNS * (1 if self.nested else 2 if self.is_half else 4)

    @property
    def factors(self) -> int:
        """Return the bytes of factors before the groups that share them."""
        return COLUMNS * 2 * (2 if self.has_offsets else 1) if self.nested else 0

    @property
    def head(self) -> int:
        """Return the bytes before the quantized values of a group."""
        return self.numbers * (2 if self.has_offsets else 1)

    @property
    def size(self) -> int:
        """Return the bytes of a group."""
        return self.head + COLUMNS * self.group // 8 * self.bits

    @property
    def block(self) -> int:
        """Return the bytes of groups with the same factors."""
        return self.factors + self.nested * self.size

    def packed_block(self, groups: int) -> int:
        """Return the bytes of a packed block."""
        return groups // self.nested * self.block if self.nested else groups * self.size


@dataclass(frozen=True)
class GroupForm(GroupLayout):
    """A layout, the elements of the rows (float32, or signed bytes), and the instructions for them."""

    is_bytes: bool
    lanes: int
    level: str

    @property
    def vectors(self) -> int:
        return COLUMNS // self.lanes

    @property
    def has_first(self) -> bool:
        """Whether quantized values are multiplied instead of numbers, and the first number is added with the offset."""
        return bool(self.upper) and not self.is_bytes

    @property
    def has_sums(self) -> bool:
        """Whether a tile reads the sum of each group of each row."""
        return self.is_bytes or self.has_offsets or self.has_first

    @property
    def rows(self) -> int:
        """Return the number of rows of a full tile."""
        # With 16 registers 2 rows of 4 vectors leave room for the table and the scales; with 32 it is 8
        # rows of 2 vectors.
        return 8 if self.lanes == 16 else 2

    @property
    def name(self) -> str:
        kind = "bytes" if self.is_bytes else "floats"
        nested = f"n{self.nested}" if self.nested else ""
        return f"groups_{kind}{self.bits}_{self.group}{'o' * self.has_offsets}{'h' * self.is_half}{nested}"


def level(features: frozenset[str], lanes: int, is_bytes: bool) -> str:
    """Return the fastest instructions of a CPU with these features, in LLVM's names."""
    if not is_bytes:
        return fastest(NUMBERS, features, lanes)
    if fastest(SHUFFLES, features, lanes) == PORTABLE:
        return PORTABLE
    # Tiles of AMX read bytes from memory: quantized values would have to be looked up and stored before.
    return fastest(BYTES, features - {"amx-int8"}, lanes)


def tile(name: str, form: GroupForm, rows: int) -> str:
    """Return a module with one function ``name(a, stride, packed_block, table, sums, c, groups)``.

    ``a`` has rows at a distance of ``stride`` bytes. ``table`` has the first 16 numbers, for rows of bytes 128 more
    than them as bytes. ``sums`` has the sum of each group of each row if the form has them. ``c`` takes the results.
    """
    text = Text()
    _Tile(text, form, rows).write()
    head = (
        f"define linkonce_odr i32 @{name}(ptr noalias %a, i32 %stride, ptr noalias %b, ptr noalias %table, "
        "ptr noalias %sums, ptr noalias %c, i32 %groups)"
    )
    body = "\n".join(text.lines)
    return "\n".join([*sorted(text.declared), f"{head} #0 {{", body, "}", "attributes #0 = { nounwind }", ""])


class _Tile:
    """Writer of one tile: a loop over groups, and in it one over the int8x4 groups of a group."""

    def __init__(self, text: Text, form: GroupForm, rows: int) -> None:
        self.text, self.form, self.rows, self.vectors = text, form, rows, form.vectors
        lanes = form.lanes
        self.floats, self.int8x4s = f"<{lanes} x float>", f"<{lanes} x i32>"
        self.bytes_ = f"<{4 * lanes} x i8>"
        self.scales_first = not form.is_bytes and rows > 2  # scale each number, rather than sums
        limit = ACCUMULATORS // (rows * form.vectors)
        parts = (1 if form.bits == 8 else 2) if form.is_bytes else 4
        self.parts = 1 if self.scales_first else max(1, min(parts, limit))
        self.kind = self.int8x4s if form.is_bytes else self.floats
        self.cells = [(i, v) for i in range(rows) for v in range(form.vectors)]

    def write(self) -> None:
        text, form = self.text, self.form
        text.label("entry")
        text.do("%stride64 = sext i32 %stride to i64")
        text.do("%n = sext i32 %groups to i64")
        for i in range(self.rows):
            text.do(f"%offset{i} = mul i64 %stride64, {i}")
            text.do(f"%row{i} = getelementptr i8, ptr %a, i64 %offset{i}")
        table = self.table()
        text.do("br label %group")
        text.label("group")
        text.do("%g = phi i64 [ 0, %entry ], [ %g2, %next ]")
        first = len(text.lines)
        # Filled in below, when the names of the next sums are known.
        text.lines += [""] * len(self.cells)
        text.do(f"%groups64 = mul i64 %g, {form.size}")
        if form.nested:
            text.do(f"%outer = udiv i64 %g, {form.nested}")
            text.do(f"%shared = mul i64 %outer, {form.block}")
            text.do("%factors = getelementptr i8, ptr %b, i64 %shared")
            text.do(f"%before = mul i64 %outer, {form.factors}")
            text.do(f"%through = add i64 %before, {form.factors}")
            text.do("%begin = add i64 %groups64, %through")
        else:
            text.do("%begin = add i64 %groups64, 0")
        text.do("%head = getelementptr i8, ptr %b, i64 %begin")
        text.do(f"%quantized = getelementptr i8, ptr %head, i64 {form.head + form.upper}")
        text.do(f"%first = mul i64 %g, {form.group}")
        scales = [self.number(0, v) for v in range(self.vectors)]
        offsets = [self.number(1, v) for v in range(self.vectors)] if form.has_offsets else []
        if form.has_first:
            offsets = [self.after_first(table[0], *numbers) for numbers in zip(scales, *([offsets] * form.has_offsets))]
        self.prefetch("%head", form.head + form.upper)
        upper = [self.upper(v) for v in range(self.vectors)] if form.upper else []
        text.do("br label %int8x4")
        sums = self.int8x4_of_group(table, upper, scales, offsets)
        text.label("next")
        after = self.scaled(sums, scales, offsets)
        text.do("%g2 = add i64 %g, 1")
        text.do("%more = icmp slt i64 %g2, %n")
        text.do("br i1 %more, label %group, label %end")
        text.label("end")
        for k, (i, v) in enumerate(self.cells):
            before = "[ zeroinitializer, %entry ]"
            text.lines[first + k] = f"  %acc{i}_{v} = phi {self.floats} {before}, [ {after[i, v]}, %next ]"
            place = text.let(f"getelementptr float, ptr %c, i64 {i * COLUMNS + v * form.lanes}")
            text.do(f"store {self.floats} {after[i, v]}, ptr {place}, align 4")
        text.do("ret i32 0")

    def int8x4_of_group(self, table: list[str], upper: list[str], scales: list[str], offsets: list[str]) -> Sums:
        """Write the loop over int8x4 groups of a group, and return its sums."""
        text, form = self.text, self.form
        text.label("int8x4")
        text.do("%q = phi i64 [ 0, %group ], [ %q2, %int8x4 ]")
        keys = [(u, i, v) for i, v in self.cells for u in range(self.parts)]
        first = len(text.lines)
        text.lines += [""] * (len(keys) + len(upper))
        sums = {(u, i, v): f"%p{u}_{i}_{v}" for u, i, v in keys}
        text.do(f"%line = mul i64 %q, {COLUMNS * 4}")
        text.do("%here = getelementptr i8, ptr %quantized, i64 %line")
        self.prefetch("%here", COLUMNS * 4)
        text.do(f"%position = mul i64 %q, {form.per}")
        text.do("%k = add i64 %first, %position")
        int8x4s = []
        for v in range(self.vectors):
            place = text.let(f"getelementptr i8, ptr %here, i64 {4 * v * form.lanes}")
            int8x4s.append(text.let(f"load {self.int8x4s}, ptr {place}, align 4"))
        rest = [f"%upper{v}" for v in range(len(upper))]
        if form.bits == 4 and form.is_bytes:
            self.add_bytes(int8x4s, table[0], sums)
        elif form.bits == 4:
            self.add_floats(int8x4s, table, sums, scales, offsets)
        else:
            for four in range(form.per // 4):
                numbers = int8x4s
                if form.upper:
                    numbers, rest = self.joined(int8x4s, rest, table[0], four)
                if form.is_bytes:
                    self.add_numbers(numbers, sums, four)
                else:
                    self.add_converted(numbers, sums, scales, offsets, four)
        for position, (u, i, v) in enumerate(keys):
            start = f"%acc{i}_{v}" if self.scales_first else "zeroinitializer"
            phi = f"phi {self.kind} [ {start}, %group ], [ {sums[u, i, v]}, %int8x4 ]"
            text.lines[first + position] = f"  %p{u}_{i}_{v} = {phi}"
        for v, int8x4 in enumerate(upper):
            phi = f"phi {self.int8x4s} [ {int8x4}, %group ], [ {rest[v]}, %int8x4 ]"
            text.lines[first + len(keys) + v] = f"  %upper{v} = {phi}"
        text.do("%q2 = add i64 %q, 1")
        text.do(f"%again = icmp slt i64 %q2, {form.group // form.per}")
        text.do("br i1 %again, label %int8x4, label %next")
        return sums

    def scaled(self, sums: Sums, scales: list[str], offsets: list[str]) -> dict[tuple[int, int], str]:
        """Add the scaled sums of a group to those of the tile."""
        text, form = self.text, self.form
        if self.scales_first:
            return {(i, v): sums[0, i, v] for i, v in self.cells}
        after = {}
        for i, v in self.cells:
            total, before = sums[0, i, v], f"%acc{i}_{v}"
            add = "add" if form.is_bytes else "fadd"
            for u in range(1, self.parts):
                total = text.let(f"{add} {self.kind} {total}, {sums[u, i, v]}")
            if form.is_bytes:  # without the 128 that each number of the table has too much
                less = text.let(f"shl i32 {self.sum(i)}, 7")
                total = text.let(f"sub {self.int8x4s} {total}, {self.broadcast('i32', less)}")
                total = text.let(f"sitofp {self.int8x4s} {total} to {self.floats}")
            if offsets:
                factor = self.sum(i)
                if form.is_bytes:
                    factor = text.let(f"sitofp i32 {factor} to float")
                before = self.fma(offsets[v], self.broadcast("float", factor), before)
            after[i, v] = self.fma(total, scales[v], before)
        return after

    # -- one int8x4 group of each column
    # ------------------------------------------------------------------------------------
    def add_floats(
        self, int8x4s: list[str], table: list[str], sums: Sums, scales: list[str], offsets: list[str]
    ) -> None:
        """Add the products of floats and of the numbers of a table."""
        for code in range(8):  # in the order of their bits
            shift = self.every(4 * code)
            shifted = [self.text.let(f"lshr {self.int8x4s} {w}, {shift}") for w in int8x4s] if code else int8x4s
            numbers = [self.look_up(table, w) for w in shifted]
            self.add_products(code // 2 + 4 * (code % 2), code, numbers, sums, scales, offsets)

    def add_converted(self, int8x4s: list[str], sums: Sums, scales: list[str], offsets: list[str], four: int) -> None:
        """Add the products of floats and of bytes: quantized values, or 128 more than numbers."""
        if not self.form.has_first:
            int8x4s = [self.text.let(f"xor {self.int8x4s} {w}, {self.every(-0x7F7F7F80)}") for w in int8x4s]
        for code in range(4):
            numbers = [self.converted(int8x4, code) for int8x4 in int8x4s]
            self.add_products(4 * four + code, code, numbers, sums, scales, offsets)

    def add_products(
        self, element: int, turn: int, numbers: list[str], sums: Sums, scales: list[str], offsets: list[str]
    ) -> None:
        """Add the products of one float of each row and the numbers of all columns to partial sums in turn."""
        text, left, u = self.text, [], turn % self.parts
        for i in range(self.rows):
            offset = text.let(f"add i64 %k, {element}")
            place = text.let(f"getelementptr float, ptr %row{i}, i64 {offset}")
            left.append(self.broadcast("float", text.let(f"load float, ptr {place}, align 4")))
        for v, number in enumerate(numbers):
            if self.scales_first and offsets:
                number = self.fma(number, scales[v], offsets[v])
            elif self.scales_first:
                number = text.let(f"fmul {self.floats} {number}, {scales[v]}")
            for i in range(self.rows):
                sums[u, i, v] = self.fma(left[i], number, sums[u, i, v])

    def upper(self, v: int) -> str:
        """Load the upper bits of the quantized values of a group."""
        text = self.text
        place = text.let(f"getelementptr i8, ptr %head, i64 {self.form.head + 4 * v * self.form.lanes}")
        return text.let(f"load {self.int8x4s}, ptr {place}, align 4")

    def joined(self, int8x4s: list[str], rest: list[str], first: str, four: int) -> tuple[list[str], list[str]]:
        """Return four quantized values of each column, or numbers plus 128, and the upper bits of the next ones."""
        text, count = self.text, self.form.bits - 4
        mask = self.every(0x10101010 * ((1 << count) - 1))
        numbers, after = [], []
        for int8x4, bits in zip(int8x4s, rest, strict=True):
            shifted = text.let(f"lshr {self.int8x4s} {int8x4}, {self.every(4)}") if four else int8x4
            low = text.let(f"and {self.int8x4s} {shifted}, {self.every(0x0F0F0F0F)}")
            high = text.let(f"and {self.int8x4s} {text.let(f'shl {self.int8x4s} {bits}, {self.every(4)}')}, {mask}")
            code = text.let(f"or {self.int8x4s} {low}, {high}")
            if self.form.is_bytes:
                number = text.let(f"bitcast {self.int8x4s} {code} to {self.bytes_}")
                code = self.as_int8x4(text.let(f"add {self.bytes_} {number}, {first}"))
            numbers.append(code)
            after.append(text.let(f"lshr {self.int8x4s} {bits}, {self.every(count)}"))
        return numbers, after

    def converted(self, int8x4: str, code: int) -> str:
        """Return a byte of each int8x4 group as float32: a quantized value, or a signed number."""
        text, bits = self.text, 24 - 8 * code
        if self.form.has_first:
            low = text.let(f"lshr {self.int8x4s} {int8x4}, {self.every(8 * code)}") if code else int8x4
            number = text.let(f"and {self.int8x4s} {low}, {self.every(255)}") if bits else low
        else:
            high = text.let(f"shl {self.int8x4s} {int8x4}, {self.every(bits)}") if bits else int8x4
            number = text.let(f"ashr {self.int8x4s} {high}, {self.every(24)}")
        return text.let(f"sitofp {self.int8x4s} {number} to {self.floats}")

    def after_first(self, first: str, scale: str, offset: str = "") -> str:
        """Return the number of quantized value 0 with its scale and offset."""
        if offset:
            return self.fma(first, scale, offset)
        return self.text.let(f"fmul {self.floats} {first}, {scale}")

    def add_numbers(self, int8x4s: list[str], sums: Sums, four: int) -> None:
        """Add the products of bytes, and of bytes that are 128 more than their numbers."""
        text, u = self.text, four % self.parts
        for i in range(self.rows):
            offset = text.let(f"add i64 %k, {4 * four}")
            place = text.let(f"getelementptr i8, ptr %row{i}, i64 {offset}")
            left = self.broadcast("i32", text.let(f"load i32, ptr {place}, align 1"))
            for v, int8x4 in enumerate(int8x4s):
                numbers = text.let(f"bitcast {self.int8x4s} {int8x4} to {self.bytes_}")
                sums[u, i, v] = self.dot(sums[u, i, v], numbers, left)

    def add_bytes(self, int8x4s: list[str], table: str, sums: Sums) -> None:
        """Add the products of bytes and of the bytes of a table."""
        text, mask = self.text, self.every(0x0F0F0F0F)
        for four in range(2):
            shifted = [text.let(f"lshr {self.int8x4s} {w}, {self.every(4)}") for w in int8x4s] if four else int8x4s
            quantized = [text.let(f"and {self.int8x4s} {w}, {mask}") for w in shifted]
            self.add_numbers([self.look_up_bytes(table, c) for c in quantized], sums, four)

    # -- instructions -----------------------------------------------------------------------------------------------
    def table(self) -> list[str]:
        """Load the table into registers."""
        text, form = self.text, self.form
        if form.bits == 8:
            return []
        if form.upper and form.is_bytes:  # the first number plus 128
            return [self.broadcast("i8", text.let("load i8, ptr %table, align 1"), 4)]
        if form.upper:
            return [self.broadcast("float", text.let("load float, ptr %table, align 4"))]
        if form.is_bytes:
            one = text.let("load <16 x i8>, ptr %table, align 1")
            order = ", ".join(f"i32 {k % 16}" for k in range(4 * form.lanes))
            mask = f"<{4 * form.lanes} x i32> <{order}>"
            return [text.let(f"shufflevector <16 x i8> {one}, <16 x i8> poison, {mask}")]
        if form.level == PERMUTED:
            return [text.let("load <16 x float>, ptr %table, align 4")]
        if form.level == BLENDED:
            high = text.let("getelementptr float, ptr %table, i64 8")
            return [text.let(f"load <8 x float>, ptr {p}, align 4") for p in ("%table", high)]
        return []

    def look_up(self, table: list[str], quantized: str) -> str:
        """Return the numbers of the lowest four bits of each int8x4 group."""
        text, form = self.text, self.form
        if form.level == PERMUTED:
            name = function(NUMBERS, PERMUTED, form.lanes)
            text.declare(f"declare <16 x float> @{name}(<16 x float>, <16 x i32>)")
            return text.let(f"call <16 x float> @{name}(<16 x float> {table[0]}, <16 x i32> {quantized})")
        if form.level == BLENDED:
            name = function(NUMBERS, BLENDED, form.lanes)
            text.declare(f"declare <8 x float> @{name}(<8 x float>, <8 x i32>)")
            low, high = (
                text.let(f"call <8 x float> @{name}(<8 x float> {x}, <8 x i32> {quantized})") for x in table
            )  # by three bits
            bit = text.let(f"shl <8 x i32> {quantized}, {self.every(28)}")
            upper = text.let(f"icmp slt <8 x i32> {bit}, zeroinitializer")
            return text.let(f"select <8 x i1> {upper}, <8 x float> {high}, <8 x float> {low}")
        masked = text.let(f"and {self.int8x4s} {quantized}, {self.every(15)}")
        result = "poison"
        for lane in range(form.lanes):
            code = text.let(f"extractelement {self.int8x4s} {masked}, i64 {lane}")
            place = text.let(f"getelementptr float, ptr %table, i32 {code}")
            number = text.let(f"load float, ptr {place}, align 4")
            result = text.let(f"insertelement {self.floats} {result}, float {number}, i64 {lane}")
        return result

    def look_up_bytes(self, table: str, quantized: str) -> str:
        """Return the bytes of a table of 16 for quantized values in bytes."""
        text, kind, count = self.text, self.bytes_, 4 * self.form.lanes
        index = text.let(f"bitcast {self.int8x4s} {quantized} to {kind}")
        if self.form.level != PORTABLE:
            name = function(SHUFFLES, NATIVE, self.form.lanes)
            text.declare(f"declare {kind} @{name}({kind}, {kind})")
            return self.as_int8x4(text.let(f"call {kind} @{name}({kind} {table}, {kind} {index})"))
        result = "poison"
        for position in range(count):
            code = text.let(f"extractelement {kind} {index}, i64 {position}")
            place = text.let(f"getelementptr i8, ptr %table, i8 {code}")
            number = text.let(f"load i8, ptr {place}, align 1")
            result = text.let(f"insertelement {kind} {result}, i8 {number}, i64 {position}")
        return self.as_int8x4(result)

    def as_int8x4(self, numbers: str) -> str:
        return self.text.let(f"bitcast {self.bytes_} {numbers} to {self.int8x4s}")

    def dot(self, total: str, numbers: str, int8x4: str) -> str:
        """Add the dot products of unsigned and signed bytes."""
        text, kind, int8x4s, lanes = self.text, self.bytes_, self.int8x4s, self.form.lanes
        if self.form.level == NATIVE:
            name = function(BYTES, NATIVE, lanes)
            text.declare(f"declare {int8x4s} @{name}({int8x4s}, {kind}, {kind})")
            right = text.let(f"bitcast {int8x4s} {int8x4} to {kind}")
            return text.let(f"call {int8x4s} @{name}({int8x4s} {total}, {kind} {numbers}, {kind} {right})")
        left = text.let(f"bitcast {kind} {numbers} to {int8x4s}")
        if self.form.level == PAIRWISE:  # pairs of 16-bit integers: bytes 0 and 2, bytes 1 and 3
            halves, name = f"<{2 * lanes} x i16>", function(BYTES, PAIRWISE, lanes)
            text.declare(f"declare {int8x4s} @{name}({halves}, {halves})")
            eight = f"<{', '.join(['i16 8'] * (2 * lanes))}>"
            pair = text.let(f"bitcast {int8x4s} {int8x4} to {halves}")
            signed = [text.let(f"ashr {halves} {text.let(f'shl {halves} {pair}, {eight}')}, {eight}")]
            signed.append(text.let(f"ashr {halves} {pair}, {eight}"))
            for p, right in enumerate(signed):
                shifted = text.let(f"lshr {int8x4s} {left}, {self.every(8)}") if p else left
                part = text.let(
                    f"bitcast {int8x4s} {text.let(f'and {int8x4s} {shifted}, {self.every(0x00FF00FF)}')} to {halves}"
                )
                product = text.let(f"call {int8x4s} @{name}({halves} {part}, {halves} {right})")
                total = text.let(f"add {int8x4s} {total}, {product}")
            return total
        for p in range(4):
            part = text.let(
                f"and {int8x4s} {text.let(f'lshr {int8x4s} {left}, {self.every(8 * p)}')}, {self.every(255)}"
            )
            high = text.let(f"shl {int8x4s} {int8x4}, {self.every(24 - 8 * p)}")
            signed_int8x4 = text.let(f"ashr {int8x4s} {high}, {self.every(24)}")
            total = text.let(f"add {int8x4s} {total}, {text.let(f'mul {int8x4s} {part}, {signed_int8x4}')}")
        return total

    def number(self, part: int, v: int) -> str:
        """Load the scales (part 0) or offsets (part 1) of a vector of columns as float32."""
        text, form, lanes = self.text, self.form, self.form.lanes
        start = part * form.numbers + v * lanes * form.numbers // COLUMNS
        place = text.let(f"getelementptr i8, ptr %head, i64 {start}")
        if form.nested:
            quantized = text.let(f"load <{lanes} x i8>, ptr {place}, align 1")
            integers = text.let(f"sext <{lanes} x i8> {quantized} to {self.int8x4s}")
            number = text.let(f"sitofp {self.int8x4s} {integers} to {self.floats}")
            shared = text.let(f"getelementptr i8, ptr %factors, i64 {2 * (part * COLUMNS + v * lanes)}")
            return text.let(f"fmul {self.floats} {number}, {self.halves(shared)}")
        if form.is_half:
            return self.halves(place)
        return text.let(f"load {self.floats}, ptr {place}, align 4")

    def halves(self, place: str) -> str:
        """Load a vector of float16 as float32."""
        text, lanes = self.text, self.form.lanes
        if self.form.level != PORTABLE:
            half = text.let(f"load <{lanes} x half>, ptr {place}, align 2")
            return text.let(f"fpext <{lanes} x half> {half} to {self.floats}")
        # without an instruction: move the bits, and correct the exponent by an exact product
        bits = text.let(f"load <{lanes} x i16>, ptr {place}, align 2")
        int8x4s = text.let(f"sext <{lanes} x i16> {bits} to {self.int8x4s}")
        low = text.let(f"and {self.int8x4s} {text.let(f'shl {self.int8x4s} {int8x4s}, {self.every(13)}')}, "
                       f"{self.every(0x0FFFE000)}")  # fmt: skip
        sign = text.let(f"and {self.int8x4s} {int8x4s}, {self.every(-(1 << 31))}")
        combined = text.let(f"or {self.int8x4s} {low}, {sign}")
        number = text.let(f"bitcast {self.int8x4s} {combined} to {self.floats}")
        power = ", ".join(["float 0x46F0000000000000"] * lanes)  # 2 ** 112
        return text.let(f"fmul {self.floats} {number}, <{power}>")

    def sum(self, i: int) -> str:
        """Load the sum of the current group of a row."""
        text = self.text
        row = text.let(f"mul i64 %n, {i}")
        offset = text.let(f"add i64 {row}, %g")
        kind = "i32" if self.form.is_bytes else "float"
        place = text.let(f"getelementptr {kind}, ptr %sums, i64 {offset}")
        return text.let(f"load {kind}, ptr {place}, align 4")

    def fma(self, a: str, b: str, c: str) -> str:
        name = f"llvm.fmuladd.v{self.form.lanes}f32"
        self.text.declare(f"declare {self.floats} @{name}({self.floats}, {self.floats}, {self.floats})")
        return self.text.let(f"call {self.floats} @{name}({self.floats} {a}, {self.floats} {b}, {self.floats} {c})")

    def broadcast(self, kind: str, x: str, per: int = 1) -> str:
        lanes = self.form.lanes * per
        one = self.text.let(f"insertelement <{lanes} x {kind}> poison, {kind} {x}, i64 0")
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.text.let(f"shufflevector <{lanes} x {kind}> {one}, <{lanes} x {kind}> poison, {zeros}")

    def every(self, value: int) -> str:
        return f"<{', '.join([f'i32 {value}'] * self.form.lanes)}>"

    def prefetch(self, place: str, size: int) -> None:
        self.text.declare("declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)")
        for start in range(0, size, LINE):
            line = self.text.let(f"getelementptr i8, ptr {place}, i64 {AHEAD + start}")
            self.text.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 3, i32 1)")
