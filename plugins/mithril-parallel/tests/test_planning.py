"""Plans without a compiler: memory, operations, collectives, fusion, and the meshes that a plan refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from small_models import block, perceptron, scalar_loss

import mithril as ml
from mithril import plugins
from mithril.derivatives import gradients
from mithril.graph import registry
from mithril.graph.type_rules import numeric
from mithril.models import Dropout, IOKey, Linear, Model, Relu
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import DATA, MODEL, Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.planning import memory_estimate
from mithril_parallel.planning.step_time import estimate_work
from mithril_parallel.xla_model.fusion_model import fuse, pointwise
from mithril_parallel.xla_model.image_layout import images, strip, strip_bytes, with_strips
from mithril_parallel.xla_model.layout_copies import copies
from mithril_parallel.xla_model.tiling import image_bytes, stored_bytes

SHAPES = {"x": [16, 128, 256]}


def big_block():
    return block(256, 8, 1024)


@pytest.fixture(scope="module")
def step_plan():
    return ml.plan(big_block(), "tpu_v5e", shapes=SHAPES, devices=(1, 8), of="y")


def test_plan_lists_all_meshes_with_the_best_first(step_plan):
    assert [w.fsdp for w in step_plan].count(True) == 3
    assert {(w.mesh.size(DATA), w.mesh.size(MODEL)) for w in step_plan} == {(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)}
    assert [w.seconds for w in step_plan] == sorted(w.seconds for w in step_plan)
    assert step_plan.best is step_plan.entries[0]
    assert step_plan.best.mesh.devices == 8


def test_16_bit_gradients_are_reduced_in_32_bits():
    float32, bfloat16 = (
        next(
            w
            for w in ml.plan(big_block(), "tpu_v5e", shapes=SHAPES, devices=8, of="y", **options)
            if is_data_parallel(w)
        )
        for options in ({}, {"precision": "bfloat16"})
    )
    assert bfloat16.work.exchanged == pytest.approx(float32.work.exchanged, rel=0.01)
    assert bfloat16.memory.arguments == pytest.approx(float32.memory.arguments / 2, rel=0.05)


def is_data_parallel(entry):
    return entry.mesh.size(MODEL) == 1 and not entry.fsdp


def test_entries_that_do_not_fit_come_last():
    plan = ml.plan(perceptron(65536, 65536), "tpu_v5e", shapes={"x": [8, 65536]}, devices=(1, 8), of="y")
    assert not plan.entries[-1].fits
    assert plan.best.mesh.size(MODEL) == 8
    assert "no" in str(plan).splitlines()[-1]


def test_an_entry_fits_only_if_the_upper_end_of_its_interval_fits():
    entry = ml.plan(wide(), "tpu_v5e", shapes={"x": [64, 512]}, of="y").best
    low, high = entry.memory.interval
    assert low < entry.memory.peak < high
    assert not replace(entry, limit=(entry.memory.peak + high) / 2).fits
    assert replace(entry, limit=high).fits
    assert replace(entry, limit=entry.memory.peak, compiled_peak=entry.memory.peak).fits


def wide():
    x = IOKey("x")
    for k in range(4):
        x = Relu()(Linear(512, name=f"l{k}")(x))
    return Model.create(outputs={"y": x})


def test_large_gradients_are_reduced_one_by_one(monkeypatch):
    """Combine the reductions of small gradients, which then exist twice until the end."""

    def temporaries():
        plan = ml.plan(wide(), "tpu_v5e", shapes={"x": [64, 512]}, devices=8, of="y")
        entry = next(e for e in plan if e.mesh.size("data") == 8 and not e.fsdp)
        return entry.memory.temporaries

    weight = 4 * 512 * 512
    combined = temporaries()
    assert combined > 4 * weight
    monkeypatch.setattr(memory_estimate, "COMBINED", weight)
    assert temporaries() < combined - 2 * weight


def test_optimizer_slots_count_as_memory():
    plain = ml.plan(scalar_loss(512), "tpu_v5e", shapes={"x": [16, 512]}, of="loss").best.memory
    adam = ml.plan(scalar_loss(512), "tpu_v5e", shapes={"x": [16, 512]}, of="loss", slots=2).best.memory
    parameters = 4 * 512 * 512
    assert adam.peak - plain.peak >= 2 * parameters


def test_mesh_with_indivisible_batch_is_refused_with_the_reason():
    plan = ml.plan(perceptron(), "tpu_v5e", shapes={"x": [6, 8]}, devices=4)
    assert "cannot be divided" in plan.refused["data=4 x model=1"]
    assert all(w.mesh.size(DATA) < 4 for w in plan)
    assert "data=4" in str(plan)


@pytest.mark.parametrize("target", ["cpu", "nvidia_h200", "apple_m2_max", "mobile_arm64", "tpu_v6e"])
def test_every_kind_of_target_can_be_planned_for(target):
    plan = ml.plan(big_block(), target, shapes=SHAPES)
    assert plan.best.seconds > 0
    assert json.loads(json.dumps(plan.as_dict()))["target"] == target


def test_faster_hardware_is_faster():
    seconds = [ml.plan(big_block(), t, shapes=SHAPES).best.seconds for t in ("cpu", "nvidia_a100", "nvidia_b200")]
    assert seconds == sorted(seconds, reverse=True)


def test_plan_without_shapes_is_rejected():
    with pytest.raises(ml.InputError, match="shapes"):
        ml.plan(perceptron(), "tpu_v5e")


def test_tiled_arrays_are_padded():
    assert stored_bytes((8, 128), 4, True) == 8 * 128 * 4
    assert stored_bytes((8, 100), 4, True) == 8 * 128 * 4
    assert stored_bytes((3, 128), 4, True) == 4 * 128 * 4
    assert 197 * 100 * 64 * 4 < stored_bytes((197, 100, 64), 4, True) <= 200 * 100 * 128 * 4
    assert stored_bytes((10, 10), 4, False) == 512
    assert image_bytes((8, 3, 224, 224), 4) == 224 * 224 * 4 * 128 * 4


def test_pipelines_are_planned_on_request():
    plan = ml.plan(big_block(), "tpu_v5e", shapes=SHAPES, devices=4, of="y", stages=(2, 4), chunks=4)
    pipes = [w for w in plan if w.stages > 1]
    assert {(w.mesh.size(DATA), w.mesh.size(MODEL), w.stages) for w in pipes} == {(2, 1, 2), (1, 2, 2), (1, 1, 4)}
    one = ml.plan(big_block(), "tpu_v5e", shapes=SHAPES, of="y").best
    four = next(w for w in pipes if w.stages == 4)
    assert four.memory.peak < one.memory.peak
    assert one.work.flops / 4 < four.work.flops < one.work.flops
    assert four.options == {"tpu_options": {"replicas": 4}, "pipeline_stages": 4, "pipeline_chunks": 4}


def test_fully_sharded_needs_less_and_exchanges_weights_or_smaller_activations():
    for rows, low, high in ((64, 0.0, 0.1), (1 << 16, 2.0, 3.0)):
        plan = ml.plan(perceptron(4096, 4096), "tpu_v5e", shapes={"x": [rows, 4096]}, devices=8, of="y", slots=2)
        plain, fully = (next(w for w in plan if w.mesh.size(DATA) == 8 and w.fsdp == fsdp) for fsdp in (False, True))
        assert fully.memory.peak < plain.memory.peak
        assert low < fully.work.exchanged / plain.work.exchanged < high
        if rows == 64:
            assert fully.memory.arguments < plain.memory.arguments / 7


def test_plans_exchange_activations_of_weights_that_stay_in_place():
    """Plan, with ``model`` too, one sum of a partial result in each direction, and no gathered weights."""
    exchanged, peaks = [], []
    for rows in (64, 1 << 16):
        plan = ml.plan(perceptron(4096, 4096), "tpu_v5e", shapes={"x": [rows, 4096]}, devices=8, of="y")
        entry = next(w for w in plan if w.mesh.size(MODEL) == 4 and w.fsdp)
        exchanged.append(entry.work.exchanged)
        peaks.append(entry.memory.peak - entry.memory.arguments)
    weight = 4 * 4096 * 4096 // 4  # over ``model``
    assert exchanged[0] < 0.4 * weight
    assert exchanged[1] > 3 * weight
    assert peaks[0] < 2 * weight


def materialized(function, *shapes):
    """Return the names of the operations of a traced function whose results a fusing compiler materializes."""
    with ml.Builder() as b:
        values = [b.param(f"p{k}", shape) for k, shape in enumerate(shapes)]
        outputs = function(*values)
    graph = b.build(dict(zip("yzw", outputs, strict=False)))
    return {k.node.op.name for k in fuse(graph, tpu=True).kernels}


def test_gradients_of_sharded_parameters_are_not_live_at_the_same_time():
    x = h = IOKey("x", shape=[None, 256])
    for k in range(200):
        h = Linear(256, bias=False, name=f"fc{k}")(h)
    plan = ml.plan(Model.create(inputs=x, outputs={"y": h}), "tpu_v5e", shapes={"x": [64, 256]}, devices=8, of="y")
    fully, plain = (next(w for w in plan if w.fsdp == fsdp and w.mesh.size(DATA) == 8) for fsdp in (True, False))
    gradients = 200 * 4 * 256 * 256
    assert plain.memory.temporaries >= gradients
    assert fully.memory.temporaries < 0.9 * gradients


def test_sharded_parameters_are_gathered_again_for_the_backward_pass():
    def exchanged(layers):
        x = h = IOKey("x", shape=[None, 256])
        for k in range(layers):
            h = Linear(256, bias=False, name=f"fc{k}")(ml.ops.tanh(h))
        model = Model.create(inputs=x, outputs={"y": h})
        rows = 8192  # activations are larger than weights, which are therefore gathered
        plan = ml.plan(model, "tpu_v5e", shapes={"x": [rows, 256]}, devices=8, of="y")
        entry = next(w for w in plan if w.fsdp and w.mesh.size(DATA) == 8)
        return entry.work.exchanged / (layers * 4 * 256 * 256)

    # a gather in each direction (the first layer needs no gradient of its input), a reduction of the gradient
    assert exchanged(4) == pytest.approx((4 + 3 + 4) / 4, rel=0.05)
    assert exchanged(60) == pytest.approx((60 + 59 + 60) / 60, rel=0.05)


def test_cheap_values_are_recomputed_and_expensive_values_materialized():
    ops = ml.ops

    def twice(function):
        def between(x, w, v):
            h = ops.matmul(x, w)
            middle = function(h)
            return ops.matmul(middle * 2.0, v), ops.sum(middle * h)

        return materialized(between, (64, 64), (64, 64), (64, 64))

    assert "add" not in twice(lambda h: h + 1.0)
    assert "tanh" in twice(ops.tanh)

    def between_products(x, w, v):
        h = ops.matmul(x, w)
        middle = ops.tanh(h)
        return ops.matmul(middle * 2.0, v), ops.matmul(x, v) * middle * h  # the latter ends the kernel of a product

    assert "tanh" not in materialized(between_products, (64, 64), (64, 64), (64, 64))


@pytest.mark.parametrize(
    ("product", "shapes"), [("matmul", [(64, 64)] * 3), ("conv", [(8, 4, 9, 9), *[(4, 4, 3, 3)] * 2])]
)
def test_products_recompute_their_operands_for_up_to_two_consumers(product, shapes):
    ops = ml.ops
    operation = getattr(ops, product)

    def between(x, w, v):
        h = operation(x, w)
        read = ops.tanh(h)
        return operation(read, v), ops.sum(read * h)

    assert "tanh" not in materialized(between, *shapes)

    def slowly(x, w, v):
        h = operation(x, w)
        read = ops.sin(h)
        return operation(read, v), ops.sum(read * h)

    assert "sin" in materialized(slowly, *shapes)

    def thrice(x, w, v):
        h = operation(x, w)
        read = ops.tanh(h)
        return operation(read, v), operation(read, v * 2.0) + operation(read, v * 3.0), ops.sum(h)

    assert "tanh" in materialized(thrice, *shapes)


def test_values_joined_from_several_places_are_stored():
    ops = ml.ops

    def shifted(x, w):
        h = ops.pad(x, widths=((1, 1), (0, 0)))
        return h[:-2] * 0.5 + h[2:] * 0.25

    def joined(x, w):
        return ops.concat(x, w, axis=0)

    def alone(x, w):
        return x * 0.5 + 0.25

    for function, name, is_stored in ((shifted, "add", True), (joined, "concat", True), (alone, "add", False)):

        def twice(x, w, function=function):
            x, w = ops.matmul(x, w), ops.matmul(w, x)
            h = function(x, w)
            return ops.sum(h * h, axis=0), ops.sum(ops.tanh(h), axis=0), x * w

        assert (name in materialized(twice, (64, 64), (64, 64))) == is_stored


def test_concatenation_of_concatenations_reads_their_parts():
    with ml.Builder() as b:
        x = [b.input(f"x{k}", (4, 4)) for k in range(3)]
        y = ml.ops.concat(ml.ops.concat(x[0], x[1], axis=1), x[2], axis=1)
        z = ml.ops.concat(ml.ops.concat(x[0], x[1], axis=1), ml.ops.concat(x[2], x[2], axis=1), axis=0)
    graph = fuse(b.build({"y": y, "z": z}), tpu=True).graph
    assert [len(graph.producers[v].operands) for v in graph.outputs] == [3, 2]


def test_sums_of_parts_are_split_like_the_values_they_are_combined_with():
    with ml.Builder() as b:
        x, w = b.input("x", (8, 16)), b.param("w", (16, 16))
        h = ml.ops.tanh(ml.ops.matmul(x, w))  # a partial sum over ``model``, complete on each device
        y = h * x
    graph = b.build({"y": y})
    sharding = propagate(graph, Mesh({DATA: 2, MODEL: 4}), {"x": (DATA, MODEL), "w": (MODEL, None)})
    assert sharding.splits[h] == (DATA, MODEL)
    assert sharding.local(h) == (4, 4)


def test_gathered_activations_are_stored():
    """Count the complete batch that weights in parts read: it stays from the forward pass to the gradient."""
    plan = ml.plan(perceptron(2048, 2048), "tpu_v5e", shapes={"x": [512, 2048]}, devices=8, of="y")
    entry = next(w for w in plan if w.fsdp and w.mesh.size(DATA) == 8)
    batch = 4 * 512 * 2048
    assert entry.memory.temporaries > 2 * batch


@pytest.mark.parametrize(
    ("compute", "is_fused"),
    [
        (lambda x: ml.ops.tanh(x), True),
        (lambda x: ml.ops.cast(x, dtype="float16"), True),
        (lambda x: ml.ops.pad(x, widths=((0, 1), (0, 0))), True),
        (lambda x: ml.ops.flip(x, axis=0), True),
        (lambda x: ml.ops.tril(x), True),
        (lambda x: x[1:], True),
        (lambda x: ml.ops.concat(x, x, axis=0), True),
        (lambda x: ml.ops.sort(x, axis=0), False),
        (lambda x: ml.ops.cumsum(x, axis=0), False),
        (lambda x: ml.ops.take(x, ml.ops.argmax(x, axis=0), axis=0), False),
    ],
)
def test_pointwise_operations_are_fused_into_their_consumers(compute, is_fused):
    with ml.Builder() as b:
        compute(b.input("x", (6, 6)))
    assert pointwise(b.nodes[-1]) is is_fused


def test_pools_of_images_are_images():
    with ml.Builder() as b:
        x, w = b.input("x", (8, 3, 8, 8)), b.param("w", (4, 3, 3, 3))
        y = ml.ops.conv(x, w)
        pools = [op(y, kernel=(2, 2)) for op in (ml.ops.max_pool, ml.ops.avg_pool, ml.ops.max_pool_positions)]
        input_pool = ml.ops.max_pool(x, kernel=(2, 2))
        total = ml.ops.sum(y, axis=1, keepdims=True)
    image_values = images(b.build({"own": input_pool, "total": total, **{str(k): v for k, v in enumerate(pools)}}))
    assert {y, *pools} <= image_values
    assert not image_values & {input_pool, total}


def test_images_have_any_number_of_axes():
    """Count no copy of a value that a convolution over time reads from another convolution."""
    with ml.Builder() as b:
        x = b.input("x", (8, 4, 32))
        h = ml.ops.tanh(ml.ops.conv(x, b.param("v", (4, 4, 1))))
        y = ml.ops.conv(h, b.param("w", (4, 4, 1)))
    fused = fuse(gradients(b.build({"y": y}), ["y"], ["v", "w"]), tpu=True)
    assert h in images(fused.graph)
    sharding = propagate(fused.graph, Mesh({DATA: 1, MODEL: 1}), {})
    without = copies(fused, sharding, images(fused.graph) - {h})
    assert len(copies(fused, sharding, images(fused.graph))) == len(without) - 1


def test_cheap_values_of_stored_values_are_computed_again():
    def gate(x, w, v):
        g = ml.ops.sigmoid(ml.ops.matmul(x, w))
        rest = 1.0 - g
        h = ml.ops.matmul(x, v)
        return h * g + x * rest, ml.ops.sum(h * g, axis=0), ml.ops.sum(h * rest, axis=0)

    assert "sub" not in materialized(gate, (64, 64), (64, 64), (64, 64))


def test_pools_compute_a_relu_of_a_product_that_they_read_unless_it_is_concatenated():
    def pooled(joins, normalizes=False):
        def net(x, w):
            h = ml.ops.conv(x, w)
            h = ml.ops.maximum(h - ml.ops.mean(h, axis=0, keepdims=True) if normalizes else h, 0.0)
            y = ml.ops.max_pool(h, kernel=(2, 2), stride=(2, 2))
            return y, ml.ops.sum(h, axis=0), *((ml.ops.conv(ml.ops.concat(h, h, axis=1), w),) if joins else ())

        return materialized(net, (8, 8, 16, 16), (4, 8, 1, 1) if joins else (8, 8, 3, 3))

    assert "maximum" not in pooled(joins=False)
    assert "maximum" in pooled(joins=True)
    assert "maximum" in pooled(joins=False, normalizes=True)


@pytest.mark.parametrize(("features", "is_narrow"), [(32, True), (128, False)])
def test_rows_of_tables_are_columns_of_tiles(features, is_narrow):
    """Count a copy of a narrow table, and complete tiles of the rows that are read from it."""
    with ml.Builder() as b:
        table = b.param("table", (4096, features))
        rows = ml.ops.take(table, b.input("x", (512,), "int32"), axis=0)
        y = ml.ops.tanh(ml.ops.matmul(rows, b.param("w", (features, 128))))
    fused = fuse(b.build({"y": y}), tpu=True)
    sharding = propagate(fused.graph, Mesh({DATA: 1, MODEL: 1}), {})
    assert memory_estimate.size_function(fused, sharding, tiled=True)(rows) == 4 * 512 * 128
    assert [nbytes for _, _, nbytes in copies(fused, sharding, frozenset())] == [4 * 4096 * 128] * is_narrow


def test_transposed_images_are_matrices():
    with ml.Builder() as b:
        y = ml.ops.conv(b.input("x", (4, 3, 8, 8)), b.param("w", (16, 3, 3, 3)))
        last = ml.ops.transpose(y, perm=(0, 2, 3, 1))
        scaled = last * 2.0
    assert not images(b.build({"y": scaled})) & {last, scaled}


def test_operand_of_a_relu_stays_live_for_its_gradient():
    """Check a simplification of XLA: ``maximum(x, 0) > 0`` is ``x > 0``."""
    with ml.Builder() as b:
        x, w = b.input("x", (8, 4, 16, 16)), b.param("w", (4, 4, 3, 3))
        y = ml.ops.max_pool(ml.ops.maximum(ml.ops.conv(x, w), 0.0), kernel=(2, 2), stride=(2, 2))
    graph = gradients(b.build({"y": y}), ["y"], ["w"])
    fused = fuse(graph, tpu=True)
    compared = next(node for node in fused.graph.nodes if node.op.name == "greater").operands[0]
    assert fused.graph.producers[compared].op.name == "conv"
    assert fused.graph.outputs == graph.outputs


@pytest.mark.parametrize(("kernel", "stride"), [((2, 2), (2, 2)), ((3, 3), (1, 1))])
def test_gradients_of_pools_store_repeated_positions(kernel, stride):
    with ml.Builder() as b:
        image = ml.ops.conv(b.input("x", (8, 4, 32, 32)), b.param("w", (128, 4, 1, 1)))
        y = ml.ops.max_pool(image, kernel=kernel, stride=stride)
    fused = fuse(gradients(b.build({"y": y}), ["y"], ["w"]), tpu=True)
    sharding = propagate(fused.graph, Mesh({DATA: 1, MODEL: 1}), {})
    node = next(node for node in fused.graph.nodes if node.op.name == "max_pool_grad")
    spans = [nbytes for first, _, nbytes in copies(fused, sharding, images(fused.graph)) if first == fused.step[node]]
    assert spans == [4 * 8 * 128 * 32 * 32]


def convolution(image, kernel, padding=0):
    """Return the fused graph of two convolutions with gradients on one device."""
    pad = ((padding, padding),) * 2
    with ml.Builder() as b:
        x, w, v = b.input("x", image), b.param("w", kernel), b.param("v", (4, kernel[0], 1, 1))
        y = ml.ops.conv(ml.ops.conv(x, w, padding=pad), v)
    fused = fuse(gradients(b.build({"y": y}), ["y"], ["w", "v"]), tpu=True)
    return fused, propagate(fused.graph, Mesh({DATA: 1, MODEL: 1}), {})


def test_one_copy_of_an_image_serves_a_convolution_and_its_gradient():
    fused, sharding = convolution((8, 3, 32, 32), (16, 3, 3, 3))
    step = {
        node.op.name: fused.step[node] for node in fused.graph.nodes if fused.graph.inputs[0].value in node.operands
    }
    images = {v for node in fused.graph.nodes for v in node.results if v.ndim == 4}
    spans = {(first, last): size for first, last, size in copies(fused, sharding, frozenset(images))}
    assert spans[step["conv"], step["conv_weight_grad"]] == image_bytes((8, 3, 32, 32), 4)
    exchanged = next(fused.step[node] for node in fused.graph.nodes if node.op.name == "conv_input_grad")
    assert spans[0, exchanged] == stored_bytes((4, 16, 1, 1), 4, True)


@pytest.mark.parametrize(("image", "cut"), [((2, 3, 64, 64), True), ((8, 3, 64, 64), False), ((2, 3, 6, 6), False)])
def test_small_batches_of_images_are_cut_into_strips(image, cut):
    fused, sharding = convolution(image, (16, 3, 3, 3), padding=1)
    in_strips = with_strips(fused, sharding)
    assert bool(in_strips.strips) == cut
    if cut:
        target = plugins.target("tpu_v5e").spec
        assert estimate_work(in_strips, sharding, target).flops == pytest.approx(
            72 / 64 * estimate_work(fused, sharding, target).flops, rel=0.02
        )
        read = next(node.result for node in in_strips.graph.nodes if node.op.name == "conv")
        assert in_strips.last[read] == len(in_strips.graph.nodes)  # gradients of kernels are computed last
        assert fused.last[read] < len(fused.graph.nodes)


def test_traffic_counts_tiled_bytes():
    fused, sharding = convolution((8, 16, 16, 16), (16, 16, 3, 3), padding=1)
    tpu, gpu = (
        estimate_work(fused, sharding, plugins.target(name).spec).traffic for name in ("tpu_v5e", "nvidia_a100")
    )
    assert tpu > 4 * gpu  # tiles of 128 columns hold 16 channels


def test_costs_of_instructions_replace_declared_flops():
    with ml.Builder() as b:
        graph = b.build({"y": ml.ops.exp(b.input("x", (8, 128)))})
    fused = fuse(graph, tpu=False)
    sharding = propagate(fused.graph, Mesh({DATA: 1, MODEL: 1}), {})
    slow = HardwareTarget("acme_board", "gpu", instructions={"exp": 1000.0})
    assert estimate_work(fused, sharding, slow).flops == 8 * 128 * 1000


def test_unknown_flops_are_named_unless_the_target_says_them(monkeypatch):
    monkeypatch.setattr(registry, "_operations", dict(registry._operations))

    @ml.op(name="acme.bump", shape=lambda x: x, dtype=numeric, samples=[])
    def bump(x):
        """A bump at zero."""
        return np.exp(-x * x)

    class Bump(ml.models.Layer):
        """Bumps of a product."""

        def build(self, x):
            return bump(ml.ops.matmul(x, np.ones((3, 3), np.float32)))

    slow = HardwareTarget("acme_board", "gpu", instructions={"acme.bump": 5.0})
    plans = [ml.plan(Bump(), target, shapes={"input": (2, 3)}) for target in ("nvidia_a100", slow)]
    assert [plan.as_dict()["unknown_flops"] for plan in plans] == [["acme.bump"], []]
    assert "unknown flops, counted as one per element: acme.bump" in str(plans[0])
    assert [plan.best.work.flops for plan in plans] == [36 + 6, 36 + 6 * 5]


def test_a_strip_has_a_margin():
    assert strip(64) == 9
    assert strip(100) == 13
    assert strip(8) == 1
    assert strip_bytes((2, 32, 64, 64), 4) == 64 * 16 * 9 * 128 * 4


def test_kernels_larger_than_images_use_im2col():
    fused, sharding = convolution((8, 16, 2, 2), (16, 16, 3, 3), padding=1)
    assert stored_bytes((8, 4, 16 * 9), 4, True) in {size for _, _, size in copies(fused, sharding, frozenset())}


def test_random_numbers_are_sharded_like_their_consumers():
    x = IOKey("x")
    model = Model.create(outputs={"y": Dropout(0.5, name="drop")(Linear(256, name="fc")(x))})
    one, eight = (
        next(w for w in ml.plan(model, "tpu_v5e", shapes={"x": [4096, 256]}, devices=n, of="y") if not w.fsdp)
        for n in (1, 8)
    )
    assert eight.memory.temporaries < one.memory.temporaries / 4
