"""Trainer: epochs, evaluation, prediction, callbacks, checkpoints, resuming, progress."""

import csv
import io
import json
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import numpy as np
import pytest
from small import X, Y, arrays, classifier, loader, trainer

import mithril as ml
from mithril.graph.errors import InputError, OptionError
from mithril.models import Accuracy
from mithril_train.loop import checkpoint
from mithril_train.loop.history import History
from mithril_train.loop.progress import Bar, Lines, make_progress


def test_fit_evaluate_predict():
    subject = trainer(metrics=[Accuracy()])
    history = subject.fit(loader(), 15, validation=ml.DataLoader((X, Y), batch_size=40))
    assert history.columns == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert len(history) == 15
    assert len(history.steps) == 90
    assert history["val_accuracy"][-1] > 0.9
    measured = subject.evaluate((X, Y))
    assert measured["accuracy"] == pytest.approx(history["val_accuracy"][-1])
    logits = subject.predict(X)
    assert logits.shape == (96, 3)
    np.testing.assert_allclose(subject.predict([X[:50], X[50:]]), logits, rtol=1e-6, atol=1e-6)
    assert (logits.argmax(1) == Y).mean() == pytest.approx(measured["accuracy"])
    np.testing.assert_array_equal(subject.compiled({"input": X})["output"], logits)


def test_means_are_weighted_by_batch_size():
    subject = trainer(optimizer=ml.SGD(0.0))
    subject.begin((X, Y))
    a = subject.evaluate((X, Y))["loss"]
    b = subject.evaluate(ml.DataLoader((X, Y), batch_size=70))["loss"]
    assert a == pytest.approx(b, rel=1e-6)


def test_second_fit_continues():
    subject, reference = trainer(), trainer()
    subject.fit(loader(), 1)
    source = loader()
    source.epoch = 1
    subject.fit(source, 1)
    reference.fit(loader(), 2)
    for n, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(subject)[n], x)


def test_a_look_at_the_first_batch_costs_no_step():
    source = loader()
    next(iter(source))
    subject = trainer()
    subject.fit(source, 1)
    assert subject.steps == 6


def test_the_trained_model_takes_batches_of_any_size():
    """Also without a declaration before training: exports, such as a file, keep the batch size open."""
    subject = trainer()
    subject.fit(loader(), 1)
    (program,) = subject.compiled.programs
    assert str(program.graph.input("input").type) == "f32[batch, 8]"
    assert subject.compiled({"input": X[:5]})["output"].shape == (5, 3)

    class Fixed(ml.models.Layer):
        inputs = ("input",)

        def __init__(self):
            self.body = ml.models.Linear(8, 3)

        def build(self, x):
            if x.shape[0] != 16:
                raise InputError("sixteen rows")
            return self.body(x)

    subject = trainer(Fixed())
    subject.fit(loader(), 1)
    assert subject.compiled({"input": X[:16]})["output"].shape == (16, 3)
    assert "the model takes batches of 16 only" in str(subject.engine.decisions)


def test_early_stopping_restores_the_best():
    class Worse(ml.Callback):
        def epoch_end(self, trainer, row):
            seen.append(arrays(trainer))
            row["val_loss"] = [1.0, 0.5, 0.7, 0.6, 0.4][trainer.epoch - 1]

    seen = []
    stopping = ml.EarlyStopping(patience=2)
    subject = trainer(callbacks=[Worse(), stopping])
    subject.fit(loader(), 5, validation=(X, Y))
    assert subject.epoch == 4
    assert "has not improved for 2 epochs" in subject.stopped
    assert stopping.best_epoch == 2
    np.testing.assert_array_equal(arrays(subject)["first.weight"], seen[1]["first.weight"])


def test_columns_of_other_callbacks_are_watched():
    class Validates(ml.Callback):
        def epoch_end(self, trainer, row):
            row["val_loss"] = 1.0 / trainer.epoch

    stopping = ml.EarlyStopping()
    trainer(callbacks=[Validates(), stopping]).fit(loader(), 2)
    assert stopping.best == 0.5


