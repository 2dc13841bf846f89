"""The keywords of ``ml.compile`` that the core owns."""

from __future__ import annotations

import contextlib
import signal
import time

import numpy as np
import pytest

import mithril as ml
from mithril.compiler.deadline import Deadline
from mithril.graph.errors import (
    CompileTimeoutError,
    InputError,
    ModelError,
    OptionError,
    PassError,
    ShapeError,
    StrictError,
)
from mithril.models import Add, BatchNorm2d, Conv2d, Dropout, Flatten, If, IOKey, Linear, Model, Relu


def mlp(hidden=8):
    model = Model()
    model |= Linear(hidden, name="first")(input="x", output="h")
    model += Relu()(input="h", output="r")
    model += Linear(2, name="second")(input="r", output="y")
    return model


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(compiled, inputs, seed=0, **keywords):
    params = compiled.randomize_params(seed, inputs)
    outputs = compiled.evaluate(params, inputs, **keywords)
    return {n: compiled.backend.to_numpy(v) for n, v in outputs.items()}


# -- the backend --------------------------------------------------------------------------------------------------
def test_backends_come_as_name_class_or_instance():
    for choice in ("numpy", ml.NumpyBackend, ml.NumpyBackend()):
        assert ml.compile(mlp(), choice).backend.name == "numpy"
        assert ml.compile(model=mlp(), backend=choice).backend.name == "numpy"


def test_something_else_is_refused():
    with pytest.raises(OptionError, match="expected Backend or type or str, got 3"):
        ml.compile(mlp(), 3)


def test_precision_in_two_places_must_agree():
    assert ml.compile(mlp(), "numpy", precision="float16").backend.precision == "float16"
    assert ml.compile(mlp(), ml.NumpyBackend(precision="float16"), precision="float16").backend.precision == "float16"
    with pytest.raises(OptionError, match="conflicts with the backend's precision"):
        ml.compile(mlp(), ml.NumpyBackend(precision="float16"), precision="bfloat16")


def test_a_target_of_another_device_is_refused():
    with pytest.raises(ml.MithrilError):
        ml.compile(mlp(), "numpy", target_hardware="nvidia_a100")


# -- shapes and types ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shapes", "good", "bad"),
    [
        ({"x": [2, 3]}, (2, 3), (4, 3)),
        ({"x": [None, 3]}, (7, 3), (7, 4)),
        ({"x": ["B", 3]}, (7, 3), (7, 4)),
        ({"x": [ml.Dim("B", 1, 8), 3]}, (7, 3), (9, 3)),
    ],
    ids=["numbers", "None", "name", "Dim"],
)
def test_shapes_hold(backend, shapes, good, bad):
    compiled = ml.compile(mlp(), backend, shapes=shapes)
    assert run(compiled, {"x": random(*good)})["y"].shape == (good[0], 2)
    with pytest.raises(InputError, match="'x'"):
        run(compiled, {"x": random(*bad)})


def test_one_name_is_one_size_and_two_nones_are_two(backend):
    model = Model()
    model |= Add()(left="a", right="b", output="y")
    compiled = ml.compile(model, backend, shapes={"a": ["N", 2], "b": ["N", 2]})
    assert run(compiled, {"a": random(3, 2), "b": random(3, 2)})["y"].shape == (3, 2)
    with pytest.raises(InputError):
        run(compiled, {"a": random(3, 2), "b": random(1, 2)})
    free = ml.compile(model, backend, shapes={"a": [2, None], "b": [2, 4]})
    assert run(free, {"a": random(2, 4), "b": random(2, 4)})["y"].shape == (2, 4)


def test_batches_of_any_size_need_one_program():
    compiled = ml.compile(mlp(), "numpy", shapes={"x": [None, 3]})
    for n in (1, 2, 5):
        run(compiled, {"x": random(n, 3)})
    assert len(compiled.programs) == 1


def test_without_shapes_the_first_call_decides(backend):
    compiled = ml.compile(mlp(), backend)
    assert len(compiled.programs) == 0
    run(compiled, {"x": random(4, 3)})
    run(compiled, {"x": random(4, 3)})
    assert len(compiled.programs) == 1
    run(compiled, {"x": random(5, 3)})
    assert len(compiled.programs) == 2
    assert any(d.kind == "specialized" for d in compiled.decisions)


