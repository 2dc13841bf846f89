"""Each deliberate mistake in the declaration of an operation must be found by the kit."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
from _pytest.outcomes import Failed

import mithril_testing_summary
from mithril import OpsSpec, hookimpl, plugins
from mithril.graph import registry
from mithril.graph.core import Op
from mithril.graph.declare import composite, op
from mithril.graph.dtypes import float64
from mithril.graph.errors import MithrilError, OperationError, PluginError
from mithril.graph.samples import exactly, sample
from mithril.graph.type_rules import floating, like, same_shape
from mithril.ops import abs as absolute, cos, mul, sin, transpose
from mithril_testing import BackendConformance, OpConformance
from mithril_testing.cases import Case
from mithril_testing.selection import core_operations, selected

pytest_plugins = ["pytester"]

SQUARE = (sample((3, 3)), sample((2, 5), label="wide"))


@pytest.fixture(autouse=True)
def declared_for_one_test():
    yield
    for name in [n for n in registry._operations if n.startswith("test.")]:
        del registry._operations[name]


def cubed(vjp=lambda g, y, x: g * x * x * 3.0, *, shape=same_shape, dtype=floating, samples=SQUARE, **more) -> Op:
    """x cubed, as a primitive; honest unless told otherwise."""
    reference = more.pop("reference", lambda x: x * x * x)

    def cubed(x):
        """x to the third power."""
        return reference(x)

    declared = op(shape=shape, dtype=dtype, samples=samples, name="test.cubed", **more)(cubed)
    if vjp is not None:
        declared.vjp(vjp)
    return declared


def scaled(vjp) -> Op:
    @op(
        shape=same_shape,
        dtype=floating,
        samples=[sample((3, 4), (3, 4), scale=3.0)],
        name="test.scaled",
        promotes="float",
    )
    def scaled(x, w, *, scale: float = 1.0):
        """x times w times a number."""
        return (x * w * scale).astype(x.dtype)

    scaled.vjp(vjp)
    return scaled


def pair(vjp) -> Op:
    @op(
        shape=lambda x: (x, x),
        dtype=lambda dtypes, _: dtypes[0],
        results=("s", "c"),
        samples=[sample((4, 3))],
        name="test.pair",
    )
    def pair(x):
        """Sine and cosine."""
        return np.sin(x), np.cos(x)

    pair.vjp(vjp)
    return pair


def body(vjp, surrogate=False) -> Op:
    @composite(samples=SQUARE, name="test.fourth")
    def fourth(x):
        """x to the fourth power."""
        return mul(x * x, x * x)

    (fourth.surrogate_vjp if surrogate else fourth.vjp)(vjp)
    return fourth


def overwritten(x):
    x *= x * x
    return x


def in_half(g, y, x):
    return g * x * x * 3.0 if len(x.shape) == 2 and x.shape[0] == 3 else g * x * x * 2.9


SABOTAGES: dict[str, Callable[[], Op]] = {
    "a gradient a hundred times too large": lambda: cubed(lambda g, y, x: g * x * 100.0),
    "a gradient off by one percent": lambda: cubed(lambda g, y, x: g * x * x * 3.03),
    "a gradient of the wrong sign where x is negative": lambda: cubed(lambda g, y, x: g * absolute(x) * x * 3.0),
    "a gradient without its cotangent": lambda: cubed(lambda g, y, x: x * x * 3.0),
    "a gradient of another shape's formula": lambda: cubed(in_half),
    "a gradient turned around": lambda: cubed(lambda g, y, x: transpose(g * x * x * 3.0, perm=(1, 0))),
    "a gradient said not to be": lambda: cubed(None).no_vjp("left out"),
    "a gradient without a reason": lambda: cubed(None),
    "a gradient no sample checks": lambda: cubed(samples=[sample((3, 3), gradient=False)]),
    "a gradient of the first operand only": lambda: scaled(lambda g, y, x, w, *, scale: (g * w * scale, None)),
    "a gradient that forgets an attribute": lambda: scaled(lambda g, y, x, w, *, scale: (g * w, g * x)),
    "gradients in the wrong order": lambda: scaled(lambda g, y, x, w, *, scale: (g * x * scale, g * w * scale)),
    "a gradient of one result of two": lambda: pair(lambda g, y, x: (g[0] * cos(x),)),
    "a gradient with results exchanged": lambda: pair(lambda g, y, x: (g[1] * cos(x) - g[0] * sin(x),)),
    "a composite's own gradient, wrong": lambda: body(lambda g, y, x: (g * x * 77.0,)),
    "a composite's own gradient, a little wrong": lambda: body(lambda g, y, x: (g * x * x * x * 4.0004,)),
    "a shape rule that turns the shape": lambda: cubed(shape=lambda x: x[::-1]),
    "a shape rule that drops an axis": lambda: cubed(shape=lambda x: x[1:]),
    "a shape rule for one size only": lambda: cubed(shape=lambda x: (3, 3) if x[0] == 3 else (2, 5)),
    "a dtype rule that widens": lambda: cubed(dtype=lambda dtypes, _: float64),
    "a reference that widens": lambda: cubed(reference=lambda x: x.astype(np.float64) ** 3),
    "a reference that writes into its operand": lambda: cubed(reference=overwritten),
    "no samples": lambda: cubed(samples=()),
}


def run(op: Op, **more) -> None:
    """Run every test of the kit on one operation."""
    kit = type("Kit", (OpConformance,), {"ops": (op,), **more})()
    kit.test_declaration(op)
    for k, s in enumerate(op.samples):
        case = Case(op, s, k)
        for test in ("types", "symbolic_types", "gradient", "gradient_of_the_body"):
            getattr(kit, f"test_{test}")(case)


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_found(name):
    with pytest.raises((AssertionError, MithrilError)):
        run(SABOTAGES[name]())


@pytest.mark.parametrize(
    "honest",
    [
        cubed,
        lambda: cubed(dtype=like),
        lambda: scaled(lambda g, y, x, w, *, scale: (g * w * scale, g * x * scale)),
        lambda: pair(lambda g, y, x: (g[0] * cos(x) - g[1] * sin(x),)),
        lambda: body(lambda g, y, x: (g * x * x * x * 4.0,)),
        lambda: body(lambda g, y, x: (g,), surrogate=True),
    ],
)
def test_honest_operations_pass(honest):
    run(honest())


def test_a_true_xfail_is_one():
    with pytest.raises(pytest.xfail.Exception):
        run(cubed(lambda g, y, x: g), xfail={"gradient:test.cubed": "left wrong on purpose"})


def test_a_false_xfail_fails():
    with pytest.raises(Failed, match="remove it"):
        run(cubed(), xfail={"gradient:test.cubed": "said to be wrong"})


# -- which operations ------------------------------------------------------------------------------------------------
def test_a_misspelled_name_is_an_error_with_the_nearest():
    with pytest.raises(OperationError, match="unknown operation 'sofmax'") as error:
        selected(("sofmax",))
    assert "did you mean 'softmax'?" in str(error.value)


@pytest.mark.parametrize("ops", [(), "softmax"])
def test_an_empty_selection_is_an_error(ops):
    with pytest.raises(OperationError):
        selected(ops)


@pytest.fixture
def third_party(monkeypatch):
    """Install a plugin whose operations are in a module that is not imported."""

    def install(source, names=("test.found",)):
        module = types.ModuleType("test_found_plugin")
        monkeypatch.setitem(sys.modules, "test_found_plugin", module)

        @hookimpl
        def mithril_ops():
            return [OpsSpec(source, names=names)]

        module.mithril_ops = mithril_ops
        plugins.register(module, "found")

    yield install
    plugins.unregister("found")


MODULE = '''
from __future__ import annotations
from mithril import op
from mithril.graph.type_rules import floating, same_shape
from mithril.graph.samples import sample


@op(shape=same_shape, dtype=floating, samples=[sample((2, 3))], name="test.found")
def found(x):
    """Twice x."""
    return x + x


@found.vjp
def _(g, y, x):
    return (g * 2.0,)
'''


def test_operations_of_plugins_are_found_through_the_hook(third_party, tmp_path, monkeypatch):
    (tmp_path / "test_found_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    third_party("test_found_module")
    assert "test.found" not in registry._operations
    assert "test.found" in selected(None)
    assert "test.found" not in core_operations()
    run(selected(("test.found",))["test.found"])


def test_an_operation_whose_module_raises_is_an_error(third_party, tmp_path, monkeypatch):
    (tmp_path / "test_raising_module.py").write_text("raise ValueError('broken on purpose')")
    monkeypatch.syspath_prepend(str(tmp_path))
    third_party("test_raising_module")
    with pytest.raises(PluginError, match="found"):
        selected(None)


def test_an_operation_that_only_a_test_declares_is_not_selected():
    cubed()
    assert "test.cubed" not in selected(None)
    assert "test.cubed" in selected(("test.cubed",))


# -- a run of pytest -------------------------------------------------------------------------------------------------
RUN = """
from mithril_testing import OpConformance

