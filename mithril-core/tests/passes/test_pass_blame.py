"""Faults of passes and rules are reported where they are made: at the pass itself, with its author's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mithril import ops, plugins
from mithril.graph import Builder, Node, Value
from mithril.graph.errors import PassError, RewriteError, VerificationError
from mithril.graph.verifier import verify
from mithril.passes import PassManager, RuleSet, as_pass, pass_, rule
from mithril.plugins import hookimpl

HERE = Path(__file__).name


@pytest.fixture
def graph():
    with Builder("g") as b:
        x = b.input("x", (2, 3), "float32")
        y = ops.softmax(ops.exp(x), axis=1)
    return b.build({"y": y})


def change_attributes(graph):
    graph.nodes[1].attributes["axis"] = 0
    return graph


def change_operands(graph):
    graph.nodes[1].operands = (graph.inputs[0].value,)
    return graph


def change_op(graph):
    graph.nodes[0].op = ops.tanh
    return graph


def change_type(graph):
    value = graph.nodes[0].result
    value.type = type(value.type)(value.type.dtype, (3, 2))
    return graph


def change_nodes(graph):
    object.__setattr__(graph, "nodes", graph.nodes[:1])
    return graph


def change_and_return_another(graph):
    graph.nodes[1].attributes["axis"] = 0
    return graph.replaced(name="other")


@pytest.mark.parametrize(
    "run",
    [change_attributes, change_operands, change_op, change_type, change_nodes, change_and_return_another],
    ids=lambda f: f.__name__,
)
def test_pass_that_changes_its_input_is_named(graph, run):
    after = pass_(name="innocent", stage="final")(lambda g: g)
    with pytest.raises(PassError, match="pass 'guilty' changed its input graph in place") as caught:
        PassManager([pass_(name="guilty")(run), after]).run(graph)
    assert HERE in str(caught.value)


def test_passes_that_build_new_graphs_are_not_accused(graph):
    def rebuild(graph):
        editor = graph.edit()
        return editor.freeze()

    PassManager([pass_(name="fine")(rebuild), pass_(name="same", stage="final")(lambda g: g)]).run(graph)


# ------------------------------------------------------------------------------------------------- malformed nodes
def with_last(graph, **changes):
    return graph.replaced(nodes=(*graph.nodes[:-1], graph.nodes[-1].replaced(**changes)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"operands": ()}, "'softmax' has 0 operands, expected 1: x"),
        ({"op": "softmax"}, "the operation of a node is 'softmax', expected an operation"),
        ({"attributes": {"axsi": 1}}, "unknown attribute 'axsi' of 'softmax'"),
        ({"attributes": {"axis": 1, "axsi": 1}}, "did you mean 'axis'?"),
        ({"attributes": {}}, "'softmax' needs the attribute 'axis'"),
        ({"attributes": {"axis": -1}}, "attribute 'axis' of 'softmax' is -1, expected non-negative axes"),
        ({"attributes": {"axis": "one"}}, "'softmax' does not accept its operands"),
    ],
)
def test_malformed_node_is_the_pass_own_mistake(graph, changes, complaint):
    @pass_(name="guilty")
    def guilty(graph):
        return with_last(graph, **changes)

    with pytest.raises(VerificationError):
        verify(with_last(graph, **changes))
    with pytest.raises(PassError, match="'guilty'") as caught:
        PassManager([guilty]).run(graph)
    assert complaint in str(caught.value)
    assert HERE in str(caught.value)


def test_node_with_too_few_results(graph):
    values = (Value("a", graph.outputs[0].type), graph.outputs[0])
    wrong = Node(graph.nodes[-1].op, graph.nodes[-1].operands, graph.nodes[-1].attributes, values)
    with pytest.raises(VerificationError, match="'softmax' has 2 results, expected 1"):
        verify(graph.replaced(nodes=(graph.nodes[0], wrong)))


# ------------------------------------------------------------------------------------------------- rules and wrappers
def wrong_rule(**changes):
    parts = {"before": lambda x: ops.exp(x), "after": lambda x: ops.exp(x), "exact": False, "name": "own"} | changes
    return rule(**parts)


def test_rule_is_named_with_its_authors_line():
    assert HERE in as_pass(wrong_rule()).origin
    assert HERE in as_pass(RuleSet("set", [wrong_rule()])).origin


def boom(x):
    raise ValueError("own")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"after": boom}, "after() of rule 'own' failed: ValueError: own"),
        ({"when": boom}, "when() of rule 'own' failed: ValueError: own"),
    ],
)
def test_failing_rule_is_named_with_its_authors_line(graph, changes, complaint):
    with pytest.raises(RewriteError) as caught:
        PassManager([wrong_rule(**changes)]).run(graph)
    assert complaint in str(caught.value)
    assert HERE in str(caught.value)


def test_pass_that_returns_nothing_is_blamed_before_wrappers_see_it(graph, site):
    class Wrapping:
        @hookimpl(wrapper=True)
        def mithril_run_pass(self, pass_, graph):
            result = yield
            len(result.nodes)
            return result

    loaded = site.plugins()
    loaded.register(Wrapping(), "kit")

    def runner(one, graph, context, last):
        return loaded.run_pass(one, graph, context, last)

    with pytest.raises(PassError, match="pass 'guilty' returned NoneType, expected a graph") as caught:
        PassManager([pass_(name="guilty")(lambda graph: None)]).run(graph, runner=runner)
    assert "kit" not in str(caught.value)
    assert plugins is not None
