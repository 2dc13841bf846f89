"""Decoding with a Llama of 111 million parameters: milliseconds per token, seconds and memory of loading.

    python benchmarks/bench_decode.py [--backends c,ggml,numpy] [--peers llama.cpp,transformers] [--tokens 24]
    python benchmarks/bench_decode.py --backends c:int4:dynamic,c:int4 --peers llama.cpp:q4_k_m,onnxruntime:int4
    python benchmarks/bench_decode.py --backends c:q4_k_m:dynamic,c:q4_k_m,ggml:q4_k_m --peers llama.cpp:q4_k_m
    python benchmarks/bench_decode.py --cache --backends c,c:int8,c:int4,c:q8_0,c:q4_k_m --peers llama.cpp:q4_k_m

An engine may have a codebook of 4-bit weights and a dtype of its activations, a type of llama.cpp (a GGUF file that
llama.cpp quantized), or onnxruntime's int4. Every engine runs in a process of its own with one thread (or
``--threads``), reads the same float32 weights, reads a prompt of 16 tokens and continues it by greedy tokens. A row is
the processor time per token, or the elapsed time with several threads (the least of all steps, and the median), the
seconds from the file to the first token, the largest memory of the process above that after imports, the anonymous
memory at the end above that after imports, and whether the tokens are those of the first row. With ``--cache`` the C
backend's programs and packed weights are those that a process before has cached on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
PROMPT = np.random.default_rng(1).integers(3, 32000, 16).tolist()
CACHE = 256


def write(folder: Path) -> None:
    """Write the checkpoint and its GGUF file."""
    from safetensors.numpy import save_file

    import mithril as ml
    from mithril_hub.architectures import build
    from mithril_hub.model import parameter_types

    rng = np.random.default_rng(0)
    model, _ = build(CONFIG, dtype="float32", cache=None)
    weights = {
        name: np.ones(t.shape, np.float32) if len(t.shape) == 1 else 0.04 * rng.standard_normal(t.shape, np.float32)
        for name, t in parameter_types(model).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ml.compile(ml.from_pretrained(folder), "numpy", inference=True).export(folder / "m.gguf", architecture="llama")


def memory(row: str = "VmHWM") -> int:
    """Return the largest resident memory of this process in bytes, or another row of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()  # ru_maxrss would count that of the parent
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(row))


def quantized(folder: Path, kind: str) -> Path:
    """Return the GGUF file in a type of llama.cpp, quantized by it."""
    import llama_cpp

    file = folder / f"{kind}.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}"), 1
    if not file.exists():
        llama_cpp.llama_model_quantize(str(folder / "m.gguf").encode(), str(file).encode(), ctypes.byref(settings))
    return file


def mithril_steps(folder: Path, backend: str, threads: int, is_cached: bool, *setting: str):
    """Yield tokens of a mithril backend, with weights of a codebook or of a GGUF file if the setting has one."""
    import mithril as ml
    from mithril.backend import to_numpy

    options: dict = {"num_threads": threads} if backend == "c" else {}
    if backend == "c" and is_cached:
        options |= {"cache": True, "cache_dir": folder / "cache", "static_inference": True}
    is_file = bool(setting) and setting[0].startswith("q")
    if setting and backend != "ggml":
        options["static_inference"] = True
        if not is_file or len(setting) > 1:
            values = ("stored" if is_file else setting[0], *setting[1:])
            options["quantization"] = dict(zip(("weights", "activations"), values))
    if is_file:
        file, name = folder / f"{setting[0]}.gguf", None if backend == "ggml" else backend
        compiled = ml.load(file, backend=name, context=CACHE, **options)
    else:
        compiled = ml.compile(ml.from_pretrained(folder, cache=CACHE), backend, inference=True, **options)
    session = ml.Session(compiled)
    logits = session.start([PROMPT])
    while True:
        token = int(np.argmax(to_numpy(logits)[0, -1]))
        yield token
        logits = session.extend([[token]])


