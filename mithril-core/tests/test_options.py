"""Options of compile: validation, aliases, owners."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import pytest

from mithril import Option, hookimpl, plugins
from mithril.backend.annotations import mismatch
from mithril.compiler import OptionRegistry, option_registry
from mithril.compiler.options import mithril_options as core_options
from mithril.graph.errors import OptionError
from mithril.graph.version import __version__


class Tiles(TypedDict, total=False):
    width: int
    height: int


def registry(site, *declared, **more):
    plugins = site.plugins()
    for name, specs in {"one": declared, **more}.items():
        hook = staticmethod(hookimpl(lambda specs=specs: list(specs)))
        plugins.register(type("P", (), {"mithril_options": hook})(), name)
    return OptionRegistry(plugins)


@pytest.fixture
def core(site):
    return OptionRegistry(site.plugins())


def refused(registry, **given):
    with pytest.raises(OptionError) as caught:
        registry.resolve(given)
    return str(caught.value)


def test_defaults(core):
    settings = core.resolve({})
    assert settings["optimization_level"] == "medium"
    assert settings["dynamic_control_flow"] is True
    assert dict(settings["shapes"]) == {}
    assert dict(settings.keywords) == {}
    assert len(settings) == len(list(settings)) == len(core_options())


def test_every_default_fits_its_own_type(core):
    for option in core_options():
        assert mismatch(option.default, option.type) is None, option.name


def test_defaults_cannot_be_changed_by_who_reads_them(core):
    with pytest.raises(TypeError):
        core.resolve({})["hints"]["x"] = 1


def test_unused_are_those_given_and_never_read(core):
    settings = core.resolve({"jit": True, "seed": 3, "hints": {"inference_priority": "latency"}})
    settings["jit"]
    settings.as_dict()
    assert settings.unused() == ["seed", "hints.inference_priority"]


def test_unknown_with_suggestion(core):
    assert refused(core, optimisation_level="low") == (
        "unknown option 'optimisation_level' of ml.compile\n"
        "  closest: optimization_level, optimizations, graph_optimization\n"
        "hint: did you mean 'optimization_level'?"
    )


def test_unknown_without_suggestion(core):
    assert refused(core, qqq=1) == "unknown option 'qqq' of ml.compile\nhint: `mithril options` lists all of them"


def test_option_of_a_plugin_that_is_not_installed(core):
    assert refused(core, torch_fx=True) == (
        "option 'torch_fx' of ml.compile belongs to mithril-torch, which is not installed\n"
        "hint: pip install mithril-torch"
    )


def test_option_of_a_plugin_that_is_broken(site):
    site.install("mithril-torch", "raise RuntimeError('boom')")
    plugins = site.plugins()
    plugins.all()
    assert refused(OptionRegistry(plugins), torch_fx=True) == (
        "option 'torch_fx' of ml.compile belongs to mithril-torch, which is not in use\n"
        "  cannot import plugin 'torch' of mithril-torch 1.0\n"
        "hint: report it to the authors of mithril-torch; set MITHRIL_DISABLE_PLUGINS=torch to leave it out"
    )


def test_option_of_a_plugin_that_is_too_old(site):
    site.install("mithril-torch", "def mithril_passes(): return []")
    assert refused(OptionRegistry(site.plugins()), torch_fx=True) == (
        "option 'torch_fx' of ml.compile belongs to mithril-torch, which does not declare it\n"
        "  installed: mithril-torch 1.0\n"
        "hint: pip install --upgrade mithril-torch"
    )


def test_the_example_of_an_option_is_the_hint_for_a_value_of_another_type(core):
    assert refused(core, shapes=[2, 4]).endswith('\nhint: for example shapes={"input": ["B", 784]}')
    assert refused(core, cache=1).endswith("\nhint: for example cache=True")


def test_wrong_choice(core):
    assert refused(core, optimization_level="hihg") == (
        "option 'optimization_level' of ml.compile: "
        "expected 'none' or 'low' or 'medium' or 'high', got 'hihg' (str)\n"
        "  optimization_level: Set of passes to run; `mithril passes` lists the passes of each level.\n"
        "  default: 'medium', owner: mithril-core\n"
        "hint: did you mean 'high'?"
    )


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"jit": "yes"}, "expected bool or None, got 'yes' (str)"),
        ({"num_threads": True}, "expected int of at least 1 or None, got True (bool)"),
        ({"num_threads": 0}, "expected int of at least 1 or None, got 0 (int)"),
        ({"timeout": -1}, "expected float above 0 or None, got -1 (int)"),
        (
            {"hints": {"input_batch_size_range": 4}},
            "at ['input_batch_size_range']: expected a list of int, got 4 (int)",
        ),
        ({"num_threads": 1.5}, "expected int of at least 1 or None, got 1.5 (float)"),
        ({"timeout": "3"}, "expected float above 0 or None, got '3' (str)"),
        ({"custom_passes": len}, "expected a list, got <built-in function len> (builtin_function_or_method)"),
        ({"code_transformers": [3]}, "at [0]: expected a function, got 3 (int)"),
        ({"shapes": {"x": [1.5]}}, "at ['x']: at [0]: expected int or str or Dim or ... or None, got 1.5 (float)"),
        ({"shapes": {"x": "32"}}, "at ['x']: expected a list of int or str or Dim or ... or None, got '32' (str)"),
        ({"shapes": {3: [1]}}, "at [3]: expected str, got 3 (int)"),
        ({"outputs": "y"}, "expected a list of str or None, got 'y' (str)"),
        ({"outputs": ["y", 3]}, "at [1]: expected str, got 3 (int)"),
        ({"file_path": 3}, "expected str or a path or None, got 3 (int)"),
    ],
)
def test_wrong_types(core, options, wrong):
    (keyword,) = options
    assert refused(core, **options).splitlines()[0] == f"option '{keyword}' of ml.compile: {wrong}"


def test_keys_of_dictionaries_are_checked_by_their_declaration(site, core):
    assert refused(core, hints={"input_batchsize_range": (1, 4)}) == (
        "unknown key 'input_batchsize_range' of hints\n"
        "  known: input_batch_size_range, inference_priority\n"
        "hint: did you mean 'input_batch_size_range'?"
    )
    table = registry(site, Option("tile_options", bool | dict, {}, "Tiles.", keys={"width": int}))
    assert table.resolve({"tile_options": True})["tile_options"] is True
    assert "unknown key 'widht' of tile_options" in refused(table, tile_options={"widht": 3})
    assert "at ['width']: expected int, got 'x' (str)" in refused(table, tile_options={"width": "x"})


def test_options_of_other_backends_are_distinguished(site):
    declared = Option("jit_sort", int, 0, "Sort.", backends=("jax",)), Option("tile", int, 0, "Tile.", ("jit_group.t",))
    table = registry(site, *declared, Option("jit_group", dict, {}, "Group.", backends=("jax",)))
    values = {"jit_sort": 3, "tile": 1, "seed": 4}
    assert table.split_by_backend(values, {"jax"}) == (values, {})
    assert table.split_by_backend(values, {"numpy"}) == ({"tile": 1, "seed": 4}, {"jit_sort": "jax"})
    assert table.split_by_backend({"jit_group": {"t": 2}}, {"jax"}) == ({"tile": 2}, {})
    assert table.split_by_backend({"jit_group": {"t": 2}}, {"numpy"}) == ({}, {"jit_group.t": "jax"})


def test_one_option_under_two_names_counts_once(core):
    assert core.resolve({"cpu_options": {"num_threads": 2}})["num_threads"] == 2
    assert "'num_threads' and 'cpu_options.num_threads'" in refused(core, num_threads=1, cpu_options={"num_threads": 2})


def test_right_types(core, tmp_path):
    import numpy as np

    values = {
        "shapes": {"a": [32, None, "B"], "b": (np.int64(3),), "c": []},
        "timeout": 3,
        "num_threads": np.int32(2),
        "file_path": tmp_path,
        "outputs": None,
        "code_transformers": [str.upper],
        "trainable": ("a", "b"),
    }
    settings = core.resolve(values)
    assert {name: settings[name] for name in values} == values


def test_alias_and_agreement(site):
    tiling = Option("tiling", Literal["small", "large"], "small", "Size of tiles.", ("tiles", "tile_options.size"))
    group = Option("tile_options", Tiles, {}, "More about tiles.")
    table = registry(site, tiling, group)
    assert table.resolve({"tiles": "large"})["tiling"] == "large"
    assert table.resolve({"tiles": "large", "tile_options": {"size": "large"}})["tiling"] == "large"
    settings = table.resolve({"tile_options": {"size": "large", "width": 3}})
    assert (settings["tiling"], settings["tile_options"]) == ("large", {"width": 3})
    assert settings.unused() == []


def test_conflicting_aliases_name_both(site):
    tiling = Option("tiling", Literal["small", "large"], "small", "Size of tiles.", ("tiles", "tile_options.size"))
    group = Option("tile_options", Tiles, {}, "More about tiles.")
    text = refused(registry(site, tiling, group), tiles="large", tile_options={"size": "small"})
    assert text == (
        "options 'tiles' and 'tile_options.size' of ml.compile set the same option to different values\n"
        "  tiles = 'large'\n"
        "  tile_options.size = 'small'\n"
        "hint: pass only 'tiling'"
    )


def test_keys_of_a_declared_dictionary_are_checked(site):
    group = registry(site, Option("tile_options", Tiles, {}, "More about tiles."))
    assert "unknown key 'widht'; did you mean 'width'?" in refused(group, tile_options={"widht": 3})
    assert "unknown key 'zzz'; known: width, height" in refused(group, tile_options={"zzz": 3})
    assert "at ['width']: expected int, got 'x' (str)" in refused(group, tile_options={"width": "x"})


def test_two_owners_of_one_keyword_is_nobodys(site):
    option = Option("tiling", int, 1, "Tiles.")
    table = registry(site, option, two=[option])
    assert refused(table, tiling=3) == (
        "option 'tiling' of ml.compile has more than one owner\n"
        "  declared by: one, two\n"
        "hint: pip uninstall one of them, or add it to MITHRIL_DISABLE_PLUGINS"
    )


def test_keywords_of_the_core_cannot_be_taken(site):
    table = registry(site, Option("jit", int, 1, "Mine now."), Option("fine", int, 1, "Fine."))
    assert table.by_name["jit"].owner == "mithril-core"
    assert table.by_name["fine"].owner == "one"
    (problem,) = table._source.loader.plugins[0].problems
    assert f"declared by: mithril-core {__version__}, one" in problem.facts


def test_arrays_that_contradict_do_not_end_in_a_foreign_error(site):
    import numpy as np

    table = registry(site, Option("offsets", Any, None, "Offsets.", ("shifts",)))
    assert "to different values" in refused(table, offsets=np.arange(3), shifts=np.arange(3))


@pytest.mark.parametrize("name", ["two words", "", "a-b", "group.key"])
def test_names_that_are_not_keywords(name):
    with pytest.raises(ValueError, match="is not a keyword"):
        Option(name, int, 1, "help")


def test_rows_are_ready_for_a_table(core):
    row = next(row for row in core.rows() if row["name"] == "optimize_for")
    assert row == {
        "name": "optimize_for",
        "type": "'throughput' or 'latency' or None",
        "default": "None",
        "owner": "mithril-core",
        "aliases": ["hints.inference_priority"],
        "help": "Optimize for throughput (merges matmuls that share an operand) or latency (does not merge them, "
        "and compiles exact batch sizes).",
        "example": "optimize_for='throughput'",
    }


def test_the_registry_follows_a_reload(monkeypatch):
    before = option_registry()
    assert option_registry() is before
    plugins.reload()
    assert option_registry() is not before
