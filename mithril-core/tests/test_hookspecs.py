"""Every hook: documented with its exact signature and a runnable example, without defaults, and tested."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import json
from pathlib import Path

import pytest

from mithril.plugins import HOOKS, hooks, specs

TESTS = Path(__file__).parent
VERSION_0_1 = json.loads((TESTS / "hooks_0.1.json").read_text())


@pytest.mark.parametrize("hook", HOOKS)
def test_no_parameter_has_a_default(hook):
    signature = inspect.signature(getattr(hooks, hook))
    assert all(p.default is p.empty for p in signature.parameters.values())
    assert all(p.annotation is not p.empty for p in signature.parameters.values())


@pytest.mark.parametrize("hook", HOOKS)
def test_example_runs_and_fits_the_hook(hook, site):
    """The example of the docstring is a plugin: it defines the hook, and the loader accepts it."""
    function = getattr(hooks, hook)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, hook, globs={})
    assert test.examples, f"{hook} has no example"
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, clear_globs=False)
    assert runner.failures == 0
    assert hook in test.globs, f"the example does not define {hook}"
    site.plugins().register(type("Example", (), {hook: staticmethod(test.globs[hook])})(), "example")


@pytest.mark.parametrize("hook", VERSION_0_1["hooks"])
def test_plugins_of_version_0_1_receive_the_parameters_that_they_declare(hook):
    """New parameters break no plugin; one that goes breaks those that declare it."""
    assert set(VERSION_0_1["hooks"][hook]) <= set(inspect.signature(getattr(hooks, hook)).parameters)


@pytest.mark.parametrize("name", VERSION_0_1["descriptors"])
def test_descriptors_of_version_0_1_are_accepted(name):
    """Fields keep their names and their order, and later ones have defaults."""
    frozen = VERSION_0_1["descriptors"][name]
    fields = [f for f in dataclasses.fields(getattr(specs, name)) if f.init]
    assert [f.name for f in fields[: len(frozen)]] == frozen
    optional = [f.default is not f.default_factory for f in fields[len(frozen) :]]
    assert all(optional)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_tested(hook):
    """Named in full, or through the helper that prefixes ``mithril_``."""
    text = (
        "".join(path.read_text() for path in TESTS.glob("plugins/test_plugins*.py"))
        + (TESTS / "test_options.py").read_text()
    )
    assert hook in text or f"{hook.removeprefix('mithril_')}=" in text


def descriptors():
    return [m for m in vars(specs).values() if dataclasses.is_dataclass(m) and m is not specs.CompileContext]


@pytest.mark.parametrize("spec", descriptors(), ids=lambda s: s.__name__)
def test_descriptors_are_frozen_and_small(spec):
    assert spec.__dataclass_params__.frozen
    assert "__slots__" in vars(spec)
    assert spec.__doc__


@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        ("BackendSpec", ("two words", "B", "m:B")),
        ("BackendSpec", ("b", "B", "m.B")),
        ("BackendSpec", ("b", "B", None)),
        ("PassSpec", ("p", "m:p", "nowhere", "low")),
        ("PassSpec", ("p", "m:p", "fuse", "extreme")),
        ("PassSpec", ("a=b", "m:p", "fuse", "low")),
        ("HardwareTarget", ("", "cpu")),
        ("Option", ("x", int, 1, "")),
        ("OpsSpec", ("not a module", ("a",))),
        ("Lowering", ("op", "nothing")),
        ("Export", ("_private", "m:x")),
        ("Command", ("a b", "m:x")),
        ("ProfilerSpec", ("p", "m:")),
        ("DeviceSpec", ("d", "m.B")),
        ("FileFormat", ("f", ("gguf",))),
        ("Architecture", ("a", "m:x", "nothing")),
        ("FileFormat", ("f", (".gguf",), "nothing")),
    ],
)
def test_descriptors_refuse_nonsense(spec, arguments):
    with pytest.raises(ValueError, match=spec):
        getattr(specs, spec)(*arguments)
