"""Disturb training by two processes at random steps: kill, freeze and cut off; nothing may be lost or differ.

``python benchmarks/bench_faults.py --runs 50`` prints a line per run and the totals of each engine. Three runs in turn
write the same format of checkpoints, so that nine runs combine all faults and formats.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from fault_runs import FORMATS, KINDS, TIMEOUT, can_cut_networks, check, undisturbed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50, help="of each engine")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--engines", default="torch,jax")
    parser.add_argument("--characters", type=int, default=6000, help="of the error of a failed run")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if kind != "partition" or can_cut_networks()]
    for engine in arguments.engines.split(","):
        expected, seconds, failures = undisturbed(engine), [], 0
        for number in range(arguments.first, arguments.first + arguments.runs):
            kind, form = kinds[number % len(kinds)], FORMATS[number // len(kinds) % len(FORMATS)]
            try:
                seconds.append(check(engine, kind, number, expected, form))
                print(
                    f"{engine} {number} {kind} {form}: others ended after {seconds[-1]:.1f} s, result equal", flush=True
                )
            except AssertionError as error:
                failures += 1
                print(f"{engine} {number} {kind} {form}: FAILED {str(error)[: arguments.characters]}", flush=True)
        slowest = max(seconds, default=0.0)
        print(f"{engine}: {len(seconds)} survived, {failures} failed, slowest end {slowest:.1f} s of {TIMEOUT} s")


if __name__ == "__main__":
    main()
