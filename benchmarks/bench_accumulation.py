"""Bytes that two processes exchange in a step of several batches, against ``DistributedDataParallel.no_sync``.

``unshare -rn python benchmarks/bench_accumulation.py``: both processes send over the loopback of a network namespace of
their own, whose counter is read before and after some steps. A transformer of 1.6 MB, 4 batches in each step.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

BATCHES, STEPS, WIDTH, VOCABULARY = 4, 3, 128, 512
WAYS = ("by hand", "torch", "jax")


def sent() -> int:
    """Return the bytes that the loopback has sent."""
    (line,) = (text for text in Path("/proc/net/dev").read_text().splitlines() if text.strip().startswith("lo:"))
    return int(line.split()[9])


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for way in WAYS:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = str(probe.getsockname()[1])
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        running = []
        for rank in ("0", "1"):
            settings = {**os.environ, **variables, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "RANK": rank}
            running.append(subprocess.Popen([sys.executable, __file__, way], env={**settings, "LOCAL_RANK": rank}))
        for process in running:
            process.wait()


def by_hand() -> Any:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    module = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(WIDTH, VOCABULARY),
    )
    replica = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(tokens: np.ndarray[Any, Any]) -> None:
        rows = torch.from_numpy(tokens).long().chunk(2)[dist.get_rank()]
        for k in range(BATCHES):
            with replica.no_sync() if k + 1 < BATCHES else nullcontext():
                torch.nn.functional.cross_entropy(replica(rows).flatten(0, 1), rows.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, 4 * sum(p.numel() for p in module.parameters()), dist.barrier


def generated(engine: str) -> Any:
    import mithril as ml
    from mithril.models import Embedding, IOKey, LayerNorm, Linear, Model, MultiHeadAttention, Relu

    if engine == "jax":
        import jax
        from jax.experimental.multihost_utils import sync_global_devices

        address = f"localhost:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, 2, int(os.environ["RANK"]))
        backend: Any = ml.JaxBackend(device_mesh=(2,))
    else:
        import torch.distributed as dist

        backend = ml.TorchBackend(device_mesh=(2,))
    x = Embedding(VOCABULARY, WIDTH, name="table")(IOKey("tokens", dtype="int32"))
    for k in range(2):
        i = IOKey("x")
        h = LayerNorm(WIDTH, name="n1")(i + MultiHeadAttention(WIDTH, 4, name="attn")(i))
        f = Linear(WIDTH, name="down")(Relu()(Linear(4 * WIDTH, name="up")(h)))
        x = Model.create(outputs={"y": LayerNorm(WIDTH, name="n2")(h + f)}, name=f"h{k}")(x)
    model = Model.create(outputs={"y": Linear(VOCABULARY, name="head")(x)})
    recipe: dict[str, Any] = {"loss": "cross_entropy", "gradient_accumulation_steps": BATCHES, "progress": False}
    trainer = ml.Trainer(model, ml.SGD(0.1), backend=backend, **recipe)

    def step(tokens: np.ndarray[Any, Any]) -> None:
        for _ in range(BATCHES):
            float(trainer.step({"tokens": tokens, "target": tokens})["loss"])

    step(tokens())
    size = sum(4 * int(np.prod(x.shape)) for x in trainer.params.values())
    return step, size, (lambda: sync_global_devices("step")) if engine == "jax" else dist.barrier


def tokens() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (8, 32)).astype(np.int32)


def measure(way: str) -> None:
    step, size, barrier = by_hand() if way == "by hand" else generated(way)
    step(tokens())
    barrier()
    before = sent()
    for _ in range(STEPS):
        step(tokens())
    barrier()
    if os.environ["RANK"] == "0":
        print(f"{way:<8} {(sent() - before) / STEPS / size:5.2f} bytes sent for each byte of parameters", flush=True)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
