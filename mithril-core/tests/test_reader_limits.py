"""Limits of readers: each at its edge, and raised by name."""

from __future__ import annotations

import json

import pytest

import mithril as ml
from mithril.graph import check_memory, limit, parse_dim, parsed_json
from mithril.models import Layer, Linear, Model

POLYNOMIAL = "*".join(["(" + "+".join("abcdefghijkl") + ")"] * 10)  # 352,716 terms
GRAPH = "graph g {{\n input %x: f32[{}]\n return o=%x\n}}\n"


def total(count):
    return "+".join(f"s{k}" for k in range(count))


def nested(depth):
    return "max(" * depth + "a" + "".join(f",b{k})" for k in range(depth))


@pytest.mark.parametrize(
    ("name", "write", "edge"),
    [
        ("terms", total, 256),
        ("terms", lambda n: f"({total(n // 8)})*({'+'.join('abcdefgh')})", 256),
        ("factors", lambda n: "*".join(["a"] * n), 32),
        ("depth", nested, 100),
        ("depth", lambda n: "(" * n + "a" + ")" * n, 100),
    ],
)
def test_sizes_at_the_edge(name, write, edge):
    parse_dim(write(edge))
    beyond = edge + 8
    with pytest.raises(ml.MithrilError, match=rf"more than the limit '{name}'"):
        parse_dim(write(beyond))
    with ml.reader_limits(**{name: beyond}):
        assert limit(name) == beyond
        parse_dim(write(beyond))
    assert limit(name) == edge


@pytest.mark.parametrize(
    "text",
    [
        POLYNOMIAL,
        nested(200),
        nested(5000),
        "-" * 5000 + "a",
        "a*" * 100_000 + "a",
        total(20_000),
        "(a+b)*" * 900 + "a",
    ],
)
def test_hostile_sizes_in_graph_text(text):
    with pytest.raises(ml.MithrilError):
        ml.parse(GRAPH.format(text))
    with pytest.raises(ml.MithrilError):
        ml.parse(f"graph g {{\n input %x: f32[a]\n guard {text} == a\n return o=%x\n}}\n")


@pytest.mark.parametrize(
    "line",
    [
        'input %"\\N{bad}": f32[2]',
        'input %"\\x": f32[2]',
        "%y: f32[2] = reshape(%x, shape=" + "[" * 5000 + "]" * 5000 + ")",
        "%y: f32[2] = reshape(%x, shape=[" + "-" * 5000 + "1])",
        "%y: f32[2] = reshape(%x, shape=[" + "1," * 1_000_000 + "1])",
        f"%y: f32[2] = reshape(%x, shape=[{POLYNOMIAL}])",
    ],
    ids=lambda line: line[:40],
)
def test_hostile_lines_of_graph_text(line):
    with pytest.raises(ml.MithrilError):
        ml.parse(f"graph g {{\n input %x: f32[2]\n {line}\n return o=%x\n}}\n")


def test_products_of_sizes_that_a_model_computes():
    sizes = [ml.Dim(name) for name in "abcdefghijkl"]
    combined = sum(sizes[1:], sizes[0])
    with pytest.raises(ml.MithrilError, match="'terms'"):
        combined * combined * combined
    with ml.reader_limits(terms=2000):
        assert str(combined * combined * combined)


def test_sizes_and_initializers_of_saved_models():
    data = Linear(4).to_dict()
    entry = next(e for e in data["layers"] if e["class"] == "Linear")
    entry["arguments"] = [{"size": POLYNOMIAL, "limits": {}}]
    with pytest.raises(ml.MithrilError, match="'terms'"):
        Layer.from_dict(data)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "[" + "[]," * 3_000_000 + "1]", b"\xff{", "{"]
)
def test_hostile_json(text):
    with pytest.raises(ml.InputError, match="the file"):
        parsed_json(text, "the file")


def test_json_costs_no_more_than_it_may():
    text = "[" + ",".join(["[]"] * 400_000) + "]"
    assert len(parsed_json(text, "the file")) == 400_000
    with ml.reader_limits(room=1 << 20), pytest.raises(ml.InputError, match="bytes of memory"):
        parsed_json(text, "the file")
    with pytest.raises(ml.ModelError, match="bytes of memory"), ml.reader_limits(room=1 << 20):
        Model.from_json(text)


def test_memory_at_the_edge():
    check_memory((64 << 20) + 4 * 100, 100, "the file")
    with pytest.raises(ml.InputError, match="a file of 100 bytes may need 67,109,264"):
        check_memory((64 << 20) + 4 * 100 + 1, 100, "the file")
    with ml.reader_limits(growth=5):
        check_memory((64 << 20) + 5 * 100, 100, "the file")


@pytest.mark.parametrize("limits", [{"term": 5}, {"terms": -1}, {"terms": "5"}, {"terms": 1.5}, {"depth": True}])
def test_unknown_limits(limits):
    with pytest.raises(ml.OptionError, match="reader_limits"), ml.reader_limits(**limits):
        pass


def test_saved_models_are_read_as_before(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(Linear(4).to_json())
    assert repr(Layer.from_json(path)) == repr(Layer.from_json(str(path))) == repr(Linear(4))
    with pytest.raises(ml.ModelError, match="cannot read"):
        Layer.from_json("a\0b")
    json.loads(path.read_text())


class Named(Layer):
    def __init__(this, n):
        this.n = n

    def build(this, x):
        return x * this.n


def test_a_constructor_may_name_its_instance_otherwise():
    assert Named(3).n == Named(n=3).n == 3
    with pytest.raises(ml.ModelError, match="Named requires 'n'"):
        Named()
