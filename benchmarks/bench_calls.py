"""The part of a call that is not the program: ``compiled.evaluate`` on programs whose function only returns a result.

``python benchmarks/bench_calls.py [other checkout] [--backend=torch]``: microseconds of processor time, the best of
interleaved rounds. With another checkout of the repository, a second process measures its code alternately with this.
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
COUNTS = (2, 8, 10, 48, 100, 300)


def emptied(program: Any, results: Any) -> Callable[[], Any]:
    """Make calls of a program return these results at once, and return such a call."""

    def function(params: Any, inputs: Any) -> Any:
        return results

    program.bucketed = function
    return lambda: function({}, {})


def cases(backend: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return the call and the bare program for models by number of parameters."""
    import numpy as np

    import mithril as ml
    from mithril.models import Linear, Model, Sequential

    seconds = {}
    for count in COUNTS:
        model = Model()
        for k in range(count // 2):
            model += Linear(1, name=f"l{k}")
        compiled = ml.compile(model, backend, shapes={"input": [1, 1]}, inference=True)
        array = compiled.backend.array
        params, inputs = compiled.randomize_params(0), {"input": array(np.ones((1, 1), np.float32))}
        program = emptied(compiled.programs[0], compiled.evaluate(params, inputs))
        fresh = {name: array(np.asarray(x)) for name, x in params.items()}
        param_sets = [params, fresh]

        def other(compiled: Any = compiled, param_sets: Any = param_sets, inputs: Any = inputs) -> Any:
            param_sets.reverse()
            return compiled.evaluate(param_sets[0], inputs)

        compiled.bind(params)
        seconds[f"{count} parameters"] = (lambda c=compiled, p=params, x=inputs: c.evaluate(p, x), program)
        seconds[f"{count} bound"] = (lambda c=compiled, x=inputs: c.evaluate(x), program)
        seconds[f"{count} others each time"] = (other, program)
    trained = ml.compile(Sequential(Linear(1)), backend, shapes={"input": [1, 1]})
    weights, x = trained.randomize_params(0), {"input": array(np.ones((1, 1), np.float32))}
    slopes = {"output": array(np.ones((1, 1), np.float32))}
    trained.evaluate(weights, x, slopes)
    program = trained.programs[-1]
    program = emptied(program, program.executable(weights, {**x, "grad/output": slopes["output"]}))
    trained.bind(weights)  # the record of the call is dropped
    trained.evaluate(weights, x, slopes)
    seconds["gradients of 2"] = (lambda: trained.evaluate(weights, x, slopes), program)
    return seconds


def worker(backend: str) -> None:
    """Measure one round for each line that comes in."""
    measured = cases(backend)
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


def start(checkout: Path, backend: str) -> subprocess.Popen[str]:
    sources = [checkout / "mithril-core" / "src", *checkout.glob("plugins/*/src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", backend],
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
    backend = next((a.removeprefix("--backend=") for a in sys.argv[1:] if a.startswith("--backend=")), "numpy")
    checkouts = [Path(__file__).parents[1], *(Path(a) for a in sys.argv[1:] if not a.startswith("--"))]
    processes = [start(path, backend) for path in checkouts]
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
    print(
        f"{f'microseconds above the program, {backend}':<40}"
        + "".join(f"{path.resolve().name:>16}" for path in checkouts)
    )
    for k, name in enumerate(names):
        print(f"{name:<40}" + "".join(f"{(b[2 * k] - b[2 * k + 1]) * 1e6:>16.2f}" for b in best))


if __name__ == "__main__":
    worker(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main()
