"""Pipeline stages and chunks: balanced, in an order that satisfies dependencies, and equal to the full graph."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from gpt import gpt
from lstm_lm import lstm_lm
from small_models import block, scalar_loss
from test_shard import step_graph

import mithril as ml
from mithril.graph import evaluate
from mithril.models import Gelu, IOKey, LayerNorm, Linear, Model, TransformerEncoderLayer


def run(pipeline, arguments):
    """Run all steps in order by the reference implementations of their operations."""
    values, outputs = {}, {}
    for step in pipeline.steps:
        task = pipeline.tasks[step.task]
        inputs = {}
        for i in task.graph.arguments:
            if i.name in task.takes:
                source = task.takes[i.name]
                last = pipeline.chunks - 1 if not pipeline.tasks[source[0]].once else None
                summed = source[1] in pipeline.tasks[source[0]].sums
                inputs[i.name] = values[(*source, "sum" if summed else last if task.once else step.chunk)]
            elif i.name == pipeline.index:
                inputs[i.name] = np.int32(step.chunk)
            else:
                x = arguments[i.name]
                inputs[i.name] = (
                    np.split(x, pipeline.chunks, pipeline.axes[i.name])[step.chunk] if i.name in pipeline.axes else x
                )
        for name, x in evaluate(task.graph, inputs).items():
            if name in task.sums:
                x = values[step.task, name, "sum"] = values.get((step.task, name, "sum"), 0) + x
                outputs[name] = [(0, x)]
            else:
                values[step.task, name, step.chunk] = x
                outputs.setdefault(name, []).append((step.chunk, x))
    out = {}
    for name, chunks in outputs.items():
        parts = [x for _, x in sorted(chunks, key=lambda pair: pair[0] or 0)]
        out[name] = np.concatenate(parts, pipeline.axes[name]) if name in pipeline.axes else parts[-1]
    return {name: x for name, x in out.items() if not name.startswith("link/")}


MODELS = {
    "block": (lambda: block(16, 4, 32), {"x": [8, 6, 16]}, "y"),
    "gpt": (lambda: gpt(32, 8, layers=3, heads=4, features=16), {"input": [8, 8]}, "output"),
    "lstm": (lambda: lstm_lm(16, 8), {"input": [4, 6]}, "output"),
    "loss": (lambda: scalar_loss(16), {"x": [8, 12]}, "loss"),
}


@pytest.mark.parametrize(("stages", "chunks"), [(1, 4), (2, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_and_chunks_equal_the_full_graph(name, schedule, stages, chunks):
    make, shapes, target = MODELS[name]
    graph, arguments = step_graph(make(), shapes, target)
    pipeline = ml.staged(graph, stages, chunks, schedule)
    expected, results = evaluate(graph, arguments), run(pipeline, arguments)
    assert results.keys() == expected.keys()
    for output, x in expected.items():
        np.testing.assert_allclose(results[output], x, rtol=2e-4, atol=2e-5, err_msg=output)


def chain(widths):
    h = IOKey("x")
    for k, width in enumerate(widths):
        h = Linear(width, name=f"l{k}")(h)
    return Model.create(outputs={"y": h})


def forward(model, shapes):
    return ml.compile(model, "numpy", shapes=shapes, optimization_level="none").graph


def test_equal_layers_make_equal_stages():
    pipeline = ml.staged(forward(chain([64] * 8), {"x": [32, 64]}), 4)
    assert pipeline.shares == pytest.approx([0.25] * 4, rel=0.1)


def test_backward_tasks_stay_with_their_forward_stage():
    """The embedding table of a GPT is read by the first stage and by the last."""
    graph, _ = step_graph(gpt(32, 8, layers=6, heads=4, features=32), {"input": [8, 8]}, "output")
    assert ml.staged(graph, 3).shares == pytest.approx([1 / 3] * 3, rel=0.25)


def test_backward_links_are_as_narrow_as_forward_links():
    """A layer is differentiated in its own stage, although its input was computed in the previous stage."""
    h = IOKey("x")
    for k in range(4):
        h = Linear(16, name=f"l{k}")(Gelu()(LayerNorm(16, name=f"n{k}")(h)))
    graph, _ = step_graph(Model.create(outputs={"y": h}), {"x": [8, 6, 16]}, "y")
    first, second, back, last = ml.staged(graph, 2).tasks
    assert len(second.takes) == 1
    assert not first.takes
    crossing = [source for source, _ in last.takes.values() if source == 2]
    assert (last.stage, back.stage, len(crossing)) == (0, 1, 1)


def test_unequal_layers_are_balanced_by_work():
    graph = forward(chain([512, 512, 256, 64, 64, 64]), {"x": [32, 512]})
    pipeline = ml.staged(graph, 3)
    work = [sum(1 for n in t.graph.nodes if n.op.name in ("linear", "matmul")) for t in pipeline.tasks]
    assert work == [1, 1, 4]


def test_cuts_are_at_points_with_few_live_values():
    """Inside a block two values are live, the residual and its branch; between blocks one."""
    x = IOKey("x")
    h = x
    for k in range(4):
        h = h + Linear(32, name=f"b{k}")(Linear(128, name=f"a{k}")(h))
    pipeline = ml.staged(forward(Model.create(outputs={"y": h}), {"x": [16, 32]}), 4)
    assert [len(t.takes) for t in pipeline.tasks] == [0, 1, 1, 1]


def test_cuts_are_between_blocks_if_the_best_balance_is_inside_one():
    """Cut seven encoder blocks in three: a third ends inside a block, where several values are live."""
    model = Model()
    for k in range(7):
        model += TransformerEncoderLayer(32, 4, 128, name=f"l{k}")
    pipeline = ml.staged(forward(model, {"input": [8, 16, 32]}), 3)
    link_bytes = [sum(4 * prod(map(int, t.graph.input(n).type.shape)) for n in t.takes) for t in pipeline.tasks]
    assert link_bytes == [0, 4 * 8 * 16 * 32, 4 * 8 * 16 * 32]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_schedules_run_every_chunk_once_and_bound_live_chunks(stages, chunks):
    """Each stage runs every chunk once forward and once backward; 1F1B limits the live chunks to the stages left."""
    graph, _ = step_graph(chain([16] * 8), {"x": [24, 16]}, "y")
    for schedule in ("gpipe", "1f1b"):
        pipeline = ml.staged(graph, stages, chunks, schedule)
        for k in range(stages):
            stage_steps = [s for s in pipeline.steps if s.stage == k and s.chunk is not None]
            assert len({(s.chunk, s.backward) for s in stage_steps}) == len(stage_steps) == 2 * chunks
            assert pipeline.alive(k) == (min(chunks, stages - k) if schedule == "1f1b" else chunks)


def test_more_stages_than_operations_are_rejected():
    with pytest.raises(ml.OptionError, match="pipeline_stages=9"):
        ml.staged(forward(chain([4]), {"x": [2, 4]}), 9)
