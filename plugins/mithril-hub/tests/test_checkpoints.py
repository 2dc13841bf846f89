"""Checkpoint folders: their places, refused files, mapped weights."""

import json
import struct
from functools import partial

import numpy as np
import pytest
from checkpoints import read_record, write_folder
from safetensors.numpy import load_file, save_file

import mithril as ml
from mithril.graph import InputError, UnsupportedError
from mithril_testing.damaged_files import attempts, check, flipped, truncated


def logits(folder, **options):
    compiled = ml.compile(ml.from_pretrained(folder, **options), "numpy", inference=True)
    return compiled({"input_ids": np.array([[5, 6, 7]], np.int32)})["logits"]


@pytest.fixture
def copy(tmp_path):
    """Return a folder of llama2 that a test may change."""
    record = read_record("llama2")
    return write_folder(tmp_path / "copy", record["config"], record["shapes"])


def test_several_files_with_an_index(copy, folders):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for k, part in enumerate((names[:7], names[7:])):
        save_file({n: tensors[n] for n in part}, copy / f"model-{k}.safetensors")
        places |= dict.fromkeys(part, f"model-{k}.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    np.testing.assert_array_equal(logits(copy), logits(folders("llama2")))
    places[names[0]] = "../model-0.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match="outside of its folder"):
        ml.from_pretrained(copy)


def test_names_without_the_root(copy, folders):
    tensors = {n.removeprefix("model."): x for n, x in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    np.testing.assert_array_equal(logits(copy), logits(folders("llama2")))


@pytest.mark.parametrize("family", ["gemma", "t5"])
def test_a_head_in_the_files_counts_although_the_configuration_says_tied(family, tmp_path):
    record = read_record(family)
    folder = write_folder(tmp_path / "copy", record["config"], record["shapes"])
    tensors = load_file(folder / "model.safetensors")
    table = next(x for n, x in tensors.items() if n.endswith(("embed_tokens.weight", "shared.weight")))
    inputs = {n: np.array([[5, 6, 7]], np.int64) for n in ("input_ids", "decoder_input_ids")[: 1 + (family == "t5")]}

    def results(head):
        save_file(tensors | ({} if head is None else {"lm_head.weight": head}), folder / "model.safetensors")
        return ml.compile(ml.from_pretrained(folder), "numpy", inference=True)(inputs)["logits"]

    tied = results(None)
    np.testing.assert_array_equal(results(table), tied)
    np.testing.assert_allclose(results(4 * table), 4 * tied, rtol=1e-6)


def test_half_precision_files_and_models(copy, folders):
    tensors = {n: x.astype(np.float16) for n, x in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    assert np.abs(logits(copy) - logits(folders("llama2"))).max() < 0.02
    model = ml.from_pretrained(copy, dtype="float16")
    assert model.pretrained["lm_head.weight"].dtype == np.float16


def test_weights_stay_in_the_mapped_file(copy):
    model = ml.from_pretrained(copy)
    array = model.pretrained["model.embed_tokens.weight"]
    while array.base is not None and not isinstance(array, np.memmap):
        array = array.base
    assert isinstance(array, np.memmap) and not model.pretrained["model.embed_tokens.weight"].flags.writeable


def test_tensors_at_odd_places_are_copied(copy, folders):
    """Readers accept a header of any length, kernels need aligned numbers."""
    data = (copy / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length] + b" "
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", length + 1) + header + data[8 + length :])
    assert ml.from_pretrained(copy).pretrained["lm_head.weight"].flags.aligned
    np.testing.assert_array_equal(logits(copy), logits(folders("llama2")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: 'model.norm.weight' \[32\]"),
        (lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}), r"is \[31\], expected \[32\]"),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), "quantized checkpoints"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            "unknown: 'model.layers.0.self_attn.q_proj.bias'",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(copy, change, message):
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(InputError, match=message):
        ml.from_pretrained(copy)


def test_buffers_of_older_files_are_ignored(copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, copy / "model.safetensors")
    assert not [name for name in ml.from_pretrained(copy).pretrained if "inv_freq" in name]


def test_an_unknown_family_and_no_configuration(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    with pytest.raises(UnsupportedError, match="'lama' are not supported"):
        ml.from_pretrained(copy)
    (copy / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config.json"):
        ml.from_pretrained(copy)


def test_pickles_are_refused_with_a_remedy(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(InputError, match="mithril convert"):
        ml.from_pretrained(copy)


def test_a_repository_in_the_local_cache(copy, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    copy.rename(repository / "snapshots" / "abc123")
    np.testing.assert_array_equal(logits("owner/name"), logits(folders("llama2")))


def test_a_repository_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="local cache of Hugging Face"):
        ml.from_pretrained("owner/name")
    with pytest.raises(InputError, match="there is no folder"):
        ml.from_pretrained("no folder")


# -- files that lie -----------------------------------------------------------------------------------------------
def with_header(folder, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


ROW = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[" * 5000,
        [],
        {"a": 3},
        {"a": {**ROW, "dtype": "F31"}},
        {"a": {**ROW, "shape": [1 << 40]}},
        {"a": {**ROW, "shape": [-4]}},
        {"a": {**ROW, "shape": [True, 4]}},
        {"a": {**ROW, "data_offsets": [0, 1 << 40]}},
        {"a": {**ROW, "data_offsets": [-16, 0]}},
        {"a": {**ROW, "data_offsets": [64, 80]}},
        {"a": ROW, "b": {**ROW, "data_offsets": [8, 24]}},
    ],
    ids=str,
)
def test_damaged_headers(copy, header):
    with_header(copy, header)
    with pytest.raises(InputError, match="damaged"):
        ml.from_pretrained(copy)


def test_truncated_and_changed_files(copy):
    """Read files of any bytes, or refuse them with an error of mithril."""
    path = copy / "model.safetensors"

    def read(content):
        path.write_bytes(content)
        ml.from_pretrained(copy)

    changes = {"truncated": truncated, "flipped": partial(flipped, first=2500)}
    check(list(attempts([path.read_bytes()], changes, read, seed=0, count=200)), refused=100)
