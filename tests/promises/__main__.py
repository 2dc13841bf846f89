"""Runs probes and writes docs/promises.md: ``python -m promises --engine c --probe fusion``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from unittest.mock import patch

from . import ENGINES, page
from .cells import FAILS, PROBES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only cells of these engines")
    parser.add_argument("--probe", action="append", choices=list(PROBES), help="only cells of these probes")
    arguments = parser.parse_args()
    cells, worse = page.read(), 0
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", MITHRIL_CACHE_DIR=folder):
        for name in arguments.probe or PROBES:
            for engine in arguments.engine or ENGINES:
                start, before = time.perf_counter(), cells.get(name, {}).get(engine)
                cell = cells.setdefault(name, {})[engine] = PROBES[name](engine)
                worse += cell.verdict == FAILS and before is not None and before.verdict != FAILS
                print(f"{name} {engine} {cell.verdict}: {cell.text}  [{time.perf_counter() - start:.1f} s]", flush=True)
    missing = [f"{name} {engine}" for name in PROBES for engine in ENGINES if engine not in cells.get(name, {})]
    if missing:
        print(f"the page is not written, because {len(missing)} cells are missing: {', '.join(missing[:6])}")
    else:
        page.PAGE.write_text(page.written(cells))
    return bool(worse or missing)


if __name__ == "__main__":
    sys.exit(main())
