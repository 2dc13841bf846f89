"""Plugins that are absent or claim the same names, and orders that name nothing: each affected compilation says so."""

from __future__ import annotations

import inspect
import pydoc
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril import plugins
from mithril.backend.arrays import as_numpy
from mithril.backend.base import Backend
from mithril.compiler import option_registry, pass_pipeline, requirements
from mithril.graph import iterate
from mithril.graph.errors import MithrilError, PassError, StrictError
from mithril.graph.evaluation import evaluate
from mithril.models import Model, Relu
from mithril.passes import Pass, PassManager, pass_
from mithril.plugins import PluginWarning

sys.path.insert(0, str(Path(__file__).parent))

from bad_plugins import BAD

PASSES = """
    from mithril import PassSpec, hookimpl

    @hookimpl
    def mithril_passes():
        return [{specs}]

    def same(graph):
        return graph
"""


def passes(module, *specs):
    texts = [f"PassSpec({s[0]!r}, '{module}:same', {s[1]!r}, 'low', {', '.join(s[2:])})" for s in specs]
    return PASSES.format(specs=", ".join(texts))


class Reference(Backend):
    """Runs graphs by the references of their operations."""

    name = "reference"

    def lowers(self, node, options=None):
        return not node.op.composite

    def build(self, graph, options=None):
        return Program(graph)

    def array(self, data, dtype=None):
        return as_numpy(data, self.dtype)

    def to_numpy(self, array):
        return array

    def is_array(self, x):
        return isinstance(x, np.ndarray)


class Program:
    source = None

    def __init__(self, graph):
        self.graph = graph
        self.lowered = frozenset(node.op.name for node, _ in iterate(graph))

    def __call__(self, params, inputs):
        return evaluate(self.graph, {**params, **inputs})


@pytest.fixture
def installed(site):
    """Use the fake site as the plugins of this process."""
    yield lambda **options: plugins.reload()
    plugins.reload()


def compiled(**options):
    model = Model()
    model |= Relu()(input="x", output="y")
    return ml.compile(model, Reference(), shapes={"x": [2, 3]}, **options)


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return compiled(**options)


def standard(site):
    site.install("mithril-passes", passes("mithril_passes_passes_plugin", ("operation-fusion", "fuse")))


def standard_and_thief(site, *, stage="fuse", name="operation-fusion", **thief):
    standard(site)
    site.install("aaa-kit", passes("aaa_kit_aaa_plugin", (name, stage)), entry="aaa", **thief)


def test_stranger_does_not_switch_off_a_standard_pass(site, installed):
    standard_and_thief(site)
    installed()
    assert plugins.passes()["operation-fusion"].origin == "mithril-passes 1.0"
    with pytest.warns(PluginWarning, match="'operation-fusion' of aaa-kit 1.0 is not used") as caught:
        result = compiled()
    assert len(caught) == 1
    assert [d.message for d in result.decisions.of("ignored")] == [
        "pass 'operation-fusion' of aaa-kit 1.0 is not used: the name belongs to mithril-passes 1.0"
    ]
    assert "\noperation-fusion " in result.explain()
    (problem,) = next(p for p in plugins.all() if p.name == "aaa").problems
    assert "the name belongs to mithril-passes 1.0, a distribution of mithril itself" in str(problem.error())


def test_strict_refuses_a_clash(site, installed):
    standard_and_thief(site)
    installed()
    with pytest.raises(StrictError, match="'operation-fusion' of aaa-kit 1.0 is not used"):
        compiled(strict=True)


def test_entry_point_named_like_a_first_party_one_does_not_displace_it(site, installed):
    standard_and_thief(site)
    site.install("bbb-kit", "raise RuntimeError", entry="passes")
    installed()
    states = {p.distribution: p.state for p in plugins.all()}
    assert states["mithril-passes"] == "loaded"
    assert states["bbb-kit"] == "clash"


def test_pass_without_an_owner_is_missed_aloud(site, installed):
    standard(site)
    for kit in ("aaa", "bbb"):
        site.install(f"{kit}-kit", passes(f"{kit}_kit_{kit}_plugin", ("shiny", "fuse")), entry=kit)
    installed()
    result = quiet()
    assert [d.message for d in result.decisions.of("ignored")] == [
        "pass 'shiny' is not available: claimed by aaa-kit 1.0, bbb-kit 1.0"
    ]
    with pytest.raises(StrictError):
        compiled(strict=True)


