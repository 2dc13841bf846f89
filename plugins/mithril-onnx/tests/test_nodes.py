"""The node tests of the ONNX standard, all of them, on numpy."""

from pathlib import Path

import pytest

from mithril_onnx import node_tests

PARTS = 4
LISTED = {
    line.split()[0]
    for line in (Path(__file__).parent / "expected_failures.txt").read_text().splitlines()
    if line and not line.startswith("#")
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_nodes_of_the_standard(part):
    cases = [c for k, c in enumerate(node_tests.cases()) if k % PARTS == part]
    assert len(cases) > 300
    outcomes = [node_tests.run(case, "numpy") for case in cases]
    wrong = [f"{o.name}: {o.detail}" for o in outcomes if o.status == "wrong"]
    assert not wrong, "\n".join(wrong)
    failing = [f"{o.name}: {o.status}, {o.detail}" for o in outcomes if o.status != "pass" and o.name not in LISTED]
    assert not failing, "\n".join(failing)
    passing = [o.name for o in outcomes if o.status == "pass" and o.name in LISTED]
    assert not passing, f"remove from expected_failures.txt: {passing}"


@pytest.mark.filterwarnings("ignore")
def test_cases_with_function_bodies_and_simple_models_pass():
    cases = [*list(node_tests.cases(expanded=True))[::12], *node_tests.cases("simple")]
    outcomes = [node_tests.run(case, "numpy") for case in cases]
    failing = [f"{o.name}: {o.status}, {o.detail}" for o in outcomes if o.status != "pass"]
    assert not failing, "\n".join(failing)
