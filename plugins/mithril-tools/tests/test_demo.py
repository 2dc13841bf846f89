"""The demo, and the picture of a graph in the terminal."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import mithril as ml
from mithril import plugins
from mithril_tools import cli
from mithril_tools.cli import demo
from mithril_tools.cli.terminal_graph import draw

needs_numpy_backend = pytest.mark.skipif("numpy" not in plugins.backends(), reason="mithril-numpy is not installed")


def picture(graph):
    return [line.plain.rstrip() for line in draw(graph)]


def test_picture_of_a_chain():
    with ml.Builder() as b:
        x = b.input("x", (2, 3))
        w = b.param("w", (3, 4))
        y = ml.ops.tanh(x @ w)
    assert picture(b.build({"y": y})) == [
        "● input  f32[2, 3]  x",
        "● matmul  f32[2, 4]  w",
        "● tanh  f32[2, 4]",
        "● output  f32[2, 4]  y",
    ]


def test_picture_of_a_skip_connection_and_two_outputs():
    with ml.Builder() as b:
        x = b.input("x", (2,))
        a = ml.ops.exp(x)
        c = ml.ops.tanh(a)
        d = a + c
        e = ml.ops.sin(x)
    assert picture(b.build({"d": d, "e": e, "again": e})) == [
        "● input  f32[2]  x",
        "├─● exp  f32[2]",
        "│ ├─● tanh  f32[2]",
        "│ ●─╯ add  f32[2]",
        "● │ sin  f32[2]",
        "│ ● output  f32[2]  d",
        "● output  f32[2]  e",
        "● output  f32[2]  again",
    ]


def test_picture_closes_lanes_of_unused_results():
    with ml.Builder() as b:
        x = b.input("x", (2,))
        ml.ops.exp(x)
        y = ml.ops.tanh(x)
    assert picture(b.build({"y": y}))[1:3] == ["├─● exp  f32[2]", "● tanh  f32[2]"]


@needs_numpy_backend
def test_demo_on_numpy():
    result = CliRunner(env={"COLUMNS": "140"}).invoke(cli.main, ["demo", "--backends", "numpy"])
    assert result.exit_code == 0, result.output
    assert "● conv  f32[8, 16, 24, 24]" in result.output
    assert "1 of 1 backends agree" in result.output


@needs_numpy_backend
def test_demo_json():
    result = CliRunner().invoke(cli.main, ["demo", "--backends", "numpy", "--json"])
    (row,) = json.loads(result.output)
    assert (row["backend"], row["agrees"], row["error"]) == ("numpy", True, "")
    assert row["call_seconds"] > 0


@needs_numpy_backend
def test_demo_says_what_went_wrong_and_fails():
    result = CliRunner().invoke(cli.main, ["demo", "--backends", "numpy,nonesuch"])
    assert result.exit_code == 1
    assert "unknown backend 'nonesuch'" in result.output
    assert "1 of 2 backends agree" in result.output


def test_demo_without_backends(monkeypatch):
    monkeypatch.setattr(plugins, "backends", dict)
    result = CliRunner().invoke(cli.main, ["demo"])
    assert result.exit_code == 1
    assert result.output == "Error: no backend is installed\nhint: pip install mithril-numpy\n"


def test_a_backend_that_computes_something_else_is_found():
    right, wrong = demo.Run("numpy"), demo.Run("other")
    right.outputs = right.gradients = {"y": np.array([1.0, -2.0])}
    wrong.outputs, wrong.gradients = {"y": np.array([1.0, -2.1])}, {"y": np.array([1.0, -2.0])}
    assert demo.compare([wrong, right]) is right
    assert right.agrees
    assert not wrong.agrees
    assert wrong.output_difference == pytest.approx(0.05)


def test_a_broken_backend_does_not_hide_the_others(monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(ml, "compile", broken)
    assert demo.run("any").error == "ZeroDivisionError: oh"
