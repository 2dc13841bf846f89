"""Pretrained models on every backend, and through GGUF files, which llama.cpp reads if it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril.backend import to_numpy
from mithril_serve.cli import loaded
from mithril_testing.damaged_files import attempts, check, flipped, truncated

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-hub" / "tests"))
from checkpoints import folder_of, read_record, write_folder
from record import START, generation_source
from small_tokenizers import SAMPLES, train

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
# record: name in GGUF files
ARCHITECTURES = {
    "llama2": "llama",
    "llama3": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "phi3": "phi3",
}
# Settings that GGUF files can describe, where those of the record have no form in them.
DESCRIBED = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "gemma2": {"sliding_window": 4096, "query_pre_attn_scalar": 16},
}


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


def described(family: str, folder: Path) -> Path:
    """Write the checkpoint of a family with settings that GGUF files can describe."""
    record = read_record(family)
    return write_folder(folder / family, record["config"] | DESCRIBED.get(family, {}), record["shapes"])


def exported(family: str, folder: Path, **options) -> Path:
    compiled = ml.compile(ml.from_pretrained(described(family, folder)), "numpy", inference=True)
    path = folder / f"{family}.gguf"
    compiled.export(path, architecture=ARCHITECTURES[family], **options)
    return path


def tokens_of(family: str, folder: Path) -> list[int]:
    """Return the tokens of transformers, or of the folder where its settings are not those of the record."""
    record = read_record(family)
    if family not in DESCRIBED:
        return record["tokens"]["13"]
    compiled = ml.compile(ml.from_pretrained(folder / family, cache=40), "numpy", inference=True)
    return ml.generate(compiled, record["prompt"][:13], max_new_tokens=20, stop=())


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_files_of_llama_cpp_both_ways(family, tmp_path):
    record, path = read_record(family), exported(family, tmp_path)
    expected = tokens_of(family, tmp_path)
    for backend in ("numpy", "ggml"):
        loaded = ml.load(path, backend=backend, context=40)
        assert ml.generate(loaded, record["prompt"][:13], max_new_tokens=20, stop=()) == expected
    again = tmp_path / "again.gguf"
    ml.load(path, backend="numpy").export(again, architecture=ARCHITECTURES[family])
    assert again.read_bytes() == path.read_bytes()


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


QUERY, EXPERT = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe.experts.2.w1.weight"
ROUTER = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.mark.parametrize(("family", "packed"), [("llama2", [QUERY]), ("mixtral", [QUERY, EXPERT])])
def test_quantized_files_run_in_place_and_unpacked(family, packed, tmp_path):
    """The matrices of the file are those of the program: GGML computes with them, other backends with their floats."""
    record, path = read_record(family), exported(family, tmp_path, quantize="q8_0")
    inputs = {"input_ids": np.array([record["prompt"]], np.int32)}
    place = ml.load(path)
    floats = ml.load(path, backend="numpy")
    kinds = {name: str(getattr(x, "kind", "float")) for name, x in place.params.items()}
    assert {kinds[name] for name in packed} == {"q8_0"} and kinds["model.norm.weight"] == "float"
    assert kinds.get(ROUTER, "float") == "float"
    a, b = (to_numpy(m(inputs)["logits"]).ravel() for m in (place, floats))
    assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 6, "model_type": "mistral"}, "windows of 'mistral'"),
        ({"model_type": "phi"}, "do not support: rms_norm_eps"),
    ],
)
def test_models_without_a_form_in_gguf(change, message, tmp_path):
    record = read_record("llama2")
    with pytest.raises(ml.MithrilError, match=message):
        folder = write_folder(tmp_path / "other", record["config"] | change, record["shapes"])
        compiled = ml.compile(ml.from_pretrained(folder), "numpy", inference=True)
        compiled.export(tmp_path / "other.gguf", architecture="llama")


@pytest.mark.parametrize("family", ["llama2", "mixtral"])
def test_damaged_files_of_llama_cpp(family, tmp_path):
    """Whatever bytes a file has, it loads, or is refused with an error of mithril."""
    path = exported(family, tmp_path)
    check_damaged(path, tmp_path)


def check_damaged(path: Path, folder: Path) -> None:
    """Load changed copies of a file."""
    target = folder / "damaged.gguf"

    def read(content: bytes) -> None:
        target.write_bytes(content)
        ml.load(target, backend="numpy")

    changes = {"truncated": truncated, "flipped": partial(flipped, first=2600)}
    check(list(attempts([path.read_bytes()], changes, read, seed=0, count=40)), refused=20)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_llama_cpp_gives_the_same_tokens(family, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    record, path = read_record(family), exported(family, tmp_path)
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # of the cache
    model = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, logits_all=True, n_threads=1, **exact)
    expected, tokens = tokens_of(family, tmp_path), []
    model.eval(record["prompt"][:13])
    while len(tokens) < len(expected):
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(tokens[-1:])
    assert tokens == expected


# -- encoders ---------------------------------------------------------------------------------------------------------
def encoder(family: str, folder: Path, pooling: str = "") -> Path:
    """Write a checkpoint of BERT, with the pooling of sentence-transformers, and export it."""
    source = folder_of(family, folder)
    if pooling:
        (source / "1_Pooling").mkdir()
        settings = {f"pooling_mode_{name}": name == pooling for name in ("mean_tokens", "cls_token", "max_tokens")}
        (source / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    path = folder / f"{family}.gguf"
    ml.compile(ml.from_pretrained(source), "numpy", inference=True).export(path, architecture="bert")
    return path


TEXTS = {
    "input_ids": np.array([[5, 7, 9, 11, 3], [4, 8, 1, 0, 0]], np.int32),
    "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32),
    "token_type_ids": np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], np.int32),
}


def test_the_server_reads_encoders_of_folders_and_files(tmp_path):
    path = encoder("bert", tmp_path, "mean_tokens")
    texts = {"input_ids": TEXTS["input_ids"][:1]}
    folder, tokenizer = loaded(str(tmp_path / "bert"), "numpy", 64, "float32")
    assert tokenizer is None
    file, _ = loaded(str(path), "numpy", 64, "float32")
    np.testing.assert_allclose(folder(texts)["embedding"], file(texts)["embedding"], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("family", "pooling", "further"),
    [("bert", "", []), ("bert", "mean_tokens", ["embedding"]), ("bert", "cls_token", ["embedding"])]
    + [("bert_classes", "", [])],
)
def test_encoders_both_ways(family, pooling, further, tmp_path):
    path = encoder(family, tmp_path, pooling)
    original = ml.compile(ml.from_pretrained(tmp_path / family), "numpy", inference=True)(TEXTS)
    assert [name for name in original if name == "embedding"] == further
    for backend in ("numpy", "ggml"):
        results = ml.load(path, backend=backend)(TEXTS)
        assert [*results] == [*original]
        for name, expected in original.items():
            np.testing.assert_allclose(to_numpy(results[name]), to_numpy(expected), rtol=1e-5, atol=3e-6)
        if further:
            hidden, mask = to_numpy(original["last_hidden_state"]), TEXTS["attention_mask"][:, :, None]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            expected = mean if pooling == "mean_tokens" else hidden[:, 0]
            np.testing.assert_allclose(to_numpy(results["embedding"]), expected, rtol=1e-5, atol=3e-6)
    again = tmp_path / "again.gguf"
    ml.load(path, backend="numpy").export(again, architecture="bert")
    assert again.read_bytes() == path.read_bytes()


def test_quantized_encoders_keep_positions_as_floats(tmp_path):
    folder_of("bert", tmp_path)
    compiled = ml.compile(ml.from_pretrained(tmp_path / "bert"), "numpy", inference=True)
    compiled.export(tmp_path / "small.gguf", architecture="bert", quantize="q8_0")
    loaded = ml.load(tmp_path / "small.gguf")
    kinds = {str(getattr(x, "kind", "float")) for n, x in loaded.params.items() if "position" in n or "type" in n}
    assert kinds == {"float"}
    a, b = (to_numpy(m(TEXTS)["last_hidden_state"]).ravel() for m in (loaded, compiled))
    assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999


@pytest.mark.parametrize(
    ("family", "pooling", "output"),
    [("bert", "mean_tokens", "embedding"), ("bert", "cls_token", "embedding"), ("bert_classes", "", "logits")],
)
def test_llama_cpp_gives_the_same_embeddings(family, pooling, output, tmp_path):
    """llama.cpp computes GELU by its approximation, so that the numbers are close and not equal."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = encoder(family, tmp_path, pooling)
    expected = to_numpy(ml.load(path, backend="numpy")({"input_ids": TEXTS["input_ids"][:1]})[output])[0]
    model = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, embedding=True, n_threads=1)
    model._batch.add_sequence(TEXTS["input_ids"][0].tolist(), 0, True)
    model._ctx.decode(model._batch)
    values = llama_cpp.llama_get_embeddings_seq(model._ctx.ctx, 0)
    np.testing.assert_allclose([values[n] for n in range(expected.size)], expected, atol=2e-3)


