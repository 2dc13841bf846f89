"""The part of a call that is not the program: ``compiled.evaluate`` on programs whose function only returns a result.

``python benchmarks/bench_calls.py [other checkout]``: microseconds of processor time, the best of interleaved rounds.
With another checkout of the repository, a second process measures its code alternately with this one.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, CALLS = 30, 300
COUNTS = (2, 8, 48, 300)


def emptied(executable: Any, params: Any, inputs: Any) -> Callable[[], Any]:
    """Make the function of a program return a result at once, and return a call of it."""
    results = executable.forward(params, inputs)

    def function(params: Any, inputs: Any) -> Any:
        return results

    executable.call = function
    return lambda: function(params, inputs)


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return the call and the bare program for models by number of parameters."""
    import numpy as np

    import mithril as ml
    from mithril.models import Linear, Model, Sequential

    seconds = {}
    for count in COUNTS:
        model = Model()
        for k in range(count // 2):
            model += Linear(1, name=f"l{k}")
        compiled = ml.compile(model, "numpy", shapes={"input": [1, 1]}, inference=True)
        params, inputs = compiled.randomize_params(0), {"input": np.ones((1, 1), np.float32)}
        program = emptied(compiled.programs[0].executable, params, inputs)
        fresh = {name: x.copy() for name, x in params.items()}
        param_sets = [params, fresh]

        def other(compiled: Any = compiled, param_sets: Any = param_sets, inputs: Any = inputs) -> Any:
            param_sets.reverse()
            return compiled.evaluate(param_sets[0], inputs)

        compiled.bind(params)
        seconds[f"{count} parameters"] = (lambda c=compiled, p=params, x=inputs: c.evaluate(p, x), program)
        seconds[f"{count} bound"] = (lambda c=compiled, x=inputs: c.evaluate(x), program)
        seconds[f"{count} others each time"] = (other, program)
    trained = ml.compile(Sequential(Linear(1)), "numpy", shapes={"input": [1, 1]})
    weights, x = trained.randomize_params(0), {"input": np.ones((1, 1), np.float32)}
    slopes = {"output": np.ones((1, 1), np.float32)}
    trained.evaluate(weights, x, slopes)
    program = emptied(trained.programs[-1].executable, weights, {**x, "grad/output": slopes["output"]})
    trained.bind(weights)  # the record of the call is dropped
    trained.evaluate(weights, x, slopes)
    seconds["gradients of 2"] = (lambda: trained.evaluate(weights, x, slopes), program)
    return seconds


def worker() -> None:
    """Measure one round for each line that comes in."""
    measured = cases()
    for pair in measured.values():
        for call in pair:
            for _ in range(50):
                call()
    gc.disable()
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = []
        for pair in measured.values():
            for call in pair:
                start = time.process_time()
                for _ in range(CALLS):
                    call()
                seconds.append((time.process_time() - start) / CALLS)
        print(*measured, sep="\t", flush=True)
        print(*seconds, flush=True)


def start(checkout: Path) -> subprocess.Popen[str]:
    sources = [checkout / "mithril-core" / "src", *checkout.glob("plugins/*/src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def main() -> None:
    """Print the overhead for each checkout."""
    checkouts = [Path(__file__).parents[1], *map(Path, sys.argv[1:])]
    processes = [start(path) for path in checkouts]
    names: list[str] = []
    best: list[list[float]] = [[] for _ in checkouts]
    for _ in range(ROUNDS):
        for k, process in enumerate(processes):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            names = process.stdout.readline().rstrip().split("\t")
            seconds = list(map(float, process.stdout.readline().split()))
            best[k] = list(map(min, best[k], seconds)) if best[k] else seconds
    for process in processes:
        process.kill()
    print(f"{'microseconds above the program':<32}" + "".join(f"{path.resolve().name:>16}" for path in checkouts))
    for k, name in enumerate(names):
        print(f"{name:<32}" + "".join(f"{(b[2 * k] - b[2 * k + 1]) * 1e6:>16.2f}" for b in best))


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
