"""Tiles of a matrix product: as many accumulators as there are registers for, over one panel of the right operand.

A panel is a few vectors of columns wide and lies in memory row after row, so that a tile reads it from one end to the
other, and the next tile finds it in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.frame import Frame, Machine

Element = Callable[[Any, Any], t.Expr]  # row, column -> element
Left = Callable[..., t.Expr]  # row, positions in what is summed over -> element
Emit = Callable[[Any, Any, t.Expr], None]  # row, column, element


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the accumulators."""

    rows: int
    columns: int


def tile_for(m: int, n: int, machine: Machine) -> Tile:
    """The largest tile that the registers hold, its rows such that the last tile is hardly smaller than the others."""
    vectors = 1 if n <= machine.lanes() else 2
    rows = (8 if machine.vector_bytes == 64 else 4) * (2 if vectors == 1 else 1)
    if m <= 2 and n >= 4 * machine.lanes():
        vectors = 4  # more sums at a time than it takes to finish one
    return Tile(-(-m // -(-m // rows)), vectors * machine.lanes())


def count(n: int, columns: int) -> int:
    return -(-n // columns)


def pack(matrix: np.ndarray[Any, Any], columns: int) -> np.ndarray[Any, Any]:
    """[k, n] as panels, the last one filled up with zeros: what ``copy_panel`` does, done before the program runs."""
    k, n = matrix.shape
    padded = np.zeros((k, count(n, columns) * columns), np.float32)
    padded[:, :n] = matrix
    return np.ascontiguousarray(padded.reshape(k, -1, columns).swapaxes(0, 1)).reshape(-1)


@dataclass(frozen=True)
class Matrix:
    """Where the elements of a stored matrix lie: [i, j] at ``start + i * row + j * column``."""

    buffer: t.Buffer
    start: Any
    row: int
    column: int

    def at(self, i: Any, j: Any) -> Any:
        return t.iadd(self.start, t.iadd(t.imul(i, self.row), t.imul(j, self.column)))

    def from_column(self, j: Any) -> Matrix:
        """What is right of a column, that one included."""
        return replace(self, start=t.iadd(self.start, t.imul(j, self.column)))

    def element(self, i: Any, j: Any) -> t.Expr:
        return t.load(self.buffer, self.at(i, j))


def copy_panel(frame: Frame, element: Element, matrix: Matrix | None, k: int, width: int, panel: Matrix) -> None:
    """k rows of ``width`` columns, zeros up to whole vectors. ``matrix`` tells where they lie, if stored."""
    code, reader, lanes = frame.code, frame.reader, frame.machine.lanes()

    def one(i: Any, j: Any) -> None:
        code.store(panel.buffer, panel.at(i, j), element(i, j))

    turned = matrix is not None and matrix.row == 1 and matrix.column != 1 and lanes > 1
    squares, left = divmod(k, lanes) if turned else (0, k)
    whole = width // lanes * lanes
    if squares and whole:
        assert matrix is not None
        with reader.loop("s", squares) as s, reader.loop("v", whole // lanes) as v:
            i, j = t.imul(s, lanes), t.imul(v, lanes)
            code.turn(lanes, matrix.buffer, matrix.at(i, j), matrix.column, panel.buffer, panel.at(i, j), panel.row)
    if left and whole:
        kind = t.VECTORIZED if matrix is not None and matrix.column == 1 else t.SERIAL
        with reader.loop("k", left) as i, reader.loop("v", whole // lanes) as v, reader.loop("j", lanes, kind) as j:
            one(t.iadd(i, squares * lanes), t.iadd(t.imul(v, lanes), j))
    if width > whole:
        with reader.loop("j", width - whole) as j, reader.loop("k", k) as i:
            one(i, t.iadd(j, whole))
        with reader.loop("j", -width % lanes) as j, reader.loop("k", k) as i:
            code.store(panel.buffer, panel.at(i, t.iadd(j, width)), t.const(0, "float32"))


def multiply(
    frame: Frame,
    m: int,
    inner: Sequence[int],
    tile: Tile,
    left: Left,
    panel: Matrix,
    width: int,
    emit: Emit,
    vector: bool,
) -> None:
    """All rows of the result over one panel. ``emit`` gets whole vectors where it may, else elements.

    ``inner`` is what is summed over, one axis or several, as which ``left`` takes its positions.
    """

    def one(row: Any, rows: int) -> None:
        _tile(frame, row, rows, inner, left, panel, width, emit, vector)

    whole, rest = divmod(m, tile.rows)
    if whole:
        with frame.reader.loop("tile", whole) as i:
            one(t.imul(i, tile.rows), tile.rows)
    if rest:
        one(whole * tile.rows, rest)


def _tile(
    frame: Frame,
    row: Any,
    rows: int,
    inner: Sequence[int],
    left: Left,
    panel: Matrix,
    width: int,
    emit: Emit,
    vector: bool,
) -> None:
    code, reader, lanes = frame.code, frame.reader, frame.machine.lanes()
    vectors = count(width, lanes)
    total = code.alloc("tile", rows * vectors * lanes, "float32")
    cells = [(i, v, (i * vectors + v) * lanes) for i in range(rows) for v in range(vectors)]
    for _, _, slot in cells:
        with reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(total, t.iadd(j, slot), t.const(0, "float32"))
    with reader.nest("ke", inner) as k:
        elements = [left(t.iadd(row, i), *k) for i in range(rows)]
        for i, v, slot in cells:
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                b = panel.element(reader.flat(k, inner), t.iadd(j, v * lanes))
                at = t.iadd(j, slot)
                code.store(total, at, t.binary("add", t.load(total, at), t.binary("mul", elements[i], b)))
    for i, v, slot in cells:
        size = min(lanes, width - v * lanes)
        kind = t.VECTORIZED if vector and size == lanes else t.SERIAL
        with reader.loop("j", size, kind) as j:
            emit(t.iadd(row, i), t.iadd(j, v * lanes), t.load(total, t.iadd(j, slot)))