def test_clash_that_does_not_matter_here_is_silent(site, installed):
    standard(site)
    text = "PassSpec('shiny', 'm:same', 'fuse', None)"
    for kit in ("aaa", "bbb"):
        site.install(f"{kit}-kit", PASSES.format(specs=text), entry=kit)
    installed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compiled(strict=True).decisions.of("ignored")


def test_alias_taken_by_a_stranger(site, installed):
    fused = ("operation-fusion", "fuse", "aliases=('fusion',)")
    site.install("mithril-passes", passes("mithril_passes_passes_plugin", fused))
    site.install("aaa-kit", passes("aaa_kit_aaa_plugin", ("fusion", "fuse")), entry="aaa")
    installed()
    assert plugins.pass_spec("fusion").origin == "mithril-passes 1.0"
    assert "pass 'fusion' of aaa-kit 1.0 is not used" in str(quiet().decisions)


def test_third_party_passes_that_change_the_graph_are_named(site, installed):
    standard_and_thief(site, name="idle")
    changing = passes("bbb_kit_bbb_plugin", ("shiny", "fuse"))
    site.install("bbb-kit", changing.replace("return graph", "return graph.replaced(nodes=graph.nodes)"), entry="bbb")
    installed()
    assert [str(d) for d in compiled().decisions] == ["plugin: pass 'shiny' by bbb-kit 1.0"]


def test_custom_passes_that_change_the_graph_are_named(installed):
    def twin(graph):
        return graph.replaced(nodes=graph.nodes)

    line = twin.__code__.co_firstlineno
    (decision,) = compiled(custom_passes=[twin, lambda graph: graph]).decisions.of("choice")
    assert decision.message == f"custom pass 'twin' of {__file__}:{line} changed the graph"


def test_amendments_and_wrappers_are_named(site, installed):
    standard_and_thief(site)
    site.install(
        "bbb-kit",
        """
        from mithril import hookimpl

        @hookimpl
        def mithril_amend_pipeline(draft):
            draft.remove("operation-fusion")

        @hookimpl(wrapper=True)
        def mithril_build(graph):
            return (yield)
        """,
        entry="bbb",
    )
    installed()
    messages = [d.message for d in quiet().decisions]
    assert "passes amended by bbb-kit 1.0: leave out 'operation-fusion'" in messages
    assert "mithril_build of bbb-kit 1.0 takes part" in messages


# ------------------------------------------------------------------------------------------------------------- order
@pytest.mark.parametrize(
    ("placement", "complaint"),
    [
        ("before=('nope-pass',)", "before='nope-pass': no installed pass has that name"),
        ("after=('operation-fusoin',)", "did the author mean 'operation-fusion'?"),
        ("after=('dead-code',)", "that pass runs in stage 'clean', not in 'fuse'"),
    ],
)
def test_order_that_names_nothing_is_the_plugins_mistake(site, installed, placement, complaint):
    specs = ("operation-fusion", "fuse"), ("dead-code", "clean")
    site.install("mithril-passes", passes("mithril_passes_passes_plugin", *specs))
    site.install("aaa-kit", passes("aaa_kit_aaa_plugin", ("shiny", "fuse", placement)), entry="aaa")
    installed()
    with pytest.warns(PluginWarning, match="pass 'shiny' of aaa-kit 1.0 says"):
        result = compiled()
    (decision,) = result.decisions.of("ignored")
    assert complaint in decision.message
    assert next(p for p in plugins.all() if p.name == "aaa").state == "broken"
    with pytest.raises(StrictError):
        compiled(strict=True)


def test_order_by_an_alias_holds(site, installed):
    spec = ("z-operation-fusion", "fuse", "aliases=('fusion',)")
    site.install("mithril-passes", passes("mithril_passes_passes_plugin", spec))
    site.install("aaa-kit", passes("aaa_kit_aaa_plugin", ("a-shiny", "fuse", "after=('fusion',)")), entry="aaa")
    installed()
    text = compiled().explain()
    assert text.index("\nz-operation-fusion ") < text.index("\na-shiny ")


def test_circle_names_the_distributions(site, installed):
    site.install("aaa-kit", passes("aaa_kit_aaa_plugin", ("one", "fuse", "before=('two',)")), entry="aaa")
    site.install("bbb-kit", passes("bbb_kit_bbb_plugin", ("two", "fuse", "before=('one',)")), entry="bbb")
    installed()
    with pytest.raises(PassError, match="cyclic order of passes") as caught:
        compiled()
    assert "'one' of aaa-kit 1.0: before=two" in str(caught.value)
    assert "'two' of bbb-kit 1.0: before=one" in str(caught.value)
    assert "optimizations={" in str(caught.value)


