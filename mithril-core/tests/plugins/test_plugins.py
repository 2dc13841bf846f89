"""The typed methods around the hooks: their results, and conflicts of plugins."""

from __future__ import annotations

import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

import mithril
from mithril import (
    Architecture,
    BackendSpec,
    Command,
    CompileContext,
    DeviceSpec,
    Export,
    FileFormat,
    Found,
    HardwareTarget,
    Lowering,
    OpsSpec,
    PassSpec,
    PipelineDraft,
    ProfilerSpec,
    hookimpl,
)
from mithril.backend import plugin_lowerings
from mithril.graph import Graph, PluginError
from mithril.plugins import PluginWarning

HERE = "heavy_module_of_test"


def answering(**hooks):
    """Return a plugin object whose hooks return fixed answers (or call a function)."""
    body = {f"mithril_{name}": staticmethod(hookimpl(value)) for name, value in hooks.items()}
    return type("Answering", (), body)()


@pytest.fixture
def plugins(site):
    (site.folder / f"{HERE}.py").write_text("class Thing: pass\nthing = Thing()\n")
    return site.plugins()


def test_backends(plugins):
    plugins.register(answering(backends=lambda: [BackendSpec("b", "BBackend", f"{HERE}:Thing")]), "one")
    assert plugins.backend_class("b").__name__ == "Thing"
    assert HERE in sys.modules


def test_class_name_of_a_backend_is_exported(plugins):
    plugins.register(answering(backends=lambda: [BackendSpec("b", "BBackend", f"{HERE}:Thing")]), "one")
    assert list(plugins.exports()) == ["BBackend"]
    assert plugins.export("BBackend") is plugins.backend_class("b")


def test_descriptors_of_exports_are_built_once_until_plugins_change(plugins):
    calls = []

    def exports():
        calls.append("exports")
        return [Export("Thing", f"{HERE}:Thing"), Export("method", f"{HERE}:Thing", on="CompiledModel")]

    plugins.register(answering(exports=exports), "one")
    for _ in range(2):
        assert list(plugins.exports()) == ["Thing"]
        assert list(plugins.extensions()) == ["method"]
        assert plugins.extension("CompiledModel", "method")[1].name == "one"
    assert len(calls) == 1
    plugins.register(answering(passes=lambda: ()), "other")
    plugins.extensions()
    assert len(calls) == 2


def test_descriptor_of_something_absent(plugins):
    plugins.register(answering(backends=lambda: [BackendSpec("b", "BBackend", f"{HERE}:Missing")]), "one")
    with pytest.raises(PluginError) as caught:
        plugins.backend_class("b")
    assert str(caught.value) == (
        "cannot load the backend 'b' of one\n"
        f"  AttributeError: module '{HERE}' has no attribute 'Missing'\n"
        f"  loading: {HERE}:Missing\n"
        "hint: report it to the authors of one"
    )


def test_passes_by_name_and_alias(plugins):
    spec = PassSpec("fold", f"{HERE}:thing", "fuse", "low", aliases=("folding",))
    plugins.register(answering(passes=lambda: [spec]), "one")
    assert plugins.passes()["fold"].spec is spec
    assert plugins.pass_aliases() == {"folding": "fold"}
    assert plugins.load_pass("folding") is plugins.load_pass("fold")
    with pytest.raises(PluginError, match="unknown pass 'fodl'\n.*\nhint: did you mean 'fold'"):
        plugins.load_pass("fodl")


def test_pass_claimed_by_two_is_nobodys(plugins):
    for name in ("one", "two"):
        spec = PassSpec("fold", f"{HERE}:thing", "fuse", "low")
        plugins.register(answering(passes=lambda spec=spec: [spec]), name)
    assert plugins.passes() == {}
    with pytest.raises(PluginError, match="the pass 'fold' is claimed by two plugins\n  claimed by: one, two"):
        plugins.load_pass("fold")
    assert {p.name: p.state for p in plugins.all()} == {"one": "clash", "two": "clash"}


