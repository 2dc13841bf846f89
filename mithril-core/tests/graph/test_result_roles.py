"""Results of graphs have roles: in text, through the editor and passes, and in gradients of gradients."""

from __future__ import annotations

import pytest

from mithril.derivatives import gradients
from mithril.graph import Builder, Output, parse, result, structurally_equal, to_text, verify
from mithril.graph.errors import VerificationError
from mithril.graph.registry import operation


def counting(name="y"):
    with Builder() as b:
        x, w, n = b.input("x", (3,)), b.param("w", (3,)), b.input("steps", (), "int32", "state")
        y = operation("tanh")(x * w)
        more = n + 1
    return b.build((Output(y, name), result("state", "steps", more), result("check", "0/low", more)))


@pytest.mark.parametrize("name", ["y", "grad/y", "state/steps 2", 'a "quoted" = name', "gradient(w)", "loss (mean)"])
def test_roles_round_trip(name):
    graph = gradients(counting(name), of=[name])
    again = parse(to_text(graph))
    assert structurally_equal(again, graph)
    assert [(r.name, r.role, r.of) for r in again.results] == [(r.name, r.role, r.of) for r in graph.results]
    assert [(i.name, i.role, i.of) for i in again.inputs] == [(i.name, i.role, i.of) for i in graph.inputs]


def test_text_contains_roles():
    text = to_text(gradients(counting()))
    assert "  cotangent(y) %grad/y: f32[3]" in text
    assert text.splitlines()[-2].startswith("  return y=%tanh, state(steps)=%add, check(0/low)=%add, gradient(w)=%")


def test_unusual_names_are_written():
    second = gradients(gradients(counting(), of=["y"]), of=["grad/w"], wrt=["w"])
    assert [(r.name, r.of) for r in second.results_of("gradient")] == [("grad/w", "w"), ("grad/grad/w", "w")]
    assert "gradient(w) grad/grad/w=%" in to_text(second)
    assert [r.name for r in parse(to_text(second)).results_of("gradient")] == ["grad/w", "grad/grad/w"]


def test_old_text_without_roles_keeps_states():
    text = """graph forward {
      input %x: float32[2]
      state %key: uint32[2]
      return y=%x, state/key=%key, state/other=%x
    }"""
    results = parse(text).results
    assert [(r.role, r.of) for r in results] == [("output", ""), ("state", "key"), ("output", "")]


def test_the_editor_keeps_roles():
    graph = counting()
    editor = graph.edit()
    with editor.before(None):
        other = operation("exp")(graph.outputs[0])
    editor.replace_value(graph.outputs[0], other)
    result = editor.freeze()
    assert result is not graph
    assert [(r.name, r.role, r.of) for r in result.results] == [(r.name, r.role, r.of) for r in graph.results]


def test_replaced_outputs_must_match_the_number_of_results():
    graph = counting()
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        graph.replaced(outputs=graph.outputs[:1])


def test_unknown_roles_are_rejected():
    graph = counting()
    with pytest.raises(VerificationError, match="result 'y' has the unknown role 'loss'") as error:
        verify(graph.replaced(results=(Output(graph.outputs[0], "y", "loss"),)))
    assert "known: output, gradient, state, report, check" in str(error.value)
