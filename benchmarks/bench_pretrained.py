"""Families of pretrained models on every backend against transformers: logits, greedy tokens, seconds.

    python benchmarks/bench_pretrained.py [--backends numpy,c] [--families llama2,gpt2]

The checkpoints are those of plugins/mithril-hub/tests/record.py, with weights drawn from their names. Each row tells
the largest difference of logits, whether the tokens of two prompts, and of a batch of them, equal those of
transformers, and the seconds of compiling and running all of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mithril as ml
from mithril.backend import to_numpy

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-hub" / "tests"))
from checkpoints import folder_of
from record import (
    DECODERS,
    GENERATORS,
    NETWORKS,
    PROMPT,
    START,
    generated,
    generation_source,
    network_inputs,
    network_reference,
    reference,
)


def row(folder: Path, backend: str, expected: tuple) -> str:
    """Return the comparison of one family on one backend."""
    start = time.perf_counter()
    logits, tokens = expected
    plain = ml.compile(ml.from_pretrained(folder), backend, inference=True)
    difference = np.abs(to_numpy(plain({"input_ids": PROMPT[None]})["logits"])[0] - logits).max()
    cached = ml.compile(ml.from_pretrained(folder, cache=48), backend, inference=True)
    prompts = [PROMPT[:n].tolist() for n in (5, 13)]
    single = [ml.generate(cached, prompt, max_new_tokens=20, stop=()) for prompt in prompts]
    batch = ml.generate(cached, prompts, max_new_tokens=20, stop=())
    seconds = time.perf_counter() - start
    equal = ["no", "yes"]
    return f"{difference:9.1e}  {equal[single == tokens]:>6}  {equal[batch == tokens]:>6}  {seconds:7.1f}"


def network_row(folder: Path, backend: str, model_class: str, texts: list | None) -> str:
    """Return the comparison of all outputs of an encoder; of padded positions only the numbers that count.

    ``texts`` are the tokens that transformers generates from an encoder's input.
    """
    start = time.perf_counter()
    model = ml.from_pretrained(folder)
    inputs = network_inputs(model)
    expected = network_reference(folder, model_class, inputs, model.outputs)
    outputs = ml.compile(model, backend, inference=True)(inputs)
    differences = [np.abs(to_numpy(outputs[name]) - y)[:, :4].max() for name, y in expected.items()]
    single = batch = ""
    if texts is not None:
        cached = ml.compile(ml.from_pretrained(folder, cache=24), backend, inference=True)
        source, settings = generation_source(folder.name), {"max_new_tokens": 20, "stop": ()}
        single, batch = (
            ["no", "yes"][equal]
            for equal in (
                [ml.generate(cached, [START], source=row, **settings) for row in source] == texts,
                ml.generate(cached, [START], source=source, **settings) == texts,
            )
        )
    return f"{max(differences):9.1e}  {single:>6}  {batch:>6}  {time.perf_counter() - start:7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="numpy,jax,torch,mlx,c,ggml")
    parser.add_argument("--families", default=",".join([*DECODERS, *NETWORKS]))
    options = parser.parse_args()
    print(f"{'family':18} {'backend':8} {'logits':>9}  {'single':>6}  {'batch':>6}  {'seconds':>7}")
    with tempfile.TemporaryDirectory() as root:
        for family in options.families.split(","):
            folder = folder_of(family, Path(root))
            expected = reference(folder) if family in DECODERS else None
            texts = generated(folder, family) if family in GENERATORS else None
            for backend in options.backends.split(","):
                network = NETWORKS.get(family)
                if network is None:
                    text = row(folder, backend, expected)
                else:
                    text = network_row(folder, backend, network[0], texts)
                print(f"{family:18} {backend:8} {text}", flush=True)


if __name__ == "__main__":
    main()