def llama_cpp_steps(folder: Path, threads: int, kind: str = ""):
    """Yield tokens of llama.cpp with a float32 cache, in float32 or in a quantized type."""
    import llama_cpp

    file, cache = folder / "m.gguf", llama_cpp.GGML_TYPE_F32
    if kind:
        file = quantized(folder, kind)
    library, default = llama_cpp.llama_cpp, llama_cpp.llama_model_default_params

    def without_tiles():
        params = default()
        params.use_extra_bufts = False  # its kernels for AMX end the process with these types
        return params

    library.llama_model_default_params = without_tiles if kind else default
    model = llama_cpp.Llama(
        str(file), n_ctx=CACHE, n_threads=threads, verbose=False, type_k=cache, type_v=cache, n_threads_batch=threads
    )
    model.eval(PROMPT)
    while True:
        token = int(np.argmax(model._ctx.get_logits()[: CONFIG["vocab_size"]]))
        yield token
        model.eval([token])


def transformers_steps(folder: Path):
    """Yield tokens of transformers on PyTorch."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, cache = torch.tensor([PROMPT]), None
    with torch.no_grad():
        while True:
            out = model(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            yield int(tokens)


def measure(engine: str, folder: Path, count: int, threads: int, is_cached: bool) -> dict:
    """Run one engine in this process."""
    engine, *setting = engine.split(":")
    if engine == "llama.cpp":
        import llama_cpp  # noqa: F401

        steps = llama_cpp_steps(folder, threads, *setting)
    elif engine == "onnxruntime":
        from decode_onnxruntime import onnxruntime_steps

        steps = onnxruntime_steps(folder, CONFIG, PROMPT, CACHE, threads, *setting)
    elif engine == "transformers":
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # not needed, and slow to import
        import transformers  # noqa: F401

        steps = transformers_steps(folder)
    else:
        import mithril as ml

        ml.plugins.backend_class(engine)
        steps = mithril_steps(folder, engine, threads, is_cached, *setting)
    before, anonymous, start = memory(), memory("RssAnon"), time.perf_counter()
    tokens = [next(steps), next(steps)]
    loaded = time.perf_counter() - start
    times, clock = [], time.process_time if threads == 1 else time.perf_counter
    for _ in range(count):
        begin = clock()
        tokens.append(next(steps))
        times.append(1e3 * (clock() - begin))
    return {
        "least": min(times),
        "median": statistics.median(times),
        "load": loaded,
        "memory": (memory() - before) / 2**20,
        "anonymous": (memory("RssAnon") - anonymous) / 2**20,
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="c,ggml,numpy,torch,jax,mlx")
    parser.add_argument("--peers", default="llama.cpp,transformers")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        engine, folder = options.run
        print(json.dumps(measure(engine, Path(folder), options.tokens, options.threads, options.cache)))
        return
    print(f"{'engine':14} {'ms least':>9} {'median':>8} {'load s':>8} {'MiB':>7} {'anon':>7}  tokens")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    first = None
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for engine in filter(None, [*options.peers.split(","), *options.backends.split(",")]):
            kind = (engine.split(":")[1:] or [""])[0]
            if kind.startswith("q"):
                quantized(Path(folder), kind)
            command = [sys.executable, __file__, "--run", engine, folder, "--tokens", str(options.tokens)]
            command += ["--threads", str(options.threads), *(["--cache"] * options.cache)]
            if options.cache and engine.split(":")[0] == "c":
                subprocess.run(command, check=False, capture_output=True, env=environment)
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
            if done.returncode:
                print(f"{engine:14} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            row = json.loads(done.stdout.strip().splitlines()[-1])
            first = first or row["tokens"]
            numbers = f"{row['least']:9.1f} {row['median']:8.1f} {row['load']:8.2f}"
            numbers += f" {row['memory']:7.0f} {row['anonymous']:7.0f}"
            print(f"{engine:14} {numbers}  {'equal' if row['tokens'] == first else 'differ'}", flush=True)


if __name__ == "__main__":
    main()