def test_unknown_level_of_a_pass_is_refused():
    with pytest.raises(PassError, match="unknown level 'ultra' of pass 'x'"):
        pass_(name="x", level="ultra")(lambda graph: graph)


def test_order_of_a_custom_pass_is_checked(site, installed):
    site.install("mithril-passes", passes("mithril_passes_passes_plugin", ("dead-code", "clean")))
    installed()
    with pytest.raises(PassError, match="unknown pass 'dead-cod' in before= or after= of pass 'mine'") as caught:
        compiled(custom_passes=[pass_(name="mine", stage="clean", before=("dead-cod",))(lambda g: g)])
    assert "did you mean 'dead-code'?" in str(caught.value)
    with pytest.raises(PassError, match="'dead-code' runs in stage 'clean'"):
        compiled(custom_passes=[pass_(name="mine", stage="fuse", before=("dead-code",))(lambda g: g)])


def test_order_across_stages_is_refused_by_the_manager():
    first = Pass("first", lambda g: g, stage="clean")
    with pytest.raises(PassError, match="'second' names 'first'"):
        PassManager([first, Pass("second", lambda g: g, stage="final", before=("first",))])


def test_custom_pass_with_the_name_of_an_installed_one_is_recorded(site, installed):
    site.install("mithril-passes", passes("mithril_passes_passes_plugin", ("dead-code", "clean")))
    installed()
    result = compiled(custom_passes=[pass_(name="dead-code")(lambda g: g)])
    assert "a pass named 'dead-code' exists: the custom pass runs as 'dead-code-2'" in str(result.decisions)


def test_undeclared_pass_option_is_recorded(site, installed):
    site.install("aaa-kit", passes("aaa_kit_aaa_plugin", ("shiny", "fuse", "options=('shine',)")), entry="aaa")
    installed()
    assert "no installed plugin declares 'shine'" in str(quiet().decisions)


# ----------------------------------------------------------------------------------------------------------- options
OPTION = """
    from mithril import Option, hookimpl

    @hookimpl
    def mithril_options():
        return [Option("tiling", int, {default}, "Size of tiles.")]
"""


def test_option_of_a_first_party_distribution_stays(site, installed):
    site.install("mithril-passes", OPTION.format(default=1))
    site.install("aaa-kit", OPTION.format(default=2), entry="aaa")
    installed()
    assert option_registry().by_name["tiling"].owner == "mithril-passes"
    assert "option 'tiling' of aaa-kit 1.0 is not used" in str(quiet(tiling=3).decisions)
    assert not compiled(optimization_level="none").decisions.of("ignored")


# ------------------------------------------------------------------------------------------ names that the core owns
def test_command_and_export_named_like_the_cores_are_clashes(site, installed):
    site.install(
        "aaa-kit",
        """
        from mithril import Command, Export, hookimpl

        @hookimpl
        def mithril_commands():
            return [Command("plugins", "m:c"), Command("fine", "m:c")]

        @hookimpl
        def mithril_exports():
            return [Export("compile", "m:c"), Export("Fine", "m:c")]
        """,
        entry="aaa",
    )
    installed()
    plugins.reserve("mithril_commands", ["plugins"])
    assert list(plugins.commands()) == ["fine"]
    assert list(plugins.exports()) == ["Fine"]
    problems = [p.what for p in next(p for p in plugins.all() if p.name == "aaa").problems]
    assert problems == [
        "the command 'plugins' of aaa-kit 1.0 cannot be reached: mithril-core has that name",
        "the name 'compile' of aaa-kit 1.0 cannot be reached: mithril-core has that name",
    ]


def test_plugin_that_prints_does_not_reach_stdout(site, installed, capsys):
    site.install("aaa-kit", "print('hello')\ndef mithril_passes():\n    print('again')\n    return []", entry="aaa")
    installed()
    plugins.passes()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "hello\nagain\n")


UNTIL_NAMED = "import sys, time\nfor _ in range(1000):\n    if sys.stderr.getvalue(): break\n    time.sleep(0.01)"


def test_slow_plugin_is_named(site, installed, capsys, monkeypatch):
    monkeypatch.setattr("mithril.plugins.loader.SLOW", 0.5)
    site.install("aaa-kit", UNTIL_NAMED, entry="aaa", version="3.1")
    site.install("mithril-good", "")
    installed()
    plugins.all()
    err = capsys.readouterr().err
    assert "'import' of plugin 'aaa' of aaa-kit 3.1 takes longer than 0.5 seconds" in err
    assert "MITHRIL_DISABLE_PLUGINS=aaa" in err
    assert "good" not in err


