"""Training steps by PyTorch's autograd: ``compiled.to_module()`` against the hand-written module.

``python benchmarks/bench_module.py``: each hand-written ``torch.nn.Module`` is imported by ``ml.from_torch``, compiled,
and turned into a module again. A step is forward, loss, backward and an update by ``torch.optim.SGD``; interleaved CPU
time.
"""

# ruff: noqa: E402  (threads are chosen before anything counts them)
from __future__ import annotations

import os
import time
from collections.abc import Callable

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import torch
from interleaved import interleaved, table
from torch import nn

import mithril as ml


class GPTBlock(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return torch.as_tensor(x + self.down(nn.functional.gelu(self.up(self.second(x)))))


def residual(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


CASES = {
    "MLP 784-512-512-10, batch 32": (
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        (32, 784),
    ),
    "MLP 16-32-4, batch 8": (lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), (8, 16)),
    "GPT, 4 blocks of 256, 4x64": (lambda: nn.Sequential(*[GPTBlock(256, 8) for _ in range(4)]), (4, 64, 256)),
    "CNN, 5 convolutions of 32, 8x32x32": (lambda: residual(32), (8, 3, 32, 32)),
}


def step(module: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Return a training step of the mean square of the output."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    module.train()

    def run() -> float:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = {}
    for name, (make, shape) in CASES.items():
        torch.manual_seed(0)
        module, x = make(), torch.randn(*shape)
        compiled = ml.compile(ml.from_torch(module, x), "torch").to_module()
        ways = {"hand-written": step(module, x), "to_module": step(compiled, x)}
        first = {way: run() for way, run in ways.items()}
        assert abs(first["hand-written"] - first["to_module"]) <= 1e-4 * abs(first["hand-written"]), first
        rows[name] = interleaved(ways, seconds=6.0, clock=time.process_time)
    table("training step", rows, "hand-written")


if __name__ == "__main__":
    main()
