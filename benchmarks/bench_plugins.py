"""Cost of plugins: importing mithril, the first result of a process, a hook call, discovery with 50 plugins.

``python benchmarks/bench_plugins.py``; ``--json`` for a script. Processes are interleaved and medians shown, so that a
busy machine slows both sides equally.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 11
COMPILED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as an installed package starts

FIRST_RESULT = """
import mithril as ml
from mithril.models import Linear, Model, Relu
model = Model()
model |= Linear(16)(input="input", output="hidden")
model |= Relu()(input="hidden", output="output")
compiled = ml.compile(model, "numpy", shapes={"input": [4, 8]})
params = compiled.randomize_params(seed=0)
compiled.evaluate(params, {"input": [[1.0] * 8] * 4})
"""

PLUGIN = """
from mithril import BackendSpec, PassSpec, hookimpl

@hookimpl
def mithril_backends():
    return [BackendSpec("fake{n}", "Fake{n}Backend", "fake{n}.backend:Backend")]

@hookimpl
def mithril_passes():
    return [PassSpec(f"fake{n}-pass-{{i}}", "fake{n}.passes:run", "fuse", "low") for i in range(4)]
"""

BACKEND = """
from mithril import BackendSpec, hookimpl

@hookimpl
def mithril_backends():
    return [BackendSpec("fake{n}", "Fake{n}Backend", "fake{n}.backend:Backend")]
"""

DISCOVERY = """
import sys, time
sys.path.insert(0, {folder!r})
from mithril.plugins import loader
start = time.perf_counter(); found = loader.find(); print(time.perf_counter() - start)
from mithril.plugins import Plugins
one = Plugins()
start = time.perf_counter(); {one}; print(time.perf_counter() - start)
everything = Plugins()
start = time.perf_counter(); everything.backends(); everything.passes(); print(time.perf_counter() - start)
"""


def process(code: str) -> float:
    """Seconds from starting a process to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=COMPILED)
    return time.perf_counter() - start


def interleaved(codes: dict[str, str]) -> dict[str, float]:
    """Return the median seconds of each process, interleaved."""
    timings: dict[str, list[float]] = {name: [] for name in codes}
    for k in range(ROUNDS + 1):
        for name, code in codes.items():
            seconds = process(code)
            if k:  # the first round writes byte code and fills the file cache
                timings[name].append(seconds)
    return {name: statistics.median(times) for name, times in timings.items()}


def starting() -> dict[str, float]:
    times = interleaved(
        {
            "empty": "pass",
            "numpy": "import numpy",
            "mithril": "import mithril",
            "first result": FIRST_RESULT,
        }
    )
    return {
        "import mithril / import numpy": (times["mithril"] - times["empty"]) / (times["numpy"] - times["empty"]),
        "import mithril, ms": 1e3 * (times["mithril"] - times["empty"]),
        "import numpy, ms": 1e3 * (times["numpy"] - times["empty"]),
        "process start to first result on numpy, ms": 1e3 * times["first result"],
        "process start to first result / process that imports numpy": times["first result"] / times["numpy"],
    }


