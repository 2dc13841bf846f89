"""Resolution of declared axes for the shapes and attributes of one call; see ``graph/axes_notation.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mithril.graph.axes_notation import Atom, Declaration, axes_error
from mithril.graph.dims import Shape, Size, floordiv, product
from mithril.graph.op_axes import WHOLE, Factors, OpAxes, Role


def resolve(
    declaration: Declaration,
    names: Sequence[str],
    shapes: Sequence[Shape | None],
    attributes: Mapping[str, Any],
    results: Sequence[Shape],
) -> OpAxes:
    """Return the axes of a call; ``names`` are the names of its operands."""
    terms = declaration.operands
    if len(terms) == 1 and len(shapes) > 1:
        terms = terms * len(shapes)
    if len(terms) < len(shapes):
        raise axes_error(declaration.text, f"it describes {len(terms)} operands, the call has {len(shapes)}")
    pairs = [(t, s) for t, s in zip(terms, shapes, strict=False) if s is not None]
    pairs += zip(declaration.results, results, strict=True)
    return _Call(declaration, attributes, pairs, len(pairs) - len(results)).axes(names, shapes, results)


class _Call:
    """The lengths of stars, the factors of axes and the sizes of factors of one call."""

    def __init__(
        self,
        declaration: Declaration,
        attributes: Mapping[str, Any],
        pairs: Sequence[tuple[tuple[Atom, ...], Shape]],
        count: int,
    ) -> None:
        self.declaration, self.attributes, self.pairs = declaration, attributes, pairs
        self.count = count  # of operands
        self.lengths: dict[str, int] = {}
        self.entries: dict[str, list[Size]] = {}  # the sizes of a factor at each of its occurrences
        for _ in range(3):  # the length of a star in one term may follow from another term
            for k, (term, shape) in enumerate(pairs):
                self._measure(term, shape, is_result=k >= count)
        self.axes_of = [self._factors(term, shape) for term, shape in pairs]
        self._sizes()

    # -- lengths
    def _measure(self, term: Sequence[Atom], shape: Shape, is_result: bool) -> None:
        singles = sum(1 for a in term if a.kind in ("axis", "product"))
        for a in term:
            if a.kind == "optional" and a.names[0] not in self.lengths and not is_result:
                room = len(shape) - singles - sum(self.lengths.get(b.names[0], 0) for b in term if b.kind == "optional")
                self.lengths[a.names[0]] = 1 if room > 0 else 0
            if a.kind == "star" and a.count and a.names[0] not in self.lengths:
                length = self.attributes.get(a.count, self._size_of(a.count))
                if isinstance(length, int):
                    self.lengths[a.names[0]] = length
        position = next((k for k, a in enumerate(term) if a.at), None)
        if position is not None:
            offset = self.attributes[term[position].at]
            self._only(term[:position], offset)
            self._only(term[position + 1 :], len(shape) - offset - 1)
        elif not any(a.kind == "dots" for a in term):
            self._only(term, len(shape))

    def _only(self, term: Sequence[Atom], rank: int) -> None:
        """Assign the remaining axes to the one star of unknown length."""
        unknown = [a for a in term if self._length(a) is None]
        if len(unknown) == 1 and not unknown[0].without:
            self.lengths[unknown[0].names[0]] = rank - sum(self._length(a) or 0 for a in term)

    def _length(self, atom: Atom) -> int | None:
        if atom.kind in ("axis", "product"):
            return 1
        if atom.kind == "dots":
            return 0
        length = self.lengths.get(atom.names[0])
        if length is None or not atom.without or self.attributes.get("keepdims"):
            return length
        return length - len(_numbers(self.attributes[atom.without]))

    def _size_of(self, factor: str) -> Size | None:
        """Return the size of an axis that is first or last in a term; this needs no lengths of stars."""
        for term, shape in self.pairs:
            for k, atom in ((0, term[:1]), (-1, term[-1:])):
                if atom and atom[0].kind == "axis" and atom[0].names[0] == factor and not atom[0].at and shape:
                    return shape[k]
        return None

    # -- factors
    def _factors(self, term: Sequence[Atom], shape: Shape) -> tuple[Factors, ...]:
        lengths = [self._length(a) for a in term]
        if None in lengths:
            raise axes_error(
                self.declaration.text, f"the number of axes '{term[lengths.index(None)].names[0]}' is unknown"
            )
        room = len(shape) - sum(n or 0 for n in lengths)
        out: list[Factors] = []
        for a in term:
            if a.kind == "dots":
                room_axes = range(len(out), len(out) + room)
                out += [() if shape[k] == 1 else (f"...{room - k + room_axes.start - 1}",) for k in room_axes]
            else:
                out += self._of_atom(a)
        if len(out) != len(shape):
            raise axes_error(self.declaration.text, f"a shape of rank {len(shape)} does not match it")
        for k, factors in enumerate(out):
            if len(factors) == 1:
                self.entries.setdefault(factors[0], []).append(shape[k])
        return tuple(out)

    def _of_atom(self, atom: Atom) -> list[Factors]:
        if atom.kind in ("axis", "product"):
            return [atom.names]
        name, count = atom.names[0], self.lengths[atom.names[0]]
        if atom.kind == "optional":
            return [(name,)] * count
        if atom.kind == "order":
            return [(f"{name}{k}",) for k in self.attributes[atom.order]]
        out: list[Factors] = [(f"{name}{k}",) for k in range(count)]
        if atom.without:
            dropped = _numbers(self.attributes[atom.without])
            keepdims = self.attributes.get("keepdims")
            return [() if k in dropped else f for k, f in enumerate(out) if keepdims or k not in dropped]
        return out

    # -- sizes
    def _sizes(self) -> None:
        counted = {a.names[0]: a.count for term, _ in self.pairs for a in term if a.kind == "product" and a.count}
        for f, attribute in counted.items():
            self.entries.setdefault(f, []).append(self.attributes[attribute])
        self.counted = counted
        for factors, n in self._axes():
            missing = [f for f in factors if f not in self.entries]
            if len(factors) > 1 and len(missing) == 1:
                covered = product(self.entries[f][0] for f in factors if f != missing[0])
                self.entries[missing[0]] = [floordiv(n, covered) if covered != 0 else 0]

    def _axes(self) -> Iterable[tuple[Factors, Size]]:
        for axes, (_, shape) in zip(self.axes_of, self.pairs, strict=True):
            yield from zip(axes, shape, strict=True)

    def axes(self, names: Sequence[str], shapes: Sequence[Shape | None], results: Sequence[Shape]) -> OpAxes:
        sizes = {f: entries[0] for f, entries in self.entries.items()}
        several = [f for f, entries in self.entries.items() if any(n != entries[0] for n in entries)]
        roles: dict[str, Role] = dict.fromkeys(several, WHOLE)
        uneven = set(roles)
        for axes, n in self._axes():
            if len(axes) > 1 and product(sizes[f] for f in axes) != n:
                roles.update(dict.fromkeys(axes, WHOLE))
        unsaid = dict(roles)
        for clause in self.declaration.clauses:
            role = Role(clause.kind, list(names).index(clause.operand) if clause.operand else None)
            for name, by in clause.selectors:
                selected = [f for f in self._selected(name, by, uneven) if f in sizes]
                roles.update(dict.fromkeys(selected, role))
                for f in selected:
                    unsaid.pop(f, None)
        present = {f for axes in self.axes_of[self.count :] for factors in axes for f in factors}
        lost = [f for f in sizes if f not in present and f not in roles]
        if lost:
            raise axes_error(self.declaration.text, f"factor '{lost[0]}' is in no result and has no role")
        operands = iter(self.axes_of)
        return OpAxes(
            tuple(None if s is None else next(operands) for s in shapes),
            tuple(operands),
            sizes,
            roles,
            tuple(results),
            self.declaration.shape_attribute,
            self.counted,
            uneven=tuple(unsaid),
        )

    def _selected(self, name: str, by: str, uneven: set[str]) -> Iterable[str]:
        if name == "...":
            return [f for f in self.entries if f.startswith("...")]
        if name not in self.lengths or name in self.entries:
            return [name]
        every = [f"{name}{k}" for k in range(self.lengths[name])]
        if not by:
            return every
        if by == "~":
            return [f for f in every if f in uneven]
        return [every[k] for k in _numbers(self.attributes[by]) if -len(every) <= k < len(every)]


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the axes that an attribute names; for pairs, such as padding, the axes of nonzero pairs."""
    if isinstance(value, tuple):
        if value and all(isinstance(v, tuple) for v in value):
            return tuple(k for k, pair in enumerate(value) if any(n != 0 for n in pair))
        return value
    return () if value is None else (value,)
