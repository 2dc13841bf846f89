"""Runs rows and prints those that fail: ``python -m crossings --rows 150 --seed today``."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections import Counter

from .oracle import judge
from .rows import every_row, found, pairs, parse, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="number of rows; all of them without it")
    parser.add_argument("--seed", default="today", help="of the covering arrays; 'today' is the date")
    parser.add_argument("--engine", action="append", help="only rows of these engines")
    parser.add_argument("--row", help="one row, as it is printed")
    parser.add_argument("--pairs", action="store_true", help="without the triples")
    arguments = parser.parse_args()
    seed = datetime.date.today().isoformat() if arguments.seed == "today" else arguments.seed
    if arguments.row:
        rows = [parse(arguments.row)]
    else:
        drawn = pairs(seed) if arguments.pairs else every_row(seed)
        rows = [row for row in [*found(), *drawn] if not arguments.engine or row["engine"] in arguments.engine]
    counts: Counter[str] = Counter()
    for row in rows[: arguments.rows]:
        begin = time.perf_counter()
        verdict = judge(row)
        counts[verdict.kind] += 1
        if verdict.kind == "failed":
            print(f"{text(row)}\n    {verdict.text}  [{time.perf_counter() - begin:.1f} s]", flush=True)
        elif arguments.row:
            print(verdict)
    print(f"seed {seed}: {dict(counts)}")
    return counts["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
