"""Do an operation's axes hold? Each factor is split in two, the parts are computed and joined as its role says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from mithril.graph import Factors, MithrilError, Op, OpAxes, Role, TensorType, call_axes, dtype as as_dtype, parse_axes
from mithril_testing.cases import Case

Array = np.ndarray[Any, Any]
TOLERANCE = 1e-4
NOT_TRIED = ("index", "window", "mixed")
JOINS: dict[str, Any] = {
    "sum": lambda a, b: np.add(a, b, dtype=np.int64 if a.dtype == bool else None),
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "any": np.logical_or,
    "all": np.logical_and,
}


@dataclass(frozen=True)
class Split:
    """One factor of one sample, split in two. ``wrong`` is empty where the parts give the result."""

    sample: str
    factor: str
    role: Role | None
    wrong: str = ""
    changed: frozenset[str] = frozenset()  # attributes that the parts needed

    @property
    def claimed(self) -> bool:
        """Whether the declaration says that this split holds."""
        return self.role is None or self.role.reduces or self.role.kind == "count"


def splits_of(op: Op) -> Iterator[Split]:
    """Split every factor of every sample of an operation."""
    for number, sample in enumerate(op.samples):
        case = Case(op, sample, number)
        try:
            yield from _splits(case)
        except MithrilError as error:  # of the declaration itself
            yield Split(case.id, "", None, str(error).splitlines()[0])


def _splits(case: Case) -> Iterator[Split]:
    op, arrays = case.op, case.op.all_operands(case.arrays)
    types = [None if a is None else TensorType(as_dtype(a.dtype), a.shape) for a in arrays]
    attributes = op.canonical(types, op.complete(case.sample.attributes))
    arrays = _promoted(op, arrays, types)
    axes = call_axes(op, types, attributes)
    complete = _results(op.evaluate(arrays, attributes))
    for factor in axes.uneven:
        sizes = "it has several sizes here and no role that allows this"
        yield Split(case.id, factor, None, sizes)
    for factor, size in axes.sizes.items():
        role = axes.role(factor)
        if not isinstance(size, int) or size < 2 or (role is not None and role.kind in NOT_TRIED):
            continue
        changed: set[str] = set()
        try:
            wrong = _split(op, axes, factor, role, arrays, attributes, complete, changed)
        except (MithrilError, ValueError, IndexError, TypeError) as error:
            wrong = f"a part is an error: {str(error).splitlines()[0]}"
        yield Split(case.id, factor, role, wrong, frozenset(changed))


def _promoted(op: Op, arrays: Sequence[Array | None], types: list[TensorType | None]) -> list[Array | None]:
    """Operands in the dtype that the operation converts them to; ``types`` follow."""
    target = op.common_dtype(list(arrays))
    out: list[Array | None] = []
    for k, a in enumerate(arrays):
        cast = target is not None and a is not None and op.is_promoted(k)
        out.append(a.astype(target.numpy) if cast and a is not None and target is not None else a)
        if (result := out[-1]) is not None:
            types[k] = TensorType(as_dtype(result.dtype), result.shape)
    return out


def _results(result: Any) -> tuple[Array, ...]:
    return result if isinstance(result, tuple) else (result,)


def _split(
    op: Op,
    axes: OpAxes,
    factor: str,
    role: Role | None,
    arrays: Sequence[Array | None],
    attributes: Mapping[str, Any],
    complete: Sequence[Array],
    changed: set[str],
) -> str:
    """Return why two parts do not give the whole, or nothing."""
    size = axes.sizes[factor]
    assert isinstance(size, int)
    half = (size + 1) // 2
    ranges = [(0, half)] if role is not None and role.kind == "count" else [(0, half), (half, size)]
    parts = []
    for number, (start, stop) in enumerate(ranges):
        local = axes.cut({factor: stop - start})
        changed.update(local)
        operands = [
            None if a is None else slice_factor(a, fs or (), axes, factor, start, stop)
            for a, fs in zip(arrays, axes.operands, strict=True)
        ]
        addend = role.operand if role is not None and role.kind == "sum" else None
        if addend is not None and number and (x := operands[addend]) is not None:
            operands[addend] = np.zeros_like(x)
        parts.append(_results(op.evaluate(operands, {**attributes, **local})))
    for k, (expected, fs) in enumerate(zip(complete, axes.results, strict=True)):
        wrong = _compare([p[k] for p in parts], expected, fs, axes, factor, role, half / size)
        if wrong:
            return f"{wrong} in result {k}" if len(complete) > 1 else wrong
    return ""


def _compare(
    parts: list[Array],
    expected: Array,
    fs: Sequence[Factors],
    axes: OpAxes,
    factor: str,
    role: Role | None,
    share: float,
) -> str:
    if role is not None and role.kind == "count":
        size = axes.sizes[factor]
        assert isinstance(size, int)
        return _differ(parts[0], slice_factor(expected, fs, axes, factor, 0, (size + 1) // 2))
    if role is not None and role.reduces:
        if role.kind == "mean":
            return _differ(parts[0] * share + parts[1] * (1 - share), expected)
        return _differ(reduce(JOINS[role.kind], parts), expected)
    if any(factor in f for f in fs):
        return _differ(join_parts(parts, fs, axes, factor), expected)
    return _differ(parts[0], expected) or _differ(parts[1], expected)


def _differ(actual: Array, expected: Array) -> str:
    if actual.shape != expected.shape:
        return f"parts give shape {list(actual.shape)}, not {list(expected.shape)}"
    if expected.dtype.kind in "iub":
        return "" if np.array_equal(actual, expected) else "parts give something else"
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    return "" if np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) else "parts give something else"


def slice_factor(x: Array, fs: Sequence[Factors], axes: OpAxes, factor: str, start: int, stop: int) -> Array:
    """Return the part of an array along a factor, which may be one of several of an axis."""
    for axis, factors in enumerate(fs):
        if factor in factors:
            sizes = [axes.sizes[f] for f in factors] if len(factors) > 1 else [x.shape[axis]]
            unfolded = x.reshape((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))
            part = np.take(unfolded, range(start, stop), axis + factors.index(factor))
            x = part.reshape((*x.shape[:axis], -1, *x.shape[axis + 1 :])) if x.size else part
    return x


def join_parts(parts: Sequence[Array], fs: Sequence[Factors], axes: OpAxes, factor: str) -> Array:
    """Return the whole of an array from its parts along a factor."""
    axis = next(k for k, factors in enumerate(fs) if factor in factors)
    factors = fs[axis]
    unfolded = []
    for part in parts:
        sizes = [-1 if f == factor else axes.sizes[f] for f in factors]
        unfolded.append(part.reshape((*part.shape[:axis], *sizes, *part.shape[axis + 1 :])) if part.size else part)
    result = np.concatenate(unfolded, axis + factors.index(factor))
    return result.reshape((*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])) if result.size else result


# -- the checks ---------------------------------------------------------------------------------------------------
def missing_axes(op: Op) -> str:
    """Return why an operation's axes are not complete, or nothing."""
    if op.composite or op.elementwise or op.declared_axes is not None or op.no_axes:
        return ""
    return f"'{op.name}' has neither axes nor a reason: axes=..., or no_axes='why'"