def test_hints_bound_the_batch():
    compiled = ml.compile(mlp(), "numpy", shapes={"x": [None, 3]}, hints={"input_batch_size_range": (1, 4)})
    run(compiled, {"x": random(4, 3)})
    with pytest.raises(InputError, match="4"):
        run(compiled, {"x": random(5, 3)})
    with pytest.raises(OptionError, match="expected a list of int, got 3"):
        ml.compile(mlp(), "numpy", hints={"input_batch_size_range": 3})
    with pytest.raises(OptionError, match="is empty"):
        ml.compile(mlp(), "numpy", hints={"input_batch_size_range": (4, 1)})


@pytest.mark.parametrize("options", [{"types": {"x": ml.float16}}, {"precision": "float16"}])
def test_floats_are_converted_to_declared_16_bits(backend, options):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]}, **options)
    for dtype in (np.float16, np.float32, np.float64):
        assert run(compiled, {"x": random(2, 3).astype(dtype)})["y"].dtype == np.float16


def test_types_of_32_bits_are_held(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]}, types={"x": ml.float32})
    with pytest.raises(InputError, match=r"Type mismatch: expected float32, got float64"):
        run(compiled, {"x": np.ones((2, 3), np.int32) + 0.5})


def test_names_in_shapes_and_types_must_be_inputs():
    with pytest.raises(OptionError, match="'inputs'") as caught:
        ml.compile(mlp(), "numpy", shapes={"inputs": [2, 3]})
    assert "x" in str(caught.value)
    with pytest.raises(OptionError, match="expected int or str or Dim"):
        ml.compile(mlp(), "numpy", shapes={"x": [2.5, 3]})


def test_shapes_that_contradict_the_model():
    model = Model()
    model |= Linear(2)(input=IOKey("x", shape=[None, 3]), output="y")
    with pytest.raises(OptionError, match="conflicts with the model"):
        ml.compile(model, "numpy", shapes={"x": [2, 4]})


def test_static_shapes():
    assert ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, static_shapes=True).programs
    with pytest.raises(ShapeError, match="Cannot infer shape for tensor 'x'"):
        ml.compile(mlp(), "numpy", static_shapes=True)
    with pytest.raises(ShapeError, match="Cannot infer shape for tensor 'x'"):
        ml.compile(mlp(), "numpy", shapes={"x": [None, 3]}, static_shapes=True)


def test_static_types():
    model = Model()
    model |= Add()(left="a", right="b", output="y")
    input_shapes = {"a": [2], "b": [2]}
    assert ml.compile(model, "numpy", shapes=input_shapes, static_types=True).programs
    with pytest.raises(OptionError, match="'a' is promoted from int32 to float32"):
        ml.compile(model, "numpy", shapes=input_shapes, types={"a": "int32", "b": "float32"}, static_types=True)


# -- what is computed ---------------------------------------------------------------------------------------------
def test_outputs_are_chosen(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]}, outputs=["r", "y"])
    assert list(run(compiled, {"x": random(2, 3)})) == ["r", "y"]
    with pytest.raises(ml.MithrilError, match="'q'"):
        ml.compile(mlp(), backend, outputs=["q"])


def test_constants_are_baked_in(backend):
    model = Model()
    model |= Add()(left="a", right="b", output="y")
    compiled = ml.compile(model, backend, constants={"b": np.float32([1, 2])}, shapes={"a": [2]})
    np.testing.assert_array_equal(run(compiled, {"a": np.float32([3, 4])})["y"], [4, 6])
    with pytest.raises(ModelError, match="'c' is not an input"):
        run(ml.compile(model, backend, constants={"c": 1.0}), {"a": random(2), "b": random(2)})


def test_trainable_narrows_the_gradients(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]}, trainable=["second.*", "x"])
    params = compiled.randomize_params(0)
    _, gradients = compiled.evaluate(params, {"x": random(2, 3)}, np.ones((2, 2), np.float32))
    assert sorted(gradients) == ["second.bias", "second.weight", "x"]


def test_inference_takes_training_away(backend):
    model = Model()
    model |= Conv2d(4, kernel_size=3)(input="x", output="h")
    model += BatchNorm2d()(input="h", output="b")
    model += Dropout(0.5)(input="b", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 3, 6, 6]}, inference=True)
    results = [run(compiled, {"x": random(2, 3, 6, 6)})["y"] for _ in range(2)]
    np.testing.assert_array_equal(*results)
    params = compiled.randomize_params(0)
    with pytest.raises(InputError, match="inference=True"):
        compiled.evaluate(params, {"x": random(2, 3, 6, 6)}, np.ones_like(results[0]))


