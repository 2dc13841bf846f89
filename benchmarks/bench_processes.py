"""Steps of ``compiled.to_module()`` and of ``ml.Trainer`` on two processes against the transformer written in PyTorch.

``python benchmarks/bench_processes.py``: forward, backward and AdamW with ``fully_shard`` and with
``DistributedDataParallel`` (the trainer: ``parallelism="fsdp"`` and ``"data"``), interleaved; medians, and the bytes of
parameters, gradients and moments of each process.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mithril as ml
from mithril.models import Embedding, Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention
from mithril_torch.parallel.launcher import launch_others

BLOCKS, FEATURES, HEADS, VOCABULARY, ROWS, TOKENS = 4, 128, 4, 512, 8, 64
ROUNDS = 40


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

    def memory() -> int:
        arrays = [x for p in module.parameters() for x in (p, p.grad, *optimizer.state[p].values())]
        return sum(getattr(x, "to_local", lambda x=x: x)().nbytes for x in arrays if x is not None)

    return step, memory


def trainer_step(way: str, approximate: str) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a step of the trainer on the rows of both processes, which it divides."""
    trainer = ml.Trainer(
        transformer(approximate),
        ml.AdamW(1e-3),
        loss="cross_entropy",
        backend=ml.TorchBackend(device_mesh=(2,)),
        parallelism="fsdp" if way == "fully_shard" else "data",
        progress=False,
    )
    generator = torch.Generator().manual_seed(0)
    tokens, target = (torch.randint(0, VOCABULARY, (2 * ROWS, TOKENS), generator=generator) for _ in range(2))
    batch = {"tokens": tokens.to(torch.int32), "target": target}

    def memory() -> int:
        arrays = trainer.engine.arrays
        trained = [arrays[n] for n in trainer.engine.trained]  # gradients have the size of parameters
        return sum(getattr(x, "to_local", lambda x=x: x)().nbytes for x in (*arrays.values(), *trained))

    return lambda: float(trainer.step(batch)["loss"]), memory


def main() -> None:
    if "RANK" not in os.environ:
        launch_others(2)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for way, approximate in itertools.product(("fully_shard", "DDP"), ("tanh", "none")):
        torch.manual_seed(0)
        steps = {
            name: step_of(make, way, approximate) for name, make in (("generated", generated), ("written", Written))
        }
        steps["trainer"] = trainer_step(way, approximate)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for k in range(ROUNDS):
            for name in list(steps)[:: 1 if k % 2 else -1]:
                dist.barrier()
                start = time.perf_counter()
                steps[name][0]()
                if k >= 4:
                    seconds[name].append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            times = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
            memory = {name: memory() / 2**20 for name, (_, memory) in steps.items()}
            print(f"{way}, gelu {approximate}: written {times['written']:.1f} ms, {memory['written']:.2f} MiB", end="")
            for name in ("generated", "trainer"):
                ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["written"], strict=True))
                print(f"; {name} {times[name]:.1f} ms, {ratio:.3f}, {memory[name]:.2f} MiB", end="")
            print(flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
