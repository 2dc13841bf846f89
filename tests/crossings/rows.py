"""Rows of values: covering arrays of pairs and triples, drawn with a seed, and the rows that failed once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from .model import FACTORS, Excluded, Row, limits

FOUND = Path(__file__).with_name("found.txt")
NAMES = {factor: [one.name for one in values] for factor, values in FACTORS.items()}
TRIPLES = (("source", "surgery", "mode", "engine"), ("mode", "mesh", "event"))


def allowed(row: Row) -> bool:
    return not any(isinstance(limit, Excluded) for limit in limits(row))


def parse(line: str) -> Row:
    """Read a row as it is printed: ``network=mlp source=layers ...``."""
    row = dict(word.split("=", 1) for word in line.split())
    for factor, name in row.items():
        if name not in (one.name for one in FACTORS.get(factor, ())):
            raise ValueError(f"{factor}={name} is not a value of the feature model")
    return {factor: row.get(factor, values[0].name) for factor, values in FACTORS.items()}


def text(row: Row) -> str:
    return " ".join(f"{factor}={name}" for factor, name in row.items())


def found() -> list[Row]:
    """Return the rows that ever failed."""
    lines = (line.partition("#")[0].strip() for line in FOUND.read_text().splitlines())
    return [parse(line) for line in lines if line]


def pairs(seed: int | str) -> list[Row]:
    """Return rows in which each allowed pair of values appears, in an order of the seed."""
    return covering(tuple(FACTORS), 2, random.Random(f"pairs {seed}"))


def triples(seed: int | str) -> list[Row]:
    """Return rows with each allowed triple of the factors that interact most; the others are drawn."""
    rng = random.Random(f"triples {seed}")
    return [row for factors in TRIPLES for row in covering(factors, 3, rng)]


def every_row(seed: int | str) -> list[Row]:
    return [*pairs(seed), *triples(seed)]


def covering(factors: Sequence[str], strength: int, rng: random.Random) -> list[Row]:
    """Return rows that cover each allowed combination of `strength` factors.

    Each row begins with a combination that no row has, and takes the values that add most new ones. (The search of
    allpairspy does not end in minutes with as many constraints.)
    """
    waiting = combinations_of(factors, strength)
    order = sorted(waiting)
    rng.shuffle(order)
    rows = []
    for part in order:
        if part in waiting and (row := completed(dict(part), waiting, factors, strength, rng)):
            rows.append(row)
            waiting -= parts(row, factors, strength)
    for part in order:  # those that no order of the factors met
        if part in waiting and (row := searched(dict(part))):
            rows.append(row)
            waiting -= parts(row, factors, strength)
    return rows


def searched(row: Row) -> Row | None:
    """Return the first allowed row with these values, or None."""
    choices = {f: [n for n in names if allowed({**row, f: n})] for f, names in NAMES.items() if f not in row}
    if not choices:
        return {factor: row[factor] for factor in FACTORS}
    factor = min(choices, key=lambda name: len(choices[name]))
    return next((result for name in choices[factor] if (result := searched({**row, factor: name}))), None)


def combinations_of(factors: Sequence[str], strength: int) -> set[tuple[tuple[str, str], ...]]:
    """Return each combination of values that no constraint excludes by itself."""
    return {
        part
        for group in combinations(factors, strength)
        for part in product(*([(factor, one.name) for one in FACTORS[factor]] for factor in group))
        if allowed(dict(part))
    }


def parts(row: Row, factors: Sequence[str], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations([(factor, row[factor]) for factor in factors if factor in row], strength))


def completed(part: Row, waiting: Any, factors: Sequence[str], strength: int, rng: random.Random) -> Row | None:
    """Choose the values of the other factors; None if no row with this part is found in 20 orders of the factors."""
    for _ in range(20):
        row = dict(part)
        missing = [factor for factor in FACTORS if factor not in row]
        rng.shuffle(missing)
        for factor in missing:
            values = [name for name in NAMES[factor] if allowed({**row, factor: name})]
            if not values:
                break
            gains = {
                name: len(parts({**row, factor: name}, factors, strength) & waiting) + rng.random() for name in values
            }
            row[factor] = max(values, key=gains.__getitem__)
        else:
            return {factor: row[factor] for factor in FACTORS}
    return None
