"""Digests of generated programs: a change that must not alter programs prints the same table before and after.

``python tools/program_digests.py [--backends numpy,c] [--write FOLDER | --compare FOLDER]``: five models,
inference and gradients, on each installed backend. ``--write`` writes the text of each program. ``--compare`` counts
the programs that differ from these texts by the kind of the difference, and fails if one computes differently.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
from collections import Counter
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
SEPARATOR = "\n" + "-" * 80 + "\n"  # between the graph and the source
WORD = r"\b[A-Za-z_]\w*"


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
    text = f"{compiled.graph}{SEPARATOR}{source}".replace(str(PROJECT), "")
    return re.sub(r"0x[0-9a-f]{6,}|(?<![.\w])\d{12,}\b(?!\.)", "ADDRESS", text)  # memory addresses in listings


def programs(backend: str, name: str) -> dict[str, str]:
    """Return the texts of the inference and the gradient program of one model on one backend."""
    make, sample = MODELS[name]
    compiled = ml.compile(make(), backend)
    inputs = {compiled.interface.with_role("input")[0].name: compiled.backend.array(sample())}
    params = compiled.randomize_params(seed=0, inputs=inputs)
    texts = {}
    results = compiled.evaluate(params, inputs)
    texts["inference"] = program_text(compiled)
    gradients = {n: compiled.backend.ones(tuple(r.shape)) for n, r in results.items() if "float" in str(r.dtype)}
    try:
        compiled.evaluate(params, inputs, output_gradients=gradients)
        texts["gradients"] = program_text(compiled)
    except ml.UnsupportedError as error:
        texts["gradients"] = str(error)
    return texts


def without_comments(text: str) -> str:
    """Return a program without comments and docstrings of Python, or else comments of C."""
    graph, _, source = text.partition(SEPARATOR)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return graph + re.sub(r"/\*.*?\*/|//[^\n]*|\s+", " ", source, flags=re.DOTALL)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return graph + ast.unparse(tree)


def is_renamed(before: str, after: str) -> bool:
    """Whether a one-to-one replacement of identifiers makes these programs equal."""
    pairs = set(zip(re.findall(WORD, before), re.findall(WORD, after), strict=False))
    names = [{pair[k] for pair in pairs} for k in (0, 1)]
    return re.sub(WORD, "", before) == re.sub(WORD, "", after) and len(pairs) == len(names[0]) == len(names[1])


def difference(before: str, after: str) -> str:
    """Return the kind of the difference of two programs."""
    if before == after:
        return "equal"
    before, after = without_comments(before), without_comments(after)
    if before == after:
        return "comments and docstrings"
    return "names of functions and variables" if is_renamed(before, after) else "code"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default=",".join(sorted(plugins.backends())))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    kinds: Counter[str] = Counter()
    for backend in arguments.backends.split(","):
        for name in arguments.models.split(","):
            for program, text in programs(backend, name).items():
                digest, file = hashlib.sha256(text.encode()).hexdigest()[:16], f"{backend}-{name}-{program}.txt"
                kind = ""
                if arguments.write is not None:
                    arguments.write.mkdir(parents=True, exist_ok=True)
                    (arguments.write / file).write_text(text)
                if arguments.compare is not None:
                    kind = difference((arguments.compare / file).read_text(), text)
                    kinds[kind] += 1
                print(f"{backend:<8}{name:<10}{program:<12}{digest}  {kind}".rstrip(), flush=True)
    print(*(f"{count:>4} {kind}" for kind, count in kinds.most_common()), sep="\n")
    sys.exit("programs compute differently" if "code" in kinds else 0)


if __name__ == "__main__":
    main()