def test_slow_hook_is_named(site, installed, capsys, monkeypatch):
    monkeypatch.setattr("mithril.plugins.loader.SLOW", 0.5)
    body = UNTIL_NAMED.replace("\n", "\n    ")
    site.install("aaa-kit", f"def mithril_passes():\n    {body}\n    return []", entry="aaa", version="3.1")
    site.install("zzz-kit", "def mithril_passes():\n    return []", entry="zzz")
    installed()
    plugins.passes()
    err = capsys.readouterr().err
    assert "'mithril_passes' of plugin 'aaa' of aaa-kit 3.1 takes longer than 0.5 seconds" in err
    assert "zzz" not in err


# ------------------------------------------------------------------------------------------------------------ targets
def test_program_larger_than_its_target(site, installed):
    standard(site)
    site.install(
        "aaa-kit",
        """
        from mithril import HardwareTarget, hookimpl

        @hookimpl
        def mithril_targets():
            return [HardwareTarget("tiny", "cpu", memory=20), HardwareTarget("large", "cpu", memory=1 << 30)]
        """,
        entry="aaa",
    )
    installed()
    assert "target_hardware='tiny' has 20 B of memory" in str(quiet(target_hardware="tiny").decisions)
    assert not compiled(target_hardware="large").decisions.of("ignored")


# -------------------------------------------------------------------------------------------------------------- names
def test_completion_lists_operations_and_layers():
    assert {"softmax", "flip", "scan", "matmul"} <= set(dir(ml.ops))
    assert {"Linear", "LSTM", "Model"} <= set(dir(ml.models))


def test_help_of_an_operation_shows_signature_and_text():
    text = pydoc.render_doc(ml.ops.softmax, renderer=pydoc.plaintext)
    assert "softmax(x, *, axis" in text
    assert ml.ops.softmax.doc.splitlines()[0] in text
    assert list(inspect.signature(ml.ops.softmax).parameters) == ["x", "axis"]


def test_unknown_operation_shows_near_names_only():
    with pytest.raises(AttributeError) as caught:
        ml.ops.sofmax
    text = str(caught.value)
    assert "did you mean 'softmax'?" in text
    assert len(text) < 300


# -- absent plugins ----------------------------------------------------------------------------------------------------
PASS = "from mithril import PassSpec\ndef mithril_passes(): return [PassSpec('p', 'bad_p:same', 'fuse', 'low')]\n"
LOWERING = "from mithril import Lowering\ndef mithril_lowerings(backend):\n    "


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    for module in (requirements, pass_pipeline):
        monkeypatch.setattr(module, "_warned", set())


def plain(**options):
    return compiled(optimization_level="none", **options)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_outcome_of_a_bad_plugin(site, installed, bad):
    """Expect an error, a warning, or a decision that strict=True refuses, and no second warning."""
    standard(site)
    site.install("bad-kit", bad.code, requires=bad.requires, entry=bad.entry, version=bad.version)
    installed()
    verify = "numeric" if "verify" in bad.what else "structure"

    def attempt(**options):
        return compiled(optimization_level=bad.level, verify=verify, **options)

    message = f"(?s){bad.message}"
    if bad.outcome == "error":
        for strict in (False, True):
            with pytest.raises(MithrilError, match=message):
                attempt(strict=strict)
        return
    if bad.outcome != "warning":  # a field that is ignored shapes no program
        with pytest.raises(StrictError, match=message):
            attempt(strict=True)
    with pytest.warns(PluginWarning, match=message) as caught:
        first = attempt()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = attempt()
    start = {"absent": "bad-kit 1.0 is not in use", "partial": "bad-kit 1.0 is only partly in use"}.get(bad.outcome, "")
    kind = "observer" if bad.outcome == "observer" else "ignored"
    for result in (first, second):
        recorded = {d.message for d in result.decisions.of(kind) if d.message.startswith(start)}
        assert len(recorded) == (bad.outcome != "warning")


@pytest.mark.parametrize("versions", [("1.0", "2.0"), ("1.0", "1.0")], ids=["versions", "twins"])
def test_two_folders_of_metadata_in_one_folder_are_named(site, installed, versions):
    for name, version in zip(("bad-kit", "Bad-Kit"), versions, strict=True):
        site.install(name, "def mithril_passes(): return []", version=version, entry="bad", module="bad_kit_plugin")
    installed()
    with pytest.warns(PluginWarning, match="2 folders of metadata describe (?i:bad-kit)"):
        result = plain()
    (record,) = result.plugins
    name = record.distribution
    assert record.problems == (f"2 folders of metadata describe {name}",)
    with pytest.raises(StrictError, match="2 folders of metadata describe") as caught:
        plain(strict=True)
    assert str(caught.value).startswith(
        f"strict=True: ignored: {name} {record.version} is doubtful: 2 folders of metadata describe {name}: "
        f"versions {', '.join(versions)} in {site.folder} "
        f"(pip uninstall {name}, until pip finds none, and install it again)"
    )


