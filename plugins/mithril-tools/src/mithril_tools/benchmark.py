"""``ml.run_benchmark``: throughput, latency and memory of a compiled model; every call is synchronized."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import CheckedType, checked, format_bytes
from mithril.compiler import CompiledModel, array_type, columns
from mithril.graph import InputError, MithrilError, OptionError, unknown
from mithril.system import time_calls

METRICS = ("throughput", "latency", "memory_usage")


@dataclass(frozen=True)
class BenchmarkConfig(metaclass=CheckedType):
    """The numbers of runs, and the metrics to report."""

    warmup_iterations: int = 10
    benchmark_iterations: int = 100
    metrics: Sequence[str] = METRICS

    def __post_init__(self) -> None:
        if self.warmup_iterations < 0 or self.benchmark_iterations < 1:
            raise OptionError("a benchmark needs benchmark_iterations >= 1 and warmup_iterations >= 0")
        for metric in self.metrics:
            if metric not in METRICS:
                message, facts, hint = unknown("metric", metric, METRICS)
                raise OptionError(message, facts=facts, hint=hint)


@dataclass(frozen=True)
class BenchmarkResult:
    """The result of a benchmark: ``latency`` is the median of a call in seconds; ``throughput`` items per second.

    The time in which a long call waited for a processor does not count. ``memory_usage`` is the measured peak in bytes.
    """

    batch_size: int
    seconds: tuple[float, ...] = field(repr=False)
    throughput: float | None = None
    latency: float | None = None
    memory_usage: int | None = None

    @property
    def fastest(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range of the calls, relative to the median: a measure of the noise of the machine."""
        ordered = sorted(self.seconds)
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        return (high - low) / statistics.median(ordered)

    def __str__(self) -> str:
        parts = [f"batch {self.batch_size}"]
        if self.throughput is not None:
            parts.append(f"{self.throughput:.4g} items/s")
        if self.latency is not None:
            spread = f"spread {100 * self.spread:.0f}%"
            parts.append(f"median {1e3 * self.latency:.4g} ms, fastest {1e3 * self.fastest:.4g} ms, {spread}")
        if self.memory_usage is not None:
            parts.append(format_bytes(self.memory_usage))
        return ", ".join(parts)


class Sweep(dict[int, BenchmarkResult]):
    """Results by batch size. ``best`` has the highest throughput; prints as a table with bars."""

    failed: dict[int, str]

    @property
    def best(self) -> int:
        return max(self, key=lambda n: n / self[n].fastest)

    def __str__(self) -> str:
        rates = {n: n / statistics.median(r.seconds) for n, r in self.items()}
        top = max(rates.values(), default=1.0)
        rows = [
            [
                str(n),
                f"{rates[n]:.4g}",
                f"{1e3 * statistics.median(r.seconds):.4g}",
                "-" if r.memory_usage is None else format_bytes(r.memory_usage),
                ("#" * round(30 * rates[n] / top)).ljust(30),
            ]
            for n, r in self.items()
        ]
        lines = columns(["batch", "items/s", "ms", "memory", ""], rows)
        return "\n".join([*lines, *(f"batch {n}: {reason}" for n, reason in self.failed.items())])

    def svg(self) -> str:
        """Draw throughput over batch size as SVG."""
        width, height, left = 90 * max(len(self), 1) + 80, 260, 70
        rates = {n: n / statistics.median(r.seconds) for n, r in self.items()}
        top = max(rates.values(), default=1.0)
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
        parts.append('<text x="10" y="20" font-size="13">items per second by batch size</text>')
        for k, (n, rate) in enumerate(rates.items()):
            bar = 180 * rate / top
            x, y = left + 90 * k, height - 40 - bar
            parts.append(f'<rect x="{x}" y="{y:.1f}" width="60" height="{bar:.1f}" fill="#4477aa"/>')
            parts.append(f'<text x="{x + 30}" y="{y - 6:.1f}" font-size="12" text-anchor="middle">{rate:.4g}</text>')
            parts.append(f'<text x="{x + 30}" y="{height - 20}" font-size="12" text-anchor="middle">{n}</text>')
        return "\n".join([*parts, "</svg>"])


@checked()
def run_benchmark(
    model: CompiledModel,
    inputs: Mapping[str, Any],
    config: BenchmarkConfig | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    batch_sizes: Sequence[int] | None = None,
) -> Any:
    """Time calls of a compiled model on ``inputs``.

    Parameters are the bound ones, otherwise random. With ``batch_sizes`` the inputs are truncated or repeated along
    their first axis to each size, and the result is a ``Sweep``.
    """
    settings = config or BenchmarkConfig()
    weights = params if params is not None else model.params
    if weights is None:
        weights = model.randomize_params(inputs=inputs)
    if batch_sizes is None:
        return _run(model, weights, inputs, settings)
    sweep = Sweep()
    sweep.failed = {}
    for n in batch_sizes:
        try:
            sweep[n] = _run(model, weights, resized(model, inputs, n), settings)
        except MithrilError as error:
            sweep.failed[n] = error.what
    if not sweep:
        raise InputError("no batch size could be run", facts=[f"{n}: {reason}" for n, reason in sweep.failed.items()])
    return sweep


def _run(
    model: CompiledModel, params: Mapping[str, Any], inputs: Mapping[str, Any], config: BenchmarkConfig
) -> BenchmarkResult:
    backend = model.backend
    arrays = {n: x if backend.is_array(x) else backend.array(x) for n, x in inputs.items()}
    for _ in range(max(config.warmup_iterations, 1)):
        backend.synchronize(model.evaluate(params, arrays))
    seconds = time_calls(lambda: model.evaluate(params, arrays), backend.synchronize, config.benchmark_iterations)
    size = batch_of(inputs)
    median = statistics.median(seconds)
    return BenchmarkResult(
        size,
        tuple(seconds),
        size / median if "throughput" in config.metrics else None,
        median if "latency" in config.metrics else None,
        _peak(model, params, arrays) if "memory_usage" in config.metrics else None,
    )


def _peak(model: CompiledModel, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> int:
    """Return the bytes of parameters, state and inputs plus the measured bytes of one more call."""
    program, arguments = model.bound_call(params, inputs)
    argument_bytes = sum(int(np.prod(x.shape)) * array_type(n, x).dtype.itemsize for n, x in arguments.items())
    return argument_bytes + model.backend.measured_memory(lambda: model.evaluate(params, inputs), program.executable)


def batch_of(inputs: Mapping[str, Any]) -> int:
    """Return the items per call: the size of the first axis of the first input that has one."""
    return next((int(np.shape(x)[0]) for x in inputs.values() if np.ndim(x)), 1)


def resized(model: CompiledModel, inputs: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Truncate or repeat the inputs that share the batch size to another size."""
    if size < 1:
        raise OptionError(f"a batch size cannot be {size}")
    now = batch_of(inputs)
    out = {}
    for name, x in inputs.items():
        array = model.backend.to_numpy(x) if model.backend.is_array(x) else np.asarray(x)
        if array.ndim and array.shape[0] == now:
            array = np.resize(array, (size, *array.shape[1:])) if array.size else array
        out[name] = model.backend.array(array)
    return out
