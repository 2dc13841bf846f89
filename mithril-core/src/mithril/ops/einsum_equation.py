"""Reading an einsum equation and doing it with dots, sums and transposes."""

from __future__ import annotations

from typing import Any

from mithril.base import OperationError, ShapeError, Size, assume, operation

HINT = "an equation looks like 'bij,bjk->bik'"


def parse(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Letters of every operand and of the result; an ellipsis becomes letters of its own."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise OperationError(f"einsum '{equation}' has {len(terms)} terms for {len(ranks)} operands", hint=HINT)
    longest = 0
    for term, rank in zip(terms, ranks, strict=True):
        if "..." in term:
            longest = max(longest, rank - len(term.replace("...", "")))
    letters = [_letters(equation, term, rank, longest) for term, rank in zip(terms, ranks, strict=True)]
    if arrow:
        result = _expand(equation, right, [f"...{k}" for k in range(longest)])
        known = {c for term in letters for c in term}
        wrong = [c for c in result if c not in known]
        if wrong or len(set(result)) != len(result):
            raise OperationError(
                f"einsum '{equation}': the result may name each letter of the operands once",
                facts=[f"unknown: {', '.join(wrong)}" if wrong else ""],
                hint=HINT,
            )
    else:
        counts: dict[str, int] = {}
        for own in letters:
            for c in own:
                counts[c] = counts.get(c, 0) + 1
        named = sorted(c for c, n in counts.items() if n == 1 and not c.startswith("..."))
        result = [*(f"...{k}" for k in range(longest)), *named]
    return letters, result


def _letters(equation: str, term: str, rank: int, longest: int) -> list[str]:
    own = rank - len(term.replace("...", ""))
    if ("..." in term and own < 0) or ("..." not in term and own != 0):
        raise ShapeError(f"einsum '{equation}': the term '{term}' does not fit an operand of rank {rank}", hint=HINT)
    return _expand(equation, term, [f"...{k}" for k in range(longest - own, longest)])


def _expand(equation: str, term: str, ellipsis: list[str]) -> list[str]:
    before, dots, after = term.partition("...")
    if not all(c.isalpha() for c in before + after):
        raise OperationError(f"einsum '{equation}' holds something else than letters, ',', '...' and '->'", hint=HINT)
    return [*before, *(ellipsis if dots else []), *after]


def contract(xs: Any, equation: str, dot: Any, sum: Any, transpose: Any, reshape: Any, broadcast_to: Any) -> Any:
    """The einsum, two operands at a time from the left."""
    letters, result = parse(equation, [len(x.shape) for x in xs])
    sizes = _sizes(equation, xs, letters)
    operands = [_diagonals(x, term) for x, term in zip(xs, letters, strict=True)]
    operands = [_squeezed(x, term, sizes, reshape) for x, term in operands]
    current, terms = operands[0]
    for k, (x, other) in enumerate(operands[1:], start=2):
        later = {c for _, t in operands[k:] for c in t} | set(result)
        current, terms = _pair(current, terms, x, other, later, dot, sum)
    gone = tuple(k for k, c in enumerate(terms) if c not in result)
    if gone:
        current = sum(current, axis=gone)
        terms = [c for c in terms if c in result]
    kept = [c for c in result if c in terms]
    if kept != terms or current is xs[0]:  # the operand itself is no result
        current = transpose(current, perm=tuple(terms.index(c) for c in kept))
    if kept != result:  # letters that only occur with size one were squeezed away
        shape = tuple(sizes[c] if c in kept else 1 for c in result)
        current = broadcast_to(reshape(current, shape=shape), shape=tuple(sizes[c] for c in result))
    return current


def _sizes(equation: str, xs: Any, letters: list[list[str]]) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for x, term in zip(xs, letters, strict=True):
        for c, n in zip(term, x.shape, strict=True):
            known = sizes.get(c, 1)
            if type(known) is int and known == 1:
                sizes[c] = n
            elif not (type(n) is int and n == 1) and not assume(known, "==", n, f"einsum letter '{c}'"):
                raise ShapeError(f"einsum '{equation}': the letter '{c}' stands for {known} and {n}")
    return sizes


def _diagonals(x: Any, term: list[str]) -> tuple[Any, list[str]]:
    """Letters that occur twice in one operand: only the diagonal counts."""
    where, equal, iota, sum_ = (operation(n) for n in ("where", "equal", "iota", "sum"))
    while len(set(term)) != len(term):
        c = next(c for c in term if term.count(c) > 1)
        i, j = [k for k, d in enumerate(term) if d == c][:2]
        shape = tuple(n if k in (i, j) else 1 for k, n in enumerate(x.shape))
        same = equal(iota(shape=shape, axis=i), iota(shape=shape, axis=j))
        x = sum_(where(same, x, 0), axis=j)
        term = term[:j] + term[j + 1 :]
    return x, term


def _squeezed(x: Any, term: list[str], sizes: dict[str, Size], reshape: Any) -> tuple[Any, list[str]]:
    """Axes of size one that stand for a larger size elsewhere broadcast: they are left out."""
    kept = [k for k, c in enumerate(term) if not (type(x.shape[k]) is int and x.shape[k] == 1 and sizes[c] != 1)]
    if len(kept) == len(term):
        return x, term
    return reshape(x, shape=tuple(x.shape[k] for k in kept)), [term[k] for k in kept]


def _pair(
    a: Any, left: list[str], b: Any, right: list[str], later: set[str], dot: Any, sum: Any
) -> tuple[Any, list[str]]:
    """Two operands as one; letters nobody needs later are summed."""
    for x, own, other in ((0, left, right), (1, right, left)):
        lonely = tuple(k for k, c in enumerate(own) if c not in other and c not in later)
        if lonely:
            if x == 0:
                a = sum(a, axis=lonely)
                left = [c for k, c in enumerate(left) if k not in lonely]
            else:
                b = sum(b, axis=lonely)
                right = [c for k, c in enumerate(right) if k not in lonely]
    shared = [c for c in left if c in right]
    batch, summed = [c for c in shared if c in later], [c for c in shared if c not in later]
    made = dot(
        a,
        b,
        contract_a=tuple(left.index(c) for c in summed),
        contract_b=tuple(right.index(c) for c in summed),
        batch_a=tuple(left.index(c) for c in batch),
        batch_b=tuple(right.index(c) for c in batch),
    )
    return made, batch + [c for c in left if c not in shared] + [c for c in right if c not in shared]