def test_control_flow_may_be_forbidden():
    model = Model()
    model |= If("flag", Relu(), Linear(3))(input="x", flag="flag", output="y")
    shapes = {"x": [2, 3], "flag": []}
    assert ml.compile(model, "numpy", shapes=shapes, types={"flag": "bool"}).programs
    with pytest.raises(OptionError, match="an 'if' depends on values known only at run time"):
        ml.compile(model, "numpy", shapes=shapes, types={"flag": "bool"}, dynamic_control_flow=False)
    fixed = ml.compile(model, "numpy", shapes={"x": [2, 3]}, constants={"flag": True}, dynamic_control_flow=False)
    assert fixed.programs


# -- generated source ---------------------------------------------------------------------------------------------
def test_source_file_is_self_contained(python_backend, tmp_path):
    path = tmp_path / "generated.py"
    compiled = ml.compile(mlp(), python_backend, shapes={"x": [2, 3]}, file_path=path)
    text = path.read_text()
    assert text == compiled.source
    lines = [line.strip() for line in text.splitlines()]
    assert lines.count("def forward(params, inputs):") == 1
    assert lines.count("return outputs") == 1
    assert "mithril" not in {word for line in lines if "import " in line for word in line.replace(".", " ").split()}
    assert any("first" in line and "#" in line for line in lines)
    assert '#   inputs["x"]: f32[2, 3]' in text and '#   result["y"]: f32[2, ' in text
    again = ml.compile(mlp(), python_backend, shapes={"x": [2, 3]})
    assert again.source == text
    scope = {}
    exec(compile(text, "generated.py", "exec"), scope)
    params = compiled.randomize_params(0)
    array = compiled.backend.array(random(2, 3))
    expected = compiled.backend.to_numpy(compiled.evaluate(params, {"x": array})["y"])
    np.testing.assert_allclose(
        compiled.backend.to_numpy(scope["forward"](params, {"x": array})["y"]), expected, rtol=1e-5, atol=1e-6
    )


def test_the_documented_transformer_runs_as_written(python_backend, capsys):
    def code_transformer(code):
        instrumented_code = code.replace(
            "def forward(params, inputs):",
            "def forward(params, inputs):\n    import time\n    start_time = time.time()",
        )
        return instrumented_code.replace(
            "return outputs",
            "    elapsed = time.time() - start_time\n    print(f'Forward pass: {elapsed:.5f}s')\n    return outputs",
        )

    compiled = ml.compile(mlp(), python_backend, shapes={"x": [2, 3]}, code_transformers=[code_transformer], jit=False)
    run(compiled, {"x": random(2, 3)})
    assert "Forward pass: 0." in capsys.readouterr().out


def test_transformers_that_break_the_code_are_shown():
    with pytest.raises(ml.MithrilError) as caught:
        ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, code_transformers=[lambda c: c.replace("return outputs", "(")])
    assert "transformer" in str(caught.value).lower()
    with pytest.raises(ml.MithrilError):
        ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, code_transformers=[lambda c: None])


def test_templates_write_the_source(python_backend, tmp_path):
    template = tmp_path / "mine.py.j2"
    template.write_text(
        "# made for {{ backend }}\n"
        "{% for line in imports %}{{ line }}\n{% endfor %}"
        "{% for helper in helpers %}{{ helper }}\n{% endfor %}"
        "{{ signature }}\n"
        "{% for line in body %}    {{ line }}\n{% endfor %}"
        "    {{ closing }}\n"
    )
    compiled = ml.compile(mlp(), python_backend, shapes={"x": [2, 3]}, template_path=template)
    assert compiled.source.startswith(f"# made for {python_backend}\n")
    run(compiled, {"x": random(2, 3)})


# -- being told ---------------------------------------------------------------------------------------------------
def test_unknown_keywords_name_the_nearest():
    with pytest.raises(OptionError, match="optimisation_level") as caught:
        ml.compile(mlp(), "numpy", optimisation_level="low")
    assert "optimization_level" in str(caught.value)


def test_strict_turns_notes_into_errors():
    for backend, options in (("jax", {"jit_options": {"static_argnums": (0,)}}), ("numpy", {"jit": True})):
        compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]}, **options)
        assert [d.kind for d in compiled.decisions] == ["ignored"]
        with pytest.raises(StrictError):
            ml.compile(mlp(), backend, shapes={"x": [2, 3]}, strict=True, **options)


def test_timeout_stops_a_slow_pass():
    def slow(graph):
        time.sleep(60)
        return graph

    start = time.monotonic()
    with pytest.raises(CompileTimeoutError, match="Compilation timed out after 0.2 seconds"):
        ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, custom_passes=[slow], timeout=0.2)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("swallows", ("finalizer", "except"))
