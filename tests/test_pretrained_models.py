"""Pretrained models on every backend, and through GGUF files, which llama.cpp reads if it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril.backend import to_numpy

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-hub" / "tests"))
from checkpoints import folder_of, read_record, write_folder
from record import START, generation_source
from small_tokenizers import SAMPLES, train

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
# record: name in GGUF files
ARCHITECTURES = {"llama2": "llama", "llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_and_sampled_tokens_are_equal_on_all_backends(backend, tmp_path):
    record, folder = read_record("qwen3"), folder_of("qwen3", tmp_path)
    compiled = ml.compile(ml.from_pretrained(folder, cache=32), backend, inference=True)
    prompt = record["prompt"][:5]
    assert ml.generate(compiled, prompt, max_new_tokens=20, stop=()) == record["tokens"]["5"]
    settings = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 11}
    reference = ml.compile(ml.from_pretrained(folder, cache=32), "numpy", inference=True)
    expected = ml.generate(reference, prompt, max_new_tokens=8, stop=(), **settings)
    assert ml.generate(compiled, prompt, max_new_tokens=8, stop=(), **settings) == expected


@pytest.mark.parametrize(
    ("family", "backend"), [*(("t5_gated", b) for b in BACKENDS[1:]), ("whisper", "torch"), ("whisper", "ggml")]
)
def test_texts_of_an_encoder_and_a_decoder_are_equal_on_all_backends(family, backend, tmp_path):
    compiled = ml.compile(ml.from_pretrained(folder_of(family, tmp_path), cache=24), backend, inference=True)
    texts = ml.generate(compiled, [START], source=generation_source(family), max_new_tokens=12, stop=())
    assert texts == [row[:12] for row in read_record(family)["tokens"]]


def exported(family: str, folder: Path, **options) -> Path:
    compiled = ml.compile(ml.from_pretrained(folder_of(family, folder)), "numpy", inference=True)
    path = folder / f"{family}.gguf"
    compiled.export(path, architecture=ARCHITECTURES[family], **options)
    return path


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_files_of_llama_cpp_both_ways(family, tmp_path):
    record, path = read_record(family), exported(family, tmp_path)
    for backend in ("numpy", "ggml"):
        loaded = ml.load(path, backend=backend, context=40)
        assert ml.generate(loaded, record["prompt"][:13], max_new_tokens=20, stop=()) == record["tokens"]["13"]
    again = tmp_path / "again.gguf"
    ml.load(path, backend="numpy").export(again, architecture=ARCHITECTURES[family])
    assert tensors(again) == tensors(path)


def tensors(path: Path) -> dict[str, bytes]:
    from mithril_ggml.gguf.reader import read_gguf

    return {name: t.data.tobytes() for name, t in read_gguf(path).tensors.items()}


def with_tokenizer(kind: str, folder: Path) -> Path:
    """Write a checkpoint of Llama with a small tokenizer."""
    tokenizer, record = train(kind), read_record("llama2")
    size = tokenizer.get_vocab_size() + 5
    table = [size, record["config"]["hidden_size"]]
    tables = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    write_folder(folder, {**record["config"], "vocab_size": size}, {**record["shapes"], **tables})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "qwen2", "spaces"])
def test_exported_files_have_their_vocabulary(kind, tmp_path):
    pytest.importorskip("tokenizers")
    folder, path = with_tokenizer(kind, tmp_path / "model"), tmp_path / "model.gguf"
    ml.compile(ml.from_pretrained(folder), "numpy", inference=True).export(path, architecture="llama")
    original, exported = ml.Tokenizer(folder), ml.Tokenizer(path)
    for text in SAMPLES:
        assert exported.encode(text) == original.encode(text)
    command = ["run", str(path), "The quick", "--max-new-tokens", "6", "--backend", "numpy"]
    shown = subprocess.run([sys.executable, "-m", "mithril", *command], capture_output=True, text=True, check=True)
    compiled = ml.compile(ml.from_pretrained(folder, cache=40), "numpy", inference=True)
    tokens = ml.generate(compiled, original.encode("The quick"), max_new_tokens=6)
    assert shown.stdout.rstrip("\n") == original.decode(tokens).rstrip("\ufffd")
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, n_threads=1)
    for text in SAMPLES:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == original.encode(text)
    text = model("The quick", max_tokens=6, temperature=0.0)["choices"][0]["text"]
    assert text == original.decode(tokens).replace("\ufffd", "")


def test_quantized_files_run_in_place_and_unpacked(tmp_path):
    """The matrices of the file are those of the program: GGML computes with them, other backends with their floats."""
    record, path = read_record("llama2"), exported("llama2", tmp_path, quantize="q8_0")
    assert path.stat().st_size < 0.5 * exported("qwen3", tmp_path).stat().st_size
    inputs = {"input_ids": np.array([record["prompt"]], np.int32)}
    place = ml.load(path)
    floats = ml.load(path, backend="numpy")
    kinds = {name: str(getattr(x, "kind", "float")) for name, x in place.params.items()}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "q8_0" and kinds["model.norm.weight"] == "float"
    a, b = (to_numpy(m(inputs)["logits"]).ravel() for m in (place, floats))
    assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 6, "model_type": "mistral"}, "windows of 'mistral'"),
        ({"model_type": "phi"}, "do not fit|cannot be exported"),
    ],
)
def test_models_without_a_form_in_gguf(change, message, tmp_path):
    record = read_record("llama2")
    with pytest.raises(ml.MithrilError, match=message):
        folder = write_folder(tmp_path / "other", record["config"] | change, record["shapes"])
        compiled = ml.compile(ml.from_pretrained(folder), "numpy", inference=True)
        compiled.export(tmp_path / "other.gguf", architecture="llama")


def test_damaged_files_of_llama_cpp(tmp_path):
    """Whatever bytes a file has, it loads, or is refused with an error of mithril."""
    path = exported("llama2", tmp_path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for trial in range(60):
        changed = bytearray(data[: rng.integers(0, len(data))] if trial % 3 == 0 else data)
        for _ in range(rng.integers(1, 4)):
            if changed:
                changed[rng.integers(0, min(len(changed), 2600))] = rng.integers(0, 256)
        path.write_bytes(bytes(changed))
        try:
            ml.load(path, backend="numpy")
        except ml.MithrilError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_llama_cpp_gives_the_same_tokens(family, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    record, path = read_record(family), exported(family, tmp_path)
    model = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, logits_all=True, n_threads=1)
    for length, expected in record["tokens"].items():
        model.reset()
        model.eval(record["prompt"][: int(length)])
        tokens = []
        while len(tokens) < len(expected):
            tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(tokens[-1:])
        assert tokens == expected
