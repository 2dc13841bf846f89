# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Rules, a pass that rewrites, and one that reports."""

from alder_ops.operations import bump
from mithril import RuleSet, pass_, rule
from mithril.ops import add, exp, mul, neg

bump_rule = rule(
    lambda x: exp(mul(neg(x), x)), lambda x: bump(x), exact=False, name="bump", when=lambda x: x.dtype.is_float
)
fold_bump = RuleSet("alder-bump", [bump_rule])


@pass_
def double(graph, context):
    """Replace ``x + x`` by ``2 * x``."""
    editor = graph.edit()
    for node in editor.nodes():
        if node.op is add and node.operands[0] is node.operands[1] and node.result.dtype.is_float:
            with editor.before(node) as builder, builder.at(node.origin):
                doubled = mul(node.operands[0], 2.0)
            editor.replace_value(node.result, doubled)
            editor.erase_dead(node)
            context.record(
                "choice", f"x + x became 2 * x at level {context.level}, {context.option('alder_mode')}", node.origin
            )
    return editor.freeze()


@pass_
def trim(graph):
    """Leave the graph."""
    return graph


@pass_
def count(graph, context):
    """Record the number of nodes."""
    context.record("choice", f"alder counted {len(graph.nodes)} nodes, fold {context.option('alder_fold')}")
    return graph
