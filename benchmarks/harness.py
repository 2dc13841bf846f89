"""The harness of all benchmarks: threads, arguments, interleaved rounds, tables, functions in fresh processes.

It is imported before anything that counts threads. All scripts understand these options: ``--threads N`` (1) sets the
threads of all libraries; ``--wall`` counts time on the clock, which also counts with several threads, instead of
processor time, which other programs disturb less; ``--rounds N`` measures exactly N rounds, to try a script; ``--json``
prints tables as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


def _value(flag: str) -> str | None:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None


for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS", "NPROC"):
    os.environ[_name] = _value("--threads") or os.environ.get(_name, "1")
THREADS = int(os.environ["OMP_NUM_THREADS"])
ROUNDS = int(_value("--rounds") or 0)
CLOCK = time.perf_counter if THREADS > 1 or "--wall" in sys.argv else time.process_time
# Seconds: thread pools of other libraries spin on the other cores after their turn.
REST = 0.25 if THREADS > 1 else 0.0


def arguments(text: str | None, words: str = "WORD", **defaults: Any) -> argparse.Namespace:
    """Read the words that select rows, and options: each has the type of its default, which a list repeats."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar=words, help="of rows or parts; all without")
    for name, default in {"threads": 1, "wall": False, "rounds": 0, "json": False, **defaults}.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, (list, tuple)):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=list(default))
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_intermixed_args()  # options between the words, too


def selected(rows: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Return the rows whose names have one of the words, or all without words."""
    words = list(words)
    return {name: row for name, row in rows.items() if not words or any(word in name for word in words)}


def run_parts(text: str | None, parts: Mapping[str, Callable[[], None]]) -> None:
    """Run the parts of a script that are named as arguments, or all of them."""
    for name in arguments(text, "PART").words or parts:
        parts[name]()


def interleaved(
    ways: Mapping[Any, Callable[[], Any]],
    seconds: float = 1.0,
    min_rounds: int = 15,
    clock: Callable[[], float] = CLOCK,
    rest: float = REST,
) -> dict[Any, float]:
    """Return the best seconds per call of each way, in rounds, so that a noisy host disturbs all ways the same.

    Each round calls every way once, or often enough to be measurable. ``rest`` is waited, and one call made, before
    each way's turn.
    """
    seconds, min_rounds = (0.0, ROUNDS) if ROUNDS else (seconds, min_rounds)
    repeats = {}
    for name, call in ways.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(2e-4 / max(clock() - start, 1e-9)))
    best = dict.fromkeys(ways, float("inf"))
    gc.collect()
    gc.disable()
    try:
        begin, rounds = time.perf_counter(), 0
        while rounds < min_rounds or time.perf_counter() - begin < seconds:
            for name, call in ways.items():
                if rest:
                    time.sleep(rest)
                    call()
                start = clock()
                for _ in range(repeats[name]):
                    call()
                best[name] = min(best[name], (clock() - start) / repeats[name])
            rounds += 1
    finally:
        gc.enable()
    return best


def ratios(seconds: Mapping[str, float], base: str, *names: str) -> str:
    """Return the times of ways over that of ``base``, of all others without names."""
    return ", ".join(f"{n} {seconds[n] / seconds[base]:.2f}" for n in names or seconds if n != base)


def table(title: str, rows: Mapping[str, Mapping[str, float]], base: str) -> None:
    """Print microseconds of each way, and its ratio to ``base``."""
    if "--json" in sys.argv:
        print(json.dumps({title: rows}, indent=2))
        return
    names = list(next(iter(rows.values())))
    width = max(len(title), *(len(r) for r in rows))
    print(f"{title:<{width}}" + "".join(f"{n:>22}" for n in names))
    for row, seconds in rows.items():
        cells = "".join(f"{seconds[n] * 1e6:>12.1f} ({seconds[n] / seconds[base]:>6.2f}x)" for n in names)
        print(f"{row:<{width}}{cells}", flush=True)


def fresh(function: Callable[..., Any], *values: Any, **variables: str) -> Any:
    """Call a function of a benchmark in a new process, and return its result; values and result are JSON."""
    code = f"import json, sys, {{0}}; print(json.dumps({{0}}.{function.__name__}(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-W", "ignore", "-c", code.format(Path(function.__code__.co_filename).stem)]
    command += [json.dumps(values), "--threads", str(THREADS)]
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return json.loads(done.stdout.splitlines()[-1])
