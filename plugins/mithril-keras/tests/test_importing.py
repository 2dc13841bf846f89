"""Archives of Keras 3: results equal to those of Keras, parameters by name, training, refusals."""

import subprocess
import sys

import numpy as np
import pytest
from archives import NAMES, changed, members, record, statistics, with_weights, write

import mithril as ml
from mithril.models import Linear, hook
from mithril_lora import Adapter, LoRA, merge


@pytest.mark.parametrize("name", NAMES)
def test_results_equal_those_of_keras(name):
    path, inputs, expected = record(name)
    compiled = ml.load(path, backend="numpy", shapes={n: a.shape for n, a in inputs.items()})
    results = compiled(inputs)
    assert len(results) == len(expected)
    for result, value in zip(results.values(), expected, strict=True):
        tolerance = 1e-2 if name == "mixed" else 2e-6 * max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(np.asarray(result), value, rtol=0, atol=tolerance)


def test_open_sizes_stay_open():
    path, inputs, expected = record("transformer")
    compiled = ml.load(path, backend="numpy")
    tokens = inputs["tokens"]
    first = next(iter(compiled(inputs).values()))
    np.testing.assert_allclose(first, expected[0], atol=1e-5)
    longer = np.concatenate([tokens, tokens], axis=1)
    assert next(iter(compiled({"tokens": longer}).values())).shape == (2, 10, 7)


def test_neither_keras_nor_code_is_loaded():
    path, _, _ = record("dense")
    code = (
        "import sys, mithril as ml; ml.from_keras(sys.argv[1]);"
        "assert not {'keras', 'tensorflow', 'pickle5', 'marshal_code'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_parameters_have_the_names_of_layers_and_variables():
    compiled = ml.compile(ml.from_keras(record("recurrent")[0]), "numpy", inference=True)
    names = set(compiled.params)
    assert {"embedding.embeddings", "both.forward_lstm.lstm_cell.kernel", "both.backward_lstm.lstm_cell.bias"} <= names
    with_statistics = ml.from_keras(record("dense")[0])
    assert "batch_normalization.moving_mean" in ml.compile(with_statistics, "numpy").initial_state()


def test_networks_of_images_transpose_at_their_ends_only():
    compiled = ml.load(record("images")[0], backend="numpy", shapes={"image": (2, 12, 10, 3)}, optimization_level="low")
    transposes = [n for n in compiled.graph.nodes if n.op.name == "transpose"]
    assert len(transposes) <= 3


def test_an_imported_model_trains():
    path, inputs, _ = record("recurrent")
    compiled = ml.compile(ml.from_keras(path), "numpy")
    name = next(iter(compiled({"tokens": inputs["tokens"]})))
    params = {n: np.array(a) for n, a in compiled.params.items()}
    losses = []
    for _ in range(8):
        outputs, gradients = compiled.evaluate(params, inputs, {name: np.ones((3, 3), np.float32)})
        losses.append(float(outputs[name].sum()))
        assert set(gradients) >= set(params)
        params = {n: a - 0.05 * np.asarray(gradients[n]) for n, a in params.items()}
    assert losses[-1] < losses[0]


def test_statistics_move_as_in_keras():
    path, inputs, _ = record("images")
    compiled = ml.compile(ml.from_keras(path), "numpy", shapes={"image": (2, 12, 10, 3)})
    expected = statistics("images")
    state = compiled.initial_state()
    assert set(state) == set(expected) and len(expected) == 2
    _, state = compiled.evaluate(compiled.params, inputs, training=True, state=state)
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, atol=1e-6)


def test_frozen_layers_keep_their_statistics(tmp_path):
    def freeze(config):
        for x in config["config"]["layers"]:
            x["config"]["trainable"] = False

    _, inputs, _ = record("images")
    path = changed("images", tmp_path / "m.keras", freeze)
    compiled = ml.compile(ml.from_keras(path), "numpy", shapes={"image": (2, 12, 10, 3)})
    before = compiled.initial_state()
    _, after = compiled.evaluate(compiled.params, inputs, training=True, state=before)
    assert before and all(np.array_equal(a, after[n]) for n, a in before.items())


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_all_layers_without_a_counterpart_are_listed(tmp_path):
    def edit(config):
        layers = config["config"]["layers"]
        layers[2]["class_name"] = "Lambda"
        layers[3].update(module="my_package", class_name="Mine", registered_name="my_package>Mine")
        layers[4]["class_name"] = "MelSpectrogram"

    with pytest.raises(ml.UnsupportedError, match="3 kinds of layers have no counterpart") as caught:
        ml.from_keras(changed("images", tmp_path / "m.keras", edit))
    text = str(caught.value)
    assert "Lambda (code of Python, which mithril does not run)" in text
    assert "my_package>Mine (a class of the user" in text
    assert "MelSpectrogram" in text


def test_code_in_arguments_is_refused(tmp_path):
    def edit(config):
        config["config"]["layers"][2]["inbound_nodes"][0]["kwargs"]["f"] = {"class_name": "__lambda__", "config": {}}

    with pytest.raises(ml.UnsupportedError, match="contains code: a function of Python"):
        ml.from_keras(changed("images", tmp_path / "m.keras", edit))


