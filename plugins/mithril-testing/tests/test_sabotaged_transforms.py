"""Each deliberate mistake of a pass or a rule must be found by the kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mithril import Builder, ops, rule
from mithril.graph.errors import PassError, RewriteError
from mithril.passes import pass_
from mithril.passes.rules import RuleSet
from mithril_testing import PassConformance, RuleConformance


def renamed(before: str, after: str, **changes: Any) -> Callable:
    """Return a pass that puts one operation in the place of another."""

    def change(graph):
        editor = graph.edit()
        for node in editor.nodes():
            if node.op.name == before and len(node.operands) == len(getattr(ops, after).operands):
                with editor.before(node):
                    attributes = {n: v for n, v in node.attributes.items() if n in getattr(ops, after).attributes}
                    value = getattr(ops, after)(*node.operands, **{**attributes, **changes})
                if value.type == node.result.type:
                    editor.replace_value(node.result, value)
        return editor.freeze()

    return change


def dropped(name: str) -> Callable:
    """Return a pass that takes an operation away."""

    def change(graph):
        editor = graph.edit()
        for node in editor.nodes():
            if node.op.name == name and node.operands and node.operands[0].type == node.result.type:
                editor.replace_value(node.result, node.operands[0])
        return editor.freeze()

    return change


PASSES = {
    "relu becomes leaky_relu": renamed("relu", "leaky_relu"),
    "sigmoid becomes tanh": renamed("sigmoid", "tanh"),
    "gelu becomes silu": renamed("gelu", "silu"),
    "gelu becomes its approximation": renamed("gelu", "gelu", approximate="tanh"),
    "floor becomes trunc": renamed("floor", "trunc"),
    "round becomes floor": renamed("round", "floor"),
    "exp becomes expm1": renamed("exp", "expm1"),
    "max becomes min": renamed("max", "min"),
    "add becomes sub": renamed("add", "sub"),
    "less becomes less_equal": renamed("less", "less_equal"),
    "sort goes": dropped("sort"),
    "cumsum goes": dropped("cumsum"),
    "mod goes": dropped("mod"),
    "neg goes": dropped("neg"),
    "flip goes": dropped("flip"),
    "clip goes": dropped("clip"),
    "nothing changes": lambda graph: graph,
}


def run(conformance: PassConformance) -> None:
    conformance.test_changes_something()
    for graph in conformance.all_graphs().values():
        conformance.test_keeps_the_meaning(graph)
        conformance.test_keeps_gradients(graph)


def of_pass(function: Callable, **members: Any) -> PassConformance:
    return type("Kit", (PassConformance,), {"pass_": pass_(name="sabotage")(function), **members})()


@pytest.mark.parametrize("name", PASSES)
def test_sabotaged_pass_is_found(name):
    with pytest.raises((AssertionError, PassError, pytest.fail.Exception)):
        run(of_pass(PASSES[name]))


def test_a_pass_that_never_fires_is_named():
    with pytest.raises(pytest.fail.Exception, match=r"the pass changed none of \d+ graphs"):
        of_pass(lambda graph: graph).test_changes_something()


def negations():
    with Builder() as builder:
        y = ops.exp(ops.neg(ops.neg(builder.input("x", (2, 3)))))
    return builder.build({"y": y})


def test_honest_pass_passes():
    run(
        of_pass(
            RuleSet("negations", [rule(lambda x: ops.neg(ops.neg(x)), lambda x: x, exact=True)]),
            graphs={"negations": negations()},
        )
    )


def test_a_class_without_pass_says_so():
    with pytest.raises(PassError, match="sets no pass"):
        PassConformance.instance()


ONE = (("float32", (2, 3)),)
TWO = ONE * 2
RULES = {
    "sqrt(x * x) is abs(x)": (lambda x: ops.sqrt(x * x), lambda x: ops.abs(x), ONE),
    "-(a - b) is b - a": (lambda a, b: ops.neg(a - b), lambda a, b: b - a, TWO),
    "x + 0 is x": (lambda x: x + 0.0, lambda x: x, ONE),
    "x - x is 0": (lambda x: x - x, lambda x: x * 0.0, ONE),
    "x * 0 is 0": (lambda x: x * 0.0, lambda x: ops.neg(x) * 0.0, ONE),
    "x / x is 1": (lambda x: x / x, lambda x: ops.exp(x * 0.0), ONE),
    "(a + b) - b is a": (lambda a, b: (a + b) - b, lambda a, b: a, TWO),
    "(a / b) * b is a": (lambda a, b: (a / b) * b, lambda a, b: a, TWO),
    "log a + log b is log ab": (lambda a, b: ops.log(a) + ops.log(b), lambda a, b: ops.log(a * b), TWO),
    "max(a, b) is where": (lambda a, b: ops.maximum(a, b), lambda a, b: ops.where(ops.greater(a, b), a, b), TWO),
    "a * a is abs(a) * a": (lambda a: a * a, lambda a: ops.abs(a) * a, ONE),
    "2x / 2 is x": (lambda x: x * 2.0 / 2.0, lambda x: x, ONE),
    "x / 4 * 4 is x": (lambda x: x / 4.0 * 4.0, lambda x: x, ONE),
    "exp(log x) is x": (lambda x: ops.exp(ops.log(x)), lambda x: x, ONE),
    "not (a < b) is a >= b": (lambda a, b: ops.logical_not(ops.less(a, b)), lambda a, b: ops.greater_equal(a, b), TWO),
}
HONEST = {
    "--x is x": (lambda x: ops.neg(ops.neg(x)), lambda x: x, ONE),
    "x * 1 is x": (lambda x: x * 1.0, lambda x: x, ONE),
    "a - b is a + -b": (lambda a, b: a - b, lambda a, b: a + ops.neg(b), TWO),
    "a + b is b + a": (lambda a, b: a + b, lambda a, b: b + a, TWO),
}


def try_rule(before: Callable, after: Callable, types: Any, exact: bool = True) -> None:
    kit = type("Kit", (RuleConformance,), {"rule": rule(before, after, exact=exact, name="tried"), "types": types})()
    kit.test_both_sides_fit()
    kit.test_both_sides_agree_on_random_values()
    kit.test_both_sides_agree_on_special_values()
    kit.test_both_sides_have_equal_gradients()


@pytest.mark.parametrize("name", RULES)
def test_false_rule_is_found(name):
    before, after, types = RULES[name]
    with pytest.raises(AssertionError):
        try_rule(before, after, types)


GRADIENTS = {
    "max(x, 0) is relu": (lambda x: ops.maximum(x, 0.0), lambda x: ops.relu(x), ONE),
    "max(a, b) is where": (lambda a, b: ops.maximum(a, b), lambda a, b: ops.where(ops.greater(a, b), a, b), TWO),
    "x + 1 lets no gradient pass": (lambda x: x + 1.0, lambda x: ops.stop_gradient(x) + 1.0, ONE),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_rule_with_another_gradient_is_found(name):
    before, after, types = GRADIENTS[name]
    members = {"rule": rule(before, after, exact=False, name="tried"), "types": types}
    kit = type("Kit", (RuleConformance,), members)()
    kit.test_both_sides_agree_on_random_values()
    kit.test_both_sides_agree_on_special_values()
    with pytest.raises(AssertionError, match="gradient"):
        kit.test_both_sides_have_equal_gradients()
    type("Kit", (RuleConformance,), {**members, "gradients": False})().test_both_sides_have_equal_gradients()


def blocked(graph):
    editor = graph.edit()
    for node in editor.nodes():
        if node.op.name == "neg":
            with editor.before(node):
                editor.replace_value(node.result, ops.stop_gradient(ops.mul(node.operands[0], -1.0)))
            editor.erase_dead(node)
    return editor.freeze()


def test_pass_with_another_gradient_is_found():
    sabotaged = of_pass(blocked)
    sabotaged.test_keeps_the_meaning(negations())
    with pytest.raises(AssertionError, match="gradient"):
        sabotaged.test_keeps_gradients(negations())
    of_pass(lambda graph, context: graph if context.gradients_follow else blocked(graph)).test_keeps_gradients(
        negations()
    )


@pytest.mark.parametrize("name", HONEST)
def test_true_rule_passes(name):
    try_rule(*HONEST[name])


def test_a_class_without_rule_says_so():
    with pytest.raises(RewriteError, match="sets no rule"):
        RuleConformance().test_both_sides_fit()


def test_a_class_without_types_says_so():
    kit = type("Kit", (RuleConformance,), {"rule": rule(lambda x: -(-x), lambda x: x, exact=True)})()
    with pytest.raises(RewriteError, match="gives 0 types for 1 operands"):
        kit.test_both_sides_fit()