def test_alias_that_is_another_ones_name(plugins):
    plugins.register(answering(passes=lambda: [PassSpec("fold", f"{HERE}:thing", "fuse", "low")]), "one")
    clashing = PassSpec("other", f"{HERE}:thing", "fuse", "low", aliases=("fold",))
    plugins.register(answering(passes=lambda: [clashing]), "two")
    assert list(plugins.passes()) == ["other"]
    with pytest.raises(PluginError, match="claimed by two"):
        plugins.load_pass("fold")


def test_targets(plugins):
    target = HardwareTarget("big", "gpu", aliases=("large",), peak_flops={"float32": 1e13})
    plugins.register(answering(targets=lambda: [target]), "one")
    assert plugins.targets()["big"].spec is target
    assert plugins.target("large").spec is target
    assert hash(target) == hash(HardwareTarget("big", "gpu", aliases=("large",)))
    with pytest.raises(PluginError, match="unknown hardware target 'huge'"):
        plugins.target("huge")


def test_detected_targets_by_rank_then_name(plugins):
    plugins.register(answering(detect_targets=lambda: [Found("c", 1, "x"), Found("b", 5, "y")]), "one")
    plugins.register(answering(detect_targets=lambda: [Found("a", 5, "z")]), "two")
    assert [f.spec.name for f in plugins.detect_targets()] == ["a", "b", "c"]


def test_devices(plugins):
    plugins.register(answering(devices=lambda: [DeviceSpec("d", f"{HERE}:Thing")]), "one")
    assert plugins.devices()["d"].spec.family == "gpu"
    assert plugins.load_device("d").__name__ == "Thing"
    with pytest.raises(PluginError, match="unknown device 'e'"):
        plugins.load_device("e")


def test_profilers(plugins):
    plugins.register(answering(profilers=lambda: [ProfilerSpec("p", f"{HERE}:Thing")]), "one")
    assert list(plugins.profilers()) == ["p"]
    assert plugins.load_profiler("p").__name__ == "Thing"


def test_formats_by_name_or_suffix(plugins):
    formats = [FileFormat("box", (".box", ".bx"), saves=f"{HERE}:Thing"), FileFormat("heap", loads=f"{HERE}:Thing")]
    plugins.register(answering(formats=lambda: formats), "one")
    assert plugins.format_of("a/b.bx").spec.name == "box"
    assert plugins.format_of("folder", "heap").spec.name == "heap"
    assert plugins.load_format(plugins.format_of("x.box"), "saves").__name__ == "Thing"
    with pytest.raises(PluginError, match="files of the format 'box' cannot be read back"):
        plugins.load_format(plugins.format_of("x.box"), "loads")
    with pytest.raises(PluginError, match="no file format has the suffix of 'x.zip'") as error:
        plugins.format_of("x.zip")
    assert "box: .box, .bx; heap: a folder" in str(error.value)
    with pytest.raises(PluginError, match="the file format 'gguf' is not installed") as error:
        plugins.format_of("x.gguf")
    assert error.value.hint == "pip install mithril-ggml"


def test_architectures_of_files(plugins):
    family = Architecture("bloom", loads=f"{HERE}:Thing", saves=f"{HERE}:Thing")
    plugins.register(answering(architectures=lambda: [family]), "one")
    assert list(plugins.architectures()) == ["bloom"]
    assert plugins.load_architecture("bloom", "loads").__name__ == "Thing"
    assert plugins.load_architecture("bloom", "saves").__name__ == "Thing"
    with pytest.raises(PluginError, match="the architecture 'qwen3' is not installed") as error:
        plugins.load_architecture("qwen3", "loads")
    assert error.value.hint == "pip install mithril-hub"


@pytest.mark.parametrize("name", ["mobile", "tpu_v5e", "a100"])
def test_targets_that_are_not_installed_name_their_distribution(plugins, name):
    with pytest.raises(PluginError, match=f"the hardware target '{name}' is not installed") as error:
        plugins.target(name)
    assert error.value.hint == "pip install mithril-targets"


