"""Probes of time: ratios of interleaved calls by the one timer, threads, and programs of other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import mithril as ml
from mithril import models as m
from mithril.system import Times, time_interleaved

from . import by_hand
from .cells import Cell, by_engine, fails, nothing, probe, when
from .networks import NETWORKS, Network, compiled

LARGE = (
    Network(
        lambda: m.Model(m.Linear(256), m.LayerNorm(256), m.Relu(), m.Linear(256), m.Gelu(), m.Linear(4)), (64, 256)
    ),
    Network(NETWORKS[1].make, (4, 3, 48, 48)),
    Network(lambda: m.Model(m.TransformerEncoderLayer(64, 4, 128), m.Linear(4)), (4, 32, 64)),
)
STREAMED = Network(lambda: m.Model(*(m.Linear(2048) for _ in range(6))), (8, 2048))
LOSS = 0.05  # a smaller one is within the noise of this machine


Hand = Callable[[str, int, np.ndarray[Any, Any]], Mapping[str, Callable[[], Any]]]


def timed(
    engine: str, index: int, first: Mapping[str, Any], second: Mapping[str, Any], rounds: int, hand: Hand | None
) -> Times[str]:
    """Return the times of a network under two options, and of programs by hand."""
    network = (*LARGE, STREAMED)[index]
    calls: dict[str, Callable[[], Any]] = {}
    for name, options in (("first", first), ("second", second)):
        subject = compiled(network, engine, **options)
        subject.bind(compiled(network, engine).randomize_params(seed=0))
        x = {"input": subject.backend.array(network.input(), dtype=subject.backend.dtype)}
        calls[name] = lambda subject=subject, x=x: subject(x)
    calls |= hand(engine, index, network.input()) if hand else {}
    return time_interleaved(
        calls, subject.backend.synchronize, seconds=0.4, rounds=rounds, hopeless=20, of=_lower_quartile
    )


def compared(
    engine: str,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    rounds: int = 25,
    hand: Hand | None = None,
) -> Cell:
    """Return the time of calls under the second options, of that under the first, for each network.

    A loss is one on which nearly all rounds agree, as a single one may be interrupted. Where programs by hand run,
    each counts, and it is the engine's if those lose as much, or take as long.
    """
    times = [timed(engine, index, first, second, rounds, hand) for index in range(len(LARGE))]
    text = _ratios(times, "second", "first")
    if hand is None:
        return when(not any(t.is_faster("first", "second", LOSS) for t in times), text)
    lost = [t for t in times if t["second"] > (1 + LOSS) * t["first"]]
    if by_hand.SECOND not in times[0]:
        return when(not lost, text)
    text += f"; by hand {_ratios(times, by_hand.SECOND, by_hand.FIRST)}"
    if lost and all(_is_of_engine(t) for t in lost):
        return nothing(f"the engine is slower by itself: {text}")
    return when(not lost, text)


def _ratios(times: Sequence[Times[str]], one: str, other: str) -> str:
    return ", ".join(f"{t[one] / t[other]:.2f}" for t in times)


def _is_of_engine(t: Times[str]) -> bool:
    """Whether a program by hand loses as much, or takes as long, within 10 %."""
    lost, lost_by_hand = t["second"] / t["first"], t[by_hand.SECOND] / t[by_hand.FIRST]
    return lost < 1.1 * lost_by_hand or t["second"] < 1.1 * t[by_hand.SECOND]


def _lower_quartile(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.25))  # noise only makes calls slower


@probe(timed=True)
def medium_in_time(engine: str) -> Cell:
    """Return the time at level medium, of that at level none."""
    return compared(engine, {"optimization_level": "none"}, {})


@probe(timed=True)
def high_in_time(engine: str) -> Cell:
    """Return the time at level high, where kernels are chosen by measurements, of that at medium."""
    with tempfile.TemporaryDirectory() as folder:
        high = {"optimization_level": "high", "cache_dir": folder}
        cell = compared(engine, {}, high)
        decisions = [d.message for network in LARGE for d in compiled(network, engine, **high).decisions]
    return cell._replace(text=f"{cell.text}; {sum('times as fast' in text for text in decisions)} kernels chosen")


@probe(timed=True)
def inference_in_time(engine: str) -> Cell:
    """Return the time of bound calls with inference=True, of that without."""
    return compared(engine, {}, {"inference": True})


@probe(timed=True)
def static_in_time(engine: str) -> Cell:
    """Return the time of bound calls with static_inference=True, of that without."""
    return compared(engine, {}, {"static_inference": True})


@probe("torch", "jax", "mlx", elsewhere="nothing reads the option jit", timed=True)
def jit_in_time(engine: str) -> Cell:
    """Return the time with jit=True, of that with jit=False; by hand: with torch.compile or mx.compile."""
    hand = by_hand.without_and_with_jit if engine != "jax" else None
    return compared(engine, {"jit": False}, {"jit": True}, hand=hand)


HALF: Mapping[str, Any] = {"precision": "bfloat16"}


@probe(timed=True)
def half_in_time(engine: str) -> Cell:
    """Return the time of products with precision='bfloat16', of that in float32: 8 rows read weights of 100 MB."""
    times = timed(engine, len(LARGE), {}, HALF, 9, by_hand.in_two_types)
    text = _ratios([times], "second", "first")
    if by_hand.SECOND in times:
        text += f"; by hand {_ratios([times], by_hand.SECOND, by_hand.FIRST)}"
        if times.is_faster(by_hand.FIRST, by_hand.SECOND, LOSS) and _is_of_engine(times):
            return nothing(f"the engine is slower by itself: {text}")
    return when(times.is_faster("second", "first", LOSS), text)


@probe(timed=True)
def half_networks_in_time(engine: str) -> Cell:
    """Return the time with precision='bfloat16', of that in float32, on this CPU, for networks that fit into caches."""
    return compared(engine, {}, HALF, rounds=9, hand=by_hand.in_two_types)


@probe(timed=True)
def reuse(engine: str) -> Cell:
    """Time of a compilation, in calls."""
    network = LARGE[0]
    start = time.process_time()
    subject = compiled(network, engine).bind(compiled(network, engine).randomize_params(seed=0))
    subject({"input": network.input()})
    spent = time.process_time() - start
    x = {"input": subject.backend.array(network.input())}
    call = time_interleaved({"call": lambda: subject(x)}, subject.backend.synchronize, seconds=0.2)["call"]
    return when(spent > call, f"{spent / call:,.0f} calls")


@probe(timed=True)
def rows_at_once(engine: str) -> Cell:
    """Time of 64 calls of one row, of that of one call of 64 rows."""
    network = LARGE[0]
    calls = {}
    for rows in (64, 1):
        part = Network(network.make, (rows, 256))
        subject = compiled(part, engine).bind(compiled(network, engine).randomize_params(seed=0))
        x = {"input": subject.backend.array(part.input())}
        calls[rows] = lambda subject=subject, x=x: subject(x)
    times = time_interleaved(calls, subject.backend.synchronize, seconds=0.4, hopeless=1e9)
    ratio = 64 * times[1] / times[64]
    return when(ratio > 1, f"{ratio:.1f} times as long")


@probe(timed=True)
def workers(engine: str) -> Cell:
    """Time of a loader of 64 slow items with 4 workers, of that without workers."""

    class Slow:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, k: int) -> Any:
            time.sleep(0.005)
            return np.float32(k)

    seconds = []
    for count in (0, 4):
        start = time.perf_counter()
        for _ in ml.DataLoader(Slow(), batch_size=8, num_workers=count):
            pass
        seconds.append(time.perf_counter() - start)
    return when(seconds[1] < 0.8 * seconds[0], f"{seconds[1] / seconds[0]:.2f}")


THREADS = """
    import json, os, sys, time
    import numpy as np
    import mithril as ml
    from mithril import models as m

    engine, rows = sys.argv[1], {}
    given = {"num_threads": 2}
    backend = ml.JaxBackend(num_threads=2) if engine == "jax" else engine
    parts = {"element-wise": m.Model(*(m.Gelu() for _ in range(2))), "product": m.Model(m.Linear(1024), m.Linear(1024)),
             "softmax": m.Model(m.Softmax(), m.Softmax()), "norm": m.Model(m.LayerNorm(1024), m.LayerNorm(1024))}

    def ticks():
        observed = {}
        for name in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{name}/schedstat") as file:
                observed[name] = int(file.read().split()[0])
        return observed

    for name, model in parts.items():
        subject = ml.compile(model, backend, shapes={"input": [1024, 1024]}, **({} if engine == "jax" else given))
        subject.bind(subject.randomize_params(seed=0))
        x = {"input": subject.backend.array(np.ones((1024, 1024), np.float32))}
        for _ in range(2):
            subject.backend.synchronize(subject(x))
        before, start = ticks(), time.process_time()
        while time.process_time() - start < 0.6:
            subject.backend.synchronize(subject(x))
        after = ticks()
        spent = sorted((after[k] - before.get(k, 0) for k in after), reverse=True)
        rows[name] = sum(s > 0.2 * spent[0] for s in spent)
    print(json.dumps(rows))