def test_unknown_settings_are_refused_where_they_are_on(tmp_path):
    def edit(value):
        def change(config):
            config["config"]["layers"][2]["config"]["turbo"] = value

        return change

    ml.from_keras(changed("images", tmp_path / "a.keras", edit(None)))
    with pytest.raises(ml.UnsupportedError, match="the setting turbo=2 of the layer"):
        ml.from_keras(changed("images", tmp_path / "b.keras", edit(2)))


def test_quantized_policies_are_refused(tmp_path):
    def edit(config):
        policy = {"module": "keras", "class_name": "QuantizedDTypePolicy", "config": {"mode": "int8"}}
        config["config"]["layers"][2]["config"]["dtype"] = policy

    with pytest.raises(ml.UnsupportedError, match="quantized by QuantizedDTypePolicy"):
        ml.from_keras(changed("dense", tmp_path / "m.keras", edit))


def test_archives_of_keras_2_are_refused_with_the_remedy(tmp_path):
    content = members(record("dense")[0])
    content["metadata.json"] = b'{"keras_version": "2.15.0"}'
    with pytest.raises(ml.UnsupportedError, match=r"was saved by Keras 2.15.0(.|\n)*load it in Keras 3"):
        ml.from_keras(write(tmp_path / "m.keras", content))


def test_missing_and_misshaped_weights(tmp_path):
    def remove(file):
        del file["layers/dense/vars/0"]

    with pytest.raises(ml.InputError, match="has no weights at 'layers/dense/vars/0'"):
        ml.from_keras(with_weights("dense", tmp_path / "a.keras", remove))

    def reshape(file):
        del file["layers/dense/vars/0"]
        file["layers/dense/vars/0"] = np.zeros((8, 6), np.float32)

    with pytest.raises(ml.InputError, match=r"of the layer 'dense.*has shape \[8, 6\], expected \[6, 8\]"):
        ml.from_keras(with_weights("dense", tmp_path / "b.keras", reshape))


def results_of(model, inputs):
    return list(ml.compile(model, "numpy", inference=True)(inputs).values())


def copied(*values):
    copies = tuple(ml.ops.reshape(v, shape=v.shape) for v in values)
    return copies if len(copies) > 1 else copies[0]


@pytest.mark.parametrize("name", NAMES)
def test_layers_have_the_paths_of_keras(name):
    path, inputs, _ = record(name)
    model = ml.from_keras(path)
    paths = [p for p, _ in model.walk() if p]
    parameters = ml.compile(model, "numpy", inference=True).params or {}
    assert paths and all(any(p.startswith(f"{path}.") for path in paths) for p in parameters)
    expected = results_of(model, inputs)
    for path in paths:
        model.replace(path, hook(copied))
    for result, value in zip(results_of(model, inputs), expected, strict=True):  # wrapped layers keep their masks
        np.testing.assert_array_equal(result, value)


def test_layers_are_adapted_replaced_frozen_and_read():
    path, inputs, _ = record("transformer")
    model = ml.from_keras(path)
    expected = results_of(model, inputs)
    assert "head.dense_1" in model.find(Linear)
    assert list(model.find("block.*")) == [
        f"block.{n}" for n in ("multi_head_attention", "add", "layer_normalization", "einsum_dense", "add_1")
    ]
    model.replace("head.dense_1", LoRA(rank=2))
    model.replace("head.dense", LoRA(rank=2, target="kernel"))  # it has an activation
    model.replace("block.einsum_dense", Adapter(2))
    model.freeze("embedding", "block.layer_normalization.*")
    compiled = ml.compile(model, "numpy", shapes={n: a.shape for n, a in inputs.items()})
    params = compiled.randomize_params(0)
    outputs = compiled.evaluate(params, inputs)
    for result, value in zip(outputs.values(), expected, strict=True):
        np.testing.assert_allclose(result, value, atol=1e-6)
    name = next(iter(outputs))
    _, gradients = compiled.evaluate(params, inputs, {name: np.ones_like(outputs[name])})
    assert "embedding.embeddings" not in gradients and "head.dense_1.lora_b" in gradients
    trained = {n: a - 0.1 * np.asarray(gradients[n]) if "lora" in n else a for n, a in params.items()}
    before = compiled.evaluate(trained, inputs)[name]
    merged = merge(model, trained)
    after = ml.compile(model, "numpy", shapes={n: a.shape for n, a in inputs.items()}).evaluate(merged, inputs)[name]
    np.testing.assert_allclose(after, before, atol=1e-5)
    inner = ml.compile(ml.from_keras(path), "numpy", outputs=["block.einsum_dense"], inference=True)(inputs)
    assert inner["block.einsum_dense"].ndim == 3


def test_another_head_and_a_mask_through_it():
    path, inputs, _ = record("transformer")
    model = ml.from_keras(path)
    model.replace("head.dense_1", Linear(8, 3))
    compiled = ml.compile(model, "numpy", shapes={n: a.shape for n, a in inputs.items()})
    assert compiled.randomize_params(0)["head.dense_1.weight"].shape == (3, 8)
    assert next(iter(compiled.evaluate(compiled.randomize_params(0), inputs).values())).shape[-1] == 3


def test_errors_of_a_replacement_are_not_those_of_the_file():
    path, inputs, _ = record("dense")
    model = ml.from_keras(path)
    model.replace("dense_3", hook(lambda y: y.missing))
    with pytest.raises(AttributeError, match="missing"):
        results_of(model, inputs)