def test_ops_are_imported_when_first_mentioned(plugins, site):
    (site.folder / "ops_of_one.py").write_text("")
    plugins.register(answering(ops=lambda: [OpsSpec("ops_of_one", ("bessel", "airy"))]), "one")
    assert plugins.op_names() == ("airy", "bessel")
    assert plugins.import_op("tanh") is False
    assert "ops_of_one" not in sys.modules
    assert plugins.import_op("bessel") is True
    assert "ops_of_one" in sys.modules


def test_op_declared_by_two(plugins):
    for name in ("one", "two"):
        plugins.register(answering(ops=lambda: [OpsSpec("ops_of_one", ("bessel",))]), name)
    with pytest.raises(PluginError, match="the operation 'bessel' is claimed by two plugins"):
        plugins.import_op("bessel")


def lowering_for(backend_wanted):
    return lambda backend: [Lowering("softmax", f"{HERE}:thing")] if backend == backend_wanted else []


def test_lowerings(plugins):
    plugins.register(answering(lowerings=lowering_for("numpy")), "one")
    assert list(plugins.lowerings("numpy")) == ["softmax"]
    assert plugins.lowerings("torch") == {}


@pytest.mark.parametrize(("wrong", "right"), [("sofmax", "softmax"), ("acme.sink", "acme.sinc")])
def test_lowerings_of_misspelled_operations(plugins, wrong, right):
    """Refuse a lowering that nothing can ever use; one for a distribution that is absent may wait."""
    answer = [Lowering(wrong, f"{HERE}:thing"), Lowering("absent.op", f"{HERE}:thing")]
    ops = [OpsSpec("acme_ops", ("acme.sinc",))]
    plugins.register(answering(lowerings=lambda backend: answer, ops=lambda: ops), "one")
    assert list(plugins.lowerings("numpy")) == ["absent.op"]
    (problem,) = plugins.all()[0].problems
    assert f"lowers an unknown operation '{wrong}'" in problem.what
    assert right in str(problem.error())


class OneNode:
    op = SimpleNamespace(name="softmax")


def test_two_lowerings_of_one_op(plugins):
    plugins.register(answering(lowerings=lowering_for("numpy")), "one")
    plugins.register(answering(lowerings=lowering_for("numpy")), "two")
    (lowering,) = plugin_lowerings("numpy", plugins)["softmax"]
    with pytest.raises(PluginError, match="the lowering on 'numpy' of 'softmax' is claimed by two plugins"):
        lowering.applies(OneNode())
    assert [p.state for p in plugins.all()] == ["clash", "clash"]


def test_lowering_of_the_plugin_that_declares_the_operation_wins(plugins):
    plugins.register(answering(lowerings=lowering_for("numpy")), "one")
    declares = answering(lowerings=lowering_for("numpy"))
    declares.mithril_ops = lambda: [OpsSpec("some.module", ("softmax",))]
    plugins.register(declares, "two")
    (lowering,) = plugin_lowerings("numpy", plugins)["softmax"]
    assert lowering.origin == "two"
    assert lowering.applies(OneNode())
    assert [p.state for p in plugins.all()] == ["clash", "loaded"]


def test_one_plugin_with_two_unconditional_lowerings(plugins):
    twice = [Lowering("softmax", f"{HERE}:thing"), Lowering("softmax", f"{HERE}:Thing")]
    plugins.register(answering(lowerings=lambda backend: twice), "one")
    (lowering,) = plugin_lowerings("numpy", plugins)["softmax"]
    with pytest.raises(PluginError, match="the lowering on 'numpy' of 'softmax' is claimed twice"):
        lowering.applies(OneNode())


def test_exports(plugins):
    plugins.register(answering(exports=lambda: [Export("Trainer", f"{HERE}:Thing")]), "one")
    assert plugins.export("Trainer").__name__ == "Thing"


def test_missing_known_export_gives_the_pip_line(plugins):
    with pytest.raises(PluginError) as caught:
        plugins.export("Trainer")
    assert str(caught.value) == "the name 'Trainer' is not installed\nhint: pip install mithril-train"


