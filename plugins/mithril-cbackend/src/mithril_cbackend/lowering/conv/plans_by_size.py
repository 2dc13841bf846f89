"""Plans of a convolution of symbolic sizes: which one runs is decided at run time, by limits of sizes.

The decisions form a small tree, which has as few plans as examples of sizes need: each plan is code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from mithril.graph import Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv import im2col, winograd
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine

Dense = im2col.Plan | winograd.Plan
LEAVES = 3  # plans of a kernel
TOLERANCE = 1.03  # ratio to the time of the best plan of a size, up to which a plan is as good
START = 10_000  # cycles of a call with little work, whatever its plan
WORTH = 0.005  # the part of the time of all examples that another plan has to save
MEASURES = ("pixels", "images", "pixels of an image")


def measures(batch: Any, result: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of decisions, in the order of ``MEASURES``, of numbers or expressions."""
    pixels = math.prod(result)
    return batch * pixels, batch, pixels


@dataclass(frozen=True)
class Split:
    """A decision: ``few`` if a measure is at most ``limit``. Both are decisions, or numbers of plans."""

    measure: int
    limit: int
    few: Split | int
    many: Split | int

    def choice(self, sizes: Sequence[Any]) -> t.Expr:
        """Return the number of the plan for measures of sizes."""
        few, many = (x.choice(sizes) if isinstance(x, Split) else t.index(x) for x in (self.few, self.many))
        return t.select(t.index(sizes[self.measure]) <= self.limit, few, many)

    def renumbered(self, numbers: Sequence[int]) -> Split:
        """Return the decision between plans that are numbered by their positions among ``numbers``."""
        few, many = (x.renumbered(numbers) if isinstance(x, Split) else numbers.index(x) for x in (self.few, self.many))
        return replace(self, few=few, many=many)

    def text(self, plans: Sequence[Dense]) -> str:
        few, many = (x.text(plans) if isinstance(x, Split) else plans[x] for x in (self.few, self.many))
        return f"({few} up to {self.limit} {MEASURES[self.measure]}, else {many})"


def numbers_of(tree: Split | int) -> set[int]:
    """Return the numbers of the plans that a decision selects."""
    return numbers_of(tree.few) | numbers_of(tree.many) if isinstance(tree, Split) else {tree}


@dataclass(frozen=True)
class BySize:
    """Plans for symbolic sizes, and the decision between them."""

    plans: tuple[Dense, ...]
    split: Split

    def __str__(self) -> str:
        return self.split.text(self.plans)

    def scratch(self, machine: Machine, constant_weights: bool) -> list[Value]:
        return [v for plan in self.plans for v in plan.scratch(machine, constant_weights)]

    def write(self, frame: KernelBuilder) -> None:
        batch, result = self.plans[0].batch, self.plans[0].layout.result
        choice = frame.code.let(self.split.choice(measures(batch, result)), "plan")
        first = 0
        for k, plan in enumerate(self.plans):
            with frame.code.when(t.equal(choice, k)), frame.reader.loop("plan", 1):
                plan.write(frame, first)
            first += len(plan.scratch(frame.machine, False))


def selected(plans: Sequence[Any], sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]]) -> Any:
    """Return the plan that is good for all sizes, or the smallest decision between plans that are.

    ``sizes`` are the measures of examples, and ``costs`` the cycles of each plan for them.
    """
    cycles = np.array(costs) + START
    ratios = cycles / cycles.min(axis=1, keepdims=True)
    losses = np.maximum(ratios, TOLERANCE) + 0.01 * ratios.mean(axis=0)  # of equal plans, the one that suits others
    worth = WORTH * len(sizes)

    @cache
    def best(examples: tuple[int, ...], leaves: int) -> tuple[float, Split | int]:
        """Return the least loss with at most this number of leaves, and their decision."""
        if leaves == 1:
            sums = losses[list(examples)].sum(axis=0)
            return float(sums.min()) + worth, int(sums.argmin())
        options = [best(examples, leaves - 1)]
        for measure, limit in splits(examples):
            sides = [tuple(e for e in examples if (sizes[e][measure] <= limit) == few) for few in (True, False)]
            for part in range(1, leaves):
                (few_loss, few), (many_loss, many) = best(sides[0], part), best(sides[1], leaves - part)
                common = len(numbers_of(few) & numbers_of(many))
                options.append((few_loss + many_loss - worth * common, Split(measure, limit, few, many)))
        return min(options, key=lambda option: round(option[0], 6))  # of equal ones, the smallest decision

    def splits(examples: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield the limits between sizes, at geometric means."""
        for measure in range(len(MEASURES)):
            values = sorted({sizes[e][measure] for e in examples})
            yield from ((measure, math.isqrt(a * b)) for a, b in pairwise(values))

    _, tree = best(tuple(range(len(sizes))), LEAVES)
    if isinstance(tree, int):
        return plans[tree]
    numbers = sorted(numbers_of(tree))
    return BySize(tuple(plans[n] for n in numbers), tree.renumbered(numbers))
