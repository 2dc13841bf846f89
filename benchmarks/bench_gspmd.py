"""Generated JAX on two processes against the same models typed by hand with ``jax.jit`` and ``NamedSharding``.

``python benchmarks/bench_gspmd.py``: starts two processes of one CPU device each (gloo), which run outputs and
gradients of a model, with the batch split and with fully sharded parameters (``once``: ``fsdp_reshard=False``).
Milliseconds of wall time, the lower quartile of interleaved rounds, and their ratio. Both ways use the same arrays and
the same shardings.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROUNDS, CALLS = 40, 2
KINDS: dict[str, dict[str, Any]] = {
    "data": {},
    "fsdp": {"parallelism": "fsdp"},
    "once": {"parallelism": "fsdp", "fsdp_reshard": False},
}


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, __file__, str(port)]
    running = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    for process in running:
        process.wait()


def rank_main(port: str, rank: int) -> None:
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    from hand_jax import Hand
    from models import encoder, gpt_block, mlp

    cases = {
        "MLP, batch 256": mlp(256),
        "GPT block 256, 8 x 64": gpt_block(256, 8, 8, 64),
        "2 encoder layers 384, 4 x 128": encoder(2, 384, 12, 4, 128),
    }
    for name, case in cases.items():
        for kind, options in KINDS.items():
            times = measured(case, Hand, options)
            if rank == 0:
                generated, hand = times["mithril"], times["by hand"]
                print(
                    f"{name:<32}{kind:<6}{generated * 1e3:>9.2f}{hand * 1e3:>9.2f}{generated / hand:>7.3f}", flush=True
                )


def measured(case: Any, hand: Any, options: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of both ways, after comparing their gradients."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import mithril as ml

    backend = ml.JaxBackend(device="cpu", device_mesh=(2,))
    compiled = ml.compile(case.model, backend, shapes={"input": case.shape}, inference=False, **options)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(case.shape, np.float32)
    drawn = compiled.randomize_params(0)
    outputs, _ = compiled.evaluate(drawn, {"input": x}, np.ones(_output_shape(compiled), np.float32))
    params = compiled.programs[-1].executable.call.placed(drawn)
    batch = NamedSharding(backend.mesh, PartitionSpec("data"))
    x, g = (_placed(a, batch) for a in (x, rng.standard_normal(_output_shape(compiled)).astype(np.float32)))

    def gradients(p: Any, x: Any, g: Any) -> Any:
        y, pull = jax.vjp(lambda p: case.by_hand(hand, p, x), p)
        return y, pull(g)[0]

    step = jax.jit(gradients, out_shardings=(batch, {n: a.sharding for n, a in params.items()}))
    ways: dict[str, Callable[[], Any]] = {
        "mithril": lambda: compiled.evaluate(params, {"input": x}, g),
        "by hand": lambda: step(params, x, g),
    }
    (_, generated), (_, expected) = ways["mithril"](), ways["by hand"]()
    for n, a in expected.items():
        np.testing.assert_allclose(backend.to_numpy(generated[n]), backend.to_numpy(a), rtol=1e-3, atol=1e-3)
    assert outputs
    times: dict[str, list[float]] = {n: [] for n in ways}
    for _ in range(ROUNDS):
        for n, way in ways.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                jax.block_until_ready(way())
            times[n].append((time.perf_counter() - start) / CALLS)
    return {n: sorted(seconds)[len(seconds) // 4] for n, seconds in times.items()}


def _output_shape(compiled: Any) -> tuple[int, ...]:
    return tuple(compiled.programs[0].executable.graph.outputs[0].type.shape)


def _placed(x: Any, sharding: Any) -> Any:
    import jax

    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        rank_main(sys.argv[1], int(sys.argv[2]))