def test_unknown_export_is_an_attribute_error(plugins):
    with pytest.raises(AttributeError, match="module 'mithril' has no attribute 'Trian'"):
        plugins.export("Trian")


def test_public_face_asks_the_plugins():
    with pytest.raises(AttributeError):
        mithril.no_such_name
    assert not hasattr(mithril, "no_such_name")
    assert not hasattr(mithril, "__no_such_name__")


def test_commands(plugins):
    plugins.register(answering(commands=lambda: [Command("greet", f"{HERE}:thing", "Say hello.")]), "one")
    assert plugins.commands()["greet"].spec.summary == "Say hello."
    assert type(plugins.load_command("greet")).__name__ == "Thing"


def test_provided_lists_everything(plugins):
    plugins.register(answering(backends=lambda: [BackendSpec("b", "BBackend", f"{HERE}:Thing")]), "one")
    plugins.register(answering(ops=lambda: [OpsSpec("ops_of_one", ("airy",))]), "two")
    rows = [(kind, name, plugin.name) for kind, name, plugin in plugins.provided()]
    assert rows == [("backend", "b", "one"), ("export", "BBackend", "one"), ("op", "airy", "two")]


# ------------------------------------------------------------------------------------------------ amending pipelines
def amending(*changes):
    def mithril_amend_pipeline(draft, level):
        for method, *arguments in changes:
            getattr(draft, method)(*arguments)

    return answering(amend_pipeline=mithril_amend_pipeline)


def test_amendments_are_merged(plugins):
    plugins.register(amending(("remove", "a"), ("add", "new")), "one")
    plugins.register(amending(("remove", "a"), ("add", "new"), ("replace", "b", "c")), "two")
    draft = plugins.amend_pipeline(PipelineDraft(["a", "b"]), None, "low")
    assert (draft.names, draft.added, draft.removed, draft.replaced) == (("a", "b"), ["new"], ["a"], {"b": "c"})


def test_contradicting_amendments_name_both(plugins):
    plugins.register(amending(("remove", "a")), "one")
    plugins.register(amending(("replace", "a", "c")), "two")
    with pytest.raises(PluginError) as caught:
        plugins.amend_pipeline(PipelineDraft(["a"]), None, "low")
    assert str(caught.value) == (
        "two plugins disagree about the pass 'a'\n"
        "  one: leave it out\n"
        "  two: run 'c' instead\n"
        "hint: set MITHRIL_DISABLE_PLUGINS=two to leave one of them out"
    )


def test_error_while_amending_is_attributed(plugins):
    plugins.register(amending(("no_such_method",)), "one")
    with pytest.raises(PluginError, match=r"'mithril_amend_pipeline' of plugin 'one' \(one\) failed\n  AttributeError"):
        plugins.amend_pipeline(PipelineDraft(["a"]), None, "low")


# --------------------------------------------------------------------------------------------------- running, building
class Doubling:
    name = "doubling"

    def __call__(self, graph):
        return graph * 2


def run(pass_, graph, context):
    return pass_(graph)


def test_run_pass_without_plugins_calls_the_core_directly(plugins):
    assert plugins.run_pass(Doubling(), 4, None, run) == 8
    assert plugins.build("graph", "backend", None, lambda *given: given) == ("graph", "backend", None)
    assert plugins._hooks == {"mithril_run_pass": None, "mithril_build": None}


def test_wrappers_nest_by_name_whatever_the_order_of_registration(plugins, site):
    def wrapping(tag, log):
        @hookimpl(wrapper=True)
        def mithril_run_pass(pass_, graph):
            log.append(f"{tag}>{pass_.name}")
            result = yield
            log.append(f"{tag}<")
            return result + 1

        return type("Wrapping", (), {"mithril_run_pass": staticmethod(mithril_run_pass)})()

    logs = []
    for order in (["one", "two"], ["two", "one"]):
        fresh, log = site.plugins(), []
        for name in order:
            fresh.register(wrapping(name, log), name)
        assert fresh.run_pass(Doubling(), 4, None, run) == 10
        logs.append(log)
    assert logs[0] == logs[1] == ["one>doubling", "two>doubling", "two<", "one<"]


