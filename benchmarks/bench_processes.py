"""Steps of ``compiled.to_module()`` and of ``ml.Trainer`` on two processes against the transformer written in PyTorch.

``python benchmarks/bench_processes.py``: forward, backward and AdamW with ``fully_shard`` and with
``DistributedDataParallel`` (the trainer: ``parallelism="fsdp"`` and ``"data"``), and in two stages of
``torch.distributed.pipelining``, interleaved. Medians of wall time and of processor time of both processes, and the
bytes of parameters, gradients and moments of each process. Names of ways as arguments select them.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import mithril as ml
from mithril.models import Embedding, Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention
from mithril_torch.parallel.launcher import launch_others

BLOCKS, FEATURES, HEADS, VOCABULARY, ROWS, TOKENS = 4, 128, 4, 512, 8, 64
ROUNDS, CHUNKS = 40, 4
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
WAYS = ("fully_shard", "DDP", *SCHEDULES)


def transformer(approximate: str) -> Model:
    x = Embedding(VOCABULARY, FEATURES, name="wte")(IOKey("tokens"))
    for k in range(BLOCKS):
        i = IOKey("x")
        h = i + MultiHeadAttention(FEATURES, HEADS, causal=True, name="attn")(LayerNorm(FEATURES, name="ln_1")(i))
        f = Gelu(approximate=approximate)(Linear(4 * FEATURES, name="fc")(LayerNorm(FEATURES, name="ln_2")(h)))
        x = Model.create(outputs={"y": h + Linear(FEATURES, name="proj")(f)}, name=f"h{k}")(x)
    logits = Linear(VOCABULARY, name="head")(LayerNorm(FEATURES, name="ln_f")(x))
    return Model.create(outputs={"logits": logits})


def generated(approximate: str) -> Any:
    return ml.compile(transformer(approximate), "torch", shapes={"tokens": ["B", TOKENS]}).to_module()


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (torch.nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(rows, tokens, HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(rows, tokens, FEATURES))


class Block(torch.nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.ln_1, self.attn = torch.nn.LayerNorm(FEATURES), Attention()
        self.ln_2, self.fc = torch.nn.LayerNorm(FEATURES), torch.nn.Linear(FEATURES, 4 * FEATURES)
        self.proj = torch.nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attn(self.ln_1(x))
        return h + self.proj(F.gelu(self.fc(self.ln_2(h)), approximate=self.approximate))


class Written(torch.nn.Module):
    """The same transformer with the same names of parameters."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(VOCABULARY, FEATURES)
        for k in range(BLOCKS):
            self.add_module(f"h{k}", Block(approximate))
        self.ln_f, self.head = torch.nn.LayerNorm(FEATURES), torch.nn.Linear(FEATURES, VOCABULARY)

    @property
    def blocks(self) -> list[torch.nn.Module]:
        return [self.get_submodule(f"h{k}") for k in range(BLOCKS)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def step_of(make: Callable[[str], Any], way: str, approximate: str) -> tuple[Callable[[], float], Callable[[], int]]:
    module = make(approximate)
    if way == "fully_shard":
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
    else:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator, dtype=torch.int32)
    targets = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, lambda: memory_of(module, optimizer)