def test_timeout_in_code_that_drops_errors_stops_the_next_code(swallows):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGALRM)

    def slow(graph):
        try:
            Finalized() if swallows == "finalizer" else signal.raise_signal(signal.SIGALRM)
        except Exception:
            assert swallows == "except"
        time.sleep(60)
        return graph

    start = time.monotonic()
    with pytest.raises(CompileTimeoutError, match="Compilation timed out after 100 seconds"):
        ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, custom_passes=[slow], timeout=100)
    assert time.monotonic() - start < 30


def test_no_alarm_is_left_whenever_it_rings():
    """Alarms ring while they are set, while they are ended, and between."""
    for seconds in np.geomspace(1e-9, 1e-3, 600):
        with contextlib.suppress(CompileTimeoutError), Deadline(float(seconds)):
            end = time.perf_counter() + 1e-4
            while time.perf_counter() < end:
                pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_custom_passes_run_and_are_checked():
    seen = []

    def look(graph):
        seen.append(len(graph.nodes))
        return graph

    ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, custom_passes=[look, "dead-code"])
    assert seen
    with pytest.raises(PassError, match="returned NoneType"):
        ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, custom_passes=[lambda graph: None])


def test_custom_rules_are_passes():
    from mithril.ops import relu, tanh

    swap = ml.rule(lambda x: relu(x), lambda x: tanh(x), exact=False, name="swap")
    compiled = ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, custom_passes=[swap], optimization_level="none")
    assert "tanh" in [n.op.name for n in compiled.graph.nodes]


def test_levels_and_switches():
    none = ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, optimization_level="none")
    assert none.pipeline.names == []
    low = ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}, optimization_level="low").pipeline.names
    assert "dead-code" in low
    without = ml.compile(
        mlp(), "numpy", shapes={"x": [2, 3]}, optimization_level="low", optimizations={"dead_code_elimination": False}
    )
    assert set(low) - set(without.pipeline.names) == {"dead-code"}
    with pytest.raises(OptionError, match="optimization"):
        ml.compile(mlp(), "numpy", optimizations={"fusing": True})


def pooled():
    model = Model()
    model |= Conv2d(4, kernel_size=2)(input="x", output="h")
    model += ml.models.MaxPool2d(2)
    model += Flatten()
    model += Linear(2)(output="y")
    return model


def sorted_rows():
    class Largest(ml.models.Layer):
        def build(self, input):
            return ml.ops.top_k(ml.ops.sort(input, axis=1), k=2, axis=1)[0]

    model = Model()
    model += Linear(5)(input="x")
    model += Largest()(output="y")
    return model


@pytest.mark.parametrize(("make", "shape"), [(mlp, (4, 3)), (pooled, (4, 3, 7, 7)), (sorted_rows, (4, 3))])
def test_native_gradients_equal_those_of_the_graph(backend, make, shape):
    model = make()
    arguments = random(*shape), np.ones((4, 2), np.float32)
    built = []
    for kind in ("graph", "native"):
        compiled = ml.compile(model, backend, shapes={"x": list(shape)}, autodiff=kind)
        params = compiled.randomize_params(0)
        try:
            _, gradients = compiled.evaluate(params, {"x": arguments[0]}, arguments[1])
        except ml.UnsupportedError:
            pytest.skip("no automatic differentiation of its own")
        built.append({n: compiled.backend.to_numpy(g) for n, g in gradients.items()})
    assert list(built[0]) == list(built[1])
    for name, gradient in built[0].items():
        np.testing.assert_allclose(built[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_native_gradients_of_surrogate_gradients(backend):
    """Frameworks would return 0 for a straight-through gradient."""

    class Rounded(ml.models.Layer):
        def build(self, input):
            return ml.ops.fake_quantize(input, 0.1)

    model = Model()
    model += Linear(2)(input="x")
    model += Rounded(name="grid")(output="y")
    compiled = ml.compile(model, backend, shapes={"x": [4, 3]}, autodiff="native")
    params, x = compiled.randomize_params(0), {"x": random(4, 3)}
    assert compiled.evaluate(params, x)["y"].shape == (4, 2)
    with pytest.raises(ml.GradientError, match="(?s)'fake_quantize'.*layer 'grid'.*omit autodiff"):
        compiled.evaluate(params, x, np.ones((4, 2), np.float32))


def test_flat_models_and_images(backend):
    model = Model()
    model |= Conv2d(4, kernel_size=3)(input="x", output="h")
    model += Flatten()(input="h", output="f")
    model += Linear(2)(input="f", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [None, 3, 6, 6]})
    for n in (1, 3):
        assert run(compiled, {"x": random(n, 3, 6, 6)})["y"].shape == (n, 2)