def test_early_stopping_lists_available_metrics():
    with pytest.raises(OptionError) as caught:
        trainer(callbacks=[ml.EarlyStopping()]).fit(loader(), 1)
    assert str(caught.value) == (
        "EarlyStopping watches 'val_loss', which is not measured\n  measured: loss\nhint: give fit(validation=...)"
    )
    subject = trainer(callbacks=[ml.ReduceLROnPlateau()], metrics="accuracy")
    with pytest.raises(OptionError, match=r"ReduceLROnPlateau watches(.|\n)*measured: loss, accuracy\n"):
        subject.fit(loader(), 1)
    assert subject.steps == 0  # before an epoch, which may take hours
    for name, hint in [("val_lost", "did you mean 'val_loss'"), ("val_accuracy", "metrics='accuracy'")]:
        with pytest.raises(OptionError, match=f"(?s)'{name}'.*measured: loss, val_loss\nhint: .*{hint}"):
            trainer(callbacks=[ml.EarlyStopping(name)]).fit(loader(), 1, validation=loader())


def test_logs(tmp_path):
    table, lines = tmp_path / "a" / "log.csv", tmp_path / "log.jsonl"
    subject = trainer(callbacks=[ml.CSVLog(table), ml.JSONLog(lines)])
    history = subject.fit(loader(), 3)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(r["loss"]) for r in rows] == history["loss"]
    assert [int(r["epoch"]) for r in rows] == [1, 2, 3]
    assert [json.loads(text)["step"] for text in lines.read_text().splitlines()] == [6, 12, 18]


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("on_epoch_end", lambda self, trainer, row: None, r"no event calls .*\n.*\n.*did you mean epoch_end\(\)"),
        ("on_train_begin", lambda self, trainer: None, r"did you mean begin\(\)"),
        ("epoch_start", lambda self, trainer, epoch: None, r"did you mean epoch_begin\(\)"),
        ("epoch_end", lambda self, trainer, epoch, row: None, r"'row'\n.*def epoch_end\(self, trainer, row\)"),
        ("end", lambda self: None, r"too many positional arguments\n.*def end\(self, trainer\)"),
    ],
)
def test_methods_that_no_event_calls(name, method, message):
    with pytest.raises(ml.OptionError, match=message):
        type("Log", (ml.Callback,), {name: method})
    type("Log", (ml.Callback,), {"epoch_end": lambda self, *arguments: None, "send": lambda self: None})


def test_callbacks_see_every_moment():
    class Log(ml.Callback):
        def begin(self, trainer):
            seen.append("begin")

        def epoch_begin(self, trainer, epoch):
            seen.append(f"epoch {epoch}")

        def step_end(self, trainer, report):
            seen.append(report.step)
            if report.step == 8:
                trainer.stop("enough")

        def epoch_end(self, trainer, row):
            seen.append("row")

        def end(self, trainer):
            seen.append("end")

    seen = []
    subject = trainer(callbacks=[Log()])
    subject.fit(loader(), 5)
    assert seen == ["begin", "epoch 1", 1, 2, 3, 4, 5, 6, "row", "epoch 2", 7, 8, "end"]
    assert subject.stopped == "enough"


# -- checkpoints -------------------------------------------------------------------------------------------------------
class Killed(Exception):
    pass


class KillAt(ml.Callback):
    def __init__(self, step):
        self.step = step

    def step_end(self, trainer, report):
        if report.step == self.step:
            raise Killed


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop_step", [3, 6, 7])
def test_resume_is_bit_for_bit(tmp_path, stop_step, accumulate):
    """Killed in the middle of an epoch, at its end, in the next: parameters, moments, keys, losses, rows are equal."""

    def fresh():
        return trainer(
            classifier(dropout=0.3),
            ml.AdamW(ml.Cosine(0.01, 20)),
            callbacks=[ml.LearningRateMonitor()],
            ema=0.9,
            gradient_accumulation_steps=accumulate,
        )

    def source():
        return loader(batch_size=16 // accumulate, seed=5)

    reference = fresh()
    reference.fit(source(), 3)
    first = fresh()
    with pytest.raises(Killed):
        first.fit(source(), 3, callbacks=[ml.Checkpoint(tmp_path, every=1), KillAt(stop_step)])
    second = fresh()
    second.fit(source(), 3, resume=tmp_path)
    for n, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(second)[n], x, err_msg=n)
    assert second.history.rows == reference.history.rows
    assert second.history.steps == reference.history.steps
    assert second.callbacks[0].rates == reference.callbacks[0].rates


