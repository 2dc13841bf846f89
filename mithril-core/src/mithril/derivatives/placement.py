"""Places for the rows of a batch in a call of an operation: derived from its axes.

Rows are one more parallel factor. Either they get an axis of their own, and attributes that name axes follow; or they
join a parallel factor that exactly the operands with rows have, such as the batch axis of a convolution. A place is
right if the axes of the call with rows are those without, and one parallel factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any

from mithril.graph import (
    Declaration,
    Dim,
    Factors,
    MithrilError,
    Op,
    OpAxes,
    Size,
    TensorType,
    call_axes,
    is_static,
    parse_axes,
    substitute,
    symbols,
)

Types = Sequence[TensorType | None]
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
AXES = ("Axis", "OpAxes", "Axis | None")


@dataclass(frozen=True)
class Inserted:
    """Rows as an axis of their own."""

    axis_places: tuple[int | None, ...]  # its place in each operand that has rows
    ones: tuple[int, ...]  # axes of size 1 that follow it, so that operands broadcast as they did
    attributes: tuple[Edit, ...]
    results: tuple[int, ...]  # its place in each result

    def edited(self, attributes: Mapping[str, Any], rows: Size) -> dict[str, Any]:
        """Return the attributes of the call with rows."""
        return {**attributes, **{e.name: e.apply(attributes[e.name], rows) for e in self.attributes}}


@dataclass(frozen=True)
class Joined:
    """Rows as the outer part of a factor of the operation."""

    factor: str
    operands: tuple[int | None, ...]  # the axis that holds the factor, in each operand that has rows
    results: tuple[int, ...]


@dataclass(frozen=True)
class Edit:
    """How an attribute follows an axis that is inserted."""

    name: str
    kind: str  # "axis": one or several; "pairs" per axis; "order": a permutation; "count"; "shape"
    place: int

    def apply(self, value: Any, rows: Size) -> Any:
        if self.kind == "shape":
            return (*value[: self.place], rows, *value[self.place :])
        if self.kind == "pairs":
            return (*value[: self.place], (0, 0), *value[self.place :])
        if self.kind == "order":
            return (self.place, *map(self._moved, value))
        if self.kind == "count":
            return value + 1
        return tuple(map(self._moved, value)) if isinstance(value, tuple) else self._moved(value)

    def _moved(self, axis: int | None) -> int | None:
        return axis if axis is None or axis < self.place else axis + 1


_known: dict[Any, Inserted | Joined | None] = {}


def place_rows(op: Op, types: Types, attributes: Mapping[str, Any], rows: Sequence[bool]) -> Inserted | Joined | None:
    """Return where operands with rows have them (``types`` are those of one row), or None if the axes do not say."""
    key = (op, tuple(types), tuple(map(repr, attributes.values())), tuple(rows))
    if key not in _known:
        # Sizes that are new in every call must not fill the memory of a long process.
        if len(_known) > 4096:
            _known.clear()
        try:
            _known[key] = _Search(op, types, attributes, rows).run()
        except MithrilError:  # sizes that the operation refuses in place of symbols
            _known[key] = None
    return _known[key]


class _Search:
    """The search over places, at sizes that no two factors share by chance."""

    def __init__(self, op: Op, types: Types, attributes: Mapping[str, Any], rows: Sequence[bool]) -> None:
        self.op, self.rows = op, rows
        shapes = [t.shape for t in types if t is not None]
        names = [s.name for s in symbols(*(d for shape in shapes for d in shape))]
        used = {n for shape in shapes for n in shape if isinstance(n, int)}
        free = iter([p for p in PRIMES if not any(n % p == 0 for n in used if n)])
        self.size = next(free)
        sizes: dict[str, Size] = {name: next(free) for name in names}
        self.types = [
            None if t is None else TensorType(t.dtype, tuple(substitute(d, sizes) for d in t.shape)) for t in types
        ]
        self.attributes = {name: _at(value, sizes) for name, value in attributes.items()}
        self.expected = op.infer(self.types, self.attributes)
        self.axes: OpAxes = call_axes(op, self.types, self.attributes, self.expected)

    def run(self) -> Inserted | Joined | None:
        """Prefer rows in front, then as part of an outer axis, then anywhere: the fewer elements move the better."""
        candidates = list(self._insertions())
        in_front = [c for c in candidates if not any(c.axis_places)]
        outermost_first = sorted(self._factors(), key=lambda j: sum(k or 0 for k in (*j.operands, *j.results)))
        inserted = self._first(in_front)
        if inserted is None and (neighbor := next(filter(self._axes_agree, outermost_first), None)) is not None:
            return neighbor
        return inserted or self._first([c for c in candidates if any(c.axis_places)])

    def _first(self, candidates: Sequence[Inserted]) -> Inserted | None:
        for inserted in candidates:
            results = self._where(inserted)
            if results is not None:
                return replace(inserted, results=results)
        return None

    # -- an axis of its own
    def _insertions(self) -> Iterator[Inserted]:
        """Yield candidates, rows in front first."""
        declaration = self._declaration()
        spare = self._ellipses(declaration)
        for width in sorted({n for n in spare if n is not None}) or [0]:
            ones = tuple(
                0 if n is None or not has_rows else max(width - n, 0)
                for n, has_rows in zip(spare, self.rows, strict=False)
            )
            places = [
                (None,) if t is None or not has_rows else (0,) if one else range(t.rank + 1)
                for t, has_rows, one in zip(self.types, self.rows, ones, strict=True)
            ]
            for axis_places in sorted(combinations(*places), key=lambda p: sum(place or 0 for place in p)):
                for edits in self._edits(declaration, axis_places):
                    yield Inserted(axis_places, ones, edits, ())

    def _ellipses(self, declaration: Declaration | None) -> list[int | None]:
        """Return how many axes each operand, then each result, has for an ellipsis; None for terms without."""
        types = (*self.types, *self.expected)
        if declaration is None:
            return [None] * len(types)
        terms = declaration.operands * (len(self.types) if self.op.variadic else 1) + declaration.results
        return [None if t is None else _ellipsis(term, t.rank) for t, term in zip(types, terms, strict=False)]

    def _declaration(self) -> Declaration | None:
        rule: Any = "... -> ..." if self.op.elementwise else self.op.declared_axes
        if callable(rule):
            shapes = [None if t is None else t.shape for t in self.types]
            rule = rule(shapes, self.attributes, [t.shape for t in self.expected])
        return parse_axes(rule) if isinstance(rule, str) else None

    def _edits(self, declaration: Declaration | None, axis_places: Sequence[int | None]) -> Iterator[tuple[Edit, ...]]:
        """Yield how the attributes may change; a count may grow or not, a result have its rows anywhere."""
        shifts: dict[str, Edit] = {}
        counts = []
        if declaration is None:
            names = [n for n, a in self.op.attributes.items() if a.annotation in AXES]
            shifts = {n: Edit(n, "axis", axis_places[0]) for n in names if axis_places and axis_places[0] is not None}
        else:
            for name, kind, operand in _axis_attributes(declaration):
                place = axis_places[operand] if operand < len(axis_places) else None
                if name in self.attributes and place is not None:
                    if kind == "count":
                        counts.append(Edit(name, kind, place))
                    elif kind == "axis" and self.op.attributes[name].annotation == "Pairs":
                        shifts[name] = Edit(name, "pairs", place)
                    else:
                        shifts.setdefault(name, Edit(name, kind, place))
        shape = self.axes.shape_attribute
        ends = range(self.expected[0].rank + 1) if shape else (0,)
        for end in ends:
            for growing in (counts, []) if counts else ([],):
                shaped = [Edit(shape, "shape", end)] if shape else []
                yield (*shifts.values(), *growing, *shaped)

    def _where(self, inserted: Inserted) -> tuple[int, ...] | None:
        """Return the places of the rows in the results, or None if this is not the operation on every row."""
        types = [
            t if t is None or place is None else _with_axis(t, place, self.size, ones)
            for t, place, ones in zip(self.types, inserted.axis_places, inserted.ones, strict=True)
        ]
        try:
            attributes = self.op.canonical(types, inserted.edited(self.attributes, self.size))
            results = self.op.infer(types, attributes)
            axes: OpAxes = call_axes(self.op, types, attributes, results)
        except Exception:  # bodies of composites get ranks that they were not written for
            return None
        factors = {axes.operands[k][p] for k, p in enumerate(inserted.axis_places) if p is not None}  # type: ignore[index]
        factor = factors.pop()
        if factors or len(factor) != 1 or factor[0] in axes.roles:
            return None
        if any(fs.count(factor) != 1 for fs in axes.results):
            return None
        ends = tuple(fs.index(factor) for fs in axes.results)
        rest = [
            fs if fs is None or place is None else fs[:place] + fs[place + 1 + ones :]
            for fs, place, ones in zip(axes.operands, inserted.axis_places, inserted.ones, strict=True)
        ]
        rest += [fs[:end] + fs[end + 1 :] for fs, end in zip(axes.results, ends, strict=True)]
        if any(factor[0] in one for fs in rest if fs is not None for one in fs):
            return None
        shapes = [t.shape[:end] + t.shape[end + 1 :] for t, end in zip(results, ends, strict=True)]
        if shapes != [t.shape for t in self.expected]:
            return None
        return ends if self._same_up_to_names(rest, axes) else None

    def _same_up_to_names(self, other_axes: Sequence[tuple[Factors, ...] | None], axes: OpAxes) -> bool:
        """Whether factors and roles are those of one row, under other names."""
        row_axes = (*self.axes.operands, *self.axes.results)
        forward: dict[str, str] = {}
        back: dict[str, str] = {}
        for a, b in zip(row_axes, other_axes, strict=True):
            if (a is None) != (b is None) or (a is not None and b is not None and len(a) != len(b)):
                return False
            for left, right in zip(a or (), b or (), strict=True):
                if len(left) != len(right):
                    return False
                for f, g in zip(left, right, strict=True):
                    if forward.setdefault(f, g) != g or back.setdefault(g, f) != f:
                        return False
        return all(self.axes.role(f) == axes.role(g) for f, g in forward.items())

    # -- joined to a factor
    def _factors(self) -> Iterator[Joined]:
        """Yield the parallel factors that exactly the operands with rows have, once each, and every result."""
        for factor in self.axes.parallel:
            operands = [None if fs is None else _axis_of(fs, factor) for fs in self.axes.operands]
            results = [_axis_of(fs, factor) for fs in self.axes.results]
            everywhere = [place is not None for place in operands] == list(self.rows) and None not in results
            if everywhere and -1 not in (*operands, *results):
                yield Joined(factor, tuple(operands), tuple(r for r in results if r is not None))

    def _axes_agree(self, candidate: Joined) -> bool:
        """Whether the operation with the longer factor has the same axes."""
        axes, factor = self.axes, candidate.factor
        spans_axes = all(
            fs[place] == (factor,)
            for fs, place in zip(
                (*axes.operands, *axes.results), (*candidate.operands, *candidate.results), strict=True
            )
            if fs is not None and place is not None
        )
        if self.op.composite and self.op.declared_axes is None and not spans_axes:
            return False  # the sizes of such factors are known for known sizes only
        local = {factor: self.size * axes.sizes[factor]}
        types = [
            t if t is None or fs is None else TensorType(t.dtype, axes.local_shape(t.shape, fs, local))
            for t, fs in zip(self.types, axes.operands, strict=True)
        ]
        expected = [axes.local_shape(t.shape, fs, local) for t, fs in zip(self.expected, axes.results, strict=True)]
        try:
            attributes = self.op.canonical(types, {**self.attributes, **axes.cut(local)})
            results = self.op.infer(types, attributes)
            longer: OpAxes = call_axes(self.op, types, attributes, results)
        except Exception:  # as above
            return False
        return [t.shape for t in results] == expected and self._same_up_to_names(
            (*longer.operands, *longer.results), longer
        )


def _at(value: Any, sizes: Mapping[str, Size]) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(v, sizes) for v in value)
    return substitute(value, sizes) if isinstance(value, Dim) and not is_static((value,)) else value


def _ellipsis(term: Sequence[Any], rank: int) -> int | None:
    """Return how many axes a term leaves for the ellipsis that it begins with, else None."""
    if not term or term[0].kind != "dots":
        return None
    return max(rank - len(term) + 1, 0)


def _with_axis(t: TensorType, place: int, size: Size, ones: int = 0) -> TensorType:
    return TensorType(t.dtype, (*t.shape[:place], size, *[1] * ones, *t.shape[place:]))


def _axis_of(axes: Sequence[Factors], factor: str) -> int | None:
    """Return the axis that holds a factor, -1 if several do."""
    places = [k for k, factors in enumerate(axes) if factor in factors]
    return None if not places else places[0] if len(places) == 1 else -1


def _axis_attributes(declaration: Declaration) -> Iterator[tuple[str, str, int]]:
    """Yield the attributes that name or count axes: (attribute, kind, operand whose axes they are)."""
    home: dict[str, int] = {}
    for k, term in enumerate(declaration.operands):
        for atom in term:
            for name in atom.names:
                home.setdefault(name, k)
    for term in (*declaration.operands, *declaration.results):
        for atom in term:
            operand = home.get(atom.names[0], len(declaration.operands)) if atom.names else 0
            for attribute, kind in ((atom.at, "axis"), (atom.without, "axis"), (atom.order, "order")):
                if attribute:
                    yield attribute, kind, operand
            if atom.count and atom.kind == "star":
                yield atom.count, "count", operand
    for clause in declaration.clauses:
        for name, by in clause.selectors:
            if by and by != "~":
                yield by, "axis", home.get(name, len(declaration.operands))
