"""The command line: output of each command for humans, for scripts and on narrow terminals."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest
from click.testing import CliRunner

from mithril import plugins
from mithril_tools import cli
from mithril_tools.cli.coverage import coverage

GOOD = """
    from mithril import BackendSpec, Command, Option, PassSpec, hookimpl

    @hookimpl
    def mithril_backends():
        return [BackendSpec("good", "GoodBackend", "good_impl:GoodBackend", ("json", "frobnicate"), "A fake one.")]

    @hookimpl
    def mithril_passes():
        return [
            PassSpec("zip", "good_impl:zip", "fuse", "high", summary="Zips."),
            PassSpec("tidy", "good_impl:tidy", "clean", "low", aliases=("clean-up",), summary="Tidies."),
            PassSpec("rare", "good_impl:rare", "fuse", None, after=("zip",), summary="Rarely wanted."),
        ]

    @hookimpl
    def mithril_options():
        return [Option("goodness", int, 3, "How good.")]

    @hookimpl
    def mithril_commands():
        return [Command("greet", "good_impl:greet", "Say hello.")]
"""
IMPLEMENTATION = """
    import click

    class GoodBackend:
        @classmethod
        def diagnose(cls):
            return {"devices": "one fake"}

    @click.command()
    def greet():
        click.echo("hello")
