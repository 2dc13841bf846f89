"""Einsum: parsing of equations, and lowering to dots, sums and transposes."""

from __future__ import annotations

from typing import Any

from mithril.graph import OperationError, ShapeError, Size, assume, operation

HINT = "an equation looks like 'bij,bjk->bik'"


def parse(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return the letters of each operand and of the result; an ellipsis expands to letters ``...0``, ``...1``, ..."""
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
        operand_letters = {c for term in letters for c in term}
        wrong = [c for c in result if c not in operand_letters]
        if wrong or len(set(result)) != len(result):
            raise OperationError(
                f"einsum '{equation}': the result can contain each letter of the operands once",
                facts=[f"unknown: {', '.join(wrong)}" if wrong else ""],
                hint=HINT,
            )
    else:
        counts: dict[str, int] = {}
        for term_letters in letters:
            for c in term_letters:
                counts[c] = counts.get(c, 0) + 1
        free = sorted(c for c, n in counts.items() if n == 1 and not c.startswith("..."))
        result = [*(f"...{k}" for k in range(longest)), *free]
    return letters, result


def _letters(equation: str, term: str, rank: int, longest: int) -> list[str]:
    ellipsis_rank = rank - len(term.replace("...", ""))
    if ("..." in term and ellipsis_rank < 0) or ("..." not in term and ellipsis_rank != 0):
        raise ShapeError(f"einsum '{equation}': the term '{term}' does not match an operand of rank {rank}", hint=HINT)
    return _expand(equation, term, [f"...{k}" for k in range(longest - ellipsis_rank, longest)])


def _expand(equation: str, term: str, ellipsis: list[str]) -> list[str]:
    before, dots, after = term.partition("...")
    if not all(c.isalpha() for c in before + after):
        raise OperationError(f"einsum '{equation}' may only contain letters, ',', '...' and '->'", hint=HINT)
    return [*before, *(ellipsis if dots else []), *after]


def contract(xs: Any, equation: str, dot: Any, sum: Any, transpose: Any, reshape: Any, broadcast_to: Any) -> Any:
    """Compute the einsum by contracting two operands at a time, from the left."""
    letters, result = parse(equation, [len(x.shape) for x in xs])
    sizes = _sizes(equation, xs, letters)
    operands = [_diagonals(x, term) for x, term in zip(xs, letters, strict=True)]
    operands = [_squeezed(x, term, sizes, reshape) for x, term in operands]
    current, terms = operands[0]
    for k, (x, other) in enumerate(operands[1:], start=2):
        later = {c for _, t in operands[k:] for c in t} | set(result)
        current, terms = _pair(current, terms, x, other, later, dot, sum)
    summed = tuple(k for k, c in enumerate(terms) if c not in result)
    if summed:
        current = sum(current, axis=summed)
        terms = [c for c in terms if c in result]
    remaining = [c for c in result if c in terms]
    if remaining != terms or current is xs[0]:  # a result must not be the operand itself
        current = transpose(current, perm=tuple(terms.index(c) for c in remaining))
    if remaining != result:  # axes of size 1 were squeezed
        shape = tuple(sizes[c] if c in remaining else 1 for c in result)
        current = broadcast_to(reshape(current, shape=shape), shape=tuple(sizes[c] for c in result))
    return current


def _sizes(equation: str, xs: Any, letters: list[list[str]]) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for x, term in zip(xs, letters, strict=True):
        for c, n in zip(term, x.shape, strict=True):
            size = sizes.get(c, 1)
            if type(size) is int and size == 1:
                sizes[c] = n
            elif not (type(n) is int and n == 1) and not assume(size, "==", n, f"einsum letter '{c}'"):
                raise ShapeError(f"einsum '{equation}': the letter '{c}' has the sizes {size} and {n}")
    return sizes


def _diagonals(x: Any, term: list[str]) -> tuple[Any, list[str]]:
    """Replace axes with the same letter by their diagonal."""
    select, equal, iota, sum_ = (operation(n) for n in ("where", "equal", "iota", "sum"))
    while len(set(term)) != len(term):
        c = next(c for c in term if term.count(c) > 1)
        i, j = [k for k, d in enumerate(term) if d == c][:2]
        shape = tuple(n if k in (i, j) else 1 for k, n in enumerate(x.shape))
        on_diagonal = equal(iota(shape=shape, axis=i), iota(shape=shape, axis=j))
        x = sum_(select(on_diagonal, x, 0), axis=j)
        term = term[:j] + term[j + 1 :]
    return x, term


def _squeezed(x: Any, term: list[str], sizes: dict[str, Size], reshape: Any) -> tuple[Any, list[str]]:
    """Drop axes of size 1 whose letter has a larger size in another operand: they broadcast."""
    axes = [k for k, c in enumerate(term) if not (type(x.shape[k]) is int and x.shape[k] == 1 and sizes[c] != 1)]
    if len(axes) == len(term):
        return x, term
    return reshape(x, shape=tuple(x.shape[k] for k in axes)), [term[k] for k in axes]


def _pair(
    a: Any, left: list[str], b: Any, right: list[str], later: set[str], dot: Any, sum: Any
) -> tuple[Any, list[str]]:
    """Contract two operands; sum over the letters that no later term uses."""
    for x, letters, other in ((0, left, right), (1, right, left)):
        private = tuple(k for k, c in enumerate(letters) if c not in other and c not in later)
        if private:
            if x == 0:
                a = sum(a, axis=private)
                left = [c for k, c in enumerate(left) if k not in private]
            else:
                b = sum(b, axis=private)
                right = [c for k, c in enumerate(right) if k not in private]
    shared = [c for c in left if c in right]
    batch, summed = [c for c in shared if c in later], [c for c in shared if c not in later]
    product = dot(
        a,
        b,
        contract_a=tuple(left.index(c) for c in summed),
        contract_b=tuple(right.index(c) for c in summed),
        batch_a=tuple(left.index(c) for c in batch),
        batch_b=tuple(right.index(c) for c in batch),
    )
    return product, batch + [c for c in left if c not in shared] + [c for c in right if c not in shared]