def hook_calls(calls: int = 20_000) -> dict[str, float]:
    """Return microseconds per call, in interleaved rounds."""
    from mithril import hookimpl
    from mithril.plugins import CompileContext, Plugins

    class Wrapping:
        @hookimpl(wrapper=True)
        def mithril_run_pass(self, pass_):
            return (yield)

    class Watching:
        @hookimpl
        def mithril_compile_stage(self, context, stage, graph):
            return None

    def last(pass_, graph, context):
        return graph

    without, wrapped, watched = (Plugins(autoload=False) for _ in range(3))
    wrapped.register(Wrapping(), "wrapping")
    watched.register(Watching(), "watching")
    context = CompileContext(None, None, {})
    cases = {
        "calling the pass directly": lambda: last(None, None, None),
        "run_pass, no plugin wraps it": lambda: without.run_pass(None, None, None, last),
        "run_pass, one plugin wraps it": lambda: wrapped.run_pass(None, None, None, last),
        "stage, no observer": lambda: without.compile_stage(context, "types", None),
        "stage, one observer": lambda: watched.compile_stage(context, "types", None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, call in cases.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append(time.perf_counter() - start)
    return {f"{name}, µs": 1e6 * min(times) / calls for name, times in seconds.items()}


def write_plugins(folder: str, count: int, code: str) -> None:
    """Write distributions with a plugin each."""
    for n in range(count):
        info = Path(folder) / f"mithril_fake{n}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: mithril-fake{n}\nVersion: 1.0\nRequires-Dist: mithril-core>=0.1\n\n"
            + "A description of the usual length.\n" * 100
        )
        (info / "entry_points.txt").write_text(f"[mithril]\nfake{n} = fake{n}_plugin\n")
        (Path(folder) / f"fake{n}_plugin.py").write_text(code.format(n=n))


def start_with_plugins(plugins: int = 50) -> dict[str, float]:
    """Return the milliseconds that more plugins add to the import and to the first compilation of a process.

    A result before them leaves the new plugins as the only work that differs: the imports of a first result take half
    a second, and vary by more than the plugins cost. Python's import of as many empty modules is the least they can
    cost.
    """
    measured = """
import sys, time
sys.path[:0] = {path!r}
start = time.process_time(); import mithril; print(time.process_time() - start)
del sys.path[0]
{code}
sys.path[:0] = {path!r}
start = time.process_time(); ml.plugins.reload()
{code}
print(time.process_time() - start)
sys.path[:0] = {modules!r}
start = time.process_time()
for n in range({plugins}): __import__(f"empty{{n}}")
print(time.process_time() - start)
"""
    with tempfile.TemporaryDirectory() as root:
        folder, empty, modules = (Path(root, name) for name in ("plugins", "nothing", "modules"))
        for one in (folder, empty, modules):
            one.mkdir()
        write_plugins(str(folder), plugins, BACKEND)
        for n in range(plugins):
            (modules / f"empty{n}.py").touch()
        rows: dict[str, list[list[float]]] = {"without": [], "with": []}
        for k in range(ROUNDS + 1):
            for name, path in {"without": [str(empty)], "with": [str(folder)]}.items():
                code = measured.format(path=path, code=FIRST_RESULT, modules=[str(modules)], plugins=plugins)
                done = subprocess.run(
                    [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=COMPILED
                )
                if k:  # the first round writes byte code
                    rows[name].append([float(line) for line in done.stdout.split()])
    # Of processor time, other processes on the machine only add: they evict the caches. The least is the work itself.
    imports, compilations = (
        1e3 * (min(row[k] for row in rows["with"]) - min(row[k] for row in rows["without"])) for k in (0, 1)
    )
    return {
        f"{plugins} more plugins: import mithril, added ms": imports,
        f"{plugins} more plugins: first result, added ms": compilations,
        f"importing {plugins} empty modules, ms": 1e3 * min(row[2] for row in rows["without"]),
    }


def discovery(plugins: int = 50) -> dict[str, float]:
    """Finding, using one and listing all of ``plugins`` more distributions than are installed here."""
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(folder, plugins, PLUGIN)
        rows = []
        for _ in range(ROUNDS):
            code = DISCOVERY.format(folder=folder, one=f"one.backend('fake{plugins // 2}')")
            done = subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=COMPILED
            )
            rows.append([float(line) for line in done.stdout.split()])
    discovery, one, everything = (1e3 * statistics.median(column) for column in zip(*rows))
    return {
        f"finding {plugins} more plugins, ms": discovery,
        f"one backend among {plugins} plugins (second look), ms": one,
        f"listing all of {plugins} plugins, ms": everything,
    }


def main() -> None:
    figures = {**starting(), **start_with_plugins(), **hook_calls(), **discovery()}
    if "--json" in sys.argv:
        print(json.dumps(figures, indent=2))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:8.2f}")


if __name__ == "__main__":
    main()