"""


@pytest.fixture
def mithril(site, monkeypatch):
    """Runs ``mithril ARGUMENTS`` in this process, on the plugins of the fake site only."""
    monkeypatch.setattr(plugins.default, "_arguments", ((), None, True))
    plugins.reload()

    def run(*arguments, width=100, code=0):
        result = CliRunner(env={"COLUMNS": str(width)}).invoke(cli.main, arguments)
        assert result.exit_code == code, result.output
        return result.output

    yield run
    monkeypatch.undo()
    plugins.reload()


@pytest.fixture
def good(site):
    site.install("mithril-good", GOOD)
    (site.folder / "good_impl.py").write_text(textwrap.dedent(IMPLEMENTATION))


def test_plugins(mithril, good):
    assert [line.rstrip() for line in mithril("plugins").splitlines()] == [
        "name  kind                                distribution  version  state",
        "good  backend, 3 passes, command, option  mithril-good  1.0      needs frobnicate",
    ]


def test_plugins_json(mithril, good):
    (row,) = json.loads(mithril("plugins", "--json"))
    assert row["provides"] == {
        "backend": ["good"],
        "pass": ["rare", "tidy", "zip"],
        "export": ["GoodBackend"],
        "command": ["greet"],
        "option": ["goodness"],
    }
    assert (row["state"], row["problems"]) == ("needs frobnicate", [])


def test_plugins_shows_what_is_wrong(mithril, site):
    site.install("mithril-bad", "raise RuntimeError('boom [red]')")
    text = mithril("plugins", code=1)
    assert "bad         mithril-bad   1.0      broken" in text
    assert "\ncannot import plugin 'bad' of mithril-bad 1.0\n  RuntimeError: boom [red]\n" in text
    (row,) = json.loads(mithril("plugins", "--json", code=1))
    assert row["problems"][0]["state"] == "broken"


def test_two_owners_of_an_option_are_shown(mithril, good, site):
    site.install(
        "mithril-other", "from mithril import Option\ndef mithril_options(): return [Option('goodness', int, 1, 'x')]"
    )
    text = mithril("plugins", code=1)
    assert text.count("the option 'goodness' of ml.compile has more than one owner") == 2
    assert "declared by: mithril-good 1.0, mithril-other 1.0" in text


def test_nothing_installed(mithril):
    assert mithril("plugins") == "No plugins are installed. A backend to begin with: pip install mithril-numpy\n"
    assert "No passes are installed" in mithril("passes")
    assert "pip install mithril-jax" in mithril("backends")


def test_disable_plugins(mithril, good):
    assert "disabled" in mithril("--disable-plugins", "good", "plugins")


def test_coverage_of_a_backend():
    from mithril import plugins
    from mithril.backend.base import Backend

    class Bare(Backend):
        name = "bare"

        def lowers(self, node, options=None):
            return node.op.name in ("tanh", "mul", "add")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "backend_class", lambda name: Bare)
        states = {row["operation"]: row["state"] for row in coverage("bare")}
    assert states["tanh"] == "lowered"
    assert states["exp"] == "missing"
    assert states["square"] == "by its body"
    assert states["softmax"] == "body needs div, exp, max, sub, sum"


def test_backends(mithril, good):
    rows = json.loads(mithril("backends", "--json"))
    assert rows[0] == {
        "name": "good",
        "class": "ml.GoodBackend",
        "distribution": "mithril-good 1.0",
        "state": "needs frobnicate",
        "summary": "A fake one.",
    }
    assert {"name": "jax", "class": "", "distribution": "", "state": "pip install mithril-jax", "summary": ""} in rows
    assert "needs frobnicate" in mithril("backends")


def test_passes_in_running_order(mithril, good):
    data = json.loads(mithril("passes", "--json"))
    assert [(r["name"], r["stage"], r["level"]) for r in data["passes"]] == [
        ("tidy", "clean", "low"),
        ("zip", "fuse", "high"),
        ("rare", "fuse", "by name"),
    ]
    assert data["pipelines"] == {"low": ["tidy"], "medium": ["tidy"], "high": ["tidy", "zip"]}
    text = mithril("passes")
    first = ["tidy", "clean", "low", "clean-up", "mithril-good", "1.0", "Tidies."]
    assert text.splitlines()[1].split() == first
    assert text.endswith("\nlow: tidy\nmedium: tidy\nhigh: tidy, zip\n")


def test_options(mithril, good):
    rows = {row["name"]: row for row in json.loads(mithril("options", "--json"))}
    assert rows["goodness"]["owner"] == "mithril-good"
    assert rows["jit"]["owner"] == "mithril-core"
    assert "goodness" in mithril("options", width=140)


def test_doctor(mithril, good, site):
    site.install("mithril-bad", "raise RuntimeError('boom')")
    report = json.loads(mithril("doctor", "--json", code=1))
    assert report["environment"]["python"].startswith("3.")
    backend = report["backends"]["good"]
    assert (backend["state"], backend["devices"], backend["frobnicate"]) == ("ready", "one fake", "not installed")
    assert "RuntimeError: boom" in report["problems"][0]
    text = mithril("doctor", code=1)
    assert "one fake" in text
    assert "RuntimeError: boom" in text


def test_doctor_survives_a_backend_that_does_not(mithril, good, site):
    (site.folder / "good_impl.py").write_text(
        "class GoodBackend:\n    @classmethod\n    def diagnose(cls): raise OSError('no driver')\n"
    )
    assert json.loads(mithril("doctor", "--json", code=1))["backends"]["good"]["why"] == "OSError: no driver"


def test_exit_status_of_a_site_without_faults(mithril, good):
    mithril("plugins")
    mithril("doctor")
    mithril("--disable-plugins", "good", "plugins")


def test_doubts_are_shown(mithril, good, site):
    site.install("mithril-odd", "def mithril_passes(): return []", version="newest!")
    for command in ("plugins", "doctor"):
        assert "the version 'newest!' of mithril-odd is not valid" in mithril(command, code=1, width=200)
    (row,) = (row for row in json.loads(mithril("plugins", "--json", code=1)) if row["name"] == "odd")
    assert row["state"] == "loaded"
    assert [problem["state"] for problem in row["problems"]] == ["doubtful"]


def test_listings_call_hooks_for_each_backend(mithril, good, site):
    site.install("mithril-bad", "def mithril_lowerings(backend): return {}[backend]")
    for command in ("plugins", "doctor"):
        assert "'mithril_lowerings' for the backend 'good' of" in mithril(command, code=1, width=200)


def test_violated_requirement_of_a_plugin_is_shown(mithril, good, site):
    requires = ("click<1", "absent-kit>=2; python_version > '3'", "x; extra == 'y'")
    site.install("mithril-held", "def mithril_passes(): return []", requires=requires)
    text = mithril("doctor", code=1, width=200)
    assert f"mithril-held 1.0 requires click<1, but {version('click')} is installed" in text
    assert "mithril-held 1.0 requires absent-kit>=2, but it is not installed" in text
    assert "extra" not in text


def test_backend_with_a_violated_requirement_is_not_ready(mithril, site):
    site.install("mithril-good", GOOD, requires=("numpy<1",))
    (site.folder / "good_impl.py").write_text(textwrap.dedent(IMPLEMENTATION))
    facts = json.loads(mithril("doctor", "--json", code=1))["backends"]["good"]
    assert facts["state"] == "not supported"
    assert facts["why"].startswith("mithril-good 1.0 requires numpy<1, but ")


@pytest.mark.parametrize("command", ["plugins", "backends", "passes", "options", "doctor"])
def test_narrow_terminals_cut_nothing(mithril, good, command):
    text = mithril(command, width=34)
    assert "…" not in text
    long_words = [line for line in text.splitlines() if len(line) > 34]
    assert not long_words


def test_command_of_a_plugin(mithril, good):
    assert mithril("greet") == "hello\n"
    assert "Say hello. [mithril-good 1.0]" in mithril("--help")


def test_help_lists_every_command(mithril):
    text = mithril("--help")
    for name in cli.COMMANDS:
        assert f"  {name}" in text


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_table_of_commands_repeats_their_help(name):
    first = cli._load(cli.COMMANDS[name][0]).help.split("\n\n")[0]
    assert cli.COMMANDS[name][1] == " ".join(first.split())


def test_unknown_command(mithril):
    assert "unknown command 'plugin'; did you mean 'plugins'?" in mithril("plugin", code=2)
    assert "`mithril --help` lists all commands" in mithril("zzzz", code=2)


def test_errors_of_mithril_are_messages_not_tracebacks(mithril, good, site):
    (site.folder / "good_impl.py").write_text("raise RuntimeError('boom')")
    text = mithril("greet", code=1)
    assert text.startswith("Error: cannot load the command 'greet' of mithril-good 1.0\n")


def test_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "mithril", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mithril, version ")


def test_cache_is_shown_and_cleared(mithril, tmp_path):
    from mithril.system.disk_cache import Store

    Store(tmp_path).put("ab" * 32, {"a": b"x" * 100})
    assert "1 entries" in mithril("cache", "info", "--dir", str(tmp_path))
    assert json.loads(mithril("cache", "info", "--dir", str(tmp_path), "--json"))["entries"] == 1
    assert "removed 1 entry" in mithril("cache", "clear", "--dir", str(tmp_path))
    assert Store(tmp_path).info().entries == 0


def test_inputs_that_the_model_declares_need_no_shape():
    import mithril as ml
    from mithril.models import Embedding, Linear, Model
    from mithril_tools.cli.models import random_inputs

    plain = {"shapes": {}, "types": {}, "inference": False}
    model = Model()
    model |= Linear(3)(input=ml.IOKey("x", shape=["N", 4]), output="y")
    assert random_inputs(model, plain, 0)["x"].shape == (2, 4)
    assert random_inputs(model, {**plain, "shapes": {"x": [5, 4]}}, 0)["x"].shape == (5, 4)
    tokens = Model()
    tokens |= Embedding(7, 3)(input=ml.IOKey("tokens", shape=["N", "T"]), output="y")
    tokens_array = random_inputs(tokens, plain, 0)["tokens"]
    assert tokens_array.dtype == "int32" and tokens_array.shape == (2, 3)


def test_a_file_without_a_name_lists_its_names(tmp_path):
    from mithril.graph.errors import ModelError
    from mithril_tools.cli.models import load_member

    file = tmp_path / "net.py"
    file.write_text("import os\n_hidden = 1\nmodel: object = 3\nclass Net: pass\ndef make(): pass\nmodel = os\n")
    for place, text in [(str(file), "names no model"), (f"{file}:modle", "has no 'modle'")]:
        with pytest.raises(ModelError, match=f"(?s){text}.*its names: model, Net, make"):
            load_member(place)
    file.write_text("model = (")
    with pytest.raises(ModelError, match="names no model\nhint: write file.py:name"):
        load_member(str(file))


def test_inputs_of_unknown_shape_are_requested():
    from mithril.graph.errors import InputError
    from mithril.models import Model, Relu
    from mithril_tools.cli.models import random_inputs

    model = Model()
    model |= Relu()(input="x", output="y")
    with pytest.raises(InputError, match="--shape NAME=2,3 for each input"):
        random_inputs(model, {"shapes": {}, "types": {}, "inference": False}, 0)


def test_backend_that_was_not_imported_is_not_called_loaded(mithril, site):
    for name, requires in {"broken": '("json",)', "absent": '("frobnicate",)'}.items():
        site.install(
            f"mithril-{name}",
            f"""
            from mithril import BackendSpec, hookimpl

            @hookimpl
            def mithril_backends():
                return [BackendSpec("{name}", "{name.title()}Backend", "{name}_impl:Backend", {requires})]
            """,
        )
    (site.folder / "broken_impl.py").write_text("raise ImportError('the framework is broken')")
    states = {row["name"]: row["state"] for row in json.loads(mithril("plugins", "--json"))}
    assert states == {"absent": "needs frobnicate", "broken": "registered"}


def test_plugin_that_prints_leaves_json_alone(mithril, site):
    site.install("mithril-loud", "print('hello')")
    output = CliRunner().invoke(cli.main, ["plugins", "--json"]).stdout
    assert json.loads(output)[0]["name"] == "loud"


def test_unknown_plugin_to_disable(mithril, good):
    assert "no plugin is named 'goood'; did you mean 'good'?" in mithril(
        "--disable-plugins", "goood", "plugins", code=2
    )


def test_plugin_command_with_a_reserved_name(mithril, site):
    site.install(
        "mithril-bold",
        """
        from mithril import Command, hookimpl

        @hookimpl
        def mithril_commands():
            return [Command("plugins", "m:c")]
        """,
    )
    assert "the command 'plugins' of mithril-bold 1.0 cannot be reached" in mithril("plugins", code=1)


@pytest.mark.parametrize("shape", ["input=2,x,,", "input=2,-3", "input=2.5", "input=2,a b"])
def test_malformed_shape(shape, tmp_path):
    (tmp_path / "net.py").write_text("from mithril.models import Relu\nnet = Relu()\n")
    result = CliRunner().invoke(cli.main, ["compile", f"{tmp_path}/net.py:net", "--shape", shape])
    assert result.exit_code == 1
    assert f"--shape {shape}: '" in result.output
    assert "is not a size" in result.output


@pytest.mark.parametrize(
    ("kind", "name", "complaint"),
    [
        ("backend", "numpy", "mithril's own distribution mithril-numpy has that name"),
        ("backend", "c", "the backend 'c' of mithril-cbackend has that name"),
        ("pass", "good", "the installed plugin 'good' of mithril-good 1.0 has that name"),
    ],
)
def test_new_plugin_with_a_name_that_is_taken(mithril, good, tmp_path, kind, name, complaint):
    assert complaint in mithril("new-plugin", kind, name, "--into", str(tmp_path), code=2)
    assert not list(tmp_path.glob(f"mithril-{name}"))


def test_calibrate_needs_several_rounds(mithril):
    assert "--rounds" in mithril("calibrate", "--rounds", "1", code=2)
