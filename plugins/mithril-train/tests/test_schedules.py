"""Learning-rate schedules: equal to torch's where torch has them."""

import math

import pytest
from small import X, Y, trainer

import mithril as ml
from mithril.graph.errors import OptionError
from mithril_train.optim.schedules import as_schedule


def torch_rates(make, steps, rate=0.1):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule = make(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        (ml.StepDecay(0.1, 7, 0.5), lambda s, o: s.StepLR(o, 7, 0.5)),
        (ml.Cosine(0.1, 40, 0.01), lambda s, o: s.CosineAnnealingLR(o, 40, 0.01)),
        (ml.OneCycle(0.1, 40), lambda s, o: s.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=False)),
    ],
)
def test_equals_torch(schedule, theirs):
    assert [schedule(k) for k in range(40)] == pytest.approx(torch_rates(theirs, 40), rel=1e-6)


def test_warm_up_then_the_inner_schedule():
    schedule = ml.WarmUp(ml.Cosine(0.1, 10), 4)
    assert [schedule(k) for k in range(5)] == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1])
    assert schedule(9) == pytest.approx(0.05)
    assert schedule(100) == 0.0


def test_numbers_and_functions_are_schedules():
    assert as_schedule(0.5)(3) == 0.5
    assert as_schedule(lambda step: 1 / (1 + step))(3) == 0.25
    assert ml.Constant(0.1)(math.inf) == 0.1
    with pytest.raises(OptionError, match="'fast'"):
        as_schedule("fast")
    with pytest.raises(OptionError, match="steps: expected int of at least 1, got 0"):
        ml.Cosine(0.1, 0)


def test_the_step_takes_the_schedules_rate():
    monitor = ml.LearningRateMonitor()
    model = ml.models.Linear(3, 1)
    trainer = ml.Trainer(model, ml.SGD(ml.StepDecay(0.1, 2)), loss="mse_loss", backend="numpy", progress=False)
    import numpy as np

    data = (np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))
    trainer.fit(ml.DataLoader(data, batch_size=2), 1, callbacks=[monitor])
    assert monitor.rates == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_polynomial_equals_torch_definition():
    rates = [ml.Polynomial(0.1, 4, power=2.0, final=0.02)(k) for k in range(7)]
    expected = [0.02 + 0.08 * (1 - min(k, 4) / 4) ** 2 for k in range(7)]
    assert rates == pytest.approx(expected)


def test_cycles_go_up_and_down_and_shrink():
    schedule = ml.Cyclic(0.1, 0.5, steps=2, decay=0.5)
    assert [schedule(k) for k in range(9)] == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.2, 0.3, 0.2, 0.1])


def test_plateaus_reduce_all_rates_and_schedules_continue(tmp_path):
    class Stagnate(ml.Callback):
        def epoch_end(self, trainer, row):
            row["watched"] = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0][trainer.epoch - 1]

    def fit(epochs, **options):
        optimizer = ml.SGD(lambda step: 0.1 / (1 + step), groups={"*.bias": {"learning_rate": 0.5}})
        subject = trainer(optimizer=optimizer)
        seen.clear()
        callbacks = [Rates(), Stagnate(), ml.ReduceLROnPlateau("watched", 0.5, patience=2), ml.Checkpoint(tmp_path)]
        subject.fit([(X, Y)], epochs, callbacks=callbacks, **options)
        return subject

    class Rates(ml.Callback):
        def step_end(self, trainer, report):
            seen.append([report.learning_rate, report.rates["learning_rate/*.bias"]])

    seen = []
    fit(6)
    scales = [1, 1, 1, 1, 0.5, 0.5]
    assert [row[0] for row in seen] == pytest.approx([0.1 / (1 + k) * s for k, s in enumerate(scales)])
    assert [row[1] for row in seen] == pytest.approx([0.5 * s for s in scales])
    for path in tmp_path.iterdir():
        path.unlink()
    fit(5)
    fit(6, resume=tmp_path)
    assert seen[0] == pytest.approx([0.1 / 6 * 0.5, 0.25]), "the scale is restored"
