"""The search for settings: asked of Optuna where it is installed, and a clear error where it is not."""

import sys

import pytest
from small import X, Y, loader, trainer

import mithril as ml
from mithril.graph.errors import OptionError, PluginError
from mithril_train.hyperparameter_search import Pruning, search


def make(trial):
    return trainer(optimizer=ml.Adam(trial.suggest_float("rate", 1e-5, 1e-1, log=True)))


def test_finds_a_good_rate_and_is_reproducible():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    result, again = (search(make, loader(), validation=(X, Y), epochs=3, trials=8, seed=1) for _ in range(2))
    assert result.settings["rate"] > 1e-3
    assert (result.settings, result.value) == (again.settings, again.value)
    assert result.trainer.history["val_loss"][-1] == result.value
    assert len(result.study.trials) == 8


def test_a_function_of_settings_instead_of_the_trial():
    pytest.importorskip("optuna")
    with pytest.raises(OptionError) as error:
        search(lambda rate, width: trainer(), loader())
    assert str(error.value) == (
        "make(rate, width) cannot be called with one argument, the trial\n"
        'hint: write def make(trial), which asks it for settings: trial.suggest_float("rate", 1e-4, 1e-1, log=True)'
    )


class Trial:
    """The part of a trial that the adapter uses."""

    def __init__(self, prune=False):
        self.prune, self.reported = prune, []

    def report(self, value, step):
        self.reported.append((step, value))

    def should_prune(self):
        return self.prune


def test_a_trial_receives_every_epoch():
    trial = Trial()
    watch = Pruning(trial)
    subject = trainer(callbacks=[watch])
    subject.fit(loader(), 2, validation=(X, Y))
    assert trial.reported == [(1, subject.history["val_loss"][0]), (2, subject.history["val_loss"][1])]
    with pytest.raises(OptionError, match="Pruning watches 'val_loss', which is not measured"):
        trainer(callbacks=[Pruning(trial)]).fit(loader(), 1)


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(PluginError) as caught:
        search(make, loader())
    assert str(caught.value) == "a search for settings needs Optuna\nhint: pip install optuna"
