"""docs/promises.md: written from the promises and the cells, and read as the record of the cells."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from . import ENGINES, graphs, guide_of_mlx, memory, options, timed  # noqa: F401  (they register their probes)
from .cells import PROBES, VERDICTS, Cell
from .documents import DOCUMENTS, PROMISES

PAGE = Path(__file__).parents[2] / "docs/promises.md"
Cells = dict[str, dict[str, Cell]]  # by probe and engine

HEAD = """# Promises

The promises of five documents (Optimization, Compilation, Performance tuning, Advanced compilation, and a guide to
optimization on MLX), and the effects that probes observe on each engine. `nox -s promises` runs all probes and writes
this page; the tests run those without timing. Figures are those of one run on two busy cores of a server without a GPU:
three numbers are a perceptron, a residual network of convolutions and a transformer encoder. Ratios of time come from
interleaved calls; one above 1 is a loss, and does not hold if nearly all rounds show a loss of more than 5 %. Where a
program by hand runs in the same rounds, each such loss counts, and is the engine's if that program shows it as well.

| verdict | meaning |
|---|---|
| holds | the probe observes the effect |
| no effect here | there is nothing to gain on this engine, for the reason that the probe states |
| refused | an error, before any work |
| **does not hold** | a shortfall |
"""


def _marked(verdict: str) -> str:
    return verdict if verdict in VERDICTS[:3] else f"**{verdict}**"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _counts(cells: Cells) -> list[str]:
    lines = ["| document | engine | " + " | ".join(VERDICTS) + " |", "|---|---|" + "---|" * len(VERDICTS)]
    for document in DOCUMENTS:
        probes = [p.probe for p in PROMISES if p.document == document]
        for engine in ENGINES if document in list(DOCUMENTS)[:4] else ("mlx",):
            counted = Counter(cells[name][engine].verdict for name in probes)
            lines.append(f"| {document} | {engine} | " + " | ".join(str(counted[v]) for v in VERDICTS) + " |")
    return lines


def _promises(document: str, cells: Cells) -> list[str]:
    lines = ["| section | promise | effect | " + " | ".join(ENGINES) + " |", "|---|---|---|" + "---|" * len(ENGINES)]
    for promise in PROMISES:
        if promise.document == document:
            verdicts = " | ".join(_marked(cells[promise.probe][engine].verdict) for engine in ENGINES)
            link = f"[{promise.probe}](#{promise.probe})"
            lines.append(f"| {promise.section} | {promise.text} | {link} | {verdicts} |")
    return lines


def _effect(name: str, cells: dict[str, Cell]) -> list[str]:
    alike: dict[Cell, list[str]] = {}
    for engine in ENGINES:
        alike.setdefault(cells[engine], []).append(engine)
    timing = " Timed." if PROBES[name].timed else ""
    rows = [f"| {', '.join(names)} | {_marked(c.verdict)} | {_escaped(c.text)} |" for c, names in alike.items()]
    return [
        f"### {name}",
        "",
        PROBES[name].subject + timing,
        "",
        "| engine | verdict | figure or reason |",
        "|---|---|---|",
        *rows,
    ]


def written(cells: Cells) -> str:
    """Return the page."""
    lines = [HEAD, "## Counts", "", *_counts(cells)]
    for document in DOCUMENTS:
        lines += ["", f"## {document}", "", *_promises(document, cells)]
    lines += ["", "## Effects"]
    for name in PROBES:
        lines += ["", *_effect(name, cells[name])]
    return "\n".join(lines) + "\n"


def read() -> Cells:
    """Return the cells of the page."""
    cells: Cells = {}
    effects = PAGE.read_text().partition("\n## Effects\n")[2] if PAGE.exists() else ""
    for part in re.split(r"^### ", effects, flags=re.M)[1:]:
        name, *lines = part.splitlines()
        for line in lines:
            if line.startswith("| ") and not line.startswith("| engine "):
                engines, verdict, text = (x.strip() for x in re.split(r"(?<!\\)\|", line)[1:4])
                plain = text.replace("\\|", "|").replace("&lt;", "<").replace("\\*", "*")
                for engine in engines.split(", "):
                    cells.setdefault(name, {})[engine] = Cell(verdict.strip("*"), plain)
    return cells
