"""Tokens and masks: int64 as tokenizers return them, or int32; encoders read attention_mask."""

import numpy as np
import pytest

import mithril as ml

ENCODERS = {"bert": ("attention_mask", "token_type_ids"), "distilbert": ("attention_mask",), "t5": ("attention_mask",)}


@pytest.mark.parametrize("family", ["bert", "distilbert", "t5", "clip", "llama2", "gpt2"])
def test_int64_and_int32_give_the_same(family, folders):
    model = ml.from_pretrained(folders(family))
    compiled = ml.compile(model, "numpy", inference=True)
    names = [name for name in model.inputs if name.endswith("_ids")]
    assert {str(compiled.specs[name].dtype) for name in names} == {"int64"}
    tokens = np.random.default_rng(0).integers(3, 96, (2, 7))
    tokens[:, 6] = 96  # the end of a text of CLIP
    rest = {"pixel_values": np.ones((1, 3, 16, 16), np.float32)} if family == "clip" else {}
    results = [
        compiled({**dict.fromkeys(names, tokens.astype(kind)), "attention_mask": np.ones((2, 7), kind), **rest})
        for kind in (np.int64, np.int32)
    ]
    for name, y in results[0].items():
        np.testing.assert_array_equal(y, results[1][name])


@pytest.mark.parametrize("family", ["llama2", "t5"])
def test_models_with_a_cache_take_both(family, folders):
    compiled = ml.compile(ml.from_pretrained(folders(family), cache=8), "numpy", inference=True)
    name = "decoder_input_ids" if family == "t5" else "input_ids"
    more = {"input_ids": np.array([[5, 6]])} if family == "t5" else {}
    runs = [
        compiled.runner()({name: np.array([[5, 6, 7]], kind), "position": kind(0), **more})
        for kind in (np.int64, np.int32)
    ]
    np.testing.assert_array_equal(runs[0]["logits"], runs[1]["logits"])


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_declare_their_masks(family, folders):
    model = ml.from_pretrained(folders(family))
    assert model.optional == ENCODERS[family]
    specs = ml.compile(model, "numpy", inference=True).specs
    assert all(str(specs[name].dtype) == "int64" and not specs[name].required for name in model.optional)


@pytest.mark.parametrize("family", ["bert", "llama2"])
def test_an_exported_file_takes_the_ids_of_a_tokenizer(family, folders, tmp_path):
    pytest.importorskip("mithril_onnx")
    onnx = pytest.importorskip("onnx")
    shapes = {"input_ids": [None, None], "attention_mask": [None, None]}
    compiled = ml.compile(ml.from_pretrained(folders(family)), "numpy", inference=True, shapes=shapes)
    compiled.export(tmp_path / "m.onnx")
    inputs = {i.name: i.type.tensor_type for i in onnx.load(tmp_path / "m.onnx").graph.input}
    assert {name: t.elem_type for name, t in inputs.items()} == dict.fromkeys(shapes, onnx.TensorProto.INT64)
    assert all(d.dim_param for t in inputs.values() for d in t.shape.dim)
