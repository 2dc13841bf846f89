"""Ctrl-C and errors at every place of training: afterwards it continues, and ends as if nothing had happened."""

import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from small import X, Y, arrays, classifier, loader, trainer

import mithril as ml
import mithril_train
from mithril_train.loop.interrupts import Interrupts

EPOCHS = 3
ROOM = Path(mithril_train.__file__).parent
LOOP = {
    str(ROOM / name)
    for name in (
        "loop/trainer.py",
        "loop/history.py",
        "loop/checkpointing.py",
        "loop/interrupts.py",
        "engine/engine.py",
        "engine/carried_arrays.py",
        "engine/adapters.py",
        "data/loader.py",
    )
}


class Strike(ml.Callback):
    """Raises at the n-th call of one event."""

    def __init__(self, event="", number=0, error=RuntimeError):
        self.left, self.error = number, error
        if event:
            setattr(self, event, self.hit)

    def hit(self, *_):
        self.left -= 1
        if self.left == 0:
            raise self.error


class Epochs(ml.Callback):
    """Notes the ends of epochs."""

    def __init__(self):
        self.numbers = []

    def epoch_end(self, trainer, row):
        self.numbers.append(trainer.epoch)


class Lines:
    """Traces the lines of the training loop, and acts at the n-th."""

    def __init__(self, subject, number=0, error=None):
        self.subject, self.number, self.error, self.count = subject, number, error, 0

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in LOOP:
            return None
        if event == "line":
            self.count += 1
            if self.number and self.count >= self.number:
                self.strike()
        return self

    def strike(self):
        if self.error is KeyboardInterrupt:
            self.number = 0
            signal.raise_signal(signal.SIGINT)
        elif self.subject._interrupts._depth == 0:  # a step that fails while it runs is another case
            self.number = 0
            raise self.error


def fresh(folder, strike=None, backend="numpy", **options):
    options = {"ema": 0.9, "gradient_accumulation_steps": 2, "metrics": "accuracy", **options}
    callbacks = [
        *([strike] if strike else []),
        Epochs(),
        ml.ReduceLROnPlateau(patience=1),
        ml.Checkpoint(folder, every=2),
    ]
    return trainer(classifier(dropout=0.2), backend=backend, seed=1, callbacks=callbacks, **options)


def fit(subject, epochs, **options):
    subject.fit(loader(seed=4), epochs, validation=(X[:20], Y[:20]), **options)


def usable(subject):
    """Evaluate and predict, which must not change training."""
    subject.evaluate(X[:20], Y[:20])
    if subject.engine.arrays:
        subject.predict(X[:20])


def complete(subject, **options):
    """Train the epochs that are left, and evaluate and predict before and after."""
    usable(subject)
    fit(subject, EPOCHS if options else EPOCHS - subject.epoch, **options)
    usable(subject)


def same(subject, reference):
    assert subject.steps == reference.steps
    assert subject.history.rows == reference.history.rows
    assert subject.history.steps == reference.history.steps
    for name, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(subject)[name], x, err_msg=name)