class WrittenStage(torch.nn.Module):
    """Half of the transformer."""

    def __init__(self, approximate: str, index: int) -> None:
        super().__init__()
        model = Written(approximate)
        self.blocks = torch.nn.ModuleList(model.blocks[2 * index : 2 * index + 2])
        self.first = model.wte if index == 0 else torch.nn.Identity()
        self.last = torch.nn.Sequential(model.ln_f, model.head) if index else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stage_step(way: str, approximate: str) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a step in which both processes have the rows of both, in chunks."""
    rank = dist.get_rank()
    module = WrittenStage(approximate, rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = SCHEDULES[way](
        stage, CHUNKS, loss_fn=lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten())
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
    batch = whole_batch()

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        else:
            schedule.step(target=batch["target"], losses=losses)
        optimizer.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(loss, 1)  # as the trainer, which reports the loss in all processes
        return float(loss)

    return step, lambda: memory_of(module, optimizer)


def memory_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    arrays = [x for p in module.parameters() for x in (p, p.grad, *optimizer.state[p].values())]
    return sum(getattr(x, "to_local", lambda x=x: x)().nbytes for x in arrays if x is not None)


def whole_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, target = (torch.randint(0, VOCABULARY, (2 * ROWS, TOKENS), generator=generator) for _ in range(2))
    return {"tokens": tokens.to(torch.int32), "target": target}


OPTIONS = {
    "fully_shard": ((2,), {"parallelism": "fsdp"}),
    "DDP": ((2,), {"parallelism": "data"}),
    **{name: ((1, 1, 2), {"pipeline_schedule": name, "pipeline_chunks": CHUNKS}) for name in SCHEDULES},
}


def trainer_step(way: str, approximate: str) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a step of the trainer on the rows of both processes, which it divides."""
    mesh, options = OPTIONS[way]
    trainer = ml.Trainer(
        transformer(approximate),
        ml.AdamW(1e-3),
        loss="cross_entropy",
        backend=ml.TorchBackend(device_mesh=mesh),
        progress=False,
        **options,
    )
    batch = whole_batch()

    def memory() -> int:
        arrays = trainer.engine.arrays
        trained = [arrays[n] for n in trainer.engine.trained]  # gradients have the size of parameters
        return sum(getattr(x, "to_local", lambda x=x: x)().nbytes for x in (*arrays.values(), *trained))

    return lambda: float(trainer.step(batch)["loss"]), memory


def steps_of(way: str, approximate: str) -> dict[str, tuple[Callable[[], float], Callable[[], int]]]:
    """Return the steps to compare, the written one first."""
    if way in SCHEDULES:
        steps = {"written": stage_step(way, approximate)}
    else:
        steps = {"written": step_of(Written, way, approximate), "generated": step_of(generated, way, approximate)}
    return {**steps, "trainer": trainer_step(way, approximate)}


def measure(way: str, approximate: str) -> None:
    """Print the medians of the steps, and of their ratios to the written one round by round."""
    torch.manual_seed(0)
    steps = steps_of(way, approximate)
    wall: dict[str, list[float]] = {name: [] for name in steps}
    work: dict[str, list[float]] = {name: [] for name in steps}
    for k in range(ROUNDS):
        for name in list(steps)[:: 1 if k % 2 else -1]:
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            steps[name][0]()
            busy = time.process_time() - busy
            if k >= 4:
                wall[name].append(time.perf_counter() - start)
                total = torch.tensor(busy, dtype=torch.float64)
                dist.all_reduce(total)
                work[name].append(float(total))
    memory = {name: memory() / 2**20 for name, (_, memory) in steps.items()}
    if dist.get_rank():
        return
    print(f"{way}, gelu {approximate}, load {os.getloadavg()[0]:.1f}: ", end="")
    parts = []
    for name in steps:
        part = (
            f"{name} {statistics.median(wall[name]) * 1e3:.1f} ms, processors {statistics.median(work[name]) * 1e3:.1f}"
        )
        if name != "written":
            ratios = [
                statistics.median(a / b for a, b in zip(seconds[name], seconds["written"], strict=True))
                for seconds in (wall, work)
            ]
            part += f", ratios {ratios[0]:.3f} and {ratios[1]:.3f}, best {min(wall[name]) / min(wall['written']):.3f}"
        parts.append(f"{part}, {memory[name]:.2f} MiB")
    print("; ".join(parts), flush=True)


def main() -> None:
    if "RANK" not in os.environ:
        launch_others(2)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for way, approximate in itertools.product(WAYS, ("tanh", "none")):
        if way in (sys.argv[1:] or WAYS):
            measure(way, approximate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
