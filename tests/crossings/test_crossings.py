"""Rows of features together: those that failed once, and the first rows of a covering array for each engine."""

from __future__ import annotations

import datetime
import importlib
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from crossings import refusals, rows
from crossings.model import FACTORS
from crossings.oracle import Verdict, judge
from mithril import plugins

SEED = "first"  # fixed, so that a commit fails for its own changes; nightly runs take the date (nox -s crossings)
ROWS = {"numpy": 14, "torch": 2, "jax": 1, "mlx": 10, "c": 2, "ggml": 5}  # some ten seconds of each engine
PAGE = Path(__file__).parents[2] / "docs/crossings.md"


def judged(row: rows.Row) -> Verdict:
    """Judge a row; in a process of its own if it needs two devices of JAX, whose number is fixed by the import."""
    if row["engine"] != "jax" or row["mesh"] == "none" or len(importlib.import_module("jax").devices()) > 1:
        return judge(row)
    command = [sys.executable, "-m", "crossings", "--row", rows.text(row)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    kind = "failed" if done.returncode else "passed"
    return Verdict(kind, done.stdout + done.stderr)


def failures(drawn: list[rows.Row]) -> tuple[list[str], int]:
    lines, number = [], 0
    for row in drawn:
        verdict = judged(row)
        number += verdict.kind in ("passed", "refused", "failed")
        if verdict.kind == "failed":
            lines.append(f"{rows.text(row)}\n    {verdict.text}")
    return lines, number


@pytest.mark.parametrize("row", rows.found(), ids=rows.text)
def test_rows_that_failed_once(row):
    verdict = judged(row)
    assert verdict.kind != "failed", verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ROWS))
def test_rows_of_the_day(engine):
    if engine not in plugins.backends():
        pytest.skip(f"{engine} is not installed")
    plugins.backend_class(engine)()
    drawn = [row for row in rows.pairs(SEED) if row["engine"] == engine]
    lines, number = failures(drawn[: ROWS[engine]])
    assert number
    assert not lines, "\n".join(lines)


@pytest.mark.soak
def test_all_rows():
    lines, _ = failures(rows.every_row(datetime.date.today().isoformat()))
    assert not lines, "\n".join(lines)


def test_every_allowed_pair_is_in_a_row():
    """Pairs that other factors exclude have no row: for each of them no value of the third factor is allowed."""
    drawn, factors = rows.pairs(SEED), tuple(FACTORS)
    assert all(rows.allowed(row) for row in drawn)
    left = rows.combinations_of(factors, 2) - {part for row in drawn for part in rows.parts(row, factors, 2)}
    for part in left:
        choices_of_factors = [
            [{**dict(part), f: one.name} for one in FACTORS[f]] for f in factors if f not in dict(part)
        ]
        assert any(not any(map(rows.allowed, choices)) for choices in choices_of_factors), part


def test_rows_depend_on_the_seed_alone():
    assert rows.pairs("a") == rows.pairs("a") != rows.pairs("b")


def test_rows_are_read_as_they_are_printed():
    for row in islice(rows.pairs(SEED), 20):
        assert rows.parse(rows.text(row)) == row
    with pytest.raises(ValueError, match="engine=abacus is not a value"):
        rows.parse("engine=abacus")


def test_page_of_refusals():
    assert PAGE.read_text() == refusals.page()


def test_every_value_has_a_row():
    drawn = rows.pairs(SEED)
    missing = {(f, v.name) for f, values in FACTORS.items() for v in values} - {i for row in drawn for i in row.items()}
    assert not missing
