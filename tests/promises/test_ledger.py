"""The verdicts of docs/promises.md are those of the probes; those of JAX and C, which compile for minutes, are run by
``nox -s promises`` alone.
"""

from __future__ import annotations

from typing import Any

import pytest

import mithril as ml
from mithril import plugins
from promises import ENGINES, page
from promises.cells import HOLDS, PROBES, VERDICTS, fewer
from promises.documents import PROMISES

QUICK = [engine for engine in ENGINES if engine not in ("jax", "c") and engine in plugins.backends()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, probe in PROBES.items() if not probe.timed])
def test_a_probe_has_the_verdicts_of_the_page(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path))
    recorded = page.read()[name]
    for engine in QUICK:
        cell = PROBES[name](engine)
        has_device = name in ("gpu", "target_gpu") and cell.verdict == HOLDS
        assert has_device or (engine, cell.verdict) == (engine, recorded[engine].verdict), cell.text


def test_the_page_is_written_from_its_cells():
    assert page.PAGE.read_text() == page.written(page.read())


def test_each_promise_has_a_probe_and_each_probe_a_promise():
    assert {promise.probe for promise in PROMISES} == set(PROBES)
    assert all(probe.subject for probe in PROBES.values())


def test_an_effect_that_is_missing_or_reversed_does_not_hold():
    assert fewer([(3, 3)], "launches").verdict == "does not hold"
    assert fewer([(3, 2), (3, 4)], "launches", "a reason").verdict == "does not hold"
    assert fewer([(3, 3)], "launches", "a reason").verdict == "no effect here"
    assert fewer([(3, 2)], "launches", "a reason").verdict == "holds"
    assert {cell.verdict for cells in page.read().values() for cell in cells.values()} <= set(VERDICTS)


# Probes of defaults, of trainers and of values, which no option of ml.compile switches.
WITHOUT_OPTIONS = set(
    """accumulation amp_training batch_loop benchmark branches data_loader dead_code dead_interface dynamic_shapes gpu
    in_place in_place_option interface lifetimes loops many_inputs one_model profile quantization_aware shape_error
    shapes_given specialization type_error""".split()
)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_probes_of_options_notice_options_without_effect(monkeypatch, tmp_path):
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path))
    compile_model, needed = ml.compile, {"shapes", "outputs", "constants"}

    def without_options(model: Any, backend: Any, **options: Any) -> Any:
        return compile_model(model, backend, **{k: v for k, v in options.items() if k in needed})

    monkeypatch.setattr(ml, "compile", without_options)
    recorded = page.read()
    unnoticed = {
        name
        for name, probe in PROBES.items()
        if not probe.timed
        and recorded[name]["numpy"].verdict != "no effect here"
        and probe("numpy").verdict == recorded[name]["numpy"].verdict
    }
    assert unnoticed == WITHOUT_OPTIONS