@pytest.fixture(autouse=True)
def handler():
    """Restore the handler, which stays if a strike hits the line that removes it; it then passes interrupts on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    subject = fresh(tmp_path_factory.mktemp("reference"))
    fit(subject, EPOCHS)
    return subject


def test_interrupt_in_validation_does_not_lock_the_trainer(tmp_path, reference):
    """Type the case of the report: Ctrl-C in the validation of an epoch, then ``fit`` again."""
    subject = fresh(tmp_path, Strike("validation_begin", 1, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fit(subject, EPOCHS)
    assert (subject.epoch, subject.steps) == (0, 3)
    complete(subject)
    same(subject, reference)


CALLS = {
    **dict.fromkeys(("begin", "end"), (1,)),
    **dict.fromkeys(("epoch_begin", "validation_begin", "validation_end", "epoch_end"), (1, 2, 3)),
    **dict.fromkeys(("batch_begin", "batch_end"), (1, 2, 5, 6, 7, 12, 17, 18)),
    "step_end": (1, 3, 4, 9),
}


ERRORS = pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])


@ERRORS
@pytest.mark.parametrize("event", CALLS)
def test_every_callback(tmp_path, reference, event, error):
    strike_callback(tmp_path, reference, event, error)


def strike_callback(folder, reference, event, error, backend="numpy"):
    for number in CALLS[event]:
        subject = fresh(folder / str(number), Strike(event, number, error), backend)
        with pytest.raises(error):
            fit(subject, EPOCHS)
        if number == CALLS[event][-1]:
            resumed = fresh(folder / str(number), backend=backend)
            complete(resumed, resume="auto")
            same(resumed, reference)
        complete(subject)
        same(subject, reference)
        assert subject.callbacks[1].numbers == [1, 2, 3]


@ERRORS
def test_random_lines(tmp_path, reference, error):
    strike_lines(tmp_path, reference, error, 50)


def strike_lines(folder, reference, error, count, backend="numpy"):
    counted = fresh(folder / "counted", backend=backend)
    lines = struck(counted, Lines(counted))
    same(counted, reference)
    for number in random.Random(error.__name__).sample(range(1, lines.count), count):
        subject = fresh(folder / str(number), backend=backend)
        struck(subject, Lines(subject, number, error))
        complete(subject)
        same(subject, reference)


def struck(subject, lines):
    sys.settrace(lines)
    try:
        fit(subject, EPOCHS)
    except (KeyboardInterrupt, RuntimeError):
        pass
    finally:
        sys.settrace(None)
    return lines


@pytest.fixture
def other(tmp_path, usable, request):
    """Return the name of a backend, and an undisturbed run on it."""
    usable(request.param)
    subject = fresh(tmp_path / "undisturbed", backend=request.param)
    fit(subject, EPOCHS)
    return request.param, subject


ENGINES = pytest.mark.parametrize("other", ["torch", "jax"], indirect=True)


@ENGINES
def test_other_engines(tmp_path, other):
    backend, undisturbed = other
    strike_lines(tmp_path, undisturbed, KeyboardInterrupt, 5, backend)


@pytest.mark.soak
@ERRORS
@ENGINES
def test_every_place_on_other_engines(tmp_path, other, error):
    backend, undisturbed = other
    strike_lines(tmp_path, undisturbed, error, 50, backend)
    for event in CALLS:
        strike_callback(tmp_path / event, undisturbed, event, error, backend)


def test_training_continues_after_a_step_that_was_not_finite():
    bad = X.copy()
    bad[40, 2] = np.nan
    subject = trainer()
    with pytest.raises(ml.MithrilError, match="is not finite"):
        subject.fit(ml.DataLoader((bad, Y), batch_size=16), 1)
    assert subject.steps == 2
    subject.fit(ml.DataLoader((X, Y), batch_size=16), 1)
    expected = trainer()
    expected.fit(ml.DataLoader((X, Y), batch_size=16), 1)
    same(subject, expected)


def test_single_steps_are_complete():
    """Strike the last lines of ``step``, after the program: the arrays move with the counter."""
    batches = [(X[k : k + 16], Y[k : k + 16]) for k in range(0, 64, 16)]

    def train(strike):
        subject, count = trainer(ema=0.9), 0
        for batch in batches:
            before = subject.steps
            lines = Lines(subject, strike if before == 2 else 0, KeyboardInterrupt)
            sys.settrace(lines if before == 2 else None)
            try:
                subject.step(batch)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            count = lines.count or count
            if subject.steps == before:
                subject.step(batch)
        return subject, count

    expected, count = train(0)
    for strike in range(count - 50, count + 1, 2):
        same(train(strike)[0], expected)


@pytest.fixture
def _python_handles_interrupts():
    """Install the handler of Python, which a process in the background starts without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_handles_interrupts")
def test_interrupts_wait_once():
    interrupts, seen = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.handled(), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        seen.append("waits")
    assert seen == ["waits"]
    with pytest.raises(KeyboardInterrupt), interrupts.handled(), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        seen.append("unreachable")
    assert seen == ["waits"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_fails_while_it_runs_warns(monkeypatch):
    subject = trainer()
    subject.begin((X[:16], Y[:16]))
    step = subject.engine.prepare({"input": X[:16], "target": Y[:16]})

    def fails(*_):
        raise MemoryError

    object.__setattr__(step, "run", fails)
    with pytest.warns(UserWarning, match="may have changed some of the parameters"), pytest.raises(MemoryError):
        subject.step((X[:16], Y[:16]))