def test_checkpoints_kept_and_the_best(tmp_path):
    keeper = ml.Checkpoint(tmp_path, keep=2, monitor="loss")
    subject = trainer(callbacks=[keeper])
    subject.fit(loader(), 4)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["best.safetensors", "step-00000018.safetensors", "step-00000024.safetensors"]
    assert keeper.latest().name == "step-00000024.safetensors"
    other = trainer()
    other.load(tmp_path / "best.safetensors")
    other.begin((X[:16], Y[:16]))
    np.testing.assert_array_equal(arrays(other)["first.weight"], arrays(subject)["first.weight"])


def test_callback_state_is_restored_in_any_order_and_not_lost_silently(tmp_path):
    def callbacks():
        return [ml.LearningRateMonitor(), ml.EarlyStopping("loss"), ml.Checkpoint(tmp_path, monitor="loss")]

    first = trainer(callbacks=callbacks())
    first.fit(loader(), 2)
    second = trainer(callbacks=callbacks()[::-1])
    second.fit(loader(), 2, resume=tmp_path)
    best, stopping, rates = second.callbacks
    assert (best.best, stopping.best) == (first.callbacks[2].best, first.callbacks[1].best)
    assert rates.rates == first.callbacks[0].rates
    np.testing.assert_array_equal(stopping.tensors()["first.weight"], first.callbacks[1].tensors()["first.weight"])
    third = trainer()
    third.fit(loader(), 2, resume=tmp_path)
    assert "the checkpoint's state of EarlyStopping: there is no such callback" in str(third.engine.decisions)


def test_halves_of_files_are_tidied_away(tmp_path):
    half = tmp_path / ".step-00000003.safetensors.0123456789abcdef.part"
    half.mkdir()
    (half / "part").write_bytes(b"half")
    trainer(callbacks=[ml.Checkpoint(tmp_path)]).fit(loader(), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000006.safetensors"]


def test_resuming_a_finished_training_returns_its_results(tmp_path):
    first = trainer(callbacks=[ml.Checkpoint(tmp_path)])
    first.fit(loader(), 2)
    second = trainer()
    second.fit(loader(), 2, resume=tmp_path)
    assert second.history.rows == first.history.rows
    np.testing.assert_array_equal(second.predict(X), first.predict(X))
    np.testing.assert_array_equal(second.compiled({"input": X})["output"], first.predict(X))
    third = trainer()
    third.load(tmp_path)  # the directory of Checkpoint
    assert third.history.rows == first.history.rows


def test_resume_from_a_folder_without_checkpoints_is_rejected(tmp_path):
    for folder, message in ((tmp_path, "is empty of checkpoints"), (tmp_path / "rnu", "does not exist")):
        with pytest.raises(InputError, match=rf"cannot resume: '{folder}' {message}\nhint: .*resume='auto'"):
            trainer().fit(loader(), 1, resume=folder)
    with pytest.raises(OptionError, match="resume='auto' requires a Checkpoint"):
        trainer().fit(loader(), 1, resume="auto")


def test_resume_auto_starts_and_restarts(tmp_path):
    def run(epochs):
        subject = trainer()
        subject.fit(loader(), epochs, callbacks=[ml.Checkpoint(tmp_path / "run")], resume="auto")
        return subject

    assert run(1).steps == 6
    assert run(2).epoch == 2, "the epoch of the first run counts"
    reference = trainer()
    reference.fit(loader(), 2)
    for n, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(run(2))[n], x)


