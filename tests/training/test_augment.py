"""Augmentation in the step's graph: the effect of each layer, and the same numbers on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Flatten, Linear, Model, Sequential

DRAW = np.random.default_rng(5)
IMAGES = DRAW.uniform(size=(12, 3, 8, 8)).astype(np.float32)
LABELS = DRAW.integers(0, 4, 12).astype(np.int32)
LAYERS = {
    "flip": lambda: ml.RandomFlip(),
    "upside down": lambda: ml.RandomFlip(1.0, axis=-2),
    "crop": lambda: ml.RandomCrop(6, padding=2),
    "affine": lambda: ml.RandomAffine(30, translate=0.2, scale=(0.8, 1.2), shear=10),
    "color": lambda: ml.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
}
MIXING = {"mixup": lambda: ml.MixUp(4, alpha=0.4), "cutmix": lambda: ml.CutMix(4)}


def run(layer, backend, inputs, *, training=True, seed=3):
    compiled = ml.compile(layer, backend)
    state = compiled.state_for(inputs, seed) if training else None
    results = compiled.evaluate({}, inputs, state=state, training=training)
    outputs = results[0] if isinstance(results, tuple) else results
    return {n: np.asarray(compiled.backend.to_numpy(x)) for n, x in outputs.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_images_agree_with_numpy(backend, name):
    outputs, reference = (run(LAYERS[name](), b, {"input": IMAGES})["output"] for b in (backend, "numpy"))
    np.testing.assert_allclose(outputs, reference, atol=1e-4)
    assert not np.array_equal(reference, IMAGES)
    if name != "crop":
        np.testing.assert_array_equal(run(LAYERS[name](), backend, {"input": IMAGES}, training=False)["output"], IMAGES)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_agrees_with_numpy(backend, name):
    inputs = {"input": IMAGES, "target": LABELS}
    outputs, reference = (run(MIXING[name](), b, inputs) for b in (backend, "numpy"))
    for output, x in reference.items():
        np.testing.assert_allclose(outputs[output], x, atol=1e-4, err_msg=output)
    np.testing.assert_allclose(reference["probabilities"].sum(1), 1.0, atol=1e-6)
    unchanged = run(MIXING[name](), backend, inputs, training=False)
    np.testing.assert_array_equal(unchanged["output"], IMAGES)
    np.testing.assert_array_equal(unchanged["probabilities"], np.eye(4, dtype=np.float32)[LABELS])


def test_layer_that_a_plugin_exports_returns_from_the_file_of_a_model():
    model = Sequential(ml.RandomFlip(0.3, axis=-2), Flatten(), Linear(4))
    assert Sequential.from_json(model.to_json()).to_json() == model.to_json()


def test_flips_are_mirror_images():
    stack = np.repeat(IMAGES, 50, axis=0)
    flipped = run(ml.RandomFlip(0.3), "numpy", {"input": stack})["output"]
    is_flipped = np.array([np.array_equal(a, b[:, :, ::-1]) for a, b in zip(flipped, stack, strict=True)])
    is_same = np.array([np.array_equal(a, b) for a, b in zip(flipped, stack, strict=True)])
    assert (is_flipped | is_same).all()
    assert 0.25 < is_flipped.mean() < 0.35


def test_crops_are_windows_of_the_padded_image():
    cropped = run(ml.RandomCrop((6, 5), padding=2), "numpy", {"input": IMAGES})["output"]
    padded = np.pad(IMAGES, ((0, 0), (0, 0), (2, 2), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (6, 5), axis=(2, 3))
    places = [
        [(y, x) for y in range(7) for x in range(8) if np.array_equal(windows[k, :, y, x], crop)]
        for k, crop in enumerate(cropped)
    ]
    assert all(places)
    assert len({p[0] for p in places}) > 5
    center = run(ml.RandomCrop((6, 4)), "numpy", {"input": IMAGES}, training=False)["output"]
    np.testing.assert_array_equal(center, IMAGES[:, :, 1:7, 2:6])


def test_affine_maps_interpolate():
    scaled = run(ml.RandomAffine(scale=(0.5, 0.5)), "numpy", {"input": IMAGES})
    assert scaled["output"].shape == IMAGES.shape
    grid = (np.arange(8) - 3.5) / 0.5 + 3.5
    valid = (grid >= 0) & (grid <= 7)
    low = np.floor(grid[valid]).astype(int)
    rows = (IMAGES[:, :, low] + IMAGES[:, :, np.minimum(low + 1, 7)]) / 2
    expected = (rows[..., low] + rows[..., np.minimum(low + 1, 7)]) / 2
    np.testing.assert_allclose(scaled["output"][:, :, valid][..., valid], expected, atol=1e-5)


def test_colors_keep_gray_images_gray_and_hue_keeps_the_sum():
    gray = np.repeat(IMAGES[:, :1], 3, axis=1)
    jittered = run(ml.ColorJitter(saturation=0.8, hue=0.5), "numpy", {"input": gray})["output"]
    np.testing.assert_allclose(jittered, gray, atol=1e-5)
    hue = run(ml.ColorJitter(hue=0.5), "numpy", {"input": IMAGES})["output"]
    np.testing.assert_allclose(hue.sum(1), IMAGES.sum(1), atol=1e-5)
    bright = run(ml.ColorJitter(brightness=0.5), "numpy", {"input": IMAGES})["output"] / IMAGES
    assert np.ptp(bright.reshape(12, -1), axis=1).max() < 1e-5
    assert 0.5 <= bright.min() < bright.max() <= 1.5


def test_labels_are_mixed_by_the_area_that_is_replaced():
    images = np.broadcast_to(np.arange(12, dtype=np.float32)[:, None, None, None], (12, 1, 9, 9))
    mixed = run(ml.CutMix(12), "numpy", {"input": images, "target": np.arange(12, dtype=np.int32)})
    remaining = (mixed["output"] == images).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(mixed["probabilities"][np.arange(12), np.arange(12)], remaining, atol=1e-6)
    assert remaining.min() < 0.9


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.5])
def test_shares_have_the_moments_of_the_beta_distribution(alpha):
    x, y = np.ones((20000, 1), np.float32), np.arange(20000) % 2
    shares = run(ml.MixUp(2, alpha=alpha), "numpy", {"input": x, "target": y.astype(np.int32)})["probabilities"]
    remaining = shares[np.arange(20000), y]
    assert remaining.mean() == pytest.approx(0.5, abs=0.01)
    assert remaining.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def trained(backend, augment):
    model = Sequential(Flatten(), Linear(4))
    subject = ml.Trainer(
        model, ml.SGD(0.1), loss="cross_entropy", metrics="accuracy", augment=augment, backend=backend, progress=False
    )
    subject.fit(IMAGES, LABELS, epochs=2, batch_size=4, validation=(IMAGES, LABELS))
    return subject


def test_a_trainer_augments_in_its_step(backend):
    """Flip, crop and mix in the graph; validation, prediction and the compiled model see the images unchanged."""

    def augment():
        return [ml.RandomFlip(), ml.RandomCrop(8, padding=1), ml.MixUp(4, alpha=0.4)]

    subject, reference, plain = trained(backend, augment()), trained("numpy", augment()), trained("numpy", ())
    np.testing.assert_allclose(subject.history.steps, reference.history.steps, rtol=1e-3)
    np.testing.assert_allclose(subject.predict(IMAGES), reference.predict(IMAGES), atol=1e-3)
    assert subject.history.steps[0] != plain.history.steps[0]
    outputs = subject.compiled({"input": IMAGES})["output"]
    np.testing.assert_allclose(subject.compiled.backend.to_numpy(outputs), subject.predict(IMAGES), atol=1e-5)
    assert len(subject.engine._steps) == 1


def test_augmentation_resumes_to_the_bit(tmp_path):
    def fit(epochs, **options):
        subject = ml.Trainer(
            Sequential(Flatten(), Linear(4)), ml.Adam(), loss="cross_entropy", augment=ml.RandomFlip(), backend="numpy",
            progress=False,
        )  # fmt: skip
        subject.fit(IMAGES, LABELS, epochs=epochs, batch_size=4, **options)
        return subject

    fit(1, callbacks=[ml.Checkpoint(tmp_path)])
    assert fit(3, resume=tmp_path).history.steps == fit(3).history.steps


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ml.RandomFlip(2.0), "p=2.0 is not a probability"),
        (lambda: ml.RandomFlip("a"), "expected float"),
        (lambda: ml.ColorJitter(hue=0.7), "at most hue=0.5"),
        (lambda: ml.RandomAffine(scale=(1.0, 0.5)), "is not a range of positive factors"),
        (lambda: ml.MixUp(0), "classes: expected int of at least 1"),
        (lambda: run(ml.RandomCrop(9), "numpy", {"input": IMAGES}), "smaller than the window 9 x 9"),
        (lambda: run(ml.RandomFlip(), "numpy", {"input": IMAGES[0]}), r"expects images \[N, C, H, W\]"),
        (lambda: run(ml.ColorJitter(hue=0.1), "numpy", {"input": IMAGES[:, :2]}), "need 3 channels"),
        (lambda: trained("numpy", ml.MixUp(5)), "."),
        (lambda: trained("numpy", Linear(3)), "has parameters(?s:.)*into the model"),
        (lambda: trained("numpy", [print]), "augment: at (?s:.)*expected Layer"),
    ],
)
def test_wrong_augmentation_is_explained(call, message):
    with pytest.raises(ml.MithrilError, match=message):
        call()


def test_terminals_are_columns_by_name():
    model = Model()
    model |= ml.RandomFlip(1.0)(input="picture", output="flipped")
    subject = ml.Trainer(
        Sequential(Flatten(), Linear(4)),
        ml.SGD(0.1),
        loss="cross_entropy",
        augment=model,
        backend="numpy",
        progress=False,
    )
    with pytest.raises(ml.OptionError, match="augment reads 'picture', which is not in the batch"):
        subject.step((IMAGES, LABELS))
