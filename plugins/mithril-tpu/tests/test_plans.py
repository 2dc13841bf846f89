"""Plans describe the compiled programs: the same graphs, and figures close to those of the TPU compiler."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from gpt import gpt
from lstm_lm import lstm_lm
from resnet18 import resnet18
from small_models import block, scalar_loss

import mithril as ml
import mithril_tpu
from mithril.backend import BuildOptions
from mithril.compiler import ProgramKey, ProgramKind
from mithril.graph import structurally_equal
from mithril_parallel.mesh import DATA, MODEL, Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import choose
from mithril_parallel.xla_model.program import XlaGraphs
from mithril_tpu.aot.program import AheadProgram, cpu_devices

SHAPES = {"x": [16, 128, 256]}


def big_block():
    return block(256, 8, 1024)


@pytest.fixture(scope="module")
def step_plan():
    return ml.plan(big_block(), "tpu_v5e", shapes=SHAPES, devices=(1, 8), of="y")


MODELS = {
    "gpt": (lambda: gpt(32, 8, layers=2, heads=4, features=16), {"input": [4, 8]}, "output"),
    "lstm": (lambda: lstm_lm(16, 8), {"input": [4, 6]}, "output"),
    "resnet": (resnet18, {"input": [2, 3, 32, 32]}, "output"),
}


@pytest.mark.parametrize("name", MODELS)
def test_plans_use_the_graphs_that_jax_compiles(name):
    make, shapes, output = MODELS[name]
    graphs = []
    for backend in (XlaGraphs(), ml.JaxBackend(device="cpu")):
        compiled = ml.compile(make(), backend, shapes=shapes)
        graphs.append(
            compiled.compiler.lowered(ProgramKey(compiled.programs[0].request.types, ProgramKind(True, (output,))))
        )
    assert structurally_equal(*graphs)


def one_step(make, shapes, output):
    """Return the graph of a training step and its JAX function."""
    compiled = ml.compile(make(), ml.JaxBackend(device="cpu"), shapes=shapes)
    graph = compiled.compiler.lowered(ProgramKey(compiled.programs[0].request.types, ProgramKind(True, (output,))))
    return graph, compiled.backend.build_whole(graph, BuildOptions()).forward


@pytest.mark.parametrize("axes", [{"data": 4}, {"model": 4}, {"data": 2, "model": 4}], ids=str)
def test_predicted_collectives_equal_the_compiled_ones(axes):
    graph, forward = one_step(lambda: scalar_loss(64), {"x": [8, 32]}, "loss")
    mesh = Mesh({"data": 1, "model": 1, **axes})
    choice = choose(graph, mesh)
    predicted = Counter()
    for exchange in propagate(graph, mesh, choice.splits).exchanges:
        predicted[exchange.kind] += exchange.bytes
    devices = cpu_devices(mesh.devices)
    program = AheadProgram(forward, graph, choice, ml.plugins.target("cpu").spec, devices, present=True)
    assert predicted == {kind: c.bytes for kind, c in program.analysis.collectives.items()}


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("mesh", [(8, 1), (2, 4)])
def test_plan_agrees_with_the_compiler(step_plan, mesh, fsdp):
    pytest.importorskip("libtpu")
    way = next(w for w in step_plan if (w.mesh.size(DATA), w.mesh.size(MODEL)) == mesh and w.fsdp == fsdp)
    options = way.options
    options["tpu_options"]["effort"] = 0
    compiled = ml.compile(big_block(), ml.JaxBackend(), target_hardware="tpu_v5e", shapes=SHAPES, **options)
    step = mithril_tpu.training_program(compiled, "y", lambda p, g: {n: p[n] - 0.1 * g[n] for n in p})
    analysis = step.analysis
    assert way.memory.arguments == pytest.approx(analysis.memory.arguments, rel=0.02)
    assert way.memory.peak == pytest.approx(analysis.memory.peak, rel=0.15)
    low, high = way.memory.interval
    assert low <= analysis.memory.peak <= high
    assert way.work.flops == pytest.approx(analysis.flops, rel=0.1)
    carried = sum(c.bytes for c in analysis.collectives.values())
    assert way.work.exchanged == pytest.approx(carried, rel=0.15, abs=2e5)


def test_first_entries_of_a_plan_are_compiled():
    pytest.importorskip("libtpu")
    plan = ml.plan(scalar_loss(64), "tpu_v5e", shapes={"x": [16, 32]}, devices=(1, 2), of="loss")
    checked = mithril_tpu.compile_plan(plan, top=2)
    assert [e.compiled_peak is not None for e in plan] == [False] * len(plan.entries)
    assert sum(e.compiled_peak is not None for e in checked) == 2
    assert "(compiled)" in str(checked)
    first = plan.entries[0]
    expected = next(e for e in checked if e.options == first.options)
    compiled = ml.compile(
        scalar_loss(64), ml.JaxBackend(), target_hardware="tpu_v5e", shapes={"x": [16, 32]}, **first.options
    )
    step = mithril_tpu.training_program(compiled, "loss", lambda p, g: {n: p[n] - 0.1 * g[n] for n in p})
    assert expected.compiled_peak == step.analysis.memory.peak


def test_entry_whose_compiled_program_does_not_fit_is_not_the_best():
    plan = ml.plan(scalar_loss(64), "tpu_v5e", shapes={"x": [16, 32]}, devices=2, of="loss")
    first = plan.best
    plan.entries[0] = replace(first, compiled_peak=int(first.limit) + 1)
    plan.sort()
    assert plan.best.options != first.options


def test_compiled_memory_contains_the_values_of_the_optimizer():
    pytest.importorskip("libtpu")
    plan = ml.plan(scalar_loss(512), "tpu_v5e", shapes={"x": [16, 32]}, devices=1, of="loss", slots=8)
    (entry,) = mithril_tpu.compile_plan(plan).entries
    assert entry.memory.slots > 8 * 4 * 32 * 512
    assert entry.compiled_peak > entry.memory.arguments > entry.memory.slots