def false_axes(op: Op) -> list[str]:
    """Return the splits that the declaration claims and that do not hold."""
    return [
        f"{s.sample}: factor '{s.factor}' ({s.role.kind if s.role else 'parallel'}): {s.wrong}"
        for s in splits_of(op)
        if s.claimed and s.wrong
    ]


def untried_axes(op: Op) -> list[str]:
    """Return the factors and attributes of a declaration that no sample tries."""
    if not isinstance(op.declared_axes, str) or not op.samples:
        return []
    declaration = parse_axes(op.declared_axes)
    tried = [s for s in splits_of(op) if s.claimed]
    names = {_stem(s.factor, declaration_names(op)) for s in tried}
    never = {
        name for c in declaration.clauses for name, by in c.selectors if not by and c.kind in ("whole", *NOT_TRIED)
    }
    needed = declaration_names(op) - never
    out = [f"'{op.name}': add a sample in which factor '{n}' has size 2 or more" for n in sorted(needed - names)]
    changed = {a for s in tried for a in s.changed}
    counted = {a.count for t in declaration.operands for a in t if a.kind == "product" and a.count}
    shape = {declaration.shape_attribute} if declaration.shape_attribute else set()
    return out + [f"'{op.name}': add a sample that cuts '{a}'" for a in sorted((counted | shape) - changed)]


