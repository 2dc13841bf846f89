"""A ``While`` that reaches its bound with its condition still true raises, wherever it stands, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Add, If, Linear, Model, Multiply, While

BACKENDS = ("numpy", "torch", "jax", "mlx", "c", "ggml")
X = np.ones((2, 3), np.float32)


def loop(**names) -> While:
    return While(
        "k < rounds",
        Multiply()(left="s", right=1.5, output="more"),
        {"s": "x", "k": 0},
        {"s": "more", "k": "k + 1"},
        {"y": "s"},
        max_trips=6,
        **names,
    )


def plain() -> Model:
    model = Model()
    model |= loop()(x="x", rounds="rounds", y="output")
    return model


def branching() -> Model:
    model = Model()
    model |= If("rounds > 1", loop(), Add()(left="x", right=1.0, output="y"))(x="x", rounds="rounds", y="output")
    return model


def nested() -> Model:
    model = Model()
    model |= While("n < 2", loop(), {"x": "x", "n": 0}, {"x": "y", "n": "n + 1"}, {"output": "x"}, max_trips=3)(
        rounds="rounds", x="x", output="output"
    )
    return model


MODELS = {"plain": plain, "in a branch": branching, "in a loop": nested}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_is_cut_off_raises(backend, name):
    compiled = ml.compile(MODELS[name](), backend, shapes={"x": [2, 3], "rounds": []})
    again = 2 if name == "in a loop" else 1
    for gradients in (False, True):
        for rounds, ends in ((4, True), (6, True), (7, False), (4, True)):
            inputs = {"x": X, "rounds": np.int32(rounds)}

            def run(inputs=inputs):
                if not gradients:
                    return compiled.evaluate({}, inputs)["output"], None
                outputs, slopes = compiled.evaluate({}, inputs, output_gradients={"output": X}, wrt=("x",))
                return outputs["output"], slopes["x"]

            if not ends:
                with pytest.raises(ml.MithrilError, match=r"max_trips=6 while its condition still holds"):
                    run()
                continue
            outputs, slope = run()
            expected = X * np.float32(1.5) ** (again * rounds)
            np.testing.assert_allclose(compiled.backend.to_numpy(outputs), expected, rtol=1e-5)
            if slope is not None:
                np.testing.assert_allclose(compiled.backend.to_numpy(slope), expected, rtol=1e-5)


DERIVATIVES = {
    "grad": lambda model: ml.grad(model, of="total", wrt="x"),
    "rows of grad": lambda model: ml.vmap(ml.grad(model, of="total", wrt="x"), {"rounds": None}),
    "hvp": lambda model: ml.hvp(model, of="total", wrt="x"),
    "jvp": lambda model: ml.jvp(model, of="total", wrt="x"),
    "hessian": lambda model: ml.hessian(model, of="total", wrt="x"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_derivative_of_a_loop_that_is_cut_off_raises(derivative, name):
    model = Model()
    model |= MODELS[name]()(x="x", rounds="rounds", output="y")
    model |= ml.models.Sum()(input="y", output="total")
    compiled = ml.compile(DERIVATIVES[derivative](model), "numpy", shapes={"x": [2, 3], "rounds": []})
    inputs = {"x": X, "rounds": np.int32(6)}
    if derivative in ("hvp", "jvp"):
        inputs["tangent/x"] = X
    assert compiled.evaluate({}, inputs)
    with pytest.raises(ml.InputError, match=r"max_trips=6 while its condition still holds"):
        compiled.evaluate({}, {**inputs, "rounds": np.int32(7)})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ("ggml", "numpy"))
def test_a_file_of_gguf_has_no_checks_as_outputs_and_makes_them(backend, name, tmp_path):
    compiled = ml.compile(MODELS[name](), "ggml", shapes={"x": [2, 3], "rounds": []}, inference=True)
    compiled.bind({}).export(tmp_path / "loop.gguf")
    loaded = ml.load(tmp_path / "loop.gguf", backend=backend)
    assert list(loaded({"x": X, "rounds": np.int32(6)})) == ["output"]
    with pytest.raises(ml.InputError, match=r"max_trips=6 while its condition still holds"):
        loaded({"x": X, "rounds": np.int32(7)})


def test_a_kept_program_still_raises(tmp_path):
    for _ in range(2):
        compiled = ml.compile(
            plain(), "numpy", shapes={"x": [2, 3], "rounds": []}, cache=True, cache_dir=tmp_path, strict=True
        )
        with pytest.raises(ml.MithrilError, match="raise max_trips"):
            compiled.evaluate({}, {"x": X, "rounds": np.int32(9)})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_a_loop_that_is_cut_off_raises(backend, name):
    model = Model()
    model |= Linear(3, name="inner")(input="x", output="h")
    model |= MODELS[name]()(x="h", rounds="rounds", output="output")

    def loss(output):
        return ml.ops.mean(output * output)

    trainer = ml.Trainer(model, ml.SGD(0.01), loss=loss, backend=backend, progress=False)
    for rounds, ends in ((4, True), (7, False), (4, True)):
        batch = {"x": X, "rounds": np.int32(rounds)}
        if ends:
            assert np.isfinite(trainer.step(batch)["loss"])
            assert np.isfinite(trainer.evaluate([batch])["loss"])
            continue
        before = {n: np.array(trainer.to_numpy(p)) for n, p in trainer.params.items()}
        for call in (trainer.step, lambda batch: trainer.evaluate([batch])):
            with pytest.raises(ml.MithrilError, match=r"max_trips=6 while its condition still holds"):
                call(batch)
        for n, p in trainer.params.items():
            np.testing.assert_array_equal(trainer.to_numpy(p), before[n])


@pytest.mark.parametrize("detect_nan", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_accumulated_step_counts_no_batch_whose_loop_is_cut_off(backend, detect_nan):
    """The batch raises, and the step ends as if it had not been there."""
    model = Model()
    model |= Linear(3, name="inner")(input="x", output="h")
    model |= plain()(x="h", rounds="rounds", output="output")
    results = []
    for batches in ((4, 5), (7, 4, 7, 5)):
        trainer = ml.Trainer(
            model,
            ml.SGD(0.01),
            loss=lambda output: ml.ops.mean(output * output),
            backend=backend,
            progress=False,
            gradient_accumulation_steps=2,
            detect_nan=detect_nan,
        )
        for rounds in batches:
            batch = {"x": X, "rounds": np.int32(rounds)}
            if rounds < 7:
                trainer.step(batch)
                continue
            with pytest.raises(ml.MithrilError, match=r"max_trips=6 while its condition still holds"):
                trainer.step(batch)
        results.append({n: np.array(trainer.to_numpy(p)) for n, p in trainer.params.items()})
    for name, expected in results[0].items():
        np.testing.assert_array_equal(results[1][name], expected)
