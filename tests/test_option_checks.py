"""Mistyped keys, patterns without a match, and options that contradict each other are errors with a remedy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mithril as ml
from mithril.compiler import option_rows, resolve_options
from mithril.models import Layer, Linear, Model, Relu, Sequential

SHAPES = {"input": [4, 16]}


def network() -> Model:
    model = Model()
    model |= Linear(dimension=8, name="linear")
    model += Relu(name="active")
    model += Linear(dimension=4, name="head")
    return model


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hints": {"input_batchsize_range": (1, 4)}}, "did you mean 'input_batch_size_range'"),
        ({"viz_options": {"formt": "svg"}}, "did you mean 'format'"),
        ({"cpu_options": {"num_treads": 2}}, "did you mean 'num_threads'"),
        ({"cpu_options": {"vectorize": "x"}}, r"at \['vectorize'\]: expected bool"),
        ({"cpu_options": {"num_threads": 0}}, "expected int of at least 1"),
        ({"num_threads": 1, "cpu_options": {"num_threads": 2}}, "set the same option to different values"),
        ({"mobile_options": {"arhc": "x86_64"}}, "did you mean 'arch'"),
        ({"torch_options": {"enable_cudn": True}}, "did you mean 'enable_cudnn'"),
        ({"torch_options": {"enable_ampp": True}}, "did you mean 'enable_amp'"),
        ({"jax_options": {"unrol": 2}}, "did you mean 'unroll'"),
        ({"tpu_options": {"topolgy": "2x2"}}, "did you mean 'topology'"),
        ({"quantization_aware": {"blok": 2}}, "did you mean 'block'"),
        ({"mixed_precision": {"keep": ["linaer*"]}}, r"'linaer\*' in mixed_precision\['keep'\] matches no layer"),
        ({"mixed_precision": {"low": ["matmull"]}}, "unknown operation 'matmull'"),
        ({"mixed_precision": {"dtype": "float8"}}, "unknown dtype 'float8' in mixed_precision"),
        ({"quantization_aware": {"keep": ["haed"]}}, "did you mean 'head'"),
        ({"trainable": ["nosuch*"]}, "matches no parameter or input"),
        ({"shapes": {"input": [64, 16]}, "hints": {"input_batch_size_range": (1, 32)}}, "has 64 rows, outside of"),
        ({"timeout": -1}, "expected float above 0"),
        ({"static_inference": True, "gradient_checkpointing": True, "strict": True}, "computes no gradients"),
        ({"mobile_options": {"arch": "x86_64"}, "strict": True, "shapes": {}}, "which is for: c"),
    ],
)
def test_a_mistake_is_an_error_when_compiling(options, text):
    with pytest.raises(ml.MithrilError, match=text):
        ml.compile(network(), "numpy", **{"shapes": SHAPES, **options})


@pytest.mark.parametrize("shapes", [{}, {"input": ["B", 16]}], ids=["unknown", "open"])
@pytest.mark.parametrize(
    ("backend", "options", "text"),
    [
        *((b, {"mixed_precision": {"dtype": "float8"}}, "unknown dtype 'float8'") for b in ("numpy", "c", "ggml")),
        *((b, {"mixed_precision": {"low": ["matmull"]}}, "unknown operation 'matmull'") for b in ("jax", "c")),
        *((b, {"max_memory_gb": "a lot"}, "'a lot' is not an amount of memory") for b in ("torch", "c")),
        ("mlx", {"max_memory_gb": -1}, "'-1' is not an amount of memory"),
        ("numpy", {"template_path": "nowhere.jinja"}, "template 'nowhere.jinja' does not exist"),
        *((b, {"template_path": "nowhere.jinja"}, "does not support template_path") for b in ("c", "ggml")),
        ("c", {"cpu_options": {"cpu": "nosuch"}}, "unknown CPU 'nosuch' in cpu_options"),
        ("jax", {"jit_options": {"static_argnums": (7,)}}, r"static_argnums=\(7,\) is out of range"),
        ("mlx", {"jit_options": {"a": 1}}, "'a' is unknown to the MLX backend"),
        ("torch", {"torch_dynamo": True, "jit": False}, "torch_dynamo=True conflicts with jit=False"),
        ("ggml", {"num_threads": 10_000}, "not a valid number of threads"),
    ],
)
def test_mistakes_do_not_wait_for_the_first_call(backend, options, text, shapes):
    with pytest.raises(ml.MithrilError, match=text):
        ml.compile(network(), backend, shapes=shapes, **options)


def test_patterns_that_match_are_accepted():
    keep = {"keep": ["lin*", "head"]}
    for options in ({"mixed_precision": keep}, {"quantization_aware": keep}, {"trainable": ["linear.*"]}):
        ml.compile(network(), "numpy", shapes=SHAPES, **options)


def test_a_layer_that_names_a_backend_without_a_map():
    model = network()
    part = Model(name="part")
    part |= Linear(dimension=4)
    part.set_attribute("backend", "torch")
    model += part
    with pytest.raises(ml.StrictError, match="no effect without backend_map"):
        ml.compile(model, "numpy", shapes=SHAPES, strict=True)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_parallelism_without_devices(backend):
    with pytest.raises(ml.StrictError, match=r"device_mesh=\(4,\)"):
        ml.compile(network(), backend, shapes=SHAPES, parallelism="data", strict=True)


def test_ignored_options_warn_at_the_user_line():
    with pytest.warns(ml.OptionWarning, match="torch_fx, which is for: torch") as seen:
        compiled = ml.compile(network(), "numpy", shapes=SHAPES, torch_fx=True)
    assert [w.filename for w in seen] == [__file__]
    assert "torch_fx" in str(compiled.decisions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ml.compile(network(), "numpy", shapes=SHAPES)


def test_amp_of_torch_changes_no_other_backend():
    params = ml.compile(network(), "numpy", shapes=SHAPES).randomize_params(seed=0)
    plain = ml.compile(network(), "numpy", shapes=SHAPES)
    with pytest.warns(ml.OptionWarning, match="torch_options.enable_amp"):
        other = ml.compile(network(), "numpy", shapes=SHAPES, torch_options={"enable_amp": True})
    x = params["linear.weight"][:4, :16]
    assert (plain.evaluate(params, {"input": x})["output"] == other.evaluate(params, {"input": x})["output"]).all()


@pytest.mark.parametrize("name", ["cbackend", "mithril-cbackend"])
def test_the_name_of_a_plugin_suggests_its_backend(name):
    with pytest.raises(ml.MithrilError, match="did you mean 'c'"):
        ml.compile(network(), name)


def test_a_picture_names_the_activation_that_was_fused(tmp_path):
    path = tmp_path / "net.svg"
    model = Model()
    model |= Linear(8)
    model += Relu()
    ml.compile(model, "numpy", shapes=SHAPES, visualize=True, viz_options={"output_path": path})
    assert "linear, relu" in path.read_text()


@pytest.mark.parametrize("row", option_rows(), ids=lambda row: row["name"])
def test_every_option_has_an_example_that_it_accepts(row):
    resolve_options(eval(f"dict({row['example']})", {"np": np}))
    assert row["example"].startswith(f"{row['name']}=")


class Nested(Layer):
    def __init__(self):
        self.body, self.head = Sequential(Linear(32), Relu(), Linear(32)), Linear(32)

    def build(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("option", ["mixed_precision", "quantization", "quantization_aware"])
def test_keep_covers_the_layers_inside(option):
    x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    params = ml.compile(Nested(), "numpy", shapes={"input": [8, 32]}).randomize_params(0)
    settings = {"weights": "int8"} if option == "quantization" else {}

    def result(keep):
        mode = {"static_inference": option == "quantization", option: {**settings, "keep": keep}}
        compiled = ml.compile(Nested(), "numpy", shapes={"input": [8, 32]}, **mode).bind(params)
        return compiled.evaluate({"input": x}, training=option == "quantization_aware")["output"]

    covered = result(["body"])
    assert np.array_equal(covered, result(["body.0", "body.2"]))
    assert not np.array_equal(covered, result([]))