def too_strict(op: Op) -> list[str]:
    """Return the factors declared whole that split well on all samples, of at least two."""
    outcomes: dict[str, list[bool]] = {}
    for s in splits_of(op):
        if s.role is not None and s.role.kind == "whole":
            outcomes.setdefault(_stem(s.factor, declaration_names(op)), []).append(not s.wrong)
    return [name for name, good in outcomes.items() if len(good) > 1 and all(good)]


def declaration_names(op: Op) -> set[str]:
    """Return the names of the factors of a declaration."""
    if not isinstance(op.declared_axes, str):
        return set()
    declaration = parse_axes(op.declared_axes)
    names = {n for t in (*declaration.operands, *declaration.results) for a in t for n in a.names}
    dots = any(a.kind == "dots" for t in declaration.operands for a in t)
    return names | ({"..."} if dots else set())


def _stem(factor: str, names: Iterable[str]) -> str:
    """Return the name in the declaration: without the number that a star adds."""
    stem = "..." if factor.startswith("...") else factor.rstrip("0123456789")
    return factor if factor in names else stem


# -- mutations: is a false declaration noticed? ---------------------------------------------------------------------
OTHERS = {"sum": ("max", "mean"), "mean": ("sum", "max"), "max": ("sum", "min"), "min": ("sum", "max"),
          "prod": ("sum", "max"), "any": ("all", "sum"), "all": ("any", "max")}  # fmt: skip


def mutations(text: str) -> Iterator[str]:
    """Yield false variants of a declaration: parts of clauses left out, other roles, factors exchanged."""
    terms, _, roles = text.partition("|")
    clauses = [c.strip() for c in roles.split(",") if c.strip()]
    for k, clause in enumerate(clauses):
        rest = clauses[:k], clauses[k + 1 :]
        for other in _weakened_clauses(clause):
            yield _text(terms, [*rest[0], *([other] if other else []), *rest[1]])
    left, _, right = terms.partition("->")
    atoms = right.split()
    complete = {w for c in clauses if c.endswith(" whole") for w in c.split()}
    for k in range(len(atoms) - 1):
        swapped = [*atoms[:k], atoms[k + 1], atoms[k], *atoms[k + 2 :]]
        if {a.strip("*?").partition("@")[0] for a in atoms[k : k + 2]} <= complete:
            continue  # the same declaration: these are never split
        read = any(atom.strip("*?").partition("@")[0] in left for atom in atoms[k : k + 2])
        if read and "..." not in atoms[k : k + 2] and not any("(" in a or ")" in a for a in atoms):
            yield _text(f"{left}-> {' '.join(swapped)} ", clauses)
    for k, atom in enumerate(atoms):
        for mark in "~[":
            if mark in atom:
                plain = "*" + atom.lstrip("*").partition(mark)[0]
                yield _text(f"{left}-> {' '.join([*atoms[:k], plain, *atoms[k + 1 :]])} ", clauses)


def _weakened_clauses(clause: str) -> Iterator[str]:
    words = clause.split()
    role = next((k for k, w in enumerate(words) if k and w in (*OTHERS, "whole", "window", "index", "count")), None)
    if role is None:
        yield ""  # shape=result
        return
    for k in range(role):  # each factor becomes parallel
        left = [*words[:k], *words[k + 1 : role]]
        yield " ".join([*left, *words[role:]]) if left else ""
    for other in OTHERS.get(words[role], ()):
        yield " ".join([*words[:role], other])
    if words[role] in ("whole", "window", "index"):
        yield " ".join([*words[:role], "sum"])


def _text(terms: str, clauses: Sequence[str]) -> str:
    return f"{terms.strip()} | {', '.join(clauses)}" if clauses else terms.strip()


def with_axes(op: Op, text: str) -> Op:
    """Return a copy of an operation with another declaration, not entered anywhere."""
    return replace(op, declared_axes=text)


def is_detected(op: Op, text: str) -> bool:
    """Whether the checks notice that a declaration is false."""
    try:
        parse_axes(text)
    except MithrilError:
        return True
    return bool(false_axes(with_axes(op, text)))