def test_a_plugin_may_answer_instead_of_the_core(plugins):
    plugins.register(answering(build=lambda graph: "from the cache" if graph == "known" else None), "one")
    assert plugins.build("known", None, None, lambda *given: "built") == "from the cache"
    assert plugins.build("new", None, None, lambda *given: "built") == "built"


def test_pass_running_a_pass(plugins):
    plugins.register(answering(run_pass=lambda pass_: None), "one")

    def outer(pass_, graph, context):
        return plugins.run_pass(Doubling(), graph, context, run) + 1

    assert plugins.run_pass(Doubling(), 4, None, outer) == 9


def test_error_of_the_pass_itself_is_unchanged(plugins):
    @hookimpl(wrapper=True)
    def mithril_run_pass(pass_):
        return (yield)

    plugins.register(type("Wrapping", (), {"mithril_run_pass": staticmethod(mithril_run_pass)})(), "one")

    def failing(pass_, graph, context):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        plugins.run_pass(Doubling(), 4, None, failing)


@pytest.mark.parametrize("wrapper", [False, True])
def test_error_of_a_wrapping_plugin_is_attributed(plugins, wrapper):
    if wrapper:

        @hookimpl(wrapper=True)
        def mithril_run_pass(pass_):
            result = yield
            raise ZeroDivisionError(f"after {result}")
    else:

        @hookimpl
        def mithril_run_pass(pass_):
            raise ZeroDivisionError("before")

    plugins.register(type("Bad", (), {"mithril_run_pass": staticmethod(mithril_run_pass)})(), "bad")
    plugins.register(answering(run_pass=lambda pass_: None), "good")
    with pytest.raises(PluginError, match=r"'mithril_run_pass' of plugin 'bad' \(bad\) failed\n  ZeroDivisionError"):
        plugins.run_pass(Doubling(), 4, None, run)


def test_threads_do_not_mix_up_their_passes(plugins):
    plugins.register(answering(run_pass=lambda pass_: None), "one")
    barrier, results = threading.Barrier(2), {}

    def work(number):
        def last(pass_, graph, context):
            barrier.wait(60)
            return graph + number

        results[number] = plugins.run_pass(Doubling(), 100, None, last)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {1: 101, 2: 102}


# -------------------------------------------------------------------------------------------------------- observers
def context():
    return CompileContext(model=None, backend=None, options={})


def test_observers_see_the_compile(plugins):
    seen, graph = [], Graph((), (), ())
    plugins.register(
        answering(
            compile_begin=lambda context: seen.append("begin"),
            compile_stage=lambda stage, graph: seen.append((stage, graph)),
            compile_end=lambda result, error: seen.append((result, error)),
        ),
        "one",
    )
    plugins.compile_begin(context())
    plugins.compile_stage(context(), "flatten", graph)
    plugins.compile_end(context(), "model", None)
    assert seen == ["begin", ("flatten", graph), ("model", None)]


def test_error_of_an_observer_is_a_warning_with_its_name_and_the_others_still_run(plugins):
    seen = []

    def failing(context):
        raise KeyError("x")

    plugins.register(answering(compile_begin=failing), "bad")
    plugins.register(answering(compile_begin=lambda context: seen.append(1)), "good")
    with pytest.warns(PluginWarning, match=r"'mithril_compile_begin' of plugin 'bad' \(bad\) failed: KeyError: 'x'"):
        plugins.compile_begin(context())
    assert seen == [1]


def test_observers_may_not_swallow_the_time_limit(plugins):
    def late(context):
        raise mithril.CompileTimeoutError("compiling took longer than 1 s")

    plugins.register(answering(compile_begin=late), "one")
    with pytest.raises(mithril.CompileTimeoutError), warnings.catch_warnings():
        plugins.compile_begin(context())
