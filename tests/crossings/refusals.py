"""Writes docs/crossings.md, the features that do not go together: ``python -m crossings.refusals``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .model import FACTORS, Known, Limit, Refused

HEAD = """# Features together

Rows of features that are used together (a source of the model, surgery, sizes, precision, an option, an engine, a
mesh, a mode, an event) are drawn so that each pair appears, and each is compared with the same row on NumPy without
optimizations; `nox -s crossings` runs them. This page is written from the feature model, `tests/crossings/model.py`.
"""


def lines(kind: type[Limit]) -> Iterator[str]:
    for factor, values in FACTORS.items():
        for one in values:
            for limit in one.limits:
                if isinstance(limit, kind):
                    conditions = "; ".join(f"{name} {', '.join(names)}" for name, names in limit.when.items())
                    yield f"| {factor} {one.name} | {conditions} | {limit.reason} |"


def page() -> str:
    tables = []
    for title, kind in (("Refused, by an error before any work", Refused), ("Known defects", Known)):
        if rows := [*lines(kind)]:
            table = "\n".join(["| feature | with | reason |", "|---|---|---|", *rows])
            tables.append(f"\n## {title}\n\n{table}\n")
    return HEAD + "".join(tables)


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs/crossings.md").write_text(page())
