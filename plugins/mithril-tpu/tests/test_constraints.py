"""Sharding constraints of fully sharded programs, by the memory and the collectives of the compiled programs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from small_models import block

import mithril as ml
import mithril_tpu
from mithril.models import Conv2d, Embedding, Flatten, IOKey, Linear, MaxPool2d, Model, Relu
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.strategy import choose
from mithril_parallel.sharding.constraints import constrained

SHAPES = {"tokens": [16, 256]}


def language_model(features=512, vocabulary=4096):
    """Embedding, one block of a transformer, and an output layer that shares the table of the embedding."""
    tokens, table = IOKey("tokens", dtype="int32"), IOKey("table", trainable=True, init="normal(std=0.02)")
    h = block(features, 8, 4 * features)(Embedding(vocabulary, features)(tokens, weight=table))
    return Model.create(outputs={"y": h @ ml.ops.transpose(table)})


def step(replicas, model, **options):
    compiled = ml.compile(
        language_model(),
        ml.JaxBackend(),
        target_hardware="tpu_v5e",
        tpu_options={"replicas": replicas, "model_parallelism": model, "effort": 0},
        shapes=SHAPES,
        **options,
    )
    program = mithril_tpu.training_program(compiled, "y", lambda p, g: {n: p[n] - 0.1 * g[n] for n in p})
    return program.analysis


def test_fully_sharded_and_tensor_parallel_needs_no_more_memory_than_tensor_parallel():
    pytest.importorskip("libtpu")
    tensor, fully = step(8, 2), step(8, 2, parallelism="fsdp")
    assert fully.memory.peak <= 1.05 * tensor.memory.peak
    assert fully.flops <= 1.05 * tensor.flops
    assert sum(c.bytes for c in fully.collectives.values()) < 3 * sum(c.bytes for c in tensor.collectives.values())


def test_parameters_are_gathered_again_only_on_request():
    pytest.importorskip("libtpu")
    again, once = (step(8, 2, parallelism="fsdp", fsdp_reshard=on).collectives["all-gather"] for on in (True, False))
    assert once.count < again.count
    assert once.bytes < again.bytes


def test_constraints_name_the_splits_of_tensor_parallelism():
    graph = ml.compile(block(), "jax", shapes={"x": [8, 16, 128]}).graph
    axes = {"data": 4, "model": 2}
    with_splits = fully_sharded(graph, axes)
    texts = {n.operands[0].name: n.attributes["split"] for n in with_splits.nodes if n.op.name == "mesh.constrain"}
    assert texts["fc.weight"] == "model ."
    assert texts["proj.weight"] == ". model"
    assert {text for name, text in texts.items() if "." not in name} <= {"data . .", "data . model", "data model . ."}


def fully_sharded(graph, axes):
    splits, stored = (choose(graph, Mesh(axes), fsdp=fsdp).splits for fsdp in (False, True))
    return constrained(graph, axes, splits, stored)


@pytest.mark.parametrize(("rows", "gathers"), [(2, False), (256, True)])
def test_pairs_of_weights_stay_in_parts_if_activations_are_smaller(rows, gathers):
    """Gather the pair and exchange its gradients with many rows only."""
    shapes = {"x": [4, rows, 128]}
    x = np.random.default_rng(0).normal(size=shapes["x"]).astype(np.float32)
    plain = ml.compile(block(), ml.JaxBackend(), shapes=shapes)
    fully = ml.compile(block(), ml.JaxBackend(device_mesh=(4,)), shapes=shapes, parallelism="fsdp")
    params = plain.randomize_params(0)
    expected, gradients = (compiled.evaluate(params, {"x": x}, {"y": x})[1] for compiled in (plain, fully))
    for name, a in expected.items():
        scale = np.abs(np.asarray(a)).max()
        np.testing.assert_allclose(gradients[name], a, rtol=0, atol=3e-6 * scale + 3e-6, err_msg=name)
    graph = fully_sharded(plain.programs[-1].executable.graph, {"data": 4})
    constraints = {n.operands[0].name: n.attributes["split"] for n in graph.nodes if n.op.name == "mesh.constrain"}
    assert ("fc.weight" in constraints) == gathers
    assert (". . data" in constraints.values()) != gathers


def wide(layers=3):
    x = IOKey("x")
    for k in range(layers):
        x = Relu()(Linear(128, name=f"layer{k}")(x))
    return Model.create(outputs={"y": x})


@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)])
@pytest.mark.parametrize(("rows", "gathers"), [(8, False), (1024, True)])
def test_weights_stay_in_place_on_a_mesh_with_model_if_activations_are_smaller(mesh, rows, gathers):
    x, g = (np.random.default_rng(k).normal(size=(rows, 128)).astype(np.float32) for k in (0, 1))
    plain = ml.compile(wide(), "jax", shapes={"x": x.shape})
    fully = ml.compile(wide(), ml.JaxBackend(device_mesh=mesh), shapes={"x": x.shape}, parallelism="fsdp")
    params = plain.randomize_params(0)
    (y, expected), (fully_y, gradients) = (c.evaluate(params, {"x": x}, {"y": g}) for c in (plain, fully))
    np.testing.assert_allclose(fully_y["y"], y["y"], rtol=0, atol=1e-5)
    for name, a in expected.items():
        scale = np.abs(np.asarray(a)).max()
        np.testing.assert_allclose(gradients[name], a, rtol=0, atol=3e-6 * scale + 3e-6, err_msg=name)
    graph = fully_sharded(plain.programs[-1].executable.graph, dict(zip(("data", "model"), mesh, strict=True)))
    constrained_values = {n.operands[0].name for n in graph.nodes if n.op.name == "mesh.constrain"}
    assert {f"layer{k}.weight" in constrained_values for k in range(3)} == {gathers}


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_of_a_larger_model_equal_one_device(reshard):
    model, shapes = block(256, 8, 1024), {"x": [8, 32, 256]}
    plain = ml.compile(model, "jax", shapes=shapes)
    params = plain.randomize_params(1)
    x, g = (np.random.default_rng(k).normal(size=(8, 32, 256)).astype(np.float32) for k in (0, 1))
    _, expected = plain.evaluate(params, {"x": x}, {"y": g})
    fully = ml.compile(
        model,
        ml.JaxBackend(device_mesh=(4, 2)),
        shapes=shapes,
        parallelism="fsdp",
        fsdp_reshard=reshard,
    )
    assert "mesh.constrain" in fully.source or "constrain(" in fully.source
    _, gradients = fully.evaluate(params, {"x": x}, {"y": g})
    for name, a in expected.items():
        scale = np.abs(np.asarray(a)).max()
        assert np.abs(np.asarray(gradients[name]) - np.asarray(a)).max() <= 3e-6 * scale + 3e-6, name


# ------------------------------------------------------------------------------------------------- meshes of a torus
def mean_hops(mesh, axis, wrap):
    """Return the mean distance in links between neighbors along a ring of the mesh."""
    coordinates = np.array([d.coords for d in mesh.devices.flat]).reshape(*mesh.devices.shape, -1)
    k = list(mesh.shape).index(axis)
    steps = np.abs(coordinates - np.roll(coordinates, -1, k))
    around = np.minimum(steps, np.array(wrap) - steps)
    return float(around.sum(-1).mean())


def test_axes_of_a_mesh_follow_the_links_of_the_torus():
    pytest.importorskip("libtpu")
    from mithril_jax.mesh.mesh_execution import arranged
    from mithril_targets.tpu import generation
    from mithril_tpu.aot.topology import described_devices

    devices = described_devices(generation("tpu_v5p"), 64)
    mesh = jax.sharding.Mesh(arranged(devices, (16, 4)), ("data", "model"))
    assert mean_hops(mesh, "data", (4, 4, 4)) <= 1.25
    assert mean_hops(mesh, "model", (4, 4, 4)) == 1.0


def test_slices_are_split_along_the_first_axis():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    from mithril_jax.mesh.mesh_execution import arranged

    devices = topologies.get_topology_desc("v5p:2x2x4", platform="tpu", num_slices=2).devices
    mesh = arranged(devices, (8, 4))
    assert [{d.slice_index for d in part.flat} for part in (mesh[:4], mesh[4:])] == [{0}, {1}]


def test_a_mesh_must_use_every_process(monkeypatch):
    from types import SimpleNamespace

    from mithril_jax.mesh import mesh_execution

    devices = [SimpleNamespace(process_index=k // 4, platform="gpu") for k in range(8)]
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices)
    with pytest.raises(ml.BackendError, match=r"device_mesh=\(4,\) leaves process 1 without a device"):
        mesh_execution.make("cuda", (4,))


def test_several_tasks_without_jax_distributed_are_refused(monkeypatch):
    from mithril_jax.mesh import mesh_execution

    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ml.BackendError, match="Slurm started 4 processes, but JAX knows only this one"):
        mesh_execution.make("cpu", (2,))


def test_the_block_of_the_guide_runs(tmp_path):
    import re
    import subprocess
    import sys
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "many-devices.md").read_text()
    block_text = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", block_text], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.stdout.strip() == "(16, 8)", done.stderr


def test_gradients_of_pools_stay_on_the_devices_of_their_examples():
    pytest.importorskip("libtpu")
    image = MaxPool2d(3, stride=2, padding=1)(Relu()(Conv2d(8, kernel_size=3, padding=1)(IOKey("x"))))
    compiled = ml.compile(
        Model.create(outputs={"y": Linear(10)(Flatten()(MaxPool2d(2)(image)))}),
        ml.JaxBackend(),
        target_hardware="tpu_v5e",
        tpu_options={"replicas": 8, "effort": 0},
        shapes={"x": [64, 3, 32, 32]},
    )
    collectives = mithril_tpu.training_program(compiled, "y").analysis.collectives
    assert set(collectives) == {"all-reduce"}  # of the gradients of 5402 parameters, not of images
    assert collectives["all-reduce"].bytes < 2 * 4 * 5402


def test_gradients_of_overlapping_pools_store_no_windows():
    pytest.importorskip("libtpu")
    features = Conv2d(64, kernel_size=3, padding=1)(IOKey("x"))
    compiled = ml.compile(
        Model.create(outputs={"y": MaxPool2d(3, stride=1, padding=1)(features)}),
        ml.JaxBackend(),
        target_hardware="tpu_v5e",
        tpu_options={"effort": 0},
        shapes={"x": [16, 3, 32, 32]},
    )
    image = 4 * 16 * 128 * 32 * 32  # 64 channels in tiles of 128
    assert mithril_tpu.training_program(compiled, "y").analysis.memory.temporaries < 9 * image
