"""``mithril demo``: compile one model for every installed backend, compare and time the results, and draw the graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from mithril import plugins
from mithril.graph import MithrilError, PluginError
from mithril.system import time_interleaved
from mithril_tools.cli.output import console, json_option, print_json, show

if TYPE_CHECKING:
    import numpy as np

    from mithril.graph import Graph
    from mithril.models import Model

    Arrays = dict[str, np.ndarray[Any, Any]]

BATCH, SIZE, CLASSES = 8, 24, 10
TOLERANCE = 1e-3  # of the largest element: a few layers in float32, with different orders of summation
SECONDS = 0.2  # to time a call


def model() -> Model:
    """Build a small residual network for images: convolutions, batch norm, a skip connection, pooling, a classifier."""
    from mithril.models import Add, BatchNorm2d, Conv2d, GlobalAvgPool2d, Linear, Model, Relu

    net = Model()
    net |= Conv2d(3, 16, kernel_size=3, padding=1)(input="image", output="stem")
    net |= BatchNorm2d(16)(input="stem", output="normal")
    net |= Relu()(input="normal", output="active")
    net |= Conv2d(16, 16, kernel_size=3, padding=1)(input="active", output="inner")
    net |= Add()(left="inner", right="active", output="sum")
    net |= Relu()(input="sum", output="features")
    net |= GlobalAvgPool2d()(input="features", output="pooled")
    net |= Linear(16, CLASSES)(input="pooled", output="output")
    return net


@dataclass
class Run:
    """The result of one backend."""

    backend: str
    graph: Graph | None = None
    compile_seconds: float = 0.0
    call_seconds: float = 0.0
    gradient_seconds: float = 0.0
    outputs: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    error: str = ""
    output_difference: float = 0.0
    gradient_difference: float = 0.0

    @property
    def agrees(self) -> bool:
        return not self.error and max(self.output_difference, self.gradient_difference) <= TOLERANCE


def run(name: str) -> Run:
    """Compile, call and differentiate on one backend."""
    import numpy as np

    import mithril as ml

    done = Run(name)
    try:
        start = time.perf_counter()
        compiled = ml.compile(model(), name, shapes={"image": [BATCH, 3, SIZE, SIZE]})
        params = compiled.randomize_params(seed=0)
        backend = compiled.backend
        image = np.random.default_rng(0).standard_normal((BATCH, 3, SIZE, SIZE)).astype(np.float32)
        inputs = {"image": backend.array(image)}
        seed = {"output": backend.array(np.linspace(-1, 1, BATCH * CLASSES, dtype=np.float32).reshape(BATCH, CLASSES))}

        def call() -> Any:
            return compiled.evaluate(params, inputs, training=False)

        def differentiate() -> Any:
            return compiled.evaluate(params, inputs, seed, training=False)

        done.outputs = {k: backend.to_numpy(v) for k, v in compiled.evaluate(params, inputs, training=False).items()}
        done.compile_seconds = time.perf_counter() - start
        done.graph = compiled.graph  # of the forward program; that of the gradients follows
        gradients = compiled.evaluate(params, inputs, seed, training=False)[1]
        done.gradients = {k: backend.to_numpy(v) for k, v in gradients.items()}
        done.call_seconds = time_interleaved({"": call}, backend.synchronize, seconds=SECONDS)[""]
        done.gradient_seconds = time_interleaved({"": differentiate}, backend.synchronize, seconds=SECONDS)[""]
    except Exception as error:  # an error of one backend must not hide the others
        done.error = str(error) if isinstance(error, MithrilError) else f"{type(error).__name__}: {error}"
    return done


def _difference(left: Arrays, right: Arrays) -> float:
    """Return the largest difference, relative to the largest element of its array."""
    worst = 0.0
    for name, array in right.items():
        scale = max(float(abs(array).max(initial=0.0)), 1e-30)
        worst = max(worst, float(abs(left[name] - array).max(initial=0.0)) / scale)
    return worst


def compare(runs: Sequence[Run]) -> Run | None:
    """Fill in the differences from the first run without an error (NumPy's, if installed), and return that run."""
    worked = [r for r in runs if not r.error]
    if not worked:
        return None
    reference = next((r for r in worked if r.backend == "numpy"), worked[0])
    for run in worked:
        run.output_difference = _difference(run.outputs, reference.outputs)
        run.gradient_difference = _difference(run.gradients, reference.gradients)
    return reference


def _row(done: Run, reference: Run | None) -> dict[str, str]:
    if done.error:
        return dict.fromkeys(COLUMNS, "") | {"backend": done.backend, "result": "failed"}
    assert reference is not None
    return {
        "backend": done.backend,
        "first result": f"{done.compile_seconds:.2f} s",
        "per call": f"{1e3 * done.call_seconds:.2f} ms",
        "with gradients": f"{1e3 * done.gradient_seconds:.2f} ms",
        "speed": f"{reference.call_seconds / done.call_seconds:.1f} x {reference.backend}",
        "outputs differ by": f"{done.output_difference:.0e}",
        "gradients differ by": f"{done.gradient_difference:.0e}",
        "result": "agrees" if done.agrees else "DIFFERS",
    }


COLUMNS = (
    "backend",
    "first result",
    "per call",
    "with gradients",
    "speed",
    "outputs differ by",
    "gradients differ by",
    "result",
)


@click.command()
@click.option("--backends", default="", metavar="NAMES", help="Comma-separated names; all installed ones by default.")
@json_option
def demo(backends: str, as_json: bool) -> None:
    """Run one model on every installed backend: compared results, timings, a picture of the graph."""
    names = [name for name in backends.split(",") if name] or sorted(
        plugins.backends(), key=lambda n: (n != "numpy", n)
    )
    if not names:
        raise PluginError("no backend is installed", hint="pip install mithril-numpy")
    out = console()
    runs = []
    for name in names:
        if not as_json and out.is_terminal:
            out.print(f"[dim]{name} ...[/dim]")
        runs.append(run(name))
    reference = compare(runs)
    if as_json:
        print_json([_data(done) for done in runs])
    else:
        _report(runs, reference, out)
    if not all(done.agrees for done in runs):
        raise click.exceptions.Exit(1)


def _data(done: Run) -> dict[str, Any]:
    keys = ("backend", "error", "compile_seconds", "call_seconds", "gradient_seconds", "output_difference")
    return {key: getattr(done, key) for key in (*keys, "gradient_difference", "agrees")}


def _report(runs: Sequence[Run], reference: Run | None, out: Any) -> None:
    from mithril_tools.cli.terminal_graph import draw

    if reference is not None and reference.graph is not None:
        out.print(f"[bold]the graph[/bold], as optimized for {reference.backend}\n")
        for line in draw(reference.graph):
            out.print(line, no_wrap=True, overflow="ellipsis")
        out.print()
    show([_row(done, reference) for done in runs], COLUMNS, out)
    for done in runs:
        if done.error:
            out.print(f"\n[bold]{done.backend}[/bold]\n{escape(done.error)}")
    if reference is not None:
        num_equal = sum(done.agrees for done in runs)
        out.print(f"\n{num_equal} of {len(runs)} backends agree within {TOLERANCE:g} of the largest element.")