def test_encoders_are_exported_with_their_vocabulary(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer, record = train("wordpiece"), read_record("bert")
    size, name = tokenizer.get_vocab_size(), "embeddings.word_embeddings.weight"
    table = {name: [size, record["config"]["hidden_size"]]}
    folder = write_folder(tmp_path / "m", record["config"] | {"vocab_size": size}, record["shapes"] | table)
    tokenizer.save(str(folder / "tokenizer.json"))
    path = tmp_path / "m.gguf"
    ml.compile(ml.from_pretrained(folder), "numpy", inference=True).export(path, architecture="bert")
    original, exported = ml.Tokenizer(folder), ml.Tokenizer(path)
    samples = [*SAMPLES[:2], "FOX dog", "isn't  it?"]
    for text in samples:
        assert exported.encode(text) == original.encode(text)
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, embedding=True, n_threads=1)
    for text in samples:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == original.encode(text)


def test_damaged_encoders(tmp_path):
    check_damaged(encoder("bert", tmp_path, "mean_tokens"), tmp_path)


@pytest.mark.parametrize("target", [{"architecture": "llama"}, {"format": "huggingface"}])
@pytest.mark.parametrize(
    ("path", "layer", "actual", "expected"),
    [
        ("lm_head", ml.models.hook(ml.ops.tanh), "Hooked(", "Projection("),
        ("*.layers.0.input_layernorm", ml.models.RMSNorm(eps=0.5), "RMSNorm(eps=0.5)", "Norm("),
    ],
)
def test_files_of_a_family_hold_no_other_layers(path, layer, actual, expected, target, tmp_path):
    model = ml.from_pretrained(described("llama2", tmp_path))
    model.replace(path, layer)
    compiled = ml.compile(model, "numpy", inference=True)
    with pytest.raises(ml.UnsupportedError) as caught:
        compiled.export(tmp_path / "exported.gguf", **target)
    text = str(caught.value)
    assert actual in text and f"the model's settings describe {expected}" in text and "layers that differ: 1" in text
    assert not (tmp_path / "exported.gguf").exists()


def test_encoders_without_a_form_in_gguf(tmp_path):
    path = encoder("bert", tmp_path)
    with pytest.raises(ml.InputError, match="have no cache"):
        ml.load(path, context=16)
    record = read_record("bert")
    other = write_folder(tmp_path / "other", record["config"] | {"hidden_act": "relu"}, record["shapes"])
    with pytest.raises(ml.UnsupportedError, match="activation 'relu' have no form"):
        ml.compile(ml.from_pretrained(other), "numpy", inference=True).export(path, architecture="bert")
    with pytest.raises(ml.InputError, match="is a 'bert', no 'llama'"):
        ml.compile(ml.from_pretrained(tmp_path / "bert"), "numpy").export(path, architecture="llama")
