"""Errors of the logits of a Llama of 111 million parameters whose weights have few bits, on the C backend.

``python benchmarks/bench_weight_errors.py``: for each codebook and each type of GGUF files, with float32 inputs of
products and with bytes, the distance of the logits to those of float32 weights divided by their norm, and how many of
16 prompts have the same most likely token. Weights are normal random numbers, for which few bits lose more than for
trained ones. Files are quantized by llama.cpp, whose own logits are compared with its own float32 ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from bench_decode import CONFIG, quantized, write

import mithril as ml

CODEBOOKS = ("int8", "int4", "nf4", "iq4_nl", "mxfp4")
TYPES = ("q8_0", "q4_k_m", "q4_0")
PROMPTS = np.random.default_rng(1).integers(3, CONFIG["vocab_size"], (16, 8))
Array = np.ndarray


def logits(compiled: ml.CompiledModel) -> Array:
    """Return the logits after each prompt."""
    return np.asarray(ml.Session(compiled).start(PROMPTS.tolist()))[:, -1]


def with_codebook(folder: Path, weights: str | None, activations: str | None) -> Array:
    """Return the logits with weights of a codebook, or with float32 weights."""
    setting = {"weights": weights, **({"activations": activations} if activations else {})}
    options = {"static_inference": True, "quantization": setting} if weights else {}
    model = ml.from_pretrained(folder, cache=PROMPTS.shape[1])
    return logits(ml.compile(model, "c", inference=True, **options))


def of_file(file: Path, activations: str | None) -> Array:
    """Return the logits with the weights of a GGUF file."""
    setting = {"weights": "stored", "activations": activations}
    options = {"quantization": setting} if activations else {}
    return logits(ml.load(file, backend="c", context=PROMPTS.shape[1], static_inference=True, **options))


def of_llama_cpp(file: Path) -> Array:
    """Return the logits of llama.cpp."""
    import llama_cpp

    model = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, verbose=False)
    rows = []
    for prompt in PROMPTS.tolist():
        model.reset()
        model.eval(prompt)
        rows.append(np.array(model._ctx.get_logits()[: CONFIG["vocab_size"]]))
    return np.stack(rows)


def cell(computed: Array, expected: Array) -> str:
    """Return the relative error, and the number of equal tokens."""
    error = np.linalg.norm(computed - expected) / np.linalg.norm(expected)
    return f"{error:8.2%} {(computed.argmax(-1) == expected.argmax(-1)).sum():3}"


def main() -> None:
    print(f"{'weights':8} {'float32':>12} {'bytes':>12} {'llama.cpp':>12}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        expected = with_codebook(folder, None, None)
        for weights in CODEBOOKS:
            cells = [cell(with_codebook(folder, weights, a), expected) for a in (None, "dynamic")]
            print(f"{weights:8} {' '.join(cells)}", flush=True)
        theirs = of_llama_cpp(folder / "m.gguf")
        for kind in TYPES:
            file = quantized(folder, kind)
            cells = [cell(of_file(file, a), expected) for a in (None, "dynamic")]
            print(f"{kind:8} {' '.join(cells)} {cell(of_llama_cpp(file), theirs)}", flush=True)


if __name__ == "__main__":
    main()
