"""Behavior on every backend: guards, accumulation, averages, resuming on another backend, donated buffers."""

import numpy as np
import pytest
from small import X, Y, arrays, classifier, everywhere, loader, trainer

import mithril as ml
from mithril.models import Layer, Linear
from mithril_train.engine.nonfinite import NotFiniteError
from mithril_train.step.step_config import LossScale


@pytest.mark.parametrize("backend", everywhere())
def test_all_at_once(backend, usable):
    """Accumulation, clipping, averages, frozen parameters, groups and dropout in one step, as on NumPy."""
    usable(backend)

    def run(name):
        subject = trainer(
            classifier(dropout=0.2),
            ml.AdamW(0.01, groups={"*.bias": {"weight_decay": 0.0, "learning_rate": 0.02}}),
            backend=name,
            gradient_accumulation_steps=2,
            clip_norm=0.5,
            ema=0.9,
            frozen="first.bias",
            metrics=[ml.models.Accuracy()],
        )
        subject.fit(loader(), 3, validation=(X, Y))
        return subject

    actual, expected = run(backend), run("numpy")
    np.testing.assert_allclose(actual.history.steps, expected.history.steps, atol=1e-5)
    assert actual.history["val_accuracy"] == pytest.approx(expected.history["val_accuracy"])
    actual_arrays, theirs = arrays(actual), arrays(expected)
    assert actual_arrays.keys() == theirs.keys()
    for n, x in theirs.items():
        np.testing.assert_allclose(actual_arrays[n], x, atol=1e-4, err_msg=n)
    np.testing.assert_allclose(actual.predict(X[:16]), expected.predict(X[:16]), atol=1e-4)


@pytest.mark.parametrize("backend", everywhere())
def test_nan_is_found_and_the_parameters_are_those_before_it(backend, usable):
    usable(backend)
    bad = X.copy()
    bad[50] = 1e30  # finite, but not its square

    def squares(output, target):
        return ml.ops.mean(output * output) + 0.0 * ml.ops.sum(ml.ops.cast(target, dtype="float32"))

    subject = trainer(backend=backend, optimizer=ml.SGD(0.1), loss=squares)
    with pytest.raises(NotFiniteError) as caught:
        subject.fit(ml.DataLoader((bad, Y), batch_size=16), 1)
    assert str(caught.value).startswith("step 3: the loss is not finite")
    good = trainer(backend=backend, optimizer=ml.SGD(0.1), loss=squares)
    good.fit(ml.DataLoader((X[:48], Y[:48]), batch_size=16), 1)
    for n in good.engine.trained:
        np.testing.assert_allclose(arrays(subject)[n], arrays(good)[n], atol=1e-7)


@pytest.mark.parametrize("backend", everywhere())
def test_float16_products_with_a_dynamic_loss_scale(backend, usable):
    """A scale too large for float16 skips steps until it fits; then training continues."""
    usable(backend)
    subject = trainer(
        optimizer=ml.SGD(0.1),
        backend=backend,
        mixed_precision={"dtype": "float16"},
        loss_scale=LossScale(2.0**20, factor=8.0),
    )
    losses = [subject.step((X[:16], Y[:16]))["loss"] for _ in range(6)]
    carried = arrays(subject)
    skipped = round(np.log2(2.0**20 / carried["training/loss_scale"]) / 3)
    assert 1 <= skipped <= 3
    assert carried["training/step"] == 6 - skipped
    assert losses[0] == losses[skipped] > losses[-1]
    assert carried["first.weight"].dtype == np.float32


@pytest.mark.parametrize("backend", everywhere("numpy"))
def test_training_resumes_on_another_backend(backend, usable, tmp_path):
    usable(backend)
    reference = trainer(classifier(dropout=0.2))
    reference.fit(loader(), 2)
    first = trainer(classifier(dropout=0.2), callbacks=[ml.Checkpoint(tmp_path)])
    first.fit(loader(), 1)
    second = trainer(classifier(dropout=0.2), backend=backend)
    second.fit(loader(), 2, resume=tmp_path)
    np.testing.assert_allclose(second.history.steps, reference.history.steps, atol=1e-5)


def test_jax_reuses_donated_buffers(usable):
    usable("jax")
    subject = trainer(backend="jax")
    subject.begin((X[:16], Y[:16]))
    before = dict(subject.engine.arrays)
    subject.step((X[:16], Y[:16]))
    assert all(x.is_deleted() for x in before.values())
    params = {n: np.asarray(x) for n, x in subject.params.items()}
    subject.fit(loader(), 1)
    bound = subject.compiled.params
    subject.step((X[:16], Y[:16]))
    assert not any(x.is_deleted() for x in bound.values()), "the compiled model has copies"
    assert params


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    ("backend", "jit"), [pytest.param("torch", True, marks=pytest.mark.soak), ("mlx", True), ("jax", False)]
)
def test_compiled_or_not(backend, jit, usable):
    usable(backend)
    expected, subject = trainer(), trainer(backend=backend, jit=jit)
    for k in (0, 16):
        batch = (X[k : k + 16], Y[k : k + 16])
        assert subject.step(batch)["loss"] == pytest.approx(expected.step(batch)["loss"], abs=1e-5)


def test_the_flag_is_training():
    class Noisy(Layer):
        inputs = ("input", "is_training")

        def __init__(self):
            self.body = Linear(8, 3)

        def build(self, x, flag):
            return self.body(x * ml.ops.where(flag, 2.0, 1.0))

    subject = trainer(Noisy(), optimizer=ml.SGD(0.0))
    training = subject.step((X[:16], Y[:16]))["loss"]
    assert training != subject.evaluate((X[:16], Y[:16]))["loss"]
    half = subject.evaluate((X[:16] * 2, Y[:16]))["loss"]
    assert training == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize("backend", everywhere())
def test_arrays_in_main_memory(backend, usable):
    """Read columns of any framework for checks, but fetch none from a device."""
    usable(backend)
    engine = ml.plugins.backend_class(backend)()
    column = np.arange(5, dtype=np.int32)
    assert engine.to_main_memory(column) is column
    fetched = engine.to_main_memory(engine.array(column))
    assert fetched is None or fetched.tolist() == column.tolist()
    assert (fetched is None) == (engine.capabilities.family != "cpu" and backend != "mlx")
    torch = pytest.importorskip("torch")
    assert engine.to_main_memory(torch.arange(5)).tolist() == column.tolist()
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert engine.to_main_memory(half).astype(np.float32).tolist() == [1, 1]


def test_rows_of_processes_need_a_backend_of_several():
    with pytest.raises(ml.BackendError, match="'numpy' does not compute in several processes"):
        ml.NumpyBackend().from_local_rows(X)