def test_resumed_second_fit_ends_where_it_would_have(tmp_path):
    """Epochs of the fit before the interrupted one do not count."""
    saving = [ml.Checkpoint(tmp_path)]
    reference, first, second = trainer(), trainer(), trainer()
    for subject in (reference, first):
        source = loader()
        subject.fit(source, 2)
        subject.fit(source, 1 if subject is first else 3, callbacks=saving if subject is first else [])
    second.fit(loader(), 3, resume=tmp_path)
    assert (first.epoch, second.epoch, reference.epoch) == (3, 5, 5)
    assert second.history.rows == reference.history.rows


def test_a_checkpoint_that_does_not_fit(tmp_path):
    subject = trainer()
    subject.fit(loader(), 1)
    subject.save(tmp_path / "a.safetensors")
    other = trainer(optimizer=ml.SGD(0.1))
    other.load(tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="checkpoint tensors do not match the model"):
        other.begin((X[:16], Y[:16]))
    subject.compiled.save(tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="is not a training checkpoint"):
        subject.load(tmp_path / "b.safetensors")


def test_a_kill_while_writing_leaves_a_good_checkpoint(tmp_path):
    """SIGKILL at random moments of a process that does nothing but write: the file is whole every time."""
    script = textwrap.dedent(f"""
        import numpy as np
        from mithril_train.loop import checkpoint
        k = 0
        while True:
            checkpoint.write({str(tmp_path / "c.safetensors")!r}, {{"x": np.full(500_000, k, np.float32)}}, {{"k": k}})
            print(k, flush=True)
            k += 1
    """)
    for wait in (0.01, 0.04, 0.09):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tensors, progress = checkpoint.read(tmp_path / "c.safetensors")
        assert (tensors["x"] == progress["k"]).all()


def test_sigterm_saves_and_ends_the_process(tmp_path):
    """Send the signal of cluster schedulers: training resumes where it was, to the bit."""
    script = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import mithril as ml
        from small import X, Y, trainer

        class Kill(ml.Callback):
            def step_end(self, trainer, report):
                if trainer.steps == 8:
                    os.kill(os.getpid(), signal.SIGTERM)

        callbacks = [ml.Checkpoint({str(tmp_path)!r}), ml.EarlyStopping("loss"), Kill()]
        trainer().fit(X, Y, 3, batch_size=16, callbacks=callbacks)
        print("unreachable")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "unreachable" not in done.stdout
    assert (tmp_path / "step-00000009.safetensors").exists(), "after the next batch, in the middle of an epoch"
    reference, resumed = trainer(), trainer()
    reference.fit(X, Y, 3, batch_size=16)
    resumed.fit(X, Y, 3, batch_size=16, resume=tmp_path)
    assert resumed.history.steps == reference.history.steps
    for n, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(resumed)[n], x)


def test_notebooks_show_one_bar_and_the_rows(monkeypatch):
    """Replace the display of a shell with a kernel, which is a notebook, in place."""
    shown = []

    class Html(str):
        pass

    def display(html, display_id):
        shown.append(html)
        return types.SimpleNamespace(update=shown.append)

    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=1)
    module.display = types.ModuleType("IPython.display")
    module.display.HTML, module.display.display = Html, display
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
    monkeypatch.setattr("mithril_train.loop.progress.LOOK", 0.0)
    trainer(progress=True).fit(loader(), 2)
    assert '<progress max="6" value="3"></progress> 3/6 loss' in shown[3]
    assert shown[-1].count("epoch") == 2
    assert "<progress" not in shown[-1]
    module.get_ipython = lambda: types.SimpleNamespace()
    assert isinstance(make_progress(None), Lines), "a shell in a terminal"


# -- nan ---------------------------------------------------------------------------------------------------------------
def test_nan_names_the_first_bad_layer_and_leaves_good_parameters():
    model = ml.Model()
    model += ml.models.Linear(8, 16, name="first")(input="input")
    model += ml.models.Log(name="logarithm")
    model += ml.models.Linear(16, 3, name="last")
    subject = trainer(model)
    subject.begin((X[:16], Y[:16]))
    start = arrays(subject)
    from mithril_train.engine.nonfinite import NotFiniteError

    with pytest.raises(NotFiniteError) as caught:
        subject.fit(loader(), 1)
    assert str(caught.value).startswith("step 0: layer 'logarithm' is not finite\n  first bad value: %")
    assert "test_trainer.py" in str(caught.value)
    for n in subject.engine.trained:
        np.testing.assert_array_equal(arrays(subject)[n], start[n])


