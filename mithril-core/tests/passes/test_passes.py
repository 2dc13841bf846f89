"""The pass manager: order, text, checks, and errors that say whose fault it is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

import mithril as ml
from mithril.graph import Builder, Output
from mithril.graph.decisions import STAGES
from mithril.graph.errors import PassError
from mithril.ops import add, exp, mul, sqrt, sub
from mithril.passes import (
    Pass,
    PassContext,
    PassManager,
    as_pass,
    parse_pipeline,
    pass_,
    pipeline_text,
    sort_passes,
)


def graph():
    with Builder() as b:
        x = b.input("x", (2, 3))
        y = add(mul(x, 2.0), exp(x))
    return b.build({"y": y})


def nothing(source):
    return source


def named(name, **placing):
    return Pass(name, nothing, **placing)


# -- order ----------------------------------------------------------------------------------------------------------
def test_stages_come_in_their_order_whatever_the_order_given():
    passes = [named(f"in-{stage}", stage=stage) for stage in reversed(STAGES)]
    assert [p.stage for p in sort_passes(passes)] == list(STAGES)


def test_before_and_after_hold_and_the_rest_stays_as_given():
    passes = [
        named("a", after=("c",)),
        named("b"),
        named("c"),
        named("d", before=("b",)),
        named("e", after=("absent",)),
    ]
    assert [p.name for p in sort_passes(passes)] == ["c", "a", "d", "b", "e"]


def test_a_circle_is_named():
    passes = [named("a", after=("b",)), named("b", after=("c",)), named("c", after=("a",)), named("free")]
    with pytest.raises(PassError) as error:
        sort_passes(passes)
    assert "cyclic order of passes" in str(error.value)
    circle = str(error.value).split("passes: ")[1].split("\n")[0].split(" -> ")
    assert circle[0] == circle[-1] and set(circle) == {"a", "b", "c"}
    before = {"a": "b", "b": "c", "c": "a"}
    assert all(before[later] == earlier for earlier, later in pairwise(circle))


def test_the_same_name_twice_is_an_error():
    with pytest.raises(PassError, match="'a' occurs twice"):
        sort_passes([named("a"), named("a", stage="final")])


def test_a_misspelt_stage_gets_the_nearest():
    with pytest.raises(PassError, match="canonical"):
        named("a", stage="canonicle")


# -- text -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fuse:
    """A pass with options."""

    max_nodes: int = 4
    kinds: tuple[str, ...] = ()

    def __call__(self, source):
        return source


def test_a_pipeline_is_text_that_reads_back():
    text = pipeline_text([as_pass(Fuse(max_nodes=8, kinds=("a", "b")), name="fuse"), as_pass(nothing)])
    assert text == 'fuse{max-nodes=8, kinds=["a", "b"]}, nothing'
    again = parse_pipeline(text, {"fuse": Fuse, "nothing": nothing}.__getitem__)
    assert again[0].run == Fuse(8, ("a", "b")) and pipeline_text(again) == text
    assert pipeline_text([as_pass(Fuse(), name="fuse")]) == "fuse"
    assert str(PassManager(again)) == text  # printed by print(compiled.pipeline)


def test_invalid_pipelines_are_rejected():
    with pytest.raises(PassError, match="cannot read the pipeline at '%%'"):
        parse_pipeline("nothing, %%", lambda name: nothing)
    with pytest.raises(PassError, match="pass 'fuse' does not take these options"):
        parse_pipeline("fuse{width=1}", lambda name: Fuse)


# -- what a pass may be -----------------------------------------------------------------------------------------------
def test_functions_objects_and_classes_are_passes():
    assert as_pass(nothing).name == "nothing"
    assert as_pass(Fuse).run == Fuse()
    assert as_pass(nothing, stage="final").stage == "final"
    with pytest.raises(PassError, match="'3' is not a pass"):
        as_pass(3)


def test_a_pass_with_a_second_parameter_gets_the_context():
    seen = []

    @pass_(stage="final", exact=False)
    def looking(source, context):
        """Look."""
        seen.append(context.option("wish"))
        return source

    ml.PassManager([looking]).run(graph(), PassContext(options={"wish": 3}))
    assert seen == [3] and looking.summary == "Look." and "test_passes.py" in looking.origin


# -- checks -----------------------------------------------------------------------------------------------------------
def fault(run, check="structure"):
    with pytest.raises(PassError) as error:
        ml.PassManager([named("earlier"), as_pass(run, name="wrong", stage="final")], check=check).run(graph())
    assert "pass 'wrong'" in str(error.value)
    return str(error.value)


def test_a_pass_that_returns_something_else():
    text = fault(lambda given: None)
    assert "returned NoneType, expected a graph" in text and "passes before: earlier" in text


def test_a_pass_that_raises_keeps_its_cause():
    def broken(source):
        raise ZeroDivisionError("oh")

    with pytest.raises(PassError) as error:
        ml.PassManager([broken]).run(graph())
    assert "pass 'broken' failed: ZeroDivisionError: oh" in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_pass_that_makes_an_unsound_graph():
    def reversed_nodes(source):
        return source.replaced(nodes=source.nodes[::-1])

    text = fault(reversed_nodes)
    assert "returned an invalid graph" in text and "bug in the pass, not in the model" in text


def test_a_pass_that_changes_the_interface():
    def renamed(source):
        return source.replaced(results=(Output(source.outputs[0], "z"),))

    text = fault(renamed)
    assert "changed the graph's inputs or outputs" in text and "keeps_interface=False" in text
    result, _ = ml.PassManager([as_pass(renamed, keeps_interface=False)]).run(graph())
    assert result.output_names == ("z",)


def test_a_pass_that_changes_values_is_found_when_asked():
    def swapped(source):
        editor = source.edit()
        node = next(n for n in source.nodes if n.op.name == "exp")
        with editor.before(node):
            editor.replace_value(node.result, mul(node.operands[0], node.operands[0]))
        return editor.freeze()

    assert ml.PassManager([swapped]).run(graph())  # structure alone is sound
    assert "changes the value of output 'y'" in fault(swapped, check="numeric")


@pytest.mark.parametrize(("factor", "sound"), [(1.002, True), (1.1, False)])
def test_values_that_cancel_may_differ_by_the_rounding_inside(factor, sound):
    with Builder() as b:
        y = add(add(b.input("x", (2, 3)), 1000.0), -1000.0)
    source = b.build({"y": y})

    def rounded(graph):
        editor = graph.edit()
        node = next(n for n in graph.nodes if n.op.name == "add")
        with editor.before(node):
            editor.replace_value(node.result, mul(add(*node.operands), factor))
        return editor.freeze()

    one = as_pass(rounded, exact=False, tolerance=0.1)
    manager = PassManager([one], check="numeric")
    if sound:
        manager.run(source)
    else:
        with pytest.raises(PassError, match="changes the value of output 'y'"):
            manager.run(source)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numeric_checks_of_short_floats(dtype):
    """Accept nan before and after; measure rounding where terms cancel, in every dtype."""
    with Builder() as b:
        x = b.input("x", (2, 3), dtype=dtype)
        y, z = sqrt(sub(x, 2.0)), add(add(x, 1000.0), -1000.0)
    source = b.build({"y": y, "z": z})
    PassManager([as_pass(lambda graph: graph.replaced(name="other"), exact=True)], check="numeric").run(source)
    with Builder() as b:
        x = b.input("x", (2, 3), dtype=dtype)
        y, z = sqrt(sub(x, 2.0)), add(x, 0.0)
    exact = b.build({"y": y, "z": z})
    tolerance = {"bfloat16": 0.1, "float16": 0.02, "float32": 1e-3}[dtype]
    PassManager([as_pass(lambda graph: exact, exact=False, tolerance=tolerance)], check="numeric").run(source)


def test_the_report_counts_nodes_and_times():
    _, report = ml.PassManager([nothing]).run(graph())
    (record,) = report.records
    count = len(graph().nodes)
    assert (record.before, record.after, record.changed) == (count, count, False)
    assert record.seconds >= 0 and "nothing" in str(report)
    assert str(ml.PassManager([]).run(graph())[1]) == "no passes"


def test_a_runner_wraps_every_pass():
    seen = []

    def runner(one, source, context, last):
        seen.append(one.name)
        return last(one, source, context)

    ml.PassManager([named("a"), named("b")]).run(graph(), runner=runner)
    assert seen == ["a", "b"]
