"""Nine standard programs in mithril, PyTorch and Keras 3: lines of code, and time of a training step.

``python benchmarks/bench_programs.py [BACKEND] [PROGRAM...]``: lines of each program in the three files (blank lines,
comments, docstrings and imports excluded, all formatted by ruff; a helper counts in the program that comes first, and
PyTorch's and Keras's function of a step in the total only), and milliseconds of processor time of a step on one
thread, the best of interleaved rounds. All compute the same with their own initial values. The default backend is
torch, to compare with the same kernels; Keras runs on PyTorch.
"""

# ruff: noqa: E402  (threads are chosen before anything counts them)
from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import harness
import numpy as np
import programs_keras
import programs_torch
import standard_programs
import torch

FILES = {
    "mithril": ROOT / "examples/standard_programs.py",
    "PyTorch": ROOT / "benchmarks/programs_torch.py",
    "Keras": ROOT / "benchmarks/programs_keras.py",
}
SIZES: dict[str, dict[str, int]] = {
    "ResNet": {"width": 32, "batch": 16},
    "U-Net": {"width": 16, "batch": 8},
    "ViT": {"features": 64, "batch": 16, "layers": 4, "heads": 4},
    "GPT": {"features": 64, "batch": 8, "length": 64, "layers": 4, "heads": 4},
    "LSTM": {"features": 64, "batch": 16},
    "VAE": {"hidden": 256, "batch": 64},
    "GAN": {"hidden": 128, "batch": 64},
    "contrastive": {"width": 16, "batch": 16},
    "LoRA": {"features": 64, "batch": 16, "layers": 4, "heads": 4},
}


def lines(path: Path) -> dict[str, int]:
    """Return the number of lines of code between the marks of the programs in a file."""
    text = path.read_text()
    code = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            code.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    counts: dict[str, int] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# program"):
            name = line.partition(": ")[2]
        elif name and line.strip() and not line.strip().startswith(("#", '"""')) and number in code:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def steps(name: str, backend: str) -> dict[str, Callable[[], Any]]:
    """Return a training step of a program in each framework, on the same data."""
    sizes = dict(SIZES[name])
    trainer, batch = standard_programs.PROGRAMS[name](backend, **sizes)
    columns = list(batch.values()) if isinstance(batch, dict) else list(batch)
    for only_data in ("batch", "length", "vocabulary"):
        sizes.pop(only_data, None)
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in columns]  # noqa: TID251
    by_torch = programs_torch.PROGRAMS[name](*[t if t.is_floating_point() else t.long() for t in tensors], **sizes)
    sizes = {"layers_" if n == "layers" else n: size for n, size in sizes.items()}
    channels_last = [np.moveaxis(x, 1, -1) if x.ndim == 4 else x for x in columns]
    by_keras = programs_keras.PROGRAMS[name](*channels_last, **sizes)
    return {"mithril": lambda: float(trainer.step(batch)["loss"]), "PyTorch": by_torch, "Keras": by_keras}


def main() -> None:
    backend, *names = harness.arguments(__doc__, "[BACKEND] [PROGRAM]").words or ["torch"]
    torch.set_num_threads(1)
    counts = {framework: lines(path) for framework, path in FILES.items()}
    print(f"{'':12}{'lines':^27}{f'ms per step, mithril on {backend}':^42}")
    print(f"{'':12}" + "".join(f"{n:>9}" for n in FILES) + "".join(f"{n:>14}" for n in FILES))
    for name in names or standard_programs.PROGRAMS:
        seconds = harness.interleaved(steps(name, backend), seconds=2.0, min_rounds=10)
        cells = "".join(f"{counts[n][name]:>9}" for n in FILES)
        times = "".join(f"{1e3 * seconds[n]:>7.2f} {seconds[n] / seconds['PyTorch']:>5.2f}x" for n in FILES)
        print(f"{name:12}{cells}{times}", flush=True)
    totals = {framework: sum(of_program.values()) for framework, of_program in counts.items()}
    print(f"{'total':12}" + "".join(f"{n:>9}" for n in totals.values()))


if __name__ == "__main__":
    main()