def test_nan_in_the_data_and_in_a_gradient():
    from mithril_train.engine.nonfinite import NotFiniteError

    bad = X.copy()
    bad[40, 2] = np.nan
    with pytest.raises(NotFiniteError) as caught:
        trainer().fit(ml.DataLoader((bad, Y), batch_size=16), 1)
    assert str(caught.value).splitlines() == [
        "step 2: 'input' of the batch is not finite",
        "  1 nan and 0 infinite values of 128",
        "hint: clean the data",
    ]

    def root(output, target):  # 0 at the start: its gradient is infinite
        return ml.ops.sum(ml.ops.sqrt(ml.ops.abs(output * 0.0)))

    subject = trainer(loss=root)
    subject.step((X[:16], Y[:16]))
    with pytest.raises(NotFiniteError, match="step 0: the gradient of "):
        subject.check_finite()


def test_reading_a_bad_loss_raises_at_once_and_not_looking_costs_nothing():
    from mithril_train.engine.nonfinite import NotFiniteError

    bad = np.full((16, 8), np.inf, np.float32)
    report = trainer().step((bad, Y[:16]))
    with pytest.raises(NotFiniteError):
        report["loss"]
    free = trainer(detect_nan=False)
    assert not np.isfinite(free.step((bad, Y[:16]))["loss"])


# -- progress ----------------------------------------------------------------------------------------------------------
def test_lines_in_a_log():
    out = io.StringIO()
    lines = Lines(out)
    lines.epoch(1, 3, 10, 0)
    lines.last_output -= 100
    lines.step({"loss": 1.25})
    lines.row(1, 3, {"loss": 0.5, "val_accuracy": 1.0})
    text = out.getvalue().splitlines()
    assert text[0] == "epoch 1/3  batch 1/10  loss 1.25"
    assert text[1].startswith("epoch 1/3  loss 0.5  val_accuracy 1  (")


def test_a_bar_on_a_terminal():
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    bar = Bar(rich.Console(file=out, force_terminal=True, width=100))
    bar.epoch(1, 2, 10, 0)
    bar.step({"loss": 0.125})
    bar.row(1, 2, {"loss": 0.5})
    bar.close()
    assert "epoch 1/2  loss 0.5" in out.getvalue()


def test_history():
    history = History([{"loss": 1.0}, {"loss": 0.5, "val_loss": 0.25}])
    assert history["loss"] == [1.0, 0.5]
    assert np.isnan(history["val_loss"][0])
    assert str(history) == "loss 1\nloss 0.5  val_loss 0.25"
    assert [row["loss"] for row in history] == history["loss"]
    with pytest.raises(KeyError, match="columns: loss, val_loss"):
        history["accuracy"]


def test_loaders_that_cannot_be():
    with pytest.raises(InputError, match="only once"):
        trainer().fit(iter([(X, Y)]), 1)
    with pytest.raises(InputError, match="gave no batch"):
        trainer().fit([], 1)
    with pytest.raises(InputError, match="gives no batches"):
        trainer().fit(3, 1)
    with pytest.raises(InputError, match="nothing is trained yet"):
        trainer().predict(X)
    assert Path(__file__).exists()


def test_methods_for_parameters():
    subject = trainer()
    with pytest.raises(InputError, match="there are no parameters yet"):
        subject.get_params()
    subject.step((X[:8], Y[:8]))
    doubled = {n: 2 * np.asarray(x) for n, x in subject.get_params().items()}
    subject.set_params({"last.bias": doubled["last.bias"]})
    np.testing.assert_array_equal(subject.params["last.bias"], doubled["last.bias"])
    with pytest.raises(InputError, match="did you mean 'last.bias'"):
        subject.set_params({"last.bia": doubled["last.bias"]})
