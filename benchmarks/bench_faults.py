"""Disturb training by two processes at random steps, and resume with two, one or three; nothing may be lost or differ.

``python benchmarks/bench_faults.py --runs 63`` prints a line per run and the totals of each launcher. Runs in turn have
another fault, then another number of processes, then another format of checkpoints.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from fault_runs import FORMATS, KINDS, LAUNCHERS, can_cut_networks, check


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=63, help="of each launcher")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--characters", type=int, default=6000, help="of the error of a failed run")
    arguments = parser.parse_args()
    for launcher in arguments.launchers.split(","):
        cut = launcher != "torchrun" and can_cut_networks()
        kinds = [kind for kind in KINDS if kind != "partition" or cut]
        survived = failures = 0
        for number in range(arguments.first, arguments.first + arguments.runs):
            kind, turn = kinds[number % len(kinds)], number // len(kinds)
            then, form = (2, 1, 3)[turn % 3], FORMATS[turn // 3 % len(FORMATS)]
            name = f"{launcher} {number} {kind} {form}, then {then}"
            try:
                seconds = check(launcher, [kind], number, form, then)
                survived += 1
                print(f"{name}: each sample once, results equal, others ended after {seconds:.1f} s", flush=True)
            except AssertionError as error:
                failures += 1
                print(f"{name}: FAILED {str(error)[: arguments.characters]}", flush=True)
        print(f"{launcher}: {survived} survived, {failures} failed")


if __name__ == "__main__":
    main()