def test_folder_that_is_twice_on_the_path_describes_a_plugin_once(site, installed, monkeypatch):
    site.install("good-kit", "def mithril_passes(): return []")
    monkeypatch.syspath_prepend(str(site.folder))
    installed()
    assert not plain(strict=True).decisions.of("ignored")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import mithril.graph, mithril\nfrom mithril.system import files\nfrom mithril import __version__", []),
        ("from . import _mine\nfrom mithril_tools import _x\nimport numpy.core._x", []),
        ("import mithril.plugins.loader as loader", ["1: mithril.plugins.loader"]),
        ("def run():\n    from mithril.plugins import loader", ["2: mithril.plugins.loader"]),
        ("from mithril.graph.core import Graph", ["1: mithril.graph.core.Graph"]),
        ("from mithril._core import x", ["1: mithril._core.x"]),
        ("def (", []),
    ],
)
def test_private_imports_are_found_in_all_code_of_a_plugin(site, installed, code, names):
    package = site.folder / "secret" / "inner"
    package.mkdir(parents=True)
    (site.folder / "secret" / "__init__.py").write_text("def mithril_passes(): return []\n")
    (package / "more.py").write_text(code)
    site.install("secret-kit", "", module="secret")
    installed()
    (plugin,) = plugins.all()
    problem = plugins.private_imports(plugin)
    facts = () if problem is None else problem.facts
    assert list(facts) == [f"secret/inner/more.py:{line}" for line in names]
    assert not plain(strict=True).decisions.of("ignored")  # it concerns the authors


def test_plugin_that_fails_for_another_backend_is_not_missed(site, installed):
    site.install("bad-kit", LOWERING + "return () if backend == 'reference' else 1 / 0")
    installed()
    assert plugins.lowerings("other") == {}
    assert plain(strict=True).decisions.of("ignored") == []


@pytest.mark.parametrize(
    "hook", ["exports", "formats", "commands", "devices", "profilers", "architectures", "detect_targets"]
)
def test_hook_that_shapes_no_program_is_not_missed(site, installed, hook):
    site.install("bad-kit", f"def mithril_{hook}(): 1 / 0")
    installed()
    assert [p.state for p in plugins.all()] == ["broken"]
    plain(strict=True)


def test_backend_that_is_not_a_class_of_backends(site, installed):
    spec = "BackendSpec('bad', 'Bad', 'bad_kit_bad_kit_plugin:Bad')"
    site.install("bad-kit", f"from mithril import BackendSpec\ndef mithril_backends(): return [{spec}]\nBad = 3")
    installed()
    with pytest.raises(MithrilError) as caught:
        ml.compile(Model(), "bad")
    assert str(caught.value) == (
        "the backend 'bad' of bad-kit 1.0 is 3, not a class of backends\n"
        "  loading: bad_kit_bad_kit_plugin:Bad\n"
        "  expected: a class derived from mithril.backend.Backend\n"
        "hint: report it to the authors of bad-kit"
    )


def test_plugin_disabled_by_the_user_is_recorded_without_a_warning(site, installed, monkeypatch):
    site.install("bad-kit", PASS)
    monkeypatch.setenv("MITHRIL_DISABLE_PLUGINS", "bad-kit")
    installed()
    assert [d.message for d in plain(strict=True).decisions.of("plugin")] == [
        "plugin 'bad-kit' of bad-kit 1.0 is disabled"
    ]


def test_compiled_model_lists_plugins_present_and_absent(site, installed):
    module = site.install("good-kit", "def mithril_passes(): return []")
    site.install("bad-kit", "raise RuntimeError('boom')", version="2.0")
    installed()
    with pytest.warns(PluginWarning):
        bad, good = plain().plugins
    assert str(bad) == "bad-kit 2.0: absent; cannot import plugin 'bad-kit' of bad-kit 2.0"
    assert (str(good), good.module) == ("good-kit 1.0: present", module)
    assert len({good.content, bad.content}) == 2


def test_level_without_standard_passes_is_a_decision(site, installed):
    installed()
    (decision,) = compiled().decisions.of("ignored")
    assert decision.message.startswith("optimization_level='medium': no standard pass is installed")
    assert plain().decisions.of("ignored") == []
