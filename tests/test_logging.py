"""The logger ``mithril``: compilations, decisions and epochs for programs that configure logging, nothing otherwise."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Relu, Sequential

X, Y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)


def test_compilations_and_programs_are_reported(caplog):
    with caplog.at_level(logging.INFO, "mithril"):
        compiled = ml.compile(Linear(3), "numpy", shapes={"input": [2, 4]})
        compiled.evaluate(compiled.randomize_params(0), {"input": np.ones((2, 4), np.float32)})
    assert any(r.getMessage().startswith("compiled 'Linear' for numpy in ") for r in caplog.records)
    assert all(r.name == "mithril" for r in caplog.records)


def test_passes_and_choices_are_of_the_level_debug(caplog):
    with caplog.at_level(logging.DEBUG, "mithril"):
        compiled = ml.compile(Sequential(Linear(3), Relu()), "numpy", shapes={"input": [2, 4]})
    messages = {r.getMessage(): r.levelname for r in caplog.records}
    for decision in compiled.decisions:
        assert messages[str(decision)] in ("DEBUG", "INFO")
    assert any(m.startswith("pass ") for m in messages)


def test_failures_and_epochs_are_reported(caplog):
    with caplog.at_level(logging.INFO, "mithril"):
        with pytest.raises(ml.MithrilError):
            ml.compile(Linear(3), "numpy", shapes={"input": [2, 4, 5], "surplus": [1]})
        stop = ml.EarlyStopping("loss", patience=1, min_delta=1e9)
        trainer = ml.Trainer(Linear(3), "adam", loss="cross_entropy", backend="numpy", progress=False)
        trainer.fit(X, Y, epochs=5, callbacks=[stop])
    text = caplog.text
    assert "in the compilation of 'Linear'" in text
    assert "epoch 1/5: loss" in text
    assert "stopped after" in text
    assert "restored" in text


def test_names_of_files_cannot_write_to_the_terminal(caplog):
    with caplog.at_level(logging.INFO, "mithril"):
        ml.compile(Linear(3, name="a\x1b[2J"), "numpy", shapes={"input": [2, 4]})
    assert "\x1b" not in caplog.text


def test_nothing_is_shown_and_imported_without_a_configuration():
    code = """
import sys
{}
import mithril as ml
from mithril.models import Linear
compiled = ml.compile(Linear(3), "numpy", shapes={{"input": [2, 4]}})
compiled.decisions.record("fallback", "of this test")
print("logging" in sys.modules)
"""
    for line, imported in (("", "False"), ("import logging", "True")):
        done = subprocess.run([sys.executable, "-c", code.format(line)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == imported
        assert done.stderr == ""