"""


def run(program: str, *arguments: str) -> str:
    """Run a program in a process of its own, without limits of threads, and return its last line."""
    is_right = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=is_right,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


@probe(timed=True)
def threads(engine: str) -> Cell:
    """Threads that compute four kinds of operations on 1024 x 1024 values with num_threads=2."""
    observed = json.loads(run(THREADS, engine))
    messages = ", ".join(f"{name} {count}" for name, count in observed.items())
    one = by_engine(
        numpy="BLAS divides products, NumPy computes all else on one thread",
        mlx="MLX computes all but products on one thread",
        ggml="ggml computes most element-wise operations on one thread",
    )[engine]
    if observed["element-wise"] == 1 and one is not None:
        return nothing(f"{one}: {messages} threads")
    return when(observed["element-wise"] > 1, f"{messages} threads")


MESH = """
    import sys
    import numpy as np
    import mithril as ml
    from mithril.models import Linear, Model, Relu

    def model():
        subject = Model()
        for size in (16, 16, 16, 8):
            subject += Linear(size)
            subject += Relu()
        return subject

    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    plain = ml.compile(model(), "numpy", shapes={"input": [16, 16]})
    params = plain.randomize_params(seed=0)
    expected = plain.evaluate(params, {"input": x})["output"]
    mesh, options = {
        "data": ((4,), {"parallelism": "data"}),
        "model": ((1, 4), {"parallelism": "model", "tensor_split_dims": {"weights": 1, "activations": 0}}),
        "pipeline": ((4,), {"parallelism": "pipeline", "pipeline_stages": 4, "pipeline_chunks": 8}),
    }[sys.argv[1]]
    subject = ml.compile(model(), ml.JaxBackend(device_mesh=mesh), shapes={"input": [16, 16]}, **options)
    observed = subject.evaluate({n: subject.backend.array(a) for n, a in params.items()}, {"input": x})["output"]
    parts = len({str(s.device) for s in getattr(observed, "addressable_shards", [])})
    print(f"{parts} {np.abs(subject.backend.to_numpy(observed) - expected).max():.0e}")
"""


def on_mesh(engine: str, kind: str) -> Cell:
    if engine == "jax":
        parts, difference = run(MESH, kind).split()
        return when(float(difference) < 1e-4, f"4 simulated devices, {parts} with results; difference {difference}")
    subject = compiled(NETWORKS[0], engine, parallelism=kind)
    messages = [d.message for d in subject.decisions if "parallelism" in d.message or "device_mesh" in d.message]
    return nothing(messages[0].splitlines()[0]) if messages else fails("nothing is messages")


@probe(timed=True)
def data_parallel(engine: str) -> Cell:
    """Devices that hold parts of the batch with parallelism='data' on a mesh of 4."""
    return on_mesh(engine, "data")


@probe(timed=True)
def model_parallel(engine: str) -> Cell:
    """Devices that hold parts of the weights with parallelism='model' on a mesh of 4."""
    return on_mesh(engine, "model")


@probe(timed=True)
def pipeline_parallel(engine: str) -> Cell:
    """Devices that hold stages with parallelism='pipeline' on a mesh of 4."""
    return on_mesh(engine, "pipeline")
