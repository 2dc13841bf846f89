"""``ml.Trainer`` with pipelines over many devices and chunked batches has the losses of one device."""

from __future__ import annotations

import math
import re
import tracemalloc

import jax
import numpy as np
import pytest
from small_models import block

import mithril as ml
from mithril.models import Conv2d, Dropout, Embedding, Flatten, IOKey, Linear, MaxPool2d, Model, Relu
from mithril_jax.mesh.mesh_execution import SMALLEST_DIVIDED

pytest.importorskip("mithril_train")
numbers = np.random.default_rng(0)
BATCHES = [
    {
        "x": numbers.standard_normal((8, 6, 16), np.float32),
        "target": numbers.standard_normal((8, 6, 16), np.float32),
    }
    for _ in range(4)
]
PIPELINE = ((1, 1, 2), {"pipeline_chunks": 4})


def trainer(mesh, options, optimizer=ml.SGD(0.1, momentum=0.9), **recipe):
    compiled = ml.compile(block(16, 4, 32), ml.JaxBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)
    return ml.Trainer(compiled, optimizer, loss="mse_loss", progress=False, **recipe)


def losses(training, batches=BATCHES):
    return [training.step(batch)["loss"] for batch in batches]


def assert_same_training(way, **recipe):
    one, many = trainer(None, {}, **recipe), trainer(*way, **recipe)
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-4)
    expected, actual = one.engine.to_numpy(), many.engine.to_numpy()
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=1e-6, err_msg=name)
    return many


