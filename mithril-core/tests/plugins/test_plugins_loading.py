"""The loader: discovery, lazy imports, and isolation of broken plugins."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import threading

import pytest

import mithril
from mithril.graph.errors import PluginError
from mithril.plugins import PluginWarning

BACKEND = """
    from mithril import BackendSpec, hookimpl

    @hookimpl
    def mithril_backends():
        return [BackendSpec("{name}", "{cls}", "{module}:{cls}")]
"""


def backend(name, cls="FakeBackend", module="fake_backend"):
    return BACKEND.format(name=name, cls=cls, module=module)


def states(plugins):
    return {plugin.name: plugin.state for plugin in plugins.all()}


def only_problem(plugins, name):
    (plugin,) = [p for p in plugins.all() if p.name == name]
    (problem,) = plugin.problems
    return str(problem.error())


def test_working_plugin(site):
    site.install("mithril-good", backend("good"))
    plugins = site.plugins()
    assert states(plugins) == {"good": "loaded"}
    assert plugins.backends()["good"].origin == "mithril-good 1.0"


def test_finding_imports_nothing(site):
    module = site.install("mithril-good", backend("good"))
    plugins = site.plugins()
    assert [p.state for p in plugins.found()] == ["found"]
    assert module not in sys.modules


def test_asking_for_one_backend_imports_only_its_plugin(site):
    expected_plugin = site.install("mithril-good", backend("good"))
    other = site.install("mithril-other", backend("other"))
    (site.folder / "fake_backend.py").write_text("class FakeBackend: pass")
    assert site.plugins().backend_class("good").__name__ == "FakeBackend"
    assert expected_plugin in sys.modules
    assert other not in sys.modules


def test_listing_backends_imports_no_backend_module(site):
    site.install("mithril-good", backend("good"))
    (site.folder / "fake_backend.py").write_text("raise RuntimeError('the framework was imported')")
    assert list(site.plugins().backends()) == ["good"]


def test_plugin_that_raises_is_isolated_and_shown_on_request(site):
    site.install("mithril-bad", "raise RuntimeError('boom')", version="2.1")
    site.install("mithril-good", backend("good"))
    plugins = site.plugins()
    assert states(plugins) == {"bad": "broken", "good": "loaded"}
    with pytest.raises(PluginError) as caught:
        plugins.backend_class("bad")
    assert str(caught.value) == (
        "cannot import plugin 'bad' of mithril-bad 2.1\n"
        "  RuntimeError: boom\n"
        "  importing: mithril_bad_bad_plugin\n"
        "hint: report it to the authors of mithril-bad; set MITHRIL_DISABLE_PLUGINS=bad to leave it out"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_plugin_that_exits_is_isolated(site):
    site.install("mithril-bad", "import sys; sys.exit(3)")
    assert states(site.plugins()) == {"bad": "broken"}


def test_missing_dependency_gives_the_pip_line(site):
    site.install("mithril-bad", "import frobnicate", requires=['frobnicate-kit[fast]>=2; python_version > "3"'])
    assert only_problem(site.plugins(), "bad") == (
        "cannot import plugin 'bad' of mithril-bad 1.0\n"
        "  ModuleNotFoundError: No module named 'frobnicate'\n"
        "  importing: mithril_bad_bad_plugin\n"
        'hint: pip install "frobnicate-kit[fast]>=2"; or set MITHRIL_DISABLE_PLUGINS=bad to leave it out'
    )


def test_missing_dependency_of_the_backend_itself(site):
    site.install("mithril-good", backend("good"), requires=["frobnicate-kit>=2"])
    (site.folder / "fake_backend.py").write_text("import frobnicate")
    with pytest.raises(PluginError) as caught:
        site.plugins().backend_class("good")
    assert str(caught.value) == (
        "cannot load the backend 'good' of mithril-good 1.0\n"
        "  ModuleNotFoundError: No module named 'frobnicate'\n"
        "  loading: fake_backend:FakeBackend\n"
        'hint: pip install "frobnicate-kit>=2"'
    )


@pytest.mark.parametrize(
    ("requirement", "side"), [("mithril-core>=99", "mithril-core"), ("Mithril_Core<0.0.1", "mithril-bad")]
)
def test_wrong_core_version_is_read_before_importing(site, requirement, side):
    module = site.install("mithril-bad", "raise RuntimeError('imported')", requires=[requirement])
    assert only_problem(site.plugins(), "bad") == (
        f"plugin 'bad' of mithril-bad 1.0 is incompatible with mithril-core {mithril.__version__}\n"
        f"  required: {requirement}\n"
        f"hint: pip install --upgrade {side}; or set MITHRIL_DISABLE_PLUGINS=bad to leave it out"
    )
    assert module not in sys.modules


def test_fitting_core_version_and_foreign_requirements(site):
    site.install("mithril-good", backend("good"), requires=["mithril-core>=0.1", "mithril-core-extras>=99", "numpy"])
    assert states(site.plugins()) == {"good": "loaded"}


@pytest.mark.parametrize("core", ["0.1.0", "0.1", "0.1.5", "0.2.0", "0.2", "0.10.1", "1.0", "0.2.0rc1", "0.0.9"])
@pytest.mark.parametrize(
    "clauses",
    [">=0.1,<0.2", ">= 0.1.0 , < 0.2", "(>=0.1,<0.10)", "", "~=0.1", ">=0.1,!=0.1.5", "==0.1.*", ">0.1", "<0.2.0"],
)
def test_quick_comparison_never_differs_from_packaging(core, clauses):
    """The short cut may only say yes where packaging does."""
    from packaging.requirements import Requirement

    from mithril.plugins.loader import Plugin, _plainly_fits, incompatibility

    line = f"mithril-core{clauses}"
    fits = Requirement(line).specifier.contains(core, prereleases=True)
    assert not _plainly_fits(line, core) or fits
    assert (incompatibility(Plugin("p", "mithril-p", "1", "m", (line,)), core) is None) == fits


def test_usual_requirement_takes_the_quick_way():
    from mithril.plugins.loader import _plainly_fits

    assert _plainly_fits("mithril-core<0.2,>=0.1", "0.1.0")
    assert not _plainly_fits("mithril-core>=0.1; extra == 'x'", "0.1.0")


NO_PASSES = "def mithril_passes(): return []\n"


@pytest.mark.parametrize(("version", "upgrade"), [(3, "mithril-core"), (1, "mithril-dated"), ("2", "mithril-dated")])
def test_api_version_is_checked_in_both_directions(site, monkeypatch, version, upgrade):
    monkeypatch.setattr("mithril.plugins.loader.API_VERSION", 2)
    monkeypatch.setattr("mithril.plugins.loader.OLDEST_API", 2)
    site.install("mithril-dated", f"api_version = {version!r}")
    site.install("mithril-fine", f"api_version = 2\n{NO_PASSES}")
    dated, fine = site.plugins().all()
    assert (dated.state, fine.state) == ("incompatible", "loaded")
    text = str(dated.problems[0].error())
    assert f"plugin 'dated' of mithril-dated 1.0 requires the plugin API {version!r}" in text
    assert "supports 2 to 2" in text
    assert f"pip install --upgrade {upgrade};" in text


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("(1, 3)", "loaded"),
        ("(0, 1)", "loaded"),
        ("1", "loaded"),
        ("(2, 3)", "incompatible"),
        ("(3, 1)", "incompatible"),
    ],
)
def test_api_version_can_be_a_range(site, version, state):
    site.install("mithril-good", f"api_version = {version}\n{NO_PASSES}")
    assert site.plugins().all()[0].state == state


@pytest.mark.parametrize("version", ["'1'", "(1,)", "(1, 2, 3)", "('1', '2')", "None"])
def test_api_version_that_is_not_a_range_is_refused(site, version):
    site.install("mithril-good", f"api_version = {version}")
    plugin = site.plugins().all()[0]
    assert plugin.state == "incompatible"
    assert "pip install --upgrade mithril-good" in str(plugin.problems[0].error())


def test_unknown_field_of_a_descriptor_is_ignored_with_a_warning(site):
    code = (
        "from mithril import PassSpec\ndef mithril_passes(): return [PassSpec('p', 'm:p', 'fuse', 'low', aliasses=())]"
    )
    site.install("mithril-good", code)
    plugins = site.plugins()
    with pytest.warns(PluginWarning, match="PassSpec: .* ignores the unknown field 'aliasses'; did .* mean 'aliases'"):
        assert list(plugins.passes()) == ["p"]
    assert plugins.found()[0].state == "loaded"


def test_misspelt_hook(site):
    site.install("mithril-bad", "from mithril import hookimpl\n@hookimpl\ndef mithril_backend(): return []")
    text = only_problem(site.plugins(), "bad")
    assert text.splitlines()[0] == (
        "plugin 'bad' of mithril-bad 1.0 defines 'mithril_backend', which is not a hook of mithril"
    )
    assert "did the author mean 'mithril_backends'?" in text


def test_misspelt_hook_without_marker(site):
    site.install("mithril-bad", "def mithril_pases(): return []")
    assert "did the author mean 'mithril_passes'?" in only_problem(site.plugins(), "bad")


def test_forgotten_marker_still_counts(site):
    site.install("mithril-good", backend("good").replace("@hookimpl", ""))
    assert list(site.plugins().backends()) == ["good"]


def test_imported_helper_is_not_a_hook(site):
    (site.folder / "helpers_of_bad.py").write_text("def mithril_helper(): pass")
    site.install("mithril-good", f"from helpers_of_bad import mithril_helper\n{NO_PASSES}")
    assert states(site.plugins()) == {"good": "loaded"}


def test_wrong_parameters(site):
    site.install("mithril-bad", "def mithril_lowerings(backend, device): return []")
    assert only_problem(site.plugins(), "bad") == (
        "plugin 'bad' of mithril-bad 1.0 implements a hook with invalid parameters\n"
        "  mithril_lowerings(backend, device); accepted: backend\n"
        "hint: report it to the authors of mithril-bad; set MITHRIL_DISABLE_PLUGINS=bad to leave it out"
    )


def test_wrapping_a_listing_hook_is_refused(site):
    site.install(
        "mithril-bad", "from mithril import hookimpl\n@hookimpl(wrapper=True)\ndef mithril_backends(): return (yield)"
    )
    assert "cannot be wrapped" in only_problem(site.plugins(), "bad")


@pytest.mark.parametrize("body", ["raise KeyError('x')", "return ['good']", "return 3", "return [None]"])
def test_wrong_answer_is_attributed_and_the_rest_stays(site, body):
    good = '\ndef mithril_backends():\n    return [BackendSpec("bad", "B", "m:B")]\n'
    site.install("mithril-bad", f"from mithril import BackendSpec{good}\ndef mithril_passes():\n    {body}\n")
    plugins = site.plugins()
    assert only_problem(plugins, "bad").startswith("'mithril_passes' of plugin 'bad' (mithril-bad 1.0) failed\n")
    assert plugins.passes() == {}
    assert list(plugins.backends()) == ["bad"]


def test_bad_descriptor_is_attributed(site):
    site.install("mithril-bad", backend("bad", module="no-module/at all"))
    assert "is not of the form 'package.module:attribute'" in only_problem(site.plugins(), "bad")


def test_malformed_entry_point(site):
    site.install("mithril-bad", "")
    (next(site.folder.glob("mithril_bad*.dist-info")) / "entry_points.txt").write_text(
        "[mithril]\nbad = some.module:object\n"
    )
    assert "has a malformed entry point\n  entry point: bad = some.module:object" in only_problem(site.plugins(), "bad")


def test_unreadable_neighbors_do_not_matter(site):
    (site.folder / "broken-1.0.dist-info").mkdir()
    (site.folder / "other-1.0.dist-info").mkdir()
    (site.folder / "other-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe nonsense")
    site.install("mithril-good", backend("good"))
    assert states(site.plugins()) == {"good": "loaded"}


def test_two_distributions_with_one_entry_point_name(site):
    site.install("aaa-kit", "raise RuntimeError", entry="good", version="3.0")
    site.install("mithril-good", backend("good"))
    plugins = site.plugins()
    with pytest.raises(PluginError) as caught:
        plugins.backend_class("good")
    assert str(caught.value) == (
        "two distributions provide a plugin named 'good'\n"
        "  aaa-kit 3.0\n"
        "  mithril-good 1.0\n"
        "hint: pip uninstall one of them, or set MITHRIL_DISABLE_PLUGINS=mithril-good"
    )
    assert site.plugins(disable=["aaa-kit"]).backends()["good"].origin == "mithril-good 1.0"


def test_backend_name_belongs_to_the_plugin_of_that_name(site):
    site.install("aaa-kit", backend("good", cls="Thief"), entry="aaa")
    site.install("mithril-good", backend("good"))
    for ask_first in (True, False):
        plugins = site.plugins()
        if ask_first:
            assert plugins.backend("good").origin == "mithril-good 1.0"
        assert plugins.backends()["good"].origin == "mithril-good 1.0"
        assert "the name belongs to mithril-good 1.0" in only_problem(plugins, "aaa")
        assert states(plugins) == {"aaa": "clash", "good": "loaded"}


def test_backend_name_claimed_by_two_strangers(site):
    site.install("aaa-kit", backend("shiny"), entry="aaa")
    site.install("bbb-kit", backend("shiny"), entry="bbb", version="2.0")
    plugins = site.plugins()
    assert plugins.backends() == {}
    with pytest.raises(PluginError) as caught:
        plugins.backend_class("shiny")
    assert str(caught.value) == (
        "the backend 'shiny' is claimed by two plugins\n"
        "  claimed by: aaa-kit 1.0, bbb-kit 2.0\n"
        "hint: pip uninstall one of them, or set MITHRIL_DISABLE_PLUGINS=aaa to leave it out"
    )


@pytest.mark.parametrize("setting", ["good", "mithril-good", "MITHRIL_Good , other", "*"])
def test_environment_disables(site, monkeypatch, setting):
    module = site.install("mithril-good", "raise RuntimeError")
    monkeypatch.setenv("MITHRIL_DISABLE_PLUGINS", setting)
    plugins = site.plugins()
    assert states(plugins) == {"good": "disabled"}
    assert module not in sys.modules
    with pytest.raises(PluginError, match="plugin 'good' of mithril-good 1.0 is disabled"):
        plugins.backend_class("good")


def test_argument_disables(site):
    site.install("mithril-good", backend("good"))
    site.install("mithril-other", backend("other"))
    assert states(site.plugins(disable=["good"])) == {"good": "disabled", "other": "loaded"}
    assert set(states(site.plugins(autoload=False)).values()) == {"disabled"}


def test_strict_raises_recorded_problems(site, monkeypatch):
    site.install("mithril-bad", "raise RuntimeError('boom')")
    monkeypatch.setenv("MITHRIL_STRICT_PLUGINS", "1")
    plugins = site.plugins()
    for _ in range(2):
        with pytest.raises(PluginError, match="boom"):
            plugins.backends()
    assert site.plugins(disable=["bad"]).backends() == {}


def test_missing_known_backend_gives_the_pip_line(site):
    with pytest.raises(PluginError) as caught:
        site.plugins().backend_class("jax")
    assert str(caught.value) == "the backend 'jax' is not installed\nhint: pip install mithril-jax"


def test_unknown_backend_suggests_and_tells_what_was_not_loaded(site):
    site.install("mithril-good", backend("good"))
    site.install("mithril-bad", "raise RuntimeError('boom')")
    with pytest.raises(PluginError) as caught:
        site.plugins().backend_class("goood")
    assert str(caught.value) == (
        "unknown backend 'goood'\n"
        "  known: good\n"
        "  not loaded: mithril-bad 1.0 (cannot import plugin 'bad' of mithril-bad 1.0)\n"
        "hint: did you mean 'good'?"
    )


def test_installation_order_does_not_matter(site, monkeypatch):
    site.install("aaa-kit", backend("good", cls="Thief"), entry="aaa")
    site.install("mithril-good", backend("good"))
    site.install("mithril-bad", "raise RuntimeError('boom')")
    site.install("twin-one", backend("one"), entry="twin")
    site.install("twin-two", backend("two"), entry="twin")
    installed = list(importlib.metadata.distributions())
    assert len(installed) == 5
    reports = set()
    for order in itertools.permutations(installed):
        monkeypatch.setattr(importlib.metadata, "distributions", lambda order=order: iter(order))
        plugins = site.plugins()
        reports.add(
            repr([(p.name, p.origin, p.state, [str(x.error()) for x in p.problems]) for p in plugins.all()])
            + repr([(kind, name, plugin.origin) for kind, name, plugin in plugins.provided()])
        )
    assert len(reports) == 1


def test_first_of_two_copies_on_the_path_is_the_one(site, tmp_path, monkeypatch):
    module = site.install("mithril-good", backend("good"), version="2.0")
    second = tmp_path / "second"
    info = second / "mithril_good-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: mithril-good\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mithril]\nold = {module}\n")
    real = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: itertools.chain(real(), real(path=[str(second)])))
    assert [(p.name, p.version) for p in site.plugins().all()] == [("good", "2.0")]


def test_register_and_unregister_by_hand(site):
    plugins = site.plugins()

    class Mine:
        def mithril_commands(self):
            from mithril import Command

            return [Command("mine", "some.module:command")]

    plugins.register(Mine(), "mine")
    assert plugins.commands()["mine"].origin == "mine"
    with pytest.raises(PluginError, match="a plugin named 'mine' already exists"):
        plugins.register(Mine(), "mine")
    plugins.unregister("mine")
    assert plugins.commands() == {}


def test_register_reports_mistakes_at_once(site):
    class Wrong:
        def mithril_comands(self):
            return []

    with pytest.raises(PluginError, match="did the author mean 'mithril_commands'"):
        site.plugins().register(Wrong(), "wrong")


def test_reload_finds_newly_installed_plugins(site):
    plugins = site.plugins()
    assert plugins.backends() == {}
    site.install("mithril-good", backend("good"))
    before = plugins.generation()
    plugins.reload()
    assert list(plugins.backends()) == ["good"]
    assert plugins.generation() is not before
    plugins.reload(disable=["good"])
    assert plugins.backends() == {}


def test_missing_module_of_an_extra_gives_the_pip_line(site):
    code = "from mithril import Export\ndef mithril_exports(): return [Export('Shiny', 'mithril_shiny_code:Shiny')]"
    requires = ["mithril-core", "absent-kit>=1; extra == 'utilities'"]
    site.install("mithril-shiny", code, requires=requires)
    (site.folder / "mithril_shiny_code.py").write_text("import absent_kit.part\n")
    with pytest.raises(PluginError, match=r'pip install "mithril-shiny\[utilities\]"'):
        site.plugins().export("Shiny")


def test_one_thread_watches_all_imports(site, monkeypatch):
    starts = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (starts.append(thread), start(thread)))
    for k in range(5):
        site.install(f"mithril-good{k}", backend(f"good{k}"))
    assert len(site.plugins().loader.load_all()) == 5
    assert len(starts) == 1


def test_work_per_plugin(site):
    """Count the calls and files that each further plugin adds to the first look at all, without its import."""

    def work(first: int, last: int) -> tuple[int, int]:
        calls, opened = 0, 0

        def count(frame, event, function):
            nonlocal calls, opened
            if "importlib._bootstrap" not in frame.f_code.co_filename:  # which compiles the plugin's modules
                calls += event == "call"
                opened += event == "c_call" and function.__name__ == "open"

        for k in range(first, last):
            site.install(f"mithril-good{k}", backend(f"good{k}"), requires=["mithril-core>=0.1,<0.3"])
        plugins = site.plugins()
        sys.setprofile(count)
        try:
            assert len(plugins.loader.load_all()) == last
            plugins.packages()
        finally:
            sys.setprofile(None)
        return calls, opened

    work(0, 5)  # imports modules of the standard library
    few, many = work(5, 5), work(5, 25)
    calls, opened = ((more - less) / 20 for more, less in zip(many, few, strict=True))
    assert opened == 2  # METADATA and entry_points.txt
    assert calls < 280