class TestMine(OpConformance):
    ops = {ops}
"""


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ("('softmax', 'relu')", "TestMine: checked 2 of 2 operations"),
        ("('sofmax',)", "did you mean 'softmax'?"),
        ("()", "no operation is selected"),
    ],
)
def test_a_run_says_how_much_it_checked(pytester, monkeypatch, ops, expected):
    monkeypatch.setattr(mithril_testing_summary, "tallies", {})
    pytester.makepyfile(RUN.format(ops=ops))
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    text = result.stdout.str()
    assert expected in text
    assert (result.ret == 0) == ("checked" in expected)
    assert ("processor time: " in text) == ("checked" in expected)


def test_parallel_workers_add_up_to_one_line(pytester):
    pytest.importorskip("xdist")
    pytester.makepyfile(RUN.format(ops="('softmax', 'relu')"))
    single_process = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider").stdout.str()
    together = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-n", "2").stdout.str()
    lines = [
        [line for line in text.splitlines() if "checked 2 of 2 operations" in line]
        for text in (single_process, together)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 1


def test_a_backend_that_fits_no_case_is_an_error():
    class Kit(BackendConformance):
        backend = "numpy"
        ops = ("softmax",)

        @classmethod
        def make(cls):
            return types.SimpleNamespace(dtypes=frozenset(), name="bare")

    with pytest.raises(OperationError, match="nothing to check"):
        Kit.cases()


def test_exactly_given_values_have_gradients_checked_too():
    with pytest.raises(AssertionError):
        run(cubed(lambda g, y, x: g, samples=[sample(exactly(1.0, 2.0, 3.0))]))