@pytest.mark.parametrize(
    ("way", "recipe"),
    [
        (PIPELINE, {"clip_norm": 0.5, "metrics": ["mean_absolute_error"]}),
        pytest.param(
            ((1, 1, 4), {"pipeline_chunks": 2, "pipeline_schedule": "gpipe"}),
            {"gradient_accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
        (
            ((2, 1, 2), {"pipeline_chunks": 2, "parallelism": "fsdp"}),
            {"clip_norm": 0.5, "ema": 0.9, "loss_scale": "dynamic"},
        ),
        pytest.param(((1, 1, 2), {}), {"clip_value": 0.01, "frozen": ["fc.*"]}, marks=pytest.mark.slow),
    ],
    ids=["clipped", "accumulated", "fully sharded, scaled", "one chunk, frozen"],
)
def test_pipeline_trains_like_one_device(way, recipe):
    training = assert_same_training(way, **recipe)
    if "parallelism" in way[1]:
        weights = [x for name, x in training.engine.arrays.items() if name.endswith("fc.weight")]
        assert weights
        assert all(x.addressable_shards[0].data.size * 4 == x.size for x in weights), (
            "in parts over data and over the stages, and its optimizer values too"
        )


def test_parameters_and_optimizer_values_of_a_pipeline_are_in_parts():
    training = trainer(*PIPELINE, ml.Adam(0.01), clip_norm=0.5)
    losses(training)
    arrays = training.engine.arrays
    for name in training.engine.trained:
        parts = 2 if arrays[name].size >= SMALLEST_DIVIDED else 1  # small arrays are not divided
        assert arrays[name].addressable_shards[0].data.size * parts == arrays[name].size
        owned = [x for other, x in arrays.items() if other.endswith(f"/{name}")]
        assert owned
        assert all(x.sharding == arrays[name].sharding for x in owned)


@pytest.mark.parametrize("way", [PIPELINE, pytest.param((None, {}), marks=pytest.mark.slow)], ids=["again", "without"])
def test_checkpoint_of_a_pipeline_resumes(way, tmp_path):
    first = trainer(*PIPELINE)
    losses(first, BATCHES[:2])
    first.save(tmp_path / "half.safetensors")
    expected = losses(first, BATCHES[2:])
    second = trainer(*way)
    second.load(tmp_path / "half.safetensors")
    np.testing.assert_allclose(losses(second, BATCHES[2:]), expected, rtol=0 if way is PIPELINE else 1e-4)


def images():
    h = MaxPool2d(2)(Relu()(Conv2d(8, kernel_size=3, padding=1, name="conv")(IOKey("x"))))
    return Model.create(outputs={"y": Linear(5, name="head")(Flatten()(h))})


def test_images_with_pooling_train_in_chunks():
    x = numbers.standard_normal((8, 3, 8, 8), np.float32)
    batch = {"x": x, "target": numbers.integers(0, 5, 8).astype(np.int32)}
    histories = []
    for mesh, options in ((None, {}), PIPELINE):
        compiled = ml.compile(images(), ml.JaxBackend(device_mesh=mesh), shapes={"x": list(x.shape)}, **options)
        training = ml.Trainer(compiled, ml.SGD(0.1), loss="cross_entropy", metrics="accuracy", progress=False)
        reports = [training.step(batch) for _ in range(3)]
        histories.append([[r["loss"], r["accuracy"]] for r in reports])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-4)


def test_non_finite_step_is_detected_in_a_pipeline():
    training = trainer(*PIPELINE)
    training.step(BATCHES[0])
    before = training.engine.to_numpy()
    bad = {**BATCHES[1], "target": np.full((8, 6, 16), np.inf, np.float32)}
    with pytest.raises(ml.MithrilError, match="not finite"):
        float(training.step(bad)["loss"])
    for name in training.engine.trained:
        np.testing.assert_array_equal(training.engine.to_numpy()[name], before[name])
    assert len(jax.devices()) >= 4


def test_updates_of_fully_sharded_parameters_gather_no_optimizer_value():
    training = trainer((4,), {"parallelism": "fsdp"}, ml.Adam(0.01), clip_norm=0.5, ema=0.9)
    losses(training, BATCHES[:1])
    source = next(iter(training.engine._steps.values())).run.source
    constrained = re.findall(r"mesh_constrain_kernel, (\w+),", source)
    assert "attn_query_weight" in constrained
    assert not [name for name in constrained if name.startswith(("optimizer", "ema"))]


def traced(function):
    """Return the result and the peak of NumPy's memory; JAX's own is not included."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_accumulated_gradients_are_exchanged_once(tmp_path):
    """Keep the sums of each device until the last batch of a step, also across a checkpoint in between."""
    model = Model.create(outputs={"y": Linear(3, name="out")(Dropout(0.2)(Linear(4, name="hidden")(IOKey("x"))))})
    rows = [6, 6, 5, 6, 6]  # two devices cannot divide five
    batches = [{n: numbers.standard_normal((k, w), np.float32) for n, w in (("x", 4), ("target", 3))} for k in rows]

    def training(mesh):
        recipe = {"clip_norm": 0.5, "gradient_accumulation_steps": 2, "seed": 0}
        return ml.Trainer(
            model, ml.SGD(0.1), loss="mse_loss", backend=ml.JaxBackend(device_mesh=mesh), progress=False, **recipe
        )

    one, many, resumed = training(None), training((2,)), training((2,))
    np.testing.assert_allclose(losses(many, batches), losses(one, batches), rtol=1e-5)
    sums = [x for name, x in many.engine.arrays.items() if name.startswith("accumulated/")]
    assert len(sums) == 4
    terms = [[np.asarray(shard.data) for shard in x.addressable_shards] for x in sums]
    assert all((first != second).any() for first, second in terms), "of its own rows"
    many.save(tmp_path / "saved")
    resumed.begin(batches[0])
    resumed.load(tmp_path / "saved")
    for subject in (one, many, resumed):
        subject.step(batches[0])
    for subject in (many, resumed):
        for name, x in one.engine.to_numpy().items():
            np.testing.assert_allclose(subject.engine.to_numpy()[name], x, rtol=1e-4, atol=1e-6, err_msg=name)
    step = next(iter(many.engine._steps.values()))
    for executable, exchanged in ((step.add, 1), (step.run, 1 + 4 * 4 + 4 + 3 * 4 + 3)):
        call, values = executable.call, {**many.engine.arrays, **batches[0], "learning_rate": np.float32(0.1)}
        arguments = [call.shardings.place(n, values[n], keep=False) for n in (*call.params, *call.inputs)]
        text = call.jitted.lower(*arguments).compile().as_text()
        shapes = re.findall(r"f32\[([\d,]*)\]", " ".join(re.findall(r"= (.*?) all-reduce\(", text)))
        assert sum(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes) == exchanged, text


def test_initial_values_are_drawn_in_parts():
    width = 4096  # one weight has 64 MiB, much more than objects of Python
    batch = {"x": np.zeros((8, width), np.float32), "target": np.zeros((8, 8), np.float32)}
    model = Model.create(outputs={"y": Linear(8, name="head")(Linear(width, name="wide")(IOKey("x")))})

    def begun(mesh, **options):
        compiled = ml.compile(model, ml.JaxBackend(device_mesh=mesh), shapes={"x": [8, width]}, **options)
        training = ml.Trainer(compiled, ml.Adam(1e-3), loss="mse_loss", ema=0.9, progress=False)
        _, peak = traced(lambda: training.begin(batch))
        return training.engine, peak

    many, peak = begun((8,), parallelism="fsdp")
    one, complete = begun(None)
    assert peak < 0.75 * 4 * width * width  # a part of 8 MiB, its copy, blocks of random words; never the weight
    assert complete > 4 * width * width
    for name, x in many.arrays.items():
        np.testing.assert_array_equal(np.asarray(x), one.backend.to_numpy(one.arrays[name]), err_msg=name)
        if "wide.weight" in name:
            assert {s.data.nbytes for s in x.addressable_shards} == {4 * width * width // 8}, name


def test_arrays_stay_in_parts_after_resuming_and_at_the_end_of_fit(tmp_path):
    """Bytes on each device: the parameters and both moments of Adam are one eighth of all."""
    batch = {"x": np.ones((8, 64), np.float32), "target": np.ones((8, 8), np.float32)}
    model = Model.create(outputs={"y": Linear(8, name="head")(Linear(64, name="wide")(IOKey("x")))})

    def sizes(arrays):
        return {n: {s.data.nbytes for s in x.addressable_shards} for n, x in arrays.items() if "wide.weight" in n}

    for epochs in (1, 2):
        backend = ml.JaxBackend(device_mesh=(8,))
        training = ml.Trainer(
            model, ml.Adam(1e-3), loss="mse_loss", backend=backend, parallelism="fsdp", progress=False
        )
        saved = ml.Checkpoint(tmp_path)
        training.fit(batch, epochs, batch_size=8, callbacks=[saved], resume=tmp_path if epochs > 1 else None)
        assert training.steps == epochs
        shards = sizes(training.engine.arrays)
        assert len(shards) == 3 and all(n == {64 * 64 * 4 // 8} for n in shards.values()), shards
        assert list(sizes(training.params).values()) == [{64 * 64 * 4 // 8}]


@pytest.mark.parametrize("dtype", ["int32", "int64"])  # programs with 64-bit values run in a setting of their own
def test_parameters_next_to_integers_are_drawn_in_parts(dtype):
    tokens = {"shapes": {"input": [8]}, "types": {"input": dtype}, "parallelism": "fsdp"}
    drawn = ml.compile(Embedding(64, 8), ml.JaxBackend(device_mesh=(8,)), **tokens).randomize_params()["weight"]
    assert drawn.addressable_shards[0].data.size == 8 * 8


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"parallelism": "fsdp"}], ids=["replicated", "in parts"])
def test_parameters_are_copies_of_pretrained_arrays(dtype, options):
    raw = np.empty(64 + 64 * 16 * 8, np.uint8)
    weight = raw[-raw.ctypes.data % 64 :][: 64 * 16 * np.dtype(dtype).itemsize].view(dtype).reshape(64, 16)
    weight[...] = 1 / 3  # JAX may use the memory of arrays with this alignment
    linear = Linear(64, name="linear")
    linear.pretrained = {"weight": weight}
    model = Model.create(outputs={"y": linear(IOKey("x"))})
    backend = ml.JaxBackend(device_mesh=(8,), dtype=dtype)
    drawn = ml.compile(model, backend, shapes={"x": [8, 16]}, **options).randomize_params()["linear.weight"]
    weight[...] = 5
    np.testing.assert_array_equal(np.asarray(drawn), np.full_like(weight, 1 / 3), strict=True)


def test_random_parameters_are_drawn_in_parts():
    width = 2048  # 16 MiB
    model = Model.create(outputs={"y": Linear(8, name="head")(Linear(width, name="wide")(IOKey("x")))})
    compiled = ml.compile(model, ml.JaxBackend(device_mesh=(8,)), shapes={"x": [8, width]}, parallelism="fsdp")
    params, peak = traced(lambda: compiled.randomize_params(3))
    assert peak < 0.75 * 4 * width * width
    assert {s.data.nbytes for s in params["wide.weight"].addressable_shards} == {4 * width * width // 8}
    for name, x in ml.compile(model, "numpy", shapes={"x": [8, width]}).randomize_params(3).items():
        np.testing.assert_array_equal(np.asarray(params[name]), x, err_msg=name)
