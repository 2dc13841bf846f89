"""Execution of generated functions: lazily, evaluated at the end of the call, or compiled by ``mx.compile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Lock
from typing import Any

from mithril.backend import BuildOptions, Forward
from mithril.graph import Graph, Node, OptionError, is_recomputed, iterate
from mithril.ops import if_op, while_op
from mithril_mlx.blas import Blas
from mithril_mlx.mlx_loader import BLAS, mx


def runner(
    forward: Forward, graph: Graph, options: BuildOptions, device: str, on_host: Callable[[Node], bool]
) -> Forward:
    """Return the function to call; ``on_host`` selects the nodes that run as NumPy references."""
    run: Any = _compiled(forward, graph, options, device, on_host)
    device_ = getattr(mx, device)
    donated = [i.name for i in graph.inputs if i.tags.get("donated") and i.role == "state"]
    threads = _threads(options, device)
    is_checkpointed = any(map(is_recomputed, graph.nodes))

    def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with ExitStack() as contexts:
            contexts.enter_context(mx.stream(device_))
            if threads is not None:
                contexts.enter_context(blas_threads(BLAS, threads))
            outputs = run(params, inputs)
            hand_over(inputs, donated)
            if is_checkpointed:
                contexts.enter_context(memory_before_speed())
            mx.eval(outputs)
        return outputs  # type: ignore[no-any-return]

    call.is_compiled = run is not forward  # type: ignore[attr-defined]
    return call


MEMORY_LIMIT = Lock()  # the limit is one number of the process


@contextmanager
def memory_before_speed() -> Iterator[None]:
    """Let MLX start an operation only when those before it have finished.

    Otherwise up to ten operations wait with their results allocated (MLX 0.32), and checkpoints save little.
    """
    with MEMORY_LIMIT:
        # Above its limit MLX waits for running operations, but still allocates.
        before = mx.set_memory_limit(1)
        try:
            yield
        finally:
            mx.set_memory_limit(before)


def hand_over(inputs: Mapping[str, Any], donated: Sequence[str]) -> None:
    """Drop the caller's references to donated arrays: MLX overwrites an array to which nothing else refers."""
    if donated and isinstance(inputs, dict):
        for name in donated:
            inputs.pop(name, None)


def reject_jit_options(options: BuildOptions) -> None:
    """Raise OptionError if there are options for the just-in-time compiler."""
    for name in options.jit_options:
        raise OptionError(
            f"jit_options: '{name}' is unknown to the MLX backend",
            facts=["mx.compile has no options that a program of known shapes could use"],
        )


def _compiled(
    forward: Forward, graph: Graph, options: BuildOptions, device: str, on_host: Callable[[Node], bool]
) -> Any:
    """Apply mx.compile: cheap kernel fusion on a GPU, but seconds of C++ compilation on the CPU of Linux."""
    jit = options.jit if options.jit is not None else device == "gpu"
    reject_jit_options(options)
    if not jit:
        return forward
    branching = next((n for n, _ in iterate(graph) if n.op in (if_op, while_op) or on_host(n)), None)
    if branching is None:
        return mx.compile(forward)
    kind = "fallback" if options.jit else "choice"
    options.decisions.record(
        kind, f"jit: MLX cannot compile '{branching.op.name}'; it runs uncompiled", branching.origin
    )
    return forward


def _threads(options: BuildOptions, device: str) -> int | None:
    """Return the thread limit for products on the CPU; MLX runs all else on one thread per stream."""
    num_threads = options.num_threads
    if num_threads is None:
        return None
    if device != "cpu":
        options.decisions.record("ignored", f"num_threads={num_threads}: this program runs on the GPU")
        return None
    if BLAS.threads() is None:
        if num_threads != 1:
            options.decisions.record(
                "ignored", f"num_threads={num_threads}: products are computed by {BLAS}, on one thread"
            )
        return None
    if num_threads != 1:
        options.decisions.record("choice", "num_threads is that of products; MLX computes all else on one thread")
    return num_threads


@contextmanager
def blas_threads(blas: Blas, count: int) -> Iterator[None]:
    """Limit the threads of products in a block."""
    before = blas.threads()
    if before is None or before == count:
        with nullcontext():
            yield
        return
    blas.set_threads(count)
    try:
        yield
    finally:
        blas.set_threads(before)
