"""Digests of generated programs: a change that must not alter programs prints the same table before and after.

``python benchmarks/program_digests.py [--backends numpy,c] [--write FILE | --compare FILE]``: five models, inference
and gradients, on each installed backend. ``--compare`` lists the programs that differ from those of ``--write`` and
fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril import plugins
from mithril.models import Linear, Model, Relu

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import gpt
from lstm_lm import lstm_lm
from resnet18 import resnet18
from unet import unet

PROJECT = Path(__file__).parents[1]


def mlp() -> Model:
    model = Model(name="mlp")
    for size_in, size_out in ((16, 32), (32, 32), (32, 8)):
        model += Linear(size_in, size_out)
        model += Relu()
    return model


def arrays(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def tokens(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 64, shape).astype(np.int32)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], np.ndarray[Any, Any]]]] = {
    "mlp": (mlp, lambda: arrays(4, 16)),
    "gpt": (lambda: gpt(64, length=16, layers=2, heads=2, features=32), lambda: tokens(2, 16)),
    "lstm": (lambda: lstm_lm(64, 16), lambda: tokens(2, 6)),
    "resnet18": (lambda: resnet18(classes=10, width=8), lambda: arrays(1, 3, 32, 32)),
    "unet": (lambda: unet(width=4, depth=2), lambda: arrays(1, 3, 16, 16)),
}


def program_text(compiled: Any) -> str:
    """Return the optimized graph and the generated source of the latest program, without the project's location."""
    program = compiled.programs[-1]
    source = program.executable.source or getattr(program.executable, "listing", "")
    text = f"{compiled.graph}\n{source}".replace(str(PROJECT), "")
    return re.sub(r"0x[0-9a-f]{6,}|\b\d{12,}\b", "ADDRESS", text)  # memory addresses in listings


def digests(backend: str, name: str) -> dict[str, str]:
    """Return the digests of the inference and the gradient program of one model on one backend."""
    make, sample = MODELS[name]
    compiled = ml.compile(make(), backend)
    inputs = {compiled.interface.with_role("input")[0].name: compiled.backend.array(sample())}
    params = compiled.randomize_params(seed=0, inputs=inputs)
    out = {}
    results = compiled.evaluate(params, inputs)
    out["inference"] = program_text(compiled)
    gradients = {n: compiled.backend.ones(tuple(r.shape)) for n, r in results.items() if "float" in str(r.dtype)}
    try:
        compiled.evaluate(params, inputs, output_gradients=gradients)
        out["gradients"] = program_text(compiled)
    except ml.UnsupportedError as error:
        out["gradients"] = str(error)
    return {kind: hashlib.sha256(text.encode()).hexdigest()[:16] for kind, text in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default=",".join(sorted(plugins.backends())))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    table: dict[str, str] = {}
    for backend in arguments.backends.split(","):
        for name in arguments.models.split(","):
            for kind, digest in digests(backend, name).items():
                table[f"{backend} {name} {kind}"] = digest
                print(f"{backend:<8}{name:<10}{kind:<12}{digest}", flush=True)
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(table, indent=1) + "\n")
    if arguments.compare is not None:
        earlier = json.loads(arguments.compare.read_text())
        different = [f"{program}: {digest}" for program, digest in table.items() if earlier.get(program) != digest]
        sys.exit("\n".join(["programs that differ:", *different]) if different else 0)


if __name__ == "__main__":
    main()
